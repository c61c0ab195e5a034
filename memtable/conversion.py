"""Cast a caller's column to the table's type without loss, with errors that name the row.

A value that does not fit exactly is refused:

    number -> number     the same number; into a float narrower than float64 it may round, never become infinite.
                         A float in a decimal is the number that its shortest digits write (0.1 is 0.1)
    date, timestamp      the same day or instant: no time of day and no digit is dropped, and a time with a time zone
                         never becomes one without or the other way round, because that would guess the zone
    text, bytes          the same in another layout
    list, struct         element by element, field by field; fields are matched by name, unknown fields are refused
    null, dictionary     null fits any type; a dictionary becomes its values

Every other type is refused: a text does not become a number, nor a number a time. All functions are pure and work on
whole arrays.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from memwal.memtable.errors import InvalidRows

_ANY_INTEGER = pa.decimal128(20, 0)
"""A decimal type that holds every 64-bit integer."""


def misfit(found: pa.DataType, wanted: pa.DataType) -> str | None:
    """Return why no value of type `found` fits a column of type `wanted`, with the remedy; None if some may fit."""
    if pa.types.is_dictionary(found):
        found = found.value_type
    if found == wanted or pa.types.is_null(found):
        return None
    if is_list(found) and is_list(wanted):
        return misfit(found.value_type, wanted.value_type)
    if pa.types.is_struct(found) and pa.types.is_struct(wanted):
        return _struct_misfit(found, wanted)
    family, into = _family(found), _family(wanted)
    if family == into:
        return _zone_misfit(found, wanted) if family == "time" else None
    if family == "number" and into in ("time", "clock", "span"):
        return "a number is no time without its unit: convert it"
    return "convert it"


def exact(values: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return `values` cast to the type `kind`. Requires: `misfit` returned None for the two types.

    Raises pa.ArrowInvalid if a value does not fit.
    """
    found = values.type
    if found == kind:
        return values
    if pa.types.is_null(found):
        return pa.nulls(len(values), kind)
    if pa.types.is_dictionary(found):
        return exact(values.dictionary_decode(), kind)
    if is_list(found):
        return _list(values, kind)
    if pa.types.is_struct(found):
        return _struct(values, kind)
    if pa.types.is_date(found) or pa.types.is_timestamp(found):
        return _time(values, kind)
    return _number(values, kind) if _family(found) == "number" else values.cast(kind)


def is_list(kind: pa.DataType) -> bool:
    """Return whether a type is a list, a large list or a list of fixed size."""
    types = pa.types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def overflows(rounded: pa.Array, given: pa.Array) -> bool:
    """Return whether floats of `given` became infinite in the narrower `rounded`."""
    infinite = np.isinf(rounded.to_numpy(zero_copy_only=False))
    return bool(infinite.any() and np.isfinite(given.to_numpy(zero_copy_only=False)[infinite]).any())


# ---- types ---------------------------------------------------------------------------------------------------------


def _family(kind: pa.DataType) -> str:
    types = pa.types
    families = {
        "number": (types.is_integer, types.is_floating, types.is_decimal),
        "text": (types.is_string, types.is_large_string, types.is_string_view),
        "bytes": (types.is_binary, types.is_large_binary, types.is_binary_view),
        "time": (types.is_date, types.is_timestamp),
        "clock": (types.is_time,),
        "span": (types.is_duration,),
    }
    return next((name for name, among in families.items() if any(of(kind) for of in among)), str(kind.id))


def _zone_misfit(found: pa.DataType, wanted: pa.DataType) -> str | None:
    of_zone, into_zone = (getattr(kind, "tz", None) is not None for kind in (found, wanted))
    if of_zone == into_zone:
        return None
    if into_zone:
        return "the values have no time zone: give them theirs"
    if pa.types.is_date(wanted):
        return "which day it is depends on the time zone: convert it"
    return f"the values have a time zone: declare the column timestamp[{wanted.unit}, UTC], or take theirs away"


def _struct_misfit(found: pa.DataType, wanted: pa.DataType) -> str | None:
    names = [field.name for field in found]
    if twice := next((name for name in names if names.count(name) > 1), None):
        return f"its field {twice!r} is there twice: leave it in once"
    for field in found:
        at = wanted.get_field_index(field.name)
        if at < 0:
            return f"its field {field.name!r} is not in the table: take it out"
        if reason := misfit(field.type, wanted.field(at).type):
            return f"its field {field.name!r} is {field.type}, not {wanted.field(at).type}; {reason}"
    return None


# ---- values --------------------------------------------------------------------------------------------------------


def _number(values: pa.Array, kind: pa.DataType) -> pa.Array:
    found = values.type
    if pa.types.is_floating(kind):
        return _float(values, kind)
    if pa.types.is_decimal(kind) and pa.types.is_floating(found):
        return values.cast(pa.string()).cast(kind)  # Arrow's own cast rounds
    if pa.types.is_decimal(kind) and pa.types.is_integer(found):
        return values.cast(_ANY_INTEGER).cast(kind)  # Arrow's own cast checks the types only
    return values.cast(kind)


