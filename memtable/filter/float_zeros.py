"""Zeros of a predicate that are compared with floats: 0.0 and -0.0 are equal, as in Lance.

DataFusion's `=` and BETWEEN take them as equal. Its IN of more than three literals looks up bits since release 55, so
`x IN (0, 1, 2, 3)` does not find -0.0; neither does `x = 0 OR x = 1 OR x = 2 OR x = 3`, which its optimizer makes such
an IN. Lance has release 54, which compares by value there as well. So a list with a zero gets the zeros of both signs,
and `x = 0` becomes such a list. That says the same, and their type is one that the comparison has anyway.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from memwal.memtable.filter.sql_paths import typed_path
from memwal.memtable.filter.sql_places import closing, elements
from memwal.memtable.filter.tokens import NOTHING, Token

Kinds = Mapping[str, pa.DataType]
_LISTS = {"=": " IN (", "==": " IN (", "!=": " NOT IN (", "<>": " NOT IN ("}
_ENDS = frozenset(("", ")", "]", ",", "and", "or", "is", "when", "then", "else", "end"))
"""What may follow an operand of a comparison that is complete."""
_BEGINS = frozenset(("", "(", ",", "and", "or", "not", "when", "then", "else", "case"))
_SIGNS = frozenset("+-*/%()[],")
_FLOATS = frozenset(("double", "float", "real"))
# Of numbers, and with a number as their result, so that what is beside them is compared as a number.
_NUMERIC = """
    abs cbrt coalesce exp greatest least ln log nanvl nullif pow power round signum sqrt trunc
    cast try_cast arrow_cast as null
"""
_FUNCTIONS = frozenset(_NUMERIC.split())
_SINGLE, _DOUBLE = 1 << 24, 1 << 53
"""Integers below it are exact in a float, so comparing them as such is the same."""


@dataclass(frozen=True)
class _Number:
    """A literal: its value, and whether its type is a float's."""

    value: float
    is_float: bool


@dataclass(frozen=True)
class _Operand:
    """What is compared with literals. `kind`: its type if it is a column or field alone. `exact`: integers below it are
    exact in its floats, 0 if it has none.
    """

    kind: pa.DataType | None
    exact: int = 0


def write_zeros(tokens: Sequence[Token], written: list[str], kinds: Kinds) -> None:
    """Complete the zeros in the texts `written` of the `tokens` (no gaps among them). `kinds`: types of the columns."""
    if not any(_is_zero(token) for token in tokens):
        return
    for place, token in enumerate(tokens):
        if token.lower == "in" and _at(tokens, place + 1).text == "(":
            _complete_list(tokens, written, kinds, place)
        elif token.text in _LISTS and not _as_list(tokens, written, kinds, place):
            _as_list_behind(tokens, written, kinds, place)


def _complete_list(tokens: Sequence[Token], written: list[str], kinds: Kinds, place: int) -> None:
    """`x IN (0, 1)`, the IN at `place`."""
    end = closing(tokens, place + 1)
    last = place - 1 - (_at(tokens, place - 1).lower == "not")
    if end < len(tokens):
        zeros = _zeros(_operand(tokens, last, kinds), elements(tokens, place + 2, end))
        written[end] = f", {zeros}{written[end]}" if zeros else written[end]


def _as_list(tokens: Sequence[Token], written: list[str], kinds: Kinds, place: int) -> bool:
    """`x = 0`, the comparison at `place`; returns whether a literal is behind it."""
    end, depth = place + 1, 0
    while end < len(tokens) and (depth or tokens[end].lower not in _ENDS):
        depth += _nesting(tokens[end])
        end += 1
    literal = tokens[place + 1 : end]
    if _number(literal) is None:
        return False
    if zeros := _zeros(_operand(tokens, place - 1, kinds), [literal]):
        written[place] = _LISTS[tokens[place].text]
        written[end - 1] += f", {zeros})"
    return True


def _as_list_behind(tokens: Sequence[Token], written: list[str], kinds: Kinds, place: int) -> None:
    """`0 = x`, the comparison at `place`; x is a column or a field."""
    kind, last = typed_path(tokens, place + 1, kinds)
    if _at(tokens, last + 1).lower not in _ENDS:
        return
    first = _begin(tokens, place - 1)
    if zeros := _zeros(_Operand(kind), [tokens[first:place]]):
        written[first : place + 1] = [""] * (place + 1 - first)
        written[last] += f"{_LISTS[tokens[place].text]}{zeros})"


