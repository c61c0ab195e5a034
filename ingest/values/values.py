"""Convert values of records into values of columns: strictly, exactly, with a reason for each rejected value.

Conversions: text into dates and times (ISO 8601), base64 text into binary (JSON has no bytes), numbers and numeric text
into decimals, numbers with a declared unit into times, and the text of keys and headers into the type of the column.

Spark has neither unsigned numbers nor fixed-size lists, so columns travel in the type that `transport_type` returns;
the sink casts them to the table's types.
"""

from __future__ import annotations

import base64
import binascii
import datetime
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from memwal.ingest.suggest import suggestion
from memwal.ingest.values.json_parts import Written, as_json, one_of

Problems = dict[int, str]
"""Row of a batch -> why it cannot be used."""

MARK_ANY = (b"memwal:values", b"any")
"""Metadata of a text column that accepts values of every kind; see `ANY_TEXT`."""
ANY_TEXT = "any"
"""In place of a unit: text is unchanged, every other value becomes JSON text, as Spark reads JSON into text."""

_UNITS: Mapping[str, tuple[int, int]] = {"s": (1_000_000, 1), "ms": (1_000, 1), "us": (1, 1), "ns": (1, 1_000)}
"""Factor and divisor that convert each unit to microseconds."""
_LIBRARY = (ArithmeticError, TypeError, RecursionError)
"""Exceptions besides ValueError that Python and Arrow raise for a value that does not fit."""
_DIGIT_GROUPS = re.compile(r"[^\x00-\x7f]|_")
"""Number syntax that Python accepts and memwal rejects: 1_000, and digits that are not ASCII."""
_WHOLE_TEXT = r"[+-]?[0-9]+"
_SHOWN = 40
FLOAT_MAX = {16: 65504.0, 32: float(np.finfo(np.float32).max), 64: math.inf}
"""Largest finite float, by width in bits."""
WHOLE = {16: 2**11, 32: 2**24, 64: 2**53}
"""Bound up to which floats represent every whole number, by width in bits."""
NARROW: Mapping[int, Callable[[Any], Any]] = {16: np.float16, 32: np.float32, 64: np.float64}