def _float(values: pa.Array, kind: pa.DataType) -> pa.Array:
    if pa.types.is_decimal(values.type):
        digits = values.cast(pa.string()).cast(pa.float64())
        _expect_same(digits.cast(pa.string()).cast(values.type), values)
        return exact(digits, kind)
    rounded = values.cast(kind)
    if pa.types.is_integer(values.type):
        if pa.types.is_float16(kind):  # for wider floats Arrow checks it
            _expect_same(rounded.cast(pa.float64()).cast(values.type), values)
    elif kind.bit_width < values.type.bit_width and overflows(rounded, values):
        raise pa.ArrowInvalid(f"a number is beyond the largest {kind}")
    return rounded


def _time(values: pa.Array, kind: pa.DataType) -> pa.Array:
    found = values.cast(kind)
    if pa.types.is_timestamp(values.type) and pa.types.is_date(kind):
        _expect_same(found.cast(values.type), values)  # Arrow's own cast drops the time of the day
    return found


def _expect_same(back: pa.Array, values: pa.Array) -> None:
    if not back.equals(values):
        row = int(np.argmax(pc.not_equal(back, values).fill_null(False).to_numpy(zero_copy_only=False)))
        was, is_now = (part.slice(row, 1).cast(pa.string())[0] for part in (values, back))  # not all fit Python
        raise pa.ArrowInvalid(f"{was} would become {is_now}")


def _struct(values: pa.StructArray, kind: pa.DataType) -> pa.Array:
    given = {field.name: at for at, field in enumerate(values.type)}
    # Not values.field(): that ignores the nulls of the struct, whose fields may hold anything.
    columns = [
        exact(pc.struct_field(values, [given[field.name]]), field.type)
        if field.name in given
        else pa.nulls(len(values), field.type)
        for field in kind
    ]
    return pa.StructArray.from_arrays(columns, fields=list(kind), mask=values.is_null())


def _list(values: pa.Array, kind: pa.DataType) -> pa.Array:
    """Convert lists of any kind to any other kind; elements of null lists are omitted, as `flatten` does."""
    elements = exact(values.flatten(), kind.value_type)
    fixed = pa.types.is_fixed_size_list(values.type) and pa.types.is_fixed_size_list(kind)
    if fixed and values.null_count == 0 and values.type.list_size == kind.list_size:
        return pa.FixedSizeListArray.from_arrays(elements, type=kind)
    lengths = pc.list_value_length(values).fill_null(0).to_numpy(zero_copy_only=False)
    if pa.types.is_fixed_size_list(kind):
        wrong = (lengths != kind.list_size) & values.is_valid().to_numpy(zero_copy_only=False)
        if wrong.any():
            raise pa.ArrowInvalid(f"it has {lengths[np.argmax(wrong)]} elements, not {kind.list_size}")
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]))
    large = pa.large_list(kind.value_field)
    found = pa.LargeListArray.from_arrays(offsets, elements, type=large, mask=values.is_null())
    return found.cast(kind)


def convert(column: pa.ChunkedArray, field: pa.Field) -> pa.ChunkedArray:
    """Return `column` in the type of `field`, by the rules of `memtable.conversion`; `column` itself if it has that
    type.

    Raises InvalidRows naming the column, both types, and the first row at fault if a value is the cause.
    """
    if column.type == field.type:
        return column
    if reason := misfit(column.type, field.type):
        raise InvalidRows(
            f"column {field.name!r} has the type {column.type}, the table wants {field.type}: {reason}",
            column=field.name,
        )
    if pa.types.is_fixed_size_list(field.type):
        _check_width(column, field)
    try:
        return _exact(column, field.type)
    except _REFUSALS as error:
        raise _refused(column, field, error) from None


_REFUSALS = (pa.ArrowInvalid, pa.ArrowNotImplementedError)


def _exact(column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    return pa.chunked_array([exact(chunk, kind) for chunk in column.chunks], kind)


def _refused(column: pa.ChunkedArray, field: pa.Field, error: Exception) -> InvalidRows:
    row = _first_failing(column, field.type)
    where = f" in row {row}" if row is not None else ""
    reason = str(error).splitlines()[0].rstrip(".")
    return InvalidRows(
        f"column {field.name!r}{where} cannot become {field.type} ({reason}): correct the value",
        column=field.name,
        row=row,
    )


def _first_failing(column: pa.ChunkedArray, kind: pa.DataType) -> int | None:
    """Return the first row whose value cannot be cast, by bisection: log2(rows) casts, on the error path only."""
    low, high = 0, len(column)
    while low < high:
        middle = (low + high) // 2
        try:
            _exact(column.slice(low, middle - low + 1), kind)
            low = middle + 1
        except _REFUSALS:
            high = middle
    return low if low < len(column) else None


def _check_width(column: pa.ChunkedArray, field: pa.Field) -> None:
    """Refuse a list whose length is not the width of the vector column."""
    if not is_list(column.type):
        return
    lengths = pc.list_value_length(column)
    wrong = pc.fill_null(pc.not_equal(lengths, field.type.list_size), False).to_numpy()
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        raise InvalidRows(
            f"column {field.name!r} has {lengths[row].as_py()} numbers in row {row}, the table wants"
            f" {field.type.list_size}: give every vector that width",
            column=field.name,
            row=row,
        )
