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

from memwal.memtable.filter.conditions import AllOf, AnyOf, Condition, Narrowing, is_exact
from memwal.memtable.filter.expression import Node
from memwal.memtable.filter.scalar_index import Asked, sort_form
from memwal.memtable.filter.translation import is_finer

Kinds: TypeAlias = Mapping[str, pa.DataType]
"""The indexed columns."""


def narrowings(tree: Node, indexed: Kinds, every: Kinds) -> tuple[Narrowing | None, Narrowing | None]:
    """The conditions of a filter on the columns `indexed`, and the exact ones on `every` column that together are all
    of it; None where there are none.
    """
    whole = _narrowing(tree, every)
    return _narrowing(tree, indexed), whole if whole is not None and is_exact(whole) else None


def _narrowing(part: Node, kinds: Kinds) -> Narrowing | None:
    part = part.bare
    if {"and", "or"}.isdisjoint(part.operators):
        return _condition(part, kinds)
    sides = [_narrowing(side, kinds) for side in part.parts]
    known = [side for side in sides if side is not None]
    if "or" in part.operators:
        return AnyOf(tuple(known)) if len(known) == len(sides) else None
    return _all_of(known, exact=len(known) == len(sides))


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


_MIRRORED = {"=": "=", "==": "=", "<": ">", "<=": ">=", ">": "<", ">=": "<="}
_IS = {"is true": "=", "is false": "="}


def _condition(part: Node, kinds: Kinds) -> Condition | None:
    """`part` as a condition on one column; None if it is none, or not a supported one."""
    negated = part.kind == "prefix" and part.text == "not"
    part = part.parts[0].bare if negated else part
    operator, sides = part.text, list(part.parts)
    if part.kind == "column":
        operator, sides = "=", [part, Node("word", "false" if negated else "true")]
    elif part.kind == "is" and operator.endswith("null"):
        operator = "is null" if (operator == "is null") != negated else "is not null"
    elif negated or part.kind not in ("chain", "in", "between", "like", "is"):
        return None
    elif part.kind == "is":
        operator, sides = _IS.get(operator, ""), [*sides, Node("word", operator.removeprefix("is "))]
    elif part.kind == "chain":
        operator = part.operators[0] if len(sides) == 2 else ""
        if sides[0].bare.kind != "column":
            operator, sides = _MIRRORED.get(operator, ""), sides[::-1]
    column, *others = sides
    kind = kinds.get(column.bare.text) if column.bare.kind == "column" else None
    asked = None if kind is None else _asked(operator, others, kind)
    return None if asked is None else Condition(column.bare.text, asked, operator != "like" and _is_exact(kind))


def _asked(operator: str, others: Sequence[Node], column: pa.DataType) -> Asked | None:
    """The values that a comparison of a column of the type `column` with `others` asks for."""
    if operator in ("is null", "is not null"):
        return Asked(nulls=operator == "is null")
    if operator == "like":
        return _prefixed(others[0], column)
    if operator == "between":
        low, high = (_literals([other], column) for other in others)
        return None if low is None or high is None else _widened(Asked(low, high))
    if operator == "in":
        others = [other for other in others if (other.bare.kind, other.bare.text) != ("word", "null")]
    values = _literals(others, column)
    if values is None:
        return None
    if operator in ("=", "==", "in"):
        return _widened(Asked(values, values))
    if operator in (">", ">="):
        return _widened(Asked(low=values, low_inclusive=operator == ">="))
    if operator in ("<", "<="):
        return _widened(Asked(high=values, high_inclusive=operator == "<="))
    return None


def _prefixed(pattern: Node, column: pa.DataType) -> Asked | None:
    """LIKE: the texts that begin with the pattern's part before its first wildcard or escape."""
    values = _literals([pattern], column) if _is_text(column) else None
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


def _literals(literals: Sequence[Node], column: pa.DataType) -> pa.Array | None:
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


def _text(literal: Node, column: pa.DataType) -> str | None:
    """The literal in the form for Arrow's cast to the column's type; None if the two are not surely comparable."""
    types, literal = pa.types, literal.bare
    if literal.kind == "hex":
        return literal.text[1:-1] if types.is_binary(column) or types.is_large_binary(column) else None
    if literal.kind == "word":
        return literal.text if types.is_boolean(column) and literal.text != "null" else None
    cast_to = ""
    if literal.kind == "cast" and literal.operators != ("try_cast",):
        cast_to, literal = literal.text, literal.parts[0].bare
    negative = "-" if literal.kind == "prefix" and literal.text == "-" else ""
    literal = literal.parts[0] if negative else literal
    text = negative + literal.text if literal.kind == "number" else literal.literal if not negative else None
    if text is None:
        return None
    return text if _comparable(literal.kind != "number", text, cast_to, column) else None


def _comparable(quoted: bool, text: str, cast_to: str, column: pa.DataType) -> bool:
    types = pa.types
    if types.is_integer(column):
        return not quoted and not cast_to and text.lstrip("-").isdecimal()
    if types.is_floating(column):
        return not quoted and not cast_to
    if _is_text(column):
        return quoted and not cast_to
    if types.is_date32(column):
        return quoted and cast_to == "date"
    if not (types.is_timestamp(column) and column.tz is None and quoted):
        return False
    # DataFusion drops the time of a DATE with a time, and what is finer than TIMESTAMP(6); Arrow would keep both.
    if cast_to in ("timestamp", "timestamp(6)"):
        return not is_finer(text)
    return cast_to == "date" and len(text) <= len("2000-01-01")


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
