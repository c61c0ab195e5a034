"""Which numbers of a predicate are compared with a float32 or float16 column.

Lance gives such a number the type of the column before comparing, so that `price = 0.1` finds the row whose
float32 is nearest to 0.1. DataFusion alone would widen the column to float64, where no float32 equals 0.1.
Recognised: column and number on the two sides of one comparison, IN lists, and BETWEEN; not a number inside
arithmetic, nor anything under a NOT, into which Lance does not look either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa

from memtable.sql_tokens import NOTHING, Token

_ARITHMETIC = frozenset("+-*/%|")


def cast_types(tokens: Sequence[Token], kinds: Mapping[str, pa.DataType]) -> dict[int, str]:
    """Place in `tokens` (no gaps among them) of each such number -> name of the type it is compared in."""
    narrow = {name: "Float32" for name, kind in kinds.items() if pa.types.is_float32(kind)}
    narrow.update({name: "Float16" for name, kind in kinds.items() if pa.types.is_float16(kind)})
    if not narrow:
        return {}
    found: dict[int, str] = {}
    negated = _under_not(tokens)
    for place, token in enumerate(tokens):
        if token.kind == "number" and not negated[place]:
            column = _compared_column(tokens, place)
            if column is not None and column in narrow:
                found[place] = narrow[column]
    return found


def _under_not(tokens: Sequence[Token]) -> list[bool]:
    """For each token whether a NOT in front of its comparison, or of parentheses around it, covers it."""
    enclosing, current, flags = [False], False, []
    for place, token in enumerate(tokens):
        flags.append(current)
        if token.lower == "not" and _at(tokens, place + 1).lower not in ("in", "between", "like", "ilike"):
            current = True
        elif token.text == "(":
            enclosing.append(current)
        elif token.text == ")" and len(enclosing) > 1:
            enclosing.pop()
            current = enclosing[-1]
        elif token.lower in ("and", "or"):
            current = enclosing[-1]
    return flags


def _compared_column(tokens: Sequence[Token], place: int) -> str | None:
    """The column the number at `place` is compared with."""
    if _at(tokens, place + 1).text in _ARITHMETIC:
        return None
    left = place - 1
    if _at(tokens, left).text == "-" and _at(tokens, left - 1).kind in ("compare", "other", "name"):
        left -= 1  # a sign, not a subtraction
    return _left_of_comparison(tokens, left) or _right_of_comparison(tokens, place, left)


def _left_of_comparison(tokens: Sequence[Token], left: int) -> str | None:
    """The column before `column <op>`, `column [NOT] IN (...` or `column [NOT] BETWEEN ...`."""
    if _at(tokens, left).kind == "compare":
        return _plain_column(tokens, left - 1, left - 2)
    start = left
    while (
        _at(tokens, start).text in (",", "-")
        or _at(tokens, start).kind == "number"
        or _at(tokens, start).lower == "null"
    ):
        start -= 1
    if _at(tokens, start).text == "(" and _at(tokens, start - 1).lower == "in":
        return _before_not(tokens, start - 2)
    if _at(tokens, left).lower == "and":
        left -= 1
        while _at(tokens, left).kind == "number" or _at(tokens, left).text == "-":
            left -= 1
    if _at(tokens, left).lower == "between":
        return _before_not(tokens, left - 1)
    return None


def _right_of_comparison(tokens: Sequence[Token], place: int, left: int) -> str | None:
    """The column after `<number> <op>`."""
    if _at(tokens, place + 1).kind == "compare" and _at(tokens, left).text not in _ARITHMETIC:
        return _plain_column(tokens, place + 2, place + 3)
    return None


def _before_not(tokens: Sequence[Token], place: int) -> str | None:
    place -= _at(tokens, place).lower == "not"
    return _plain_column(tokens, place, place - 1)


def _plain_column(tokens: Sequence[Token], place: int, beside: int) -> str | None:
    """The column at `place`, unless its neighbour makes it part of arithmetic or of a struct."""
    token = _at(tokens, place)
    if token.kind != "column" or _at(tokens, beside).text in (*_ARITHMETIC, "."):
        return None
    return token.column


def _at(tokens: Sequence[Token], place: int) -> Token:
    return tokens[place] if 0 <= place < len(tokens) else NOTHING