def _zeros(operand: _Operand | None, elements: Sequence[Sequence[Token]]) -> str:
    """The zeros that a list of `elements` needs beside `operand`, "" for none; of a type that the comparison has
    anyway.
    """
    numbers = [_number(element) for element in elements]
    given = [number for number in numbers if number is not None]
    if operand is None or not any(number.value == 0 for number in given):
        return ""
    if operand.kind is not None and pa.types.is_floating(operand.kind) and not pa.types.is_float64(operand.kind):
        zero = f"arrow_cast(0.0, 'Float{operand.kind.bit_width}')"
        return f"{zero}, -{zero}"
    if (operand.kind is not None and pa.types.is_float64(operand.kind)) or any(number.is_float for number in given):
        return "0.0, -0.0"
    small = all(abs(number.value) < operand.exact for number in given)
    known = all(number is not None or _is_null(element) for number, element in zip(numbers, elements, strict=True))
    return "-0.0" if small and known else ""


# ---- operands --------------------------------------------------------------------------------------------------------


def _operand(tokens: Sequence[Token], last: int, kinds: Kinds) -> _Operand | None:
    """What ends at `last`; None unless it is surely a number."""
    return _numeric(tokens, _begin(tokens, last), last, kinds)


def _begin(tokens: Sequence[Token], last: int) -> int:
    """The first place of the operand that ends at `last`."""
    first, depth = last, 0
    while first >= 0 and (depth or tokens[first].lower not in _BEGINS):
        depth -= _nesting(tokens[first])
        first -= 1
    return first + 1


def _nesting(token: Token) -> int:
    return (token.text in ("(", "[")) - (token.text in (")", "]"))


def _numeric(tokens: Sequence[Token], first: int, last: int, kinds: Kinds) -> _Operand | None:
    """The operand from `first` to `last`; None unless it consists of nothing but numbers."""
    paths, floats, alone, place = list[pa.DataType](), list[int](), True, first
    while place <= last:
        token = tokens[place]
        if token.kind == "column":
            kind, place = typed_path(tokens, place, kinds)
            if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)):
                return None
            paths.append(kind)
            floats += [_DOUBLE if pa.types.is_float64(kind) else _SINGLE] if pa.types.is_floating(kind) else []
        elif token.kind == "number":
            floats += [] if token.text.isdecimal() else [_DOUBLE]
        elif token.lower in _FLOATS:
            floats.append(_SINGLE)
        elif token.text not in _SIGNS and token.lower not in _FUNCTIONS:
            return None
        alone &= token.kind == "column" or token.text in ("(", ")")
        place += 1
    return _Operand(paths[0] if alone and len(paths) == 1 else None, min(floats, default=0))


# ---- literals --------------------------------------------------------------------------------------------------------


def _number(element: Sequence[Token]) -> _Number | None:
    """The literal that an element is, signed, in parentheses or cast; None for anything else."""
    while element and (element[0].text == "-" or (element[0].text == "(" and closing(element, 0) == len(element) - 1)):
        element = element[1:] if element[0].text == "-" else element[1:-1]
    if len(element) == 1 and element[0].kind == "number":
        text = element[0].text
        return None if (value := _value(text)) is None else _Number(value, not text.isdecimal())
    if len(element) > 4 and element[0].lower in ("cast", "try_cast", "arrow_cast") and element[1].text == "(":
        at = 2 + (element[2].text == "-")
        inside = _number(element[at : at + 1]) if _at(element, at + 1).lower in ("as", ",") else None
        into = " ".join(token.lower for token in element[at + 1 :])
        return inside and _Number(inside.value, inside.is_float or any(name in into for name in _FLOATS))
    return None


def _value(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _is_zero(token: Token) -> bool:
    return token.kind == "number" and _value(token.text) == 0


def _is_null(element: Sequence[Token]) -> bool:
    return len(element) == 1 and element[0].lower == "null"


def _at(tokens: Sequence[Token], place: int) -> Token:
    return tokens[place] if 0 <= place < len(tokens) else NOTHING
