"""The numbers of a predicate that are compared with a float32 or float16 column.

Lance gives such a number the type of the column before comparing, so that `price = 0.1` finds the row whose
float32 is nearest to 0.1. DataFusion alone would widen the column to float64, where no float32 equals 0.1.
Recognised: a column, or field of a struct, and a number on the two sides of one comparison, IN lists, and BETWEEN, if
AND, OR and brackets alone join them to the whole (`reached`). Right of a column there may be arithmetic of numbers,
each of which gets the type: `price = 0.2 / 2`. Numbers beside columns in arithmetic are left alone, by Lance too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa

from memwal.memtable.filter.reached import reached
from memwal.memtable.filter.tokens import NOTHING, Token

_ARITHMETIC = frozenset("+-*/%|")


def write_casts(tokens: Sequence[Token], written: list[str], kinds: Mapping[str, pa.DataType]) -> None:
    """Cast each such number to the type of its column, in the texts `written`. `tokens`: without gaps."""
    if not any(map(_holds_narrow, kinds.values())):
        return
    flags = reached(tokens)
    for place, token in enumerate(tokens):
        if token.kind == "number" and flags[place]:
            path = _compared_column(tokens, place)
            name = None if path is None else _narrow_name(path, kinds)
            if name is not None:
                written[place] = f"arrow_cast({token.text}, '{name}')"


def _holds_narrow(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        return any(_holds_narrow(kind.field(place).type) for place in range(kind.num_fields))
    return bool(pa.types.is_float32(kind) or pa.types.is_float16(kind))


def _narrow_name(path: Sequence[str], kinds: Mapping[str, pa.DataType]) -> str | None:
    """DataFusion's name of the type at `path`, a column and fields of structs; None where it is not a narrow float."""
    kind = kinds.get(path[0], pa.null())
    for name in path[1:]:
        inside = pa.types.is_struct(kind) and kind.get_field_index(name) >= 0
        kind = kind.field(name).type if inside else pa.null()
    if pa.types.is_float32(kind):
        return "Float32"
    return "Float16" if pa.types.is_float16(kind) else None


def _compared_column(tokens: Sequence[Token], place: int) -> Sequence[str] | None:
    """The column, or path to a field, that the number at `place`, or arithmetic with it, is compared with."""
    left, last = place - 1, place
    while _is_constant(tokens, last + 1):
        last += 1
    if _at(tokens, last).text in _ARITHMETIC:
        return None
    while _is_constant(tokens, left):
        left -= 1
    return _left_of_comparison(tokens, left) or _right_of_comparison(tokens, left + 1, last)


def _left_of_comparison(tokens: Sequence[Token], left: int) -> Sequence[str] | None:
    """The column before `column <op>`, `column [NOT] IN (...` or `column [NOT] BETWEEN ...`."""
    if _at(tokens, left).kind == "compare":
        return _path_before(tokens, left - 1)
    start = left
    while _at(tokens, start).text == "," or _is_constant(tokens, start) or _at(tokens, start).lower == "null":
        start -= 1
    if _at(tokens, start).text == "(":
        path = _before_not(tokens, start - 2)
        return path if path is not None and len(path) == 1 else None  # Lance leaves values for a field as they are
    if _at(tokens, left).lower == "and":
        left -= 1
        while _is_constant(tokens, left):
            left -= 1
    if _at(tokens, left).lower == "between":
        return _before_not(tokens, left - 1)
    return None


def _right_of_comparison(tokens: Sequence[Token], first: int, last: int) -> Sequence[str] | None:
    """The column after `<number> <op>`."""
    number = [token.text for token in tokens[first : last + 1] if token.text not in ("(", ")")]
    if _at(tokens, last + 1).kind == "compare" and (len(number) == 1 or (len(number) == 2 and number[0] == "-")):
        return _path_behind(tokens, last + 2)
    return None


def _is_constant(tokens: Sequence[Token], place: int) -> bool:
    """Whether a token may be part of arithmetic of numbers; the bracket of an IN list is not."""
    token = _at(tokens, place)
    if token.text == "(":
        return _at(tokens, place - 1).lower != "in"
    return token.kind == "number" or token.text == ")" or token.text in _ARITHMETIC


def _before_not(tokens: Sequence[Token], place: int) -> Sequence[str] | None:
    place -= _at(tokens, place).lower == "not"
    return _path_before(tokens, place)


def _path_before(tokens: Sequence[Token], last: int) -> Sequence[str] | None:
    """The column or path that ends at `last`, unless the token before it makes it part of arithmetic."""
    first = last
    while _at(tokens, first).kind == "column" and _at(tokens, first - 1).text == ".":
        first -= 2
    return _path(tokens, first, last) if _at(tokens, first - 1).text not in _ARITHMETIC else None


def _path_behind(tokens: Sequence[Token], first: int) -> Sequence[str] | None:
    """The column or path that begins at `first`, unless the token after it makes it part of arithmetic or a list."""
    last = first
    while _at(tokens, last + 1).text == "." and _at(tokens, last + 2).kind == "column":
        last += 2
    return _path(tokens, first, last) if _at(tokens, last + 1).text not in (*_ARITHMETIC, "[") else None


def _path(tokens: Sequence[Token], first: int, last: int) -> Sequence[str] | None:
    names = [_at(tokens, place) for place in range(first, last + 1, 2)]
    return [name.column for name in names] if all(name.kind == "column" for name in names) else None


def _at(tokens: Sequence[Token], place: int) -> Token:
    return tokens[place] if 0 <= place < len(tokens) else NOTHING
