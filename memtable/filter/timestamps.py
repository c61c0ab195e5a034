"""The unit of TIMESTAMP: microseconds to Lance, nanoseconds to DataFusion.

Lance plans a predicate itself and gives `timestamp '...'`, `cast(... as timestamp)` and `...::timestamp` microseconds.
It leaves only the arguments of functions to DataFusion, and there they are nanoseconds at every level. So the type is
written out as `timestamp(6)` everywhere else. A type with its own number of digits means the same in both.

Lance cuts a literal with nanoseconds down to microseconds, so `t = timestamp '... 00:00:00.000000001'` would find, and
delete, the row at 00:00:00. It cuts the literals of an IN list or BETWEEN down to the coarsest unit of them, too, which
DataFusion does not since release 55. Both are refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import pyarrow as pa

from memwal.memtable.filter.sql_paths import typed_path
from memwal.memtable.filter.sql_places import closing, elements
from memwal.memtable.filter.tokens import NOTHING, Token, tokenize

_FRACTION = re.compile(r"\d\.(\d+)")
_MICROS = 6
"""Digits of a second in a TIMESTAMP."""
_FUNCTIONS = {
    "to_timestamp": 9,
    "to_timestamp_nanos": 9,
    "to_timestamp_micros": 6,
    "to_timestamp_millis": 3,
    "to_timestamp_seconds": 0,
}
_UNITS = {"nano": 9, "micro": 6, "milli": 3, "(second": 0}
_NO_CALLS = frozenset(("and", "or", "not", "in", "between", "like", "ilike", "cast", "try_cast"))
"""Words before a parenthesis whose content Lance plans itself."""


def write_units(tokens: Sequence[Token], written: list[str], kinds: Mapping[str, pa.DataType]) -> None:
    """Write TIMESTAMP as Lance reads it, in the texts `written` of the `tokens` (no gaps among them). `kinds`: types of
    the columns.
    """
    for place in _bare_types(tokens):
        if not _casts_nanoseconds(tokens, place, kinds):
            written[place] = f"timestamp({_MICROS})"


def is_finer(text: str) -> bool:
    """Whether the text of a time has digits beyond microseconds that are not zeros."""
    return _digits(text) > _MICROS


def problem(predicate: str, columns: Sequence[str]) -> str:
    """Return why a predicate is refused for a literal that would be cut short, "" if it is not. `columns`: of the
    table.
    """
    if "timestamp" not in predicate.lower() or not _FRACTION.search(predicate):
        return ""
    tokens = [token for token in tokenize(predicate, columns) if token.kind != "gap"]
    for place in _bare_types(tokens):
        text = _literal(tokens, place).text[1:-1]
        if is_finer(text):
            return (
                f"the timestamp '{text}' has nanoseconds, and TIMESTAMP only microseconds; "
                f"write to_timestamp_nanos('{text}')"
            )
    for several in _compared_together(tokens):
        text = _cut_short(several)
        if text:
            return (
                f"the timestamp '{text}' would be cut to the unit of another one in the same IN list or BETWEEN; "
                f"write all of them with to_timestamp_nanos('...')"
            )
    return ""


def _bare_types(tokens: Sequence[Token]) -> Iterator[int]:
    """Yield the place of each type TIMESTAMP without a number of digits, but in the arguments of functions."""
    if not any(token.lower == "timestamp" for token in tokens):
        return
    inside = [False]
    for place, token in enumerate(tokens):
        before, after = _at(tokens, place - 1), _at(tokens, place + 1)
        if token.text == "(":
            called = before.kind in ("name", "column", "double") and before.lower not in _NO_CALLS
            inside.append(inside[-1] or called)
        elif token.text == ")" and len(inside) > 1:
            inside.pop()
        elif token.kind == "name" and token.lower == "timestamp" and not inside[-1]:
            is_type = before.lower == "as" or before.text == ":" or after.kind in ("text", "double")
            if is_type and after.text != "(" and after.lower not in ("with", "without"):
                yield place


def _casts_nanoseconds(tokens: Sequence[Token], place: int, kinds: Mapping[str, pa.DataType]) -> bool:
    """Whether the type at `place` casts a column of nanoseconds: Lance's optimizer takes the cast away, and all digits
    are compared.
    """
    as_cast = _at(tokens, place - 1).lower == "as"
    last = first = place - 2 if as_cast else place - 3
    while _at(tokens, first).kind == "column" and _at(tokens, first - 1).text == ".":
        first -= 2
    if _at(tokens, first).kind != "column" or (as_cast and _at(tokens, first - 1).text != "("):
        return False
    kind, end = typed_path(tokens, first, kinds)
    return end >= last and pa.types.is_timestamp(kind) and kind.unit == "ns"


def _literal(tokens: Sequence[Token], place: int) -> Token:
    """The text that the type at `place` is given to, maybe in parentheses; NOTHING if it is computed."""
    if _at(tokens, place + 1).kind in ("text", "double"):
        return tokens[place + 1]
    last = first = place - 2 if _at(tokens, place - 1).lower == "as" else place - 3  # `as` or `::`
    while _at(tokens, first).text == ")":
        first -= 1
    literal, opening = _at(tokens, first), first - (last - first)
    enclosed = all(_at(tokens, at).text == "(" for at in range(opening, first))
    called = opening < first and _at(tokens, opening - 1).kind in ("name", "column")
    return literal if literal.kind in ("text", "double") and enclosed and not called else NOTHING


# ---- several literals in one comparison ------------------------------------------------------------------------------


def _compared_together(tokens: Sequence[Token]) -> Iterator[Sequence[Sequence[Token]]]:
    """Yield the values of each IN list, and the two bounds of each BETWEEN."""
    for place, token in enumerate(tokens):
        if token.lower == "in" and _at(tokens, place + 1).text == "(":
            yield elements(tokens, place + 2, closing(tokens, place + 1))
        elif token.lower == "between":
            middle = _end_of_operand(tokens, place + 1)
            yield tokens[place + 1 : middle], tokens[middle + 1 : _end_of_operand(tokens, middle + 1)]


def _end_of_operand(tokens: Sequence[Token], first: int) -> int:
    """The place behind the operand that begins at `first`."""
    depth = 0
    for place in range(first, len(tokens)):
        depth += (tokens[place].text in ("(", "[")) - (tokens[place].text in (")", "]"))
        if depth < 0 or (not depth and tokens[place].lower in ("and", "or", ",")):
            return place
    return len(tokens)


def _cut_short(values: Sequence[Sequence[Token]]) -> str:
    """The first text of the timestamps among `values` that has more digits than the coarsest of them."""
    units = [_unit(value) for value in values]
    coarsest = min((unit for unit in units if unit is not None), default=9)
    for value, unit in zip(values, units, strict=True):
        for token in value:
            if token.kind in ("text", "double") and min(_digits(token.text), unit or 0) > coarsest:
                return token.text[1:-1]
    return ""


def _unit(value: Sequence[Token]) -> int | None:
    """Digits of a second in a timestamp, None for another value or one that is not written out."""
    if any(True for _ in _bare_types(value)):
        return _MICROS
    for token, after in pairwise(value):
        if token.lower in _FUNCTIONS and after.text == "(":
            return _FUNCTIONS[token.lower]
        if token.lower == "arrow_cast":
            into = value[-2].lower if len(value) > 1 else ""
            return next((digits for unit, digits in _UNITS.items() if "timestamp" in into and unit in into), None)
    written = [value[at + 2].text for at, token in enumerate(value[:-2]) if token.lower == "timestamp"]
    return int(written[0]) if written and written[0].isdecimal() else None


def _digits(text: str) -> int:
    """Digits of a second in the text of a time, but zeros at its end."""
    fraction = _FRACTION.search(text)
    return len(fraction[1].rstrip("0")) if fraction else 0


def _at(tokens: Sequence[Token], place: int) -> Token:
    return tokens[place] if 0 <= place < len(tokens) else NOTHING
