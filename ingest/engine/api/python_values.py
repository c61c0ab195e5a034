"""Convert Python values to Arrow columns by the rule of `memtable.conversion`: values that do not fit are rejected.

For a given type, Arrow changes values silently: 5.5 becomes the integer 5, 1.7e9 a microsecond, noon without a zone
13:00 in Berlin. It changes nothing if the Python types are those of the column (`_SAME`), which one check of the set of
types verifies. Other values first get the type that Arrow infers, and are then cast exactly.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping, Sequence
from decimal import Decimal
from itertools import chain
from operator import attrgetter
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from memwal.memtable import exact, is_list, misfit, overflows

NOT_TAKEN = (pa.ArrowException, TypeError, OverflowError, ValueError)
"""Errors of `column_of` for values that do not fit."""

_NONE = frozenset({type(None)})
_SAME: Mapping[int, frozenset[type]] = {
    kind.id: _NONE | set(types)
    for kinds, types in (
        ((pa.int8(), pa.int16(), pa.int32(), pa.int64()), (int,)),
        ((pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()), (int,)),
        ((pa.float16(),), (float,)),  # Arrow rounds integers into it
        ((pa.float32(), pa.float64()), (float, int)),
        ((pa.string(), pa.large_string()), (str,)),
        ((pa.binary(), pa.large_binary(), pa.binary(1)), (bytes,)),
        ((pa.bool_(),), (bool,)),
        ((pa.date32(), pa.date64()), (datetime.date,)),
        ((pa.decimal128(1), pa.decimal256(1)), (Decimal, int)),
    )
    for kind in kinds
}
"""By the id of an Arrow type: Python types whose values Arrow accepts unchanged or rejects. For floats narrower than
float64 the result must be checked for infinity.
"""


_NARROW = {pa.float16().id, pa.float32().id}


def column_of(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Return `values` (None = null) as an array of the type `kind`. Raises: one of `NOT_TAKEN`."""
    same = _SAME.get(kind.id)
    if same is not None and set(map(type, values)) <= same:
        found = pa.array(values, kind)
        infinite = kind.id in _NARROW and np.isinf(_numbers(found)).any()
        if infinite and overflows(found, pa.array(values, pa.float64())):
            raise pa.ArrowInvalid(f"a number is beyond the largest {kind}")
        return found
    if isinstance(kind, pa.BaseExtensionType):
        if kind != pa.bool8():
            return pa.array(values, kind)
        # Arrow converts numbers to bool8, and rejects booleans.
        truths = column_of(values, pa.bool_())
        if not (pa.types.is_boolean(truths.type) or pa.types.is_null(truths.type)):
            raise pa.ArrowTypeError(f"{truths.type} is not a truth value: write True or False")
        return pa.ExtensionArray.from_storage(kind, truths.cast(pa.int8()))
    if is_list(kind):
        plain = _plain_lists(values, kind)
        return _lists(values, kind) if plain is None else plain
    if pa.types.is_struct(kind):
        return pa.array(values, kind) if _loses_nothing(values, kind) else _structs(values, kind)
    if _alike(values, set(map(type, values))):
        return _converted(values, kind)
    return pa.concat_arrays([_converted([value], kind) for value in values])


def _alike(values: Sequence[Any], types: set[type]) -> bool:
    """Return whether all values have one type, with or without a time zone: Arrow changes some values of a mixture."""
    several = len(types - _NONE) > 1
    return not several and len({getattr(value, "tzinfo", None) is None for value in values if value is not None}) <= 1


