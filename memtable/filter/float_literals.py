"""The numbers of a predicate that are compared with a float32 or float16 column.

Lance gives such a number the type of the column before comparing, so that `price = 0.1` finds the row whose
float32 is nearest to 0.1. DataFusion alone would widen the column to float64, where no float32 equals 0.1.
Recognised: a column, or field of a struct, and a number on the two sides of one comparison, IN lists, and BETWEEN, if
AND, OR and brackets alone join them to the whole (`reached`). Right of a column there may be arithmetic of numbers,
each of which gets the type: `price = 0.2 / 2`. As in Lance, a comparison leaves arithmetic with anything else alone,
such as columns, functions, casts (`0.1::double`) and signs of brackets (`-(0.1)`); IN and BETWEEN leave only these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain

import pyarrow as pa

from memwal.memtable.filter.reached import reached
from memwal.memtable.filter.sql_places import closing
from memwal.memtable.filter.tokens import NOTHING, Token

_ARITHMETIC = frozenset("+-*/%|&^")
_OPERAND_ENDS = frozenset(("number", "column", "name", "text", "double"))
Span = tuple[int, int]
"""The first place of a part of a predicate, and the place behind its last one."""


def write_casts(tokens: Sequence[Token], written: list[str], kinds: Mapping[str, pa.DataType]) -> None:
    """Cast each such number to the type of its column, in the texts `written`. `tokens`: without gaps."""
    if not any(map(_holds_narrow, kinds.values())):
        return
    flags = reached(tokens)
    for place, token in enumerate(tokens):
        if flags[place] and (token.kind == "compare" or token.lower in ("in", "between")):
            name, values = _values(tokens, place, kinds)
            is_all = token.kind == "compare"
            for number in chain.from_iterable(_numbers(tokens, value, is_all) for value in values if name):
                written[number] = f"arrow_cast({tokens[number].text}, '{name}')"


def _holds_narrow(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        return any(_holds_narrow(kind.field(place).type) for place in range(kind.num_fields))
    return bool(pa.types.is_float32(kind) or pa.types.is_float16(kind))


def _narrow_name(path: Sequence[str], kinds: Mapping[str, pa.DataType]) -> str:
    """DataFusion's name of the type at `path`, a column and fields of structs; "" where it is not a narrow float."""
    kind = kinds.get(path[0], pa.null()) if path else pa.null()
    for name in path[1:]:
        inside = pa.types.is_struct(kind) and kind.get_field_index(name) >= 0
        kind = kind.field(name).type if inside else pa.null()
    return "Float32" if pa.types.is_float32(kind) else "Float16" if pa.types.is_float16(kind) else ""


def _values(tokens: Sequence[Token], place: int, kinds: Mapping[str, pa.DataType]) -> tuple[str, list[Span]]:
    """The name of the type of the column in the comparison at `place`, and what is compared with it."""
    word = tokens[place].lower
    behind = place + 1, _end(tokens, place + 1, is_between=word == "between")
    before = _begin(tokens, place), place - (word in ("in", "between") and _at(tokens, place - 1).lower == "not")
    path = _path(tokens, before)
    name = _narrow_name(path, kinds)
    if word == "between":
        return name, _parts(tokens, behind, lambda at: tokens[at].lower == "and")
    if word == "in":
        name = name if len(path) == 1 else ""  # Lance leaves values for a field as they are
        return name, _parts(tokens, (behind[0] + 1, behind[1] - 1), lambda at: tokens[at].text == ",")
    if name:
        return name, [behind]
    # Left of a column Lance knows a number alone.
    is_number = _number(tokens, before) is not None
    return (_narrow_name(_path(tokens, behind), kinds), [before]) if is_number else ("", [])


def _begin(tokens: Sequence[Token], place: int) -> int:
    """Where the operand left of the comparison at `place` begins."""
    depth = 0
    while place:
        token = tokens[place - 1]
        depth += (token.text in (")", "]")) - (token.text in ("(", "["))
        if depth < 0 or (not depth and token.lower in ("and", "or")):
            break
        place -= 1
    return place


def _end(tokens: Sequence[Token], place: int, *, is_between: bool) -> int:
    """The place behind the operand that begins at `place`; with `is_between` behind both of them."""
    depth = 0
    while place < len(tokens):
        token = tokens[place]
        depth += (token.text in ("(", "[")) - (token.text in (")", "]"))
        if depth < 0 or (not depth and token.lower in ("and", "or") and not is_between):
            break
        is_between = is_between and (depth > 0 or token.lower != "and")
        place += 1
    return place


def _path(tokens: Sequence[Token], span: Span) -> list[str]:
    """The column and fields that `column.field`, or `column['field']`, names; nothing where it is no such path."""
    names: list[str] = []
    first, end = _bare(tokens, span)
    while end - first > 2:
        last = tokens[end - 1]
        if last.kind == "column" and tokens[end - 2].text == ".":
            names, end = [last.column, *names], end - 2
        elif last.text == "]" and tokens[end - 2].kind == "text" and tokens[end - 3].text == "[":
            names, end = [tokens[end - 2].text[1:-1].replace("''", "'"), *names], end - 3
        else:
            return []
        first, end = _bare(tokens, (first, end))
    return [tokens[first].column, *names] if end - first == 1 and tokens[first].kind == "column" else []


def _numbers(tokens: Sequence[Token], value: Span, is_all: bool) -> list[int]:
    """The places of the numbers that a value is, or that arithmetic joins to it; with `is_all`, of nothing else."""
    numbers, left = [], [value]
    while left:
        span = left.pop()
        if (number := _number(tokens, span)) is not None:
            numbers.append(number)
            continue
        first, end = _bare(tokens, span)
        parts = _parts(tokens, (first, end), partial(_joins, tokens, first))
        if len(parts) > 1:
            left += parts
        elif is_all:
            return []
    return numbers


def _number(tokens: Sequence[Token], span: Span) -> int | None:
    """The place of the number that a part is, with its sign and in brackets or not; None where it is none."""
    first, end = _bare(tokens, span)
    length = end - first - (_at(tokens, first).text == "-")
    return end - 1 if length == 1 and tokens[end - 1].kind == "number" else None


def _joins(tokens: Sequence[Token], first: int, place: int) -> bool:
    """Whether an operator stands between two operands of what begins at `first`, rather than being the sign of one."""
    before = tokens[place - 1] if place > first else NOTHING
    return tokens[place].text in _ARITHMETIC and (before.kind in _OPERAND_ENDS or before.text in (")", "]"))


def _bare(tokens: Sequence[Token], span: Span) -> Span:
    """The part without brackets around the whole of it."""
    first, end = span
    while end - first > 2 and tokens[first].text == "(" and closing(tokens, first) == end - 1:
        first, end = first + 1, end - 1
    return first, end


def _parts(tokens: Sequence[Token], span: Span, divides: Callable[[int], bool]) -> list[Span]:
    """What stands between the tokens outside of brackets at whose places `divides` is true."""
    parts, depth, begin = [], 0, span[0]
    for place in range(*span):
        depth += (tokens[place].text in ("(", "[")) - (tokens[place].text in (")", "]"))
        if not depth and divides(place):
            parts.append((begin, place))
            begin = place + 1
    return [*parts, (begin, span[1])]


def _at(tokens: Sequence[Token], place: int) -> Token:
    return tokens[place] if 0 <= place < len(tokens) else NOTHING
