"""Conditions of a query as a filter of a scan.

A filter may pass more rows than the conditions, never fewer: DataFusion applies the conditions again. So a condition
of an AND that has no translation is left out, an OR needs one for every part, and NOT an exact one. Lance plans its
filters by DataFusion too; what is translated is a comparison of a whole column with a value of the column's own type,
which means the same in both. Everything else (casts, functions, arithmetic, two columns) is left to the query.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

MOST_PARTS = 200
"""Of AND and OR in one filter; memtables refuse filters of more than 400 operators."""
INT64_MIN = -(2**63)
_MOST_SINGLE = float(np.finfo(np.float32).max)
_MIRRORED = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "=": "=", "!=": "!="}
_IS = {
    "IsNull": "IS NULL",
    "IsNotNull": "IS NOT NULL",
    "IsTrue": "IS TRUE",
    "IsFalse": "IS FALSE",
    "IsNotTrue": "IS NOT TRUE",
    "IsNotFalse": "IS NOT FALSE",
}
_UNITS = {"s": "Second", "ms": "Millisecond", "us": "Microsecond", "ns": "Nanosecond"}
Filter = tuple[str, bool]
"""A text, and whether it passes exactly the rows that pass the conditions."""


def filter_of(conditions: Sequence[Any], schema: pa.Schema) -> tuple[str | None, bool]:
    """Return a filter (None: all rows) that passes every row that passes all of `conditions`, and whether it is exact.

    `conditions`: DataFusion's expressions over the columns of `schema`, which was analysed: types are equal on both
    sides of a comparison.
    """
    translation = _Translation({field.name: field.type for field in schema})
    parts = [part for condition in conditions for part in _parts(condition, "AND")]
    found = [translation.of(part) for part in parts]
    kept = [each for each in found if each is not None]
    if not kept or translation.parts > MOST_PARTS:
        return None, not parts
    return _joined([text for text, _ in kept], "AND"), len(kept) == len(found) and all(exact for _, exact in kept)


def any_of(filters: Sequence[str | None]) -> str | None:
    """Return a filter that passes the rows of all `filters`; None for all rows."""
    distinct = list(dict.fromkeys(filters))
    if None in distinct or len(distinct) > MOST_PARTS:
        return None
    return _joined([text for text in distinct if text is not None], "OR")


class _Translation:
    def __init__(self, types: Mapping[str, pa.DataType]) -> None:
        self._types = types
        self.parts = 0
        self._by_kind: Mapping[str, Callable[[Any, Sequence[Any]], str | None]] = {
            "Column": self._bare,
            "Not": self._not,
            "InList": self._in,
            "Between": self._between,
            "Like": self._like,
        }

    def of(self, condition: Any) -> Filter | None:
        """Return a filter for one condition, None if there is none."""
        self.parts += 1
        kind = condition.variant_name()
        if kind == "BinaryExpr":
            return self._binary(condition)
        operands = condition.rex_call_operands() if kind in self._by_kind or kind in _IS else []
        if kind in _IS:
            column = self._column(operands[0])
            return None if column is None else (f"{column} {_IS[kind]}", True)
        by_kind = self._by_kind.get(kind)
        text = by_kind(condition, operands) if by_kind else None
        return None if text is None else (text, True)

    # ---- kinds of conditions -------------------------------------------------------------------------------------

    def _binary(self, condition: Any) -> Filter | None:
        operator = condition.rex_call_operator()
        if operator in ("AND", "OR"):
            found = [self.of(part) for part in _parts(condition, operator)]
            kept = [each for each in found if each is not None]
            if not kept or (operator == "OR" and len(kept) < len(found)):
                return None
            exact = len(kept) == len(found) and all(exact for _, exact in kept)
            return _joined([text for text, _ in kept], operator), exact
        left, right = condition.rex_call_operands()
        if left.variant_name() == "Literal":
            left, right, operator = right, left, _MIRRORED.get(operator)
        if operator not in _MIRRORED or right.variant_name() != "Literal":
            return None
        if left.variant_name() == "Cast":
            return self._single_precision(left, operator, right)
        column, value = self._column(left), self._value(left, right)
        return None if column is None or value is None else (f"{column} {operator} {value}", True)

    def _single_precision(self, cast: Any, operator: str, literal: Any) -> Filter | None:
        """A float32 column compared as float64: pass the rows up to the next float32 number, as Lance compares those
        as float32.
        """
        (inner,), value = cast.rex_call_operands(), literal.python_value()
        column = self._column(inner)
        if column is None or operator == "!=" or value.type != pa.float64() or not value.is_valid:
            return None
        if self._types[inner.to_variant().name()] != pa.float32() or not abs(value.as_py()) < _MOST_SINGLE:
            return None
        near = np.float32(value.as_py())
        if operator == "=":
            return (f"{column} = {float(near)!r}", False) if float(near) == value.as_py() else None
        below = operator in (">", ">=")
        if below and float(near) > value.as_py():
            near = np.nextafter(near, np.float32(-np.inf))
        if not below and float(near) < value.as_py():
            near = np.nextafter(near, np.float32(np.inf))
        return (f"{column} {operator[0]}= {float(near)!r}", False) if math.isfinite(near) else None

    def _bare(self, condition: Any, _: Sequence[Any]) -> str | None:
        """A boolean column by itself."""
        return self._column(condition)

    def _not(self, _: Any, operands: Sequence[Any]) -> str | None:
        inner = self.of(operands[0])
        return f"NOT ({inner[0]})" if inner is not None and inner[1] else None

    def _in(self, condition: Any, operands: Sequence[Any]) -> str | None:
        column, *values = operands
        name, texts = self._column(column), [self._value(column, value) for value in values]
        if name is None or not texts or None in texts:
            return None
        negated = "NOT " if condition.to_variant().negated() else ""
        return f"{name} {negated}IN ({', '.join(map(str, texts))})"

    def _between(self, condition: Any, operands: Sequence[Any]) -> str | None:
        column, low, high = operands
        name, first, last = self._column(column), self._value(column, low), self._value(column, high)
        if name is None or first is None or last is None:
            return None
        negated = "NOT " if condition.to_variant().negated() else ""
        return f"{name} {negated}BETWEEN {first} AND {last}"

    def _like(self, condition: Any, operands: Sequence[Any]) -> str | None:
        column, pattern = operands
        name, text, like = self._column(column), self._value(column, pattern), condition.to_variant()
        if name is None or text is None or "\\" in text or like.escape_char() is not None:
            return None
        return f"{name} {condition.rex_call_operator().upper()} {text}"

    # ---- columns and values --------------------------------------------------------------------------------------

    def _column(self, expression: Any) -> str | None:
        if expression.variant_name() != "Column":
            return None
        name = expression.to_variant().name()
        return f"`{name}`" if name in self._types and "`" not in name else None

    def _value(self, column: Any, literal: Any) -> str | None:
        """Return a literal of the column's type as SQL; None if it is null, of another type or has no exact text."""
        if column.variant_name() != "Column" or literal.variant_name() != "Literal":
            return None
        kind, value = self._types.get(column.to_variant().name()), literal.python_value()
        if kind is None or not isinstance(value, pa.Scalar) or not value.is_valid:
            return None
        if _family(kind) != _family(value.type) or (pa.types.is_floating(kind) and value.as_py() == 0):
            return None  # DataFusion tells 0.0 from -0.0, a filter does not
        return next((text(value) for fits, text in _TEXTS if fits(kind)), None)