def _converted(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    inferred = _whole(values)
    if pa.types.is_floating(inferred.type) and not pa.types.is_floating(kind) and any(map(_is_nan, values)):
        raise pa.ArrowTypeError(_WRITE_NONE.format("nan"))
    if reason := misfit(inferred.type, kind):
        raise pa.ArrowTypeError(f"it is {inferred.type}; {reason}")
    return exact(inferred, kind)


def _whole(values: Sequence[Any]) -> pa.Array:
    """Return `values` in the type that Arrow infers, with the nanoseconds that it would drop.

    Raises: pa.ArrowTypeError for a time of day with a zone; one of `NOT_TAKEN`.
    """
    missing = next((value for value in values if type(value).__name__ in _MISSING), None)
    if missing is not None:
        raise pa.ArrowTypeError(_WRITE_NONE.format(missing))
    inferred = pa.array(values)
    if isinstance(inferred.type, pa.BaseExtensionType):  # among Python's own types only UUID gives one
        return inferred.storage
    if pa.types.is_time(inferred.type) and any(getattr(value, "tzinfo", None) is not None for value in values):
        raise pa.ArrowTypeError("a time of day has a time zone, which no column can hold: remove it")
    if pa.types.is_timestamp(inferred.type) and inferred.type.tz is not None:
        check_offsets(values)
    # pandas' times and durations have nanoseconds, which Arrow would cut to microseconds.
    if pa.types.is_timestamp(inferred.type) and any(getattr(value, "nanosecond", 0) for value in values):
        return pa.array(values, pa.timestamp("ns", inferred.type.tz))
    if pa.types.is_duration(inferred.type) and any(getattr(value, "nanoseconds", 0) for value in values):
        return pa.array(values, pa.duration("ns"))
    return inferred


def check_offsets(times: Sequence[Any]) -> None:
    """Reject datetimes (all with a zone, or None) whose UTC offset has microseconds, which Arrow truncates.

    A zone whose offsets are all whole seconds is checked once. Raises: pa.ArrowTypeError.
    """
    zones = list(map(_ZONE, filter(None, times)))
    unsure = {at for at, zone in dict(zip(map(id, zones), zones, strict=True)).items() if not _has_whole_seconds(zone)}
    if unsure and any(
        time.utcoffset().microseconds for time in times if time is not None and id(time.tzinfo) in unsure
    ):
        raise pa.ArrowTypeError("its UTC offset has microseconds: write the time in UTC, .astimezone(datetime.UTC)")


_ZONE = attrgetter("tzinfo")


def _has_whole_seconds(zone: datetime.tzinfo) -> bool:
    """Return whether no time in `zone` has microseconds in its offset; False if unknown."""
    if type(zone) is datetime.timezone:
        return zone.utcoffset(None).microseconds == 0
    return isinstance(zone, ZoneInfo)


_MISSING = ("NaTType", "NAType")
"""Type names of pandas' missing values."""


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


_WRITE_NONE = "{} is not a value of this type: write None for a null"


def _numbers(found: pa.Array) -> Any:
    return found.to_numpy(zero_copy_only=False)


# ---- lists and structs ---------------------------------------------------------------------------------------------


def _plain_lists(values: Sequence[Any], kind: pa.DataType) -> pa.Array | None:
    """Convert lists by Arrow alone; None if that may change values.

    Lists of floats, which may be long and numerous, are checked element by element only where an element may be a bool.
    """
    if not pa.types.is_floating(kind.value_type) or pa.types.is_float16(kind.value_type):
        return pa.array(values, kind) if _loses_nothing(values, kind) else None
    if len(values) <= _FEW and _are_small_floats(values):
        return pa.array(values, kind)
    try:
        found = pa.array(values, kind)
    except NOT_TAKEN:
        return None
    elements = _numbers(found.flatten())
    if np.isinf(elements).any():
        return None
    doubtful = np.flatnonzero((elements == 0) | (elements == 1))  # Arrow converts True and False to these
    if len(doubtful):
        rows = np.unique(pc.list_parent_indices(found).to_numpy()[doubtful])
        if not all(_has_no_bools(values[row]) for row in rows.tolist()):
            return None
    return found


def _loses_nothing(values: Sequence[Any], kind: pa.DataType) -> bool:
    """Return whether Arrow accepts lists, structs and their elements unchanged, or rejects them."""
    types = set(map(type, values))
    if is_list(kind):
        within = list(chain.from_iterable(filter(None, values))) if types <= _LISTS else []
        return types <= _LISTS and _loses_nothing(within, kind.value_type)
    if pa.types.is_struct(kind):
        rows = list(filter(None, values)) if types <= _DICTS else []
        named = types <= _DICTS and set().union(*rows) <= {field.name for field in kind}
        return named and all(_loses_nothing([row.get(f.name) for row in rows], f.type) for f in kind)
    return kind.id not in _NARROW and types <= _SAME.get(kind.id, _NONE)


_LISTS, _DICTS = _NONE | {list}, _NONE | {dict}


_FEW = 4
"""Up to this number of lists, checking each element costs less than the first call of NumPy."""


def _are_small_floats(values: Sequence[Any]) -> bool:
    """Return whether all elements are floats too small to overflow any float type; a NaN counts as too large."""
    if not set(map(type, values)) <= _LISTS:
        return False
    elements = list(chain.from_iterable(filter(None, values)))
    return set(map(type, elements)) <= {float} and all(map(_SMALL.__gt__, map(abs, elements)))


_SMALL = 60_000.0


def _has_no_bools(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "fiu"
    return set(map(type, value)) <= {float, int, type(None)}


def _lists(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    lengths = [None if value is None else len(_expect(value, (list, tuple, np.ndarray), kind)) for value in values]
    elements = column_of(list(chain.from_iterable(value for value in values if value is not None)), kind.value_type)
    offsets = pa.array(np.cumsum([0, *(length or 0 for length in lengths)]), pa.int64())
    nulls = pa.array([length is None for length in lengths], pa.bool_())
    large = pa.LargeListArray.from_arrays(offsets, elements, type=pa.large_list(kind.value_field), mask=nulls)
    return exact(large, kind)


def _structs(values: Sequence[Any], kind: pa.StructType) -> pa.Array:
    nothing: Mapping[str, Any] = {}
    rows = [nothing if value is None else _expect(value, (Mapping,), kind) for value in values]
    if unknown := set().union(*rows) - {field.name for field in kind}:
        raise pa.ArrowTypeError(f"its field {min(unknown)!r:.200} is not in the table; remove it")
    columns = [column_of([row.get(field.name) for row in rows], field.type) for field in kind]
    nulls = pa.array([value is None for value in values], pa.bool_())
    return pa.StructArray.from_arrays(columns, fields=list(kind), mask=nulls)


def _expect(value: Any, types: tuple[type, ...], kind: pa.DataType) -> Any:
    if not isinstance(value, types):
        raise pa.ArrowTypeError(f"a {type(value).__name__} is not a {kind}")
    return value
