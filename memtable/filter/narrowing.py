"""Derivation of the conditions of a predicate that an index can answer, or Arrow exactly.

Only AND and OR are analysed, and a condition counts only if the comparison of the index is provably DataFusion's:
numbers with numbers, text with text, dates and timestamps with their own literals. All other parts narrow nothing and
cost only time: the predicate is evaluated on the remaining rows.

Comparisons of integers, texts, dates and truth values with literals of their own type are exact: they need no further
evaluation if the predicate consists of such.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import sqlglot
from sqlglot import exp

from memwal.memtable.filter.conditions import AllOf, AnyOf, Condition, Narrowing, is_exact
from memwal.memtable.filter.scalar_index import Asked, sort_form
from memwal.memtable.filter.timestamps import is_finer

# Parsing a longer predicate costs more than the index saves.
LONGEST = 100_000

Kinds: TypeAlias = Mapping[str, pa.DataType]
"""The indexed columns."""


class _Lance(sqlglot.Dialect):
    """sqlglot's own dialect with X'00', which it lacks."""

    class Tokenizer(sqlglot.Tokenizer):
        HEX_STRINGS = [("x'", "'"), ("X'", "'")]  # noqa: RUF012 - sqlglot's way to declare it


def narrowings(sql: str, indexed: Kinds, every: Kinds) -> tuple[Narrowing | None, Narrowing | None]:
    """The conditions of `sql` (from predicate.translate) on the columns `indexed`, and the exact ones on `every` column
    that together are all of it; None where there are none.
    """
    if len(sql) > LONGEST:
        return None, None
    try:
        tree = sqlglot.parse_one(sql, dialect=_Lance)
        # DataFusion reads all that follows IS DISTINCT FROM as its right side, sqlglot only the next operand.
        if tree.find(exp.NullSafeEQ, exp.NullSafeNEQ) is not None:
            return None, None
        whole = _narrowing(tree, every)
        return _narrowing(tree, indexed), whole if whole is not None and is_exact(whole) else None
    except (sqlglot.errors.SqlglotError, RecursionError):
        return None, None


def _narrowing(part: exp.Expr, kinds: Kinds) -> Narrowing | None:
    part = part.unnest()
    if isinstance(part, (exp.And, exp.Or)):
        sides = [_narrowing(side, kinds) for side in part.flatten()]
        known = [side for side in sides if side is not None]
        if isinstance(part, exp.Or):
            return AnyOf(tuple(known)) if len(known) == len(sides) else None
        return _all_of(known, exact=len(known) == len(sides))
    return _condition(part, kinds)


def _all_of(parts: Sequence[Narrowing], *, exact: bool) -> Narrowing | None:
    """The conjunction, with the lower and the upper bound of a column merged into one range. `exact`: of all parts."""
    merged: list[Narrowing] = []
    for part in parts:
        for at, other in enumerate(merged):
            if (both := _one_range(other, part)) is not None:
                merged[at] = both
                break
        else:
            merged.append(part)
    if not merged:
        return None
    return merged[0] if len(merged) == 1 and exact else AllOf(tuple(merged), exact)


def _one_range(first: Narrowing, second: Narrowing) -> Condition | None:
    if not (isinstance(first, Condition) and isinstance(second, Condition) and first.column == second.column):
        return None
    for lower, upper in ((first.asked, second.asked), (second.asked, first.asked)):
        if lower.low is not None and lower.high is None and upper.low is None and upper.high is not None:
            both = replace(lower, high=upper.high, high_inclusive=upper.high_inclusive)
            return Condition(first.column, both, first.exact and second.exact)
    return None


_MIRRORED: Mapping[type[exp.Expr], type[exp.Expr]] = {
    exp.EQ: exp.EQ,
    exp.GT: exp.LT,
    exp.GTE: exp.LTE,
    exp.LT: exp.GT,
    exp.LTE: exp.GTE,
}


def _condition(part: exp.Expr, kinds: Kinds) -> Condition | None:
    """`part` as a condition on one column; None if it is none, or not a supported one."""
    negated = isinstance(part, exp.Not)
    if negated:
        part = part.this.unnest()
    if part.args.get("negate"):
        return None
    column, other, kind = part.this, part.args.get("expression"), type(part)
    if kind is exp.Column:
        column, other, kind = part, exp.Boolean(this=not negated), exp.EQ
    elif negated and not (kind is exp.Is and isinstance(other, exp.Null)):
        return None
    elif kind in _MIRRORED and not isinstance(column, exp.Column):
        column, other, kind = other, column, _MIRRORED[kind]
    if not isinstance(column, exp.Column) or column.table or column.name not in kinds:
        return None
    if kind is exp.Is and isinstance(other, exp.Null):
        asked: Asked | None = Asked(nulls=not negated)
    else:
        asked = _asked(part, kind, other, kinds[column.name])
    exact = kind is not exp.Like and _is_exact(kinds[column.name])
    return None if asked is None else Condition(column.name, asked, exact)