def is_text(kind: pa.DataType) -> bool:
    """Return whether a column holds text."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def is_bytes(kind: pa.DataType) -> bool:
    """Return whether a column holds bytes."""
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def holds(kind: pa.DataType, of: Callable[[pa.DataType], bool]) -> bool:
    """Return whether a column holds values of a type for which `of` is true, at any depth."""
    if pa.types.is_struct(kind):
        return any(holds(field.type, of) for field in kind)
    return holds(kind.value_type, of) if pa.types.is_nested(kind) else bool(of(kind))


def is_readable(kind: pa.DataType) -> bool:
    """Return whether records and text files can contain values for a column."""
    return any(family(kind) for family, _ in _FAMILIES)


def transport_type(kind: pa.DataType) -> pa.DataType:
    """Return the type that a column has in Spark, as in `spark.schema`."""
    wider = {pa.uint8(): pa.int16(), pa.uint16(): pa.int32(), pa.uint32(): pa.int64(), pa.float16(): pa.float32()}
    wider |= {pa.uint64(): pa.decimal128(20, 0), pa.large_string(): pa.string(), pa.large_binary(): pa.binary()}
    if pa.types.is_fixed_size_list(kind) or pa.types.is_list(kind):
        return pa.list_(transport_type(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(transport_type(field.type)) for field in kind])
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", None if kind.tz is None else "UTC")
    return wider.get(kind, kind)


def check_unit(unit: str, kind: pa.DataType) -> str:
    """Return `unit` if it fits a column of type `kind`. Raises: ValueError."""
    wanted = ("d",) if pa.types.is_date(kind) else tuple(_UNITS) if pa.types.is_timestamp(kind) else ()
    if unit and not wanted:
        raise ValueError(f"unit = {unit!r} is for time columns, this one is {kind}; remove it")
    if unit and unit not in wanted:
        raise ValueError(f"unit = {unit!r} is not known{suggestion(unit, wanted)}")
    return unit


# ---- single values -------------------------------------------------------------------------------------------------


def typed(value: Any, kind: pa.DataType, unit: str = "") -> Any:
    """Convert a value of JSON or Avro to a value that Arrow accepts for `transport_type(kind)`; None stays None.

    Raises: ValueError.
    """
    if value is None:
        return None
    for family, convert in _FAMILIES:
        if family(kind):
            try:
                return convert(value, kind, unit)
            except _LIBRARY:
                raise _misfit(value, kind) from None
    raise ValueError(f"a column of type {kind} cannot be filled from a record")


def cast_texts(texts: pa.Array, kind: pa.DataType) -> pa.Array:
    """Cast texts to `kind`. Raises: pa.ArrowInvalid for texts that do not fit, and for hexadecimal numbers."""
    if pa.types.is_integer(kind):
        odd = texts.filter(pc.match_substring_regex(texts, "^[+-]?0[xX]"))  # Arrow reads 0x10 as 16
        if len(odd):
            raise pa.ArrowInvalid(f"{odd[0].as_py()!r} is hexadecimal; write its digits")
    return texts.cast(kind)


def rounds(texts: pa.Array, floats: pa.Array) -> bool:
    """Return whether `floats`, the cast of `texts`, may differ from a whole number in `texts`.

    True also for whole numbers beyond int64, which `from_text` checks one by one.
    """
    large = pc.greater_equal(pc.abs(floats), pa.scalar(WHOLE[floats.type.bit_width], floats.type))
    if not pc.any(large).as_py():
        return False
    whole = pc.and_(large, pc.match_substring_regex(texts, f"^{_WHOLE_TEXT}$"))
    try:
        written = texts.filter(whole).cast(pa.int64()).to_numpy()
    except pa.ArrowInvalid:
        return True
    held = floats.filter(whole).cast(pa.float64()).to_numpy()
    return bool(np.any(held >= 2.0**63) or np.any(held.astype(np.int64) != written))


def from_text(text: str, kind: pa.DataType, unit: str = "") -> Any:
    """Convert the text of a key or header to a value as `typed` returns it. Raises: ValueError."""
    if is_text(kind):
        return typed(text, kind)
    number = unit or pa.types.is_integer(kind)
    wanted = pa.int64() if unit else kind
    if number or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
        try:
            value = typed(cast_texts(pa.array([text.strip()]), wanted)[0].as_py(), kind, unit)
        except pa.ArrowInvalid:
            raise _misfit(text, kind) from None
        if pa.types.is_floating(kind) and re.fullmatch(_WHOLE_TEXT, text.strip()):
            # Check the exact number, as the cast has rounded. By way of Decimal: int() accepts at most 4,300 digits.
            typed(int(Decimal(text.strip())), kind)
        return value
    return typed(text, kind, unit)


def _misfit(value: Any, kind: pa.DataType, why: str = "") -> ValueError:
    text = value.digits if isinstance(value, Written) else repr(value)
    text = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
    return ValueError(f"{text} is not a valid {_named(kind)}{why and f' ({why})'}")


def _named(kind: pa.DataType) -> str:
    """Return the name of a type as [table] columns writes it."""
    name = {"halffloat": "float16", "float": "float32", "double": "float64"}.get(str(kind), str(kind))
    return name.replace("tz=", "").replace("[day]", "")


def _integer(value: Any, kind: pa.DataType, _unit: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _misfit(value, kind)
    low = 0 if pa.types.is_unsigned_integer(kind) else -(2 ** (kind.bit_width - 1))
    if not low <= value < low + 2**kind.bit_width:
        raise _misfit(value, kind, "out of range")
    return value


def _floating(value: Any, kind: pa.DataType, _unit: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        raise _misfit(value, kind)
    try:
        number = float(value)
    except OverflowError:
        raise _misfit(value, kind, "out of range") from None
    if not math.isfinite(number) or abs(number) > FLOAT_MAX[kind.bit_width]:
        raise _misfit(value, kind, "not a finite number in range")
    if isinstance(value, int):
        rounded = abs(value) > WHOLE[kind.bit_width] and int(NARROW[kind.bit_width](value)) != value
    else:
        rounded = isinstance(value, Decimal) and Decimal(repr(number)) != value
    if rounded:
        raise _misfit(value, kind, "it would be rounded; store it as a decimal or an integer")
    return number


def _boolean(value: Any, kind: pa.DataType, _unit: str) -> bool:
    if not isinstance(value, bool):
        raise _misfit(value, kind)
    return value


def _text(value: Any, kind: pa.DataType, unit: str) -> str:
    if isinstance(value, UUID | Decimal | datetime.time):
        return str(value)
    if unit == ANY_TEXT and not isinstance(value, str):
        value = as_json(value)
    if not isinstance(value, str):
        raise _misfit(value, kind, "to store numbers and objects as text, write sql with to_json or cast")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _misfit(value, kind, "it has half of a surrogate pair") from None
    return value


def _decimal(value: Any, kind: pa.DataType, _unit: str) -> Decimal:
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal | str):
        raise _misfit(value, kind)
    try:
        # A float without original digits, as in Avro, is converted from its shortest representation.
        number = Decimal(value.digits if isinstance(value, Written) else str(value))
        if number.is_finite() and not _DIGIT_GROUPS.search(str(value)):  # Arrow raises TypeError for infinity
            return pa.scalar(number).cast(kind).as_py()  # type: ignore[no-any-return]
    except (ArithmeticError, pa.ArrowException, ValueError):
        pass
    raise _misfit(value, kind, "not a number with that precision and scale")


def _binary(value: Any, kind: pa.DataType, _unit: str) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        try:
            return base64.b64decode(value, validate=True)
        except (binascii.Error, ValueError):
            raise _misfit(value, kind, "bytes in JSON must be base64") from None
    raise _misfit(value, kind)


def _date(value: Any, kind: pa.DataType, unit: str) -> Any:
    if unit:
        return _within(value, kind, 2_900_000)
    if isinstance(value, datetime.date) and not isinstance(value, datetime.datetime):
        return value
    return _parsed(value, kind)


def _timestamp(value: Any, kind: pa.DataType, unit: str) -> Any:
    if unit:
        factor, divisor = _UNITS[unit]
        whole = _within(value, kind, 2**63) * factor
        if whole % divisor:
            raise _misfit(value, kind, "finer than a microsecond")
        return _within(whole // divisor, kind, 2**63)
    if isinstance(value, datetime.datetime):
        if kind.tz is not None and value.tzinfo is None:
            raise _misfit(value, kind, f"a time without a zone; declare the column timestamp[{kind.unit}]")
        aware = value if value.tzinfo else value.replace(tzinfo=datetime.UTC)
        return aware if kind.tz is not None else aware.astimezone(datetime.UTC).replace(tzinfo=None)
    return _parsed(value, kind)


def _within(value: Any, kind: pa.DataType, limit: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _misfit(value, kind, "a column with a unit needs a whole number")
    if not -limit <= value < limit:
        raise _misfit(value, kind, "out of range")
    return value


def _parsed(value: Any, kind: pa.DataType) -> Any:
    if isinstance(value, bool) or not isinstance(value, str):
        raise _misfit(value, kind, "numbers need a unit" if isinstance(value, int | float) else "")
    try:
        # The integer representation: Python's dates are limited to years 1 to 9999, Arrow's are not.
        return pa.scalar(value).cast(transport_type(kind)).value
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        why = "with an offset, such as Z" if "expected a zone offset" in str(error) else ""
        if "no zone offset" in str(error):
            why = f"without an offset, or declare the column timestamp[{kind.unit}, UTC]"
        raise _misfit(value, kind, f"write ISO 8601 {why}".strip()) from None


def _vector(value: Any, kind: pa.DataType, unit: str) -> list[Any]:
    if not isinstance(value, list):
        raise _misfit(value, kind)
    if len(value) != kind.list_size:
        raise ValueError(f"has {len(value)} numbers, vectors of the column have {kind.list_size}")
    if None in value:
        raise _misfit(None, kind.value_type)
    return [typed(each, kind.value_type, unit) for each in value]


def _list(value: Any, kind: pa.DataType, unit: str) -> list[Any]:
    if not isinstance(value, list):
        raise _misfit(value, kind)
    return [typed(element, kind.value_type, unit) for element in value]


def _struct(value: Any, kind: pa.StructType, _unit: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _misfit(value, kind)
    for name in value:
        if kind.get_field_index(name) < 0:
            raise ValueError(f"has a field {name!r} that the column lacks")
    fields = {}
    for field in kind:
        try:
            fields[field.name] = typed(one_of(value, field.name), field.type)
        except ValueError as error:
            raise ValueError(f"{field.name}: {error}") from None
    return fields


_Convert = Callable[[Any, pa.DataType, str], Any]
_FAMILIES: tuple[tuple[Callable[[pa.DataType], bool], _Convert], ...] = (
    (pa.types.is_integer, _integer),
    (pa.types.is_floating, _floating),
    (pa.types.is_boolean, _boolean),
    (is_text, _text),
    (is_bytes, _binary),
    (pa.types.is_date32, _date),
    (pa.types.is_timestamp, _timestamp),
    (pa.types.is_decimal128, _decimal),
    (pa.types.is_fixed_size_list, _vector),
    (pa.types.is_list, _list),
    (pa.types.is_struct, _struct),
)


# ---- whole columns -------------------------------------------------------------------------------------------------


def column(
    values: Sequence[Any], kind: pa.DataType, unit: str, convert: Callable[[Any, pa.DataType, str], Any] = typed
) -> tuple[pa.Array, Problems]:
    """Convert values one by one. Return the column, null where a value does not fit, and the reasons by row."""
    taken: list[Any] = []
    problems: Problems = {}
    for row, value in enumerate(values):
        try:
            if isinstance(value, ValueError):
                raise value
            taken.append(convert(value, kind, unit))
        except (ValueError, *_LIBRARY) as error:
            taken.append(None)
            problems[row] = str(error)
    return pa.array(taken, transport_type(kind)), problems


def bytes_column(values: pa.Array, kind: pa.DataType, unit: str) -> tuple[pa.Array, Problems]:
    """Return bytes (binary array: keys, headers, raw values) as a column, and the problems; text is UTF-8."""
    if is_bytes(kind):
        return values.cast(pa.binary()), {}
    if is_text(kind):
        with suppress(pa.ArrowInvalid):
            return values.cast(pa.string()), {}

    def convert(value: bytes | None, *how: Any) -> Any:
        try:
            return None if value is None else from_text(value.decode(), *how)
        except UnicodeDecodeError:
            raise ValueError(f"{(value or b'')[:_SHOWN]!r} is not UTF-8 text") from None

    return column(values.to_pylist(), kind, unit, convert)
