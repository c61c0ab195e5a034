"""Which rows a predicate could select at all, told by the conditions an index can answer.

Only the conditions of the outermost AND are looked at, and only where the comparison of the index is provably
that of DataFusion: numbers with numbers, text with text, dates and timestamps with their own literals.
Everything else narrows nothing and costs only time: the predicate is evaluated on whatever is left.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import sqlglot
from sqlglot import exp

from memtable.scalar_index import Bounds, sort_form

# Parsing a longer predicate costs more than the index saves.
LONGEST = 100_000


@dataclass(frozen=True)
class Condition:
    """One condition on one column: a range, or a set of values (either, never both). Values in sort_form."""

    column: str
    bounds: Bounds | None = None
    values: tuple[Any, ...] = ()


def conditions(sql: str, columns: Mapping[str, pa.DataType]) -> list[Condition]:
    """The conditions in `sql` (as predicate.translate gives it) on `columns`, all of which must hold."""
    if len(sql) > LONGEST:
        return []
    try:
        tree = sqlglot.parse_one(sql)
        found = [_condition(part, columns) for part in _conjuncts(tree)]
    except (sqlglot.errors.SqlglotError, RecursionError):
        return []
    return [condition for condition in found if condition is not None]


def _conjuncts(tree: exp.Expr) -> Iterator[exp.Expr]:
    pending = [tree]
    while pending:
        part = pending.pop().unnest()
        if isinstance(part, exp.And):
            pending += [part.this, part.expression]
        else:
            yield part


def _condition(part: exp.Expr, columns: Mapping[str, pa.DataType]) -> Condition | None:
    if isinstance(part, exp.Between):
        return _range(part.this, part.args["low"], part.args["high"], columns)
    if isinstance(part, exp.In):
        return _values(part.this, part.expressions, columns) if part.expressions else None
    if not isinstance(part, (exp.EQ, exp.GT, exp.GTE, exp.LT, exp.LTE)):
        return None
    left, right = part.this, part.expression
    kind: type[exp.Expr] = type(part)
    if not isinstance(left, exp.Column):
        mirrored: dict[type[exp.Expr], type[exp.Expr]] = {
            exp.GT: exp.LT,
            exp.GTE: exp.LTE,
            exp.LT: exp.GT,
            exp.LTE: exp.GTE,
        }
        left, right, kind = right, left, mirrored.get(kind, kind)
    if kind is exp.EQ:
        return _values(left, [right], columns)
    if kind in (exp.GT, exp.GTE):
        return _range(left, right, None, columns, strict=kind is exp.GT)
    return _range(left, None, right, columns, strict=kind is exp.LT)


def _range(
    column: exp.Expr,
    low: exp.Expr | None,
    high: exp.Expr | None,
    columns: Mapping[str, pa.DataType],
    *,
    strict: bool = False,
) -> Condition | None:
    kind = _column_type(column, columns)
    if kind is None:
        return None
    floating = pa.types.is_floating(kind)
    ends = [None if side is None else _literal(side, kind) for side in (low, high)]
    if any(side is not None and end is None for side, end in zip((low, high), ends, strict=True)):
        return None
    if floating:
        return Condition(column.name, Bounds(*_widened(ends[0], ends[1])))
    return Condition(column.name, Bounds(ends[0], ends[1], not strict, not strict))


def _values(column: exp.Expr, literals: list[exp.Expr], columns: Mapping[str, pa.DataType]) -> Condition | None:
    kind = _column_type(column, columns)
    if kind is None:
        return None
    values = [_literal(literal, kind) for literal in literals]
    if any(value is None for value in values):
        return None
    if pa.types.is_floating(kind):
        if len(values) > 1:
            return None
        return Condition(column.name, Bounds(*_widened(values[0], values[0])))
    return Condition(column.name, values=tuple(dict.fromkeys(values)))


def _column_type(column: exp.Expr, columns: Mapping[str, pa.DataType]) -> pa.DataType | None:
    if not isinstance(column, exp.Column) or column.table:
        return None
    return columns.get(column.name)


def _literal(literal: exp.Expr, kind: pa.DataType) -> Any:
    """The literal in the column's type and sort_form; None where the two are not surely comparable."""
    cast_to = ""
    if isinstance(literal, exp.Cast):
        cast_to = literal.to.sql().upper()
        literal = literal.this
    negative = isinstance(literal, exp.Neg)
    if negative:
        literal = literal.this
    if isinstance(literal, exp.Anonymous) and literal.name.lower() == "arrow_cast":
        literal = literal.expressions[0]  # put there by predicate.translate
    if not isinstance(literal, exp.Literal):
        return None
    text = ("-" if negative else "") + literal.this
    if not _comparable(literal.is_string, text, cast_to, kind):
        return None
    try:
        value = sort_form(pa.array([text], pa.string()).cast(kind))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return None
    return value[0].as_py() if isinstance(value, pa.Array) else value[0].item()


def _comparable(quoted: bool, text: str, cast_to: str, kind: pa.DataType) -> bool:
    types = pa.types
    if types.is_integer(kind):
        return not quoted and not cast_to and text.lstrip("-").isdecimal()
    if types.is_floating(kind):
        return not quoted and not cast_to
    if types.is_string(kind) or types.is_large_string(kind):
        return quoted and not cast_to
    if types.is_date32(kind):
        return quoted and cast_to == "DATE"
    return types.is_timestamp(kind) and kind.tz is None and quoted and cast_to in ("DATE", "TIMESTAMP")


def _widened(low: float | None, high: float | None) -> tuple[float | None, float | None]:
    """Bounds one float32 step wider: the engine may round a literal to the column's width first."""
    if low is not None:
        low = float(np.nextafter(np.float32(low), np.float32(-np.inf)))
    if high is not None:
        high = float(np.nextafter(np.float32(high), np.float32(np.inf)))
    return low, high
