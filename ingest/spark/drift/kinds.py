"""The kinds of fields of a source, as types of the columns that they become. Pure.

Every value of a field fits its kind, in all records. Numbers widen to wider numbers if those represent each of them
exactly: whole numbers up to 2^53 beside floats are float64. Lists of one kind of scalar stay lists. Everything else (an
object, a list of lists, text in one record and a number in another, int64 beside floats, a number beyond int64) is
`ANY`: a text column that accepts every value, text unchanged and other values as JSON (`values.values.ANY_TEXT`), so
that nothing is lost, whatever values follow. None: only nulls and empty lists so far; no column can be created.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from memwal.ingest.values.json_columns import largest
from memwal.ingest.values.values import MARK_ANY, WHOLE

Kind: TypeAlias = pa.DataType | None
Kinds: TypeAlias = dict[str, Kind]
ANY = pa.json_(pa.string())
"""Represents `MARK_ANY` while kinds are determined; no column has this type."""
EXACT = pa.opaque(pa.int64(), "a whole number that float64 holds", "memwal")
"""Whole numbers of JSON up to 2^53: their column is int64, or float64 if floats follow. No column has this type."""
_IN_FLOATS = (pa.int8(), pa.int16(), pa.int32(), EXACT)
_INTEGERS = (*_IN_FLOATS, pa.int64())
_FLOATS = (pa.float32(), pa.float64())
DIGITS = 38
"""Maximum number of digits of a decimal."""


def of_value(value: object) -> Kind:
    """Return the kind of a value of a JSON document."""
    if isinstance(value, bool):
        return pa.bool_()
    if isinstance(value, int):
        if abs(value) <= WHOLE[64]:
            return EXACT
        return pa.int64() if -(2**63) <= value < 2**63 else ANY
    if isinstance(value, float):
        return pa.float64() if math.isfinite(value) else ANY  # JSON's 1e400, beyond float64
    if isinstance(value, str):
        return pa.string()
    if isinstance(value, list):
        return listed(common(map(of_value, value)))
    return None if value is None else ANY


def of_arrow(values: pa.ChunkedArray) -> Kind:
    """Return the kind of a field that Arrow's JSON reader read as `values`; text that it parsed as times stays text.

    Not for floats that the reader may have rounded: see `may_be_rounded`.
    """
    kind, types = values.type, pa.types
    if types.is_null(kind):
        return None
    if types.is_list(kind):
        return listed(of_arrow(pc.list_flatten(values)))
    if types.is_struct(kind):
        return ANY
    if types.is_integer(kind):
        return EXACT if largest(values) <= WHOLE[64] else kind
    return kind if types.is_boolean(kind) or types.is_floating(kind) else pa.string()


def may_be_rounded(values: pa.ChunkedArray) -> bool:
    """Return whether floats that Arrow's JSON reader read may be whole numbers beyond 2^53.

    The reader returns these as floats if they are beside floats or beyond int64.
    """
    if pa.types.is_list(values.type):
        return may_be_rounded(pc.list_flatten(values))
    return bool(pa.types.is_floating(values.type)) and largest(values) >= WHOLE[64]


def listed(kind: Kind) -> Kind:
    """Return the kind of a list of values of `kind`."""
    if kind is None:
        return None
    return ANY if kind == ANY or pa.types.is_nested(kind) else pa.list_(kind)


def common(kinds: Iterable[Kind]) -> Kind:
    """Return one kind that fits all `kinds`."""
    found: Kind = None
    for kind in kinds:
        found = widened(found, kind)
    return found


def widened(one: Kind, other: Kind) -> Kind:
    """Return a kind that fits the values of both kinds."""
    if one is None or other is None or one == other:
        return other if one is None else one
    if pa.types.is_list(one) and pa.types.is_list(other):
        return listed(widened(one.value_type, other.value_type))
    if pa.types.is_decimal(one) and pa.types.is_decimal(other):
        return _decimal(one, other)
    for family in (_INTEGERS, _FLOATS):
        if one in family and other in family:
            return max(one, other, key=family.index)
    numbers = (*_IN_FLOATS, *_FLOATS)  # not int64: a float64 would round some of its values
    return pa.float64() if one in numbers and other in numbers else ANY


def _decimal(one: pa.DataType, other: pa.DataType) -> pa.DataType:
    scale = max(one.scale, other.scale)
    digits = scale + max(one.precision - one.scale, other.precision - other.scale)
    return pa.decimal128(digits, scale) if digits <= DIGITS else ANY


def widen(found: Kinds, more: Mapping[str, Kind]) -> None:
    """Widen the kinds in `found` by those in `more`."""
    for name, kind in more.items():
        found[name] = widened(found.get(name), kind)


def new_columns(found: Mapping[str, Kind], known: Iterable[str]) -> tuple[list[pa.Field], list[str]]:
    """Return the columns for new fields, which are not in `known`, and the names of fields that cannot become columns.

    Spark does not distinguish `Id` from `id`: of two such fields, the first becomes a column.
    """
    taken = {name.lower() for name in known}
    columns: list[pa.Field] = []
    passed: list[str] = []
    for name, kind in found.items():
        if kind is None or name in known:
            continue
        # Names that begin with _ are reserved for Lance and memwal.
        usable = name and name[0] != "_" and name.isprintable() and not set(name) & set('."`\\')
        if name.lower() in taken or not usable:
            passed.append(name)
            continue
        taken.add(name.lower())
        columns.append(column(name, kind))
    return columns, passed


def column(name: str, kind: pa.DataType) -> pa.Field:
    """Return the nullable column of a field."""
    if kind == ANY:
        return pa.field(name, pa.string(), metadata=dict([MARK_ANY]))
    if kind == pa.list_(EXACT):
        return pa.field(name, pa.list_(pa.int64()))
    return pa.field(name, pa.int64() if kind == EXACT else kind)


def described(field: pa.Field) -> str:
    """Return name and type of a column for messages."""
    return f"{field.name} ({'text of any value' if field.metadata else field.type})"


def packed(found: Mapping[str, Kind]) -> bytes:
    """Return kinds as bytes, to transfer them from a task to the driver. Kinds that are None are omitted."""
    fields = [pa.field(_text(name), kind) for name, kind in found.items() if kind is not None]
    return bytes(pa.schema(fields).serialize())


def unpacked(told: bytes) -> Kinds:
    """Return the kinds from the bytes of `packed`."""
    return {field.name: field.type for field in pa.ipc.read_schema(pa.py_buffer(told))}


def _text(name: str) -> str:
    """Return a name as valid text: names in JSON may contain halves of surrogate pairs."""
    return name.encode(errors="backslashreplace").decode()
