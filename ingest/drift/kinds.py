"""The kinds of values that fields of a source have, as types of the columns that they become. Everything here is pure.

A kind is one that every value of the field fits, in whichever record it was found. Numbers widen to wider numbers and
lists of one kind of scalar stay lists; what has no such type (an object, a list of lists, text here and a number there)
is `ANY`: a column of text that takes every value, text as it is and everything else as JSON (`mapping_types.ANY_TEXT`),
so whatever comes later, nothing of it is lost. None: only nulls and empty lists so far, of which no column can be made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias

import pyarrow as pa

from memwal.ingest.mapping.values import MARK_ANY

Kind: TypeAlias = pa.DataType | None
Kinds: TypeAlias = dict[str, Kind]
ANY = pa.json_(pa.string())
"""Stands for `MARK_ANY` while kinds are told apart; no column ever has this type."""
_INTEGERS = (pa.int8(), pa.int16(), pa.int32(), pa.int64())
_FLOATS = (pa.float32(), pa.float64())
DIGITS = 38
"""That a decimal can have."""


def of_value(value: object) -> Kind:
    """The kind of a value of a JSON document."""
    if isinstance(value, bool):
        return pa.bool_()
    if isinstance(value, int):
        return pa.int64() if -(2**63) <= value < 2**63 else pa.float64()
    if isinstance(value, float):
        return pa.float64()
    if isinstance(value, str):
        return pa.string()
    if isinstance(value, list):
        return listed(common(map(of_value, value)))
    return None if value is None else ANY


def of_arrow(kind: pa.DataType) -> Kind:
    """The kind of a field that Arrow's JSON reader took for `kind`: it guesses times in text."""
    types = pa.types
    if types.is_null(kind):
        return None
    if types.is_list(kind):
        return listed(of_arrow(kind.value_type))
    if types.is_struct(kind):
        return ANY
    return kind if types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind) else pa.string()


def listed(kind: Kind) -> Kind:
    """The kind of a list of values of `kind`."""
    if kind is None:
        return None
    return ANY if kind == ANY or pa.types.is_nested(kind) else pa.list_(kind)


def common(kinds: Iterable[Kind]) -> Kind:
    """One for all."""
    found: Kind = None
    for kind in kinds:
        found = widened(found, kind)
    return found


def widened(one: Kind, other: Kind) -> Kind:
    """A kind that the values of both fit."""
    if one is None or other is None or one == other:
        return other if one is None else one
    if pa.types.is_list(one) and pa.types.is_list(other):
        return listed(widened(one.value_type, other.value_type))
    if pa.types.is_decimal(one) and pa.types.is_decimal(other):
        return _decimal(one, other)
    for family in (_INTEGERS, _FLOATS):
        if one in family and other in family:
            return max(one, other, key=family.index)
    numbers = (*_INTEGERS, *_FLOATS)
    return pa.float64() if one in numbers and other in numbers else ANY


def _decimal(one: pa.DataType, other: pa.DataType) -> pa.DataType:
    scale = max(one.scale, other.scale)
    digits = scale + max(one.precision - one.scale, other.precision - other.scale)
    return pa.decimal128(digits, scale) if digits <= DIGITS else ANY


def widen(found: Kinds, more: Mapping[str, Kind]) -> None:
    """Take `more` into `found`."""
    for name, kind in more.items():
        found[name] = widened(found.get(name), kind)


def new_columns(found: Mapping[str, Kind], known: Iterable[str]) -> tuple[list[pa.Field], list[str]]:
    """The columns that fields become beside those of the names `known`, and the names of fields that cannot.

    Spark does not tell `Id` from `id`: of two such fields the first is a column.
    """
    taken = {name.lower() for name in known}
    columns: list[pa.Field] = []
    passed: list[str] = []
    for name, kind in found.items():
        if kind is None or name in known:
            continue
        if name.lower() in taken or not _is_usable(name):
            passed.append(name)
            continue
        taken.add(name.lower())
        columns.append(column(name, kind))
    return columns, passed


def column(name: str, kind: pa.DataType) -> pa.Field:
    """The nullable column of a field."""
    return pa.field(name, pa.string(), metadata=dict([MARK_ANY])) if kind == ANY else pa.field(name, kind)


def said(field: pa.Field) -> str:
    """A column as a line for the user names it."""
    return f"{field.name} ({'text of any value' if field.metadata else field.type})"


def _is_usable(name: str) -> bool:
    """Whether it can be a column: names that begin with _ Lance or memwal may take for themselves."""
    return bool(name) and not name.startswith("_") and name.isprintable() and not set(name) & set('."`\\')


def packed(found: Mapping[str, Kind]) -> bytes:
    """Kinds on their way from a task to the driver; those that are None stay behind."""
    fields = [pa.field(_text(name), kind) for name, kind in found.items() if kind is not None]
    return bytes(pa.schema(fields).serialize())


def unpacked(told: bytes) -> Kinds:
    """What `packed` made."""
    return {field.name: field.type for field in pa.ipc.read_schema(pa.py_buffer(told))}


def _text(name: str) -> str:
    """JSON has names that are no text: halves of surrogate pairs."""
    return name.encode(errors="backslashreplace").decode()