def _asked(part: exp.Expr, kind: type[exp.Expr], other: exp.Expr | None, column: pa.DataType) -> Asked | None:
    """The condition of a comparison of the kind `kind` with `other` on a column of the type `column`."""
    if kind is exp.Between:
        low, high = _literals([part.args["low"]], column), _literals([part.args["high"]], column)
        return None if low is None or high is None else _widened(Asked(low, high))
    if kind is exp.Like:
        return _prefixed(other, column)
    if kind is exp.Is:
        kind = exp.EQ if isinstance(other, exp.Boolean) else kind
    literals = [each for each in part.expressions if not isinstance(each, exp.Null)] if kind is exp.In else [other]
    values = _literals(literals, column)
    if values is None:
        return None
    if kind in (exp.EQ, exp.In):
        return _widened(Asked(values, values))
    if kind in (exp.GT, exp.GTE):
        return _widened(Asked(low=values, low_inclusive=kind is exp.GTE))
    if kind in (exp.LT, exp.LTE):
        return _widened(Asked(high=values, high_inclusive=kind is exp.LTE))
    return None


def _prefixed(pattern: exp.Expr | None, column: pa.DataType) -> Asked | None:
    """LIKE: the texts that begin with the pattern's part before its first wildcard or escape."""
    values = None if pattern is None or not _is_text(column) else _literals([pattern], column)
    if values is None:
        return None
    text = values[0].as_py()
    prefix = text[: min((at for at, letter in enumerate(text) if letter in "%_\\"), default=len(text))]
    if not prefix:
        return None
    beyond = _after(prefix)
    high = None if beyond is None else sort_form(pa.array([beyond], column))
    return Asked(sort_form(pa.array([prefix], column)), high, high_inclusive=False)


def _after(prefix: str) -> str | None:
    """The first text after all texts that begin with `prefix`, by code point; None if there is none."""
    while prefix:
        code = ord(prefix[-1]) + 1
        if code <= 0x10FFFF:
            return prefix[:-1] + chr(0xE000 if code == 0xD800 else code)  # surrogates are no text
        prefix = prefix[:-1]
    return None


def _literals(literals: Sequence[exp.Expr | None], column: pa.DataType) -> pa.Array | None:
    """The distinct literals in the column's type and sort_form; None if one is not surely comparable with it."""
    texts = [_text(literal, column) for literal in literals]
    if not texts or any(text is None for text in texts):
        return None
    try:
        if pa.types.is_binary(column) or pa.types.is_large_binary(column):
            values = pa.array([bytes.fromhex(text or "") for text in texts], column)
        else:
            values = pa.array(texts, pa.string()).cast(column)
    except (ValueError, pa.ArrowNotImplementedError):  # pa.ArrowInvalid is a ValueError
        return None
    return pc.unique(sort_form(values))


def _text(literal: exp.Expr | None, column: pa.DataType) -> str | None:
    """The literal in the form for Arrow's cast to the column's type; None if the two are not surely comparable."""
    types = pa.types
    if isinstance(literal, exp.HexString):
        return str(literal.this) if types.is_binary(column) or types.is_large_binary(column) else None
    if isinstance(literal, exp.Boolean):
        return str(literal.this).lower() if types.is_boolean(column) else None
    cast_to = ""
    if isinstance(literal, exp.Cast):
        cast_to = literal.to.sql().upper()
        literal = literal.this
    negative = isinstance(literal, exp.Neg)
    if negative and literal is not None:
        literal = literal.this
    if isinstance(literal, exp.Anonymous) and literal.name.lower() == "arrow_cast":
        literal = literal.expressions[0]  # put there by predicate.translate
    if not isinstance(literal, exp.Literal):
        return None
    text = ("-" if negative else "") + literal.this
    return text if _comparable(literal.is_string, text, cast_to, column) else None


def _comparable(quoted: bool, text: str, cast_to: str, column: pa.DataType) -> bool:
    types = pa.types
    if types.is_integer(column):
        return not quoted and not cast_to and text.lstrip("-").isdecimal()
    if types.is_floating(column):
        return not quoted and not cast_to
    if _is_text(column):
        return quoted and not cast_to
    if types.is_date32(column):
        return quoted and cast_to == "DATE"
    if not (types.is_timestamp(column) and column.tz is None and quoted):
        return False
    # DataFusion drops the time of a DATE with a time, and what is finer than TIMESTAMP(6); Arrow would keep both.
    if cast_to == "TIMESTAMP(6)":
        return not is_finer(text)
    return cast_to == "DATE" and len(text) <= len("2000-01-01")


def _is_exact(kind: pa.DataType) -> bool:
    """Whether Arrow compares a column of this type with literals exactly as DataFusion does: not floats, whose literals
    may be rounded and whose NaN is the largest number, nor times, whose literals may have another unit.
    """
    types = pa.types
    return bool(types.is_integer(kind) or types.is_boolean(kind) or types.is_date32(kind)) or _is_text(kind)


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _widened(asked: Asked) -> Asked:
    """Bounds of floats one float32 step wider: the engine may round a literal to the column's width first."""
    kind = (asked.low if asked.low is not None else asked.high).type  # type: ignore[union-attr]
    if not pa.types.is_floating(kind):
        return asked

    def step(values: pa.Array | None, towards: float) -> pa.Array | None:
        if values is None:
            return None
        with np.errstate(over="ignore"):
            narrow = values.to_numpy().astype(np.float32)
        return pa.array(np.nextafter(narrow, np.float32(towards)), kind)

    return Asked(step(asked.low, -np.inf), step(asked.high, np.inf))
