"""Casting a caller's column to the table's, losing nothing, and naming the row where it cannot be done."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from memtable.errors import InvalidRows


def convert(column: pa.ChunkedArray, field: pa.Field) -> pa.ChunkedArray:
    """`column` in the type of `field`.

    Allowed: number to number, text to text, bytes to bytes, date and timestamp units, lists to vectors,
    dictionary to its values, null to anything; always value-preserving (floats may lose digits, as any
    float32 column does). A string never becomes a number, nor a number a string: that hides mistakes. Raises
    InvalidRows naming the column, both types, and the first row at fault where a value is.
    """
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if column.type == field.type:
        return column
    if pa.types.is_fixed_size_list(field.type):
        _check_width(column, field)
    if not _same_family(column.type, field.type):
        raise InvalidRows(
            f"column {field.name!r} has the type {column.type}, the table wants {field.type}: convert it",
            column=field.name,
        )
    try:
        return column.cast(field.type)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise _refused(column, field, error) from None


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
    """First row whose value alone cannot be cast, by halving: log2(rows) casts on the error path only."""
    low, high = 0, len(column)
    while low < high:
        middle = (low + high) // 2
        try:
            column.slice(low, middle - low + 1).cast(kind)
            low = middle + 1
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            high = middle
    return low if low < len(column) else None


def _check_width(column: pa.ChunkedArray, field: pa.Field) -> None:
    """Refuse a list whose length is not the width of the vector column."""
    if not _is_list(column.type):
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


def _is_list(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _family(kind: pa.DataType) -> str:
    types = pa.types
    if types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind):
        return "number"
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return "text"
    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind):
        return "bytes"
    if types.is_date(kind) or types.is_timestamp(kind):
        return "time"
    return "list" if _is_list(kind) else str(kind.id)


def _same_family(found: pa.DataType, wanted: pa.DataType) -> bool:
    if pa.types.is_null(found):
        return True
    if _is_list(found) and _is_list(wanted):
        return _same_family(found.value_type, wanted.value_type)
    return _family(found) == _family(wanted)