def _parts(condition: Any, operator: str) -> Iterator[Any]:
    """Yield the parts of a chain of AND or OR, which may be deeper than Python recurses."""
    waiting = [condition]
    while waiting:
        part = waiting.pop()
        if part.variant_name() == "BinaryExpr" and part.rex_call_operator() == operator:
            waiting.extend(reversed(part.rex_call_operands()))
        else:
            yield part


def _joined(texts: Sequence[str], operator: str) -> str:
    return texts[0] if len(texts) == 1 else f" {operator} ".join(f"({text})" for text in texts)


def _family(kind: pa.DataType) -> Any:
    """Return what types of one family share: texts are equal whatever their offsets are, others only in one type."""
    if pa.types.is_large_string(kind) or pa.types.is_string(kind) or pa.types.is_string_view(kind):
        return "text"
    if pa.types.is_large_binary(kind) or pa.types.is_binary(kind) or pa.types.is_binary_view(kind):
        return "bytes"
    return kind


def _integer(value: pa.Scalar) -> str:
    number = value.as_py()
    # SQL parses the digits without the sign, and they alone overflow int64.
    return f"({number + 1} - 1)" if number == INT64_MIN else str(number)


def _float(value: pa.Scalar) -> str | None:
    number = value.as_py()
    return repr(number) if math.isfinite(number) else None


def _timestamp(value: pa.Scalar) -> str:
    zone = "None" if value.type.tz is None else f'Some("{value.type.tz}")'
    return f"arrow_cast({value.value}, 'Timestamp({_UNITS[value.type.unit]}, {zone})')"


_TEXTS: Sequence[tuple[Callable[[pa.DataType], bool], Callable[[pa.Scalar], str | None]]] = (
    (pa.types.is_boolean, lambda value: str(value.as_py()).lower()),
    (pa.types.is_integer, _integer),
    (pa.types.is_float64, _float),
    (pa.types.is_date32, lambda value: f"arrow_cast({value.value}, 'Date32')"),
    (pa.types.is_timestamp, _timestamp),
    (
        pa.types.is_decimal128,
        lambda value: f"cast('{value.as_py():f}' as decimal({value.type.precision}, {value.type.scale}))",
    ),
    (lambda kind: _family(kind) == "text", lambda value: "'" + value.as_py().replace("'", "''") + "'"),
    (lambda kind: _family(kind) == "bytes", lambda value: f"X'{value.as_py().hex()}'"),
)
