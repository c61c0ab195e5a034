"""How much longer than its columns a predicate may make a value: planners and engines allocate it without a limit.

`repeat('x', 1000000000)` is computed when the filter is planned, `lpad(v, 1000000000)` for every row. So a predicate is
measured before a planner sees it. The growth of a call is bounded from above, by tokens; that of a call inside another
one multiplies, that of calls beside one another adds up:

- `repeat`, `lpad`, `range` and the like: their number, which must be written out.
- `replace`, `array_to_string` and the like: the length of the text that they put in; of a column's value, the most that
  is allowed, so that it is allowed once.
- `encode`: 2, for hexadecimal.

- `concat`, `make_array` and the like: the number of their arguments.

A text that is written in the predicate may be copied for every row by a function, CASE or `||`, so it is limited there,
and the more so the more the functions grow it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from memwal.memtable.filter.tokens import NOTHING, Token, tokenize

MOST = 100
"""The greatest growth."""
TEXT = 10_000
"""Characters of the longest text in a predicate that computes something."""
_LOOKED_AT = 128
"""Tokens of an argument: one is a value, two a value with a sign, more something else, or such a value in brackets, of
which a planner reads 50.
"""
Arguments = Sequence[Sequence[Token]]


def _numbers(*places: int) -> Callable[[Arguments], float]:
    """A call makes as much as its largest argument at `places` says."""
    return lambda given: max((number(given[at]) for at in places if at < len(given)), default=1)


def _text(*places: int) -> Callable[[Arguments], float]:
    """A call puts in its arguments at `places`, any number of times."""
    return lambda given: max((_length(given[at]) for at in places if at < len(given)), default=1) or 1


def _resized(given: Arguments) -> float:
    """A call fills up to as many elements as its second argument says with its third one."""
    return _numbers(1)(given) * _text(2)(given)


def _all(given: Arguments) -> float:
    """A call puts all its arguments together."""
    return len(given)


def _separated(given: Arguments) -> float:
    """A call puts its first argument between all the others."""
    return max(1, _length(given[0]) * (len(given) - 2)) if given else 1


def _either(*names: str) -> Sequence[str]:
    return [f"{prefix}_{name}" for prefix in ("array", "list") for name in names]


GROWING: Mapping[str, Callable[[Arguments], float]] = {
    **dict.fromkeys(("repeat", "lpad", "rpad", *_either("repeat")), _numbers(1)),
    **dict.fromkeys(_either("resize"), _resized),
    **dict.fromkeys(("concat", "make_array", "make_list", "struct", "named_struct", *_either("concat", "cat")), _all),
    "space": _numbers(0),
    **dict.fromkeys(("range", "generate_series"), _numbers(0, 1)),
    **dict.fromkeys(("replace", "regexp_replace", *_either("replace", "replace_n", "replace_all")), _text(2)),
    **dict.fromkeys(_either("to_string", "join"), _text(1, 2)),
    "concat_ws": _separated,
    "encode": lambda _: 2,
}
_NAMED = re.compile(r"(?i)\b(" + "|".join(GROWING) + r")\b")
_COMPUTED = re.compile(r"(?i)\|\||\bcase\b|\w[`\"]?\s*\(")
_LISTS = frozenset(("in", "and", "or", "not", "(", ","))
"""What stands before a parenthesis that is no call."""


@dataclass
class _Bracket:
    """An open bracket. `begins`: of its arguments; `inside`: growth of the calls in it."""

    closing: str = ""
    growth: Callable[[Arguments], float] | None = None
    begins: list[int] = field(default_factory=list)
    inside: float = 0

    def closed(self, solid: Sequence[Token], end: int) -> float:
        """Return the growth of what the bracket, which ends at the token `end`, stands for."""
        if self.growth is None:
            return self.inside
        ends = [*(begin - 1 for begin in self.begins[1:]), end]
        given = [solid[begin : min(to, begin + _LOOKED_AT)] for begin, to in zip(self.begins, ends, strict=True)]
        return self.growth(given) * max(1, self.inside)


def growth(solid: Sequence[Token], growing: Mapping[str, Callable[[Arguments], float]] = GROWING) -> float:
    """Return an upper bound of how much longer a predicate makes a value, maybe inf.

    `solid`: its tokens but gaps. `growing`: what the calls of a function make, by its name.
    """
    opened = [_Bracket()]
    for place, token in enumerate(solid):
        if token.text in _CLOSING:
            called = growing.get(_name(solid[place - 1] if place else NOTHING)) if token.text == "(" else None
            opened.append(_Bracket(_CLOSING[token.text], called, [place + 1]))
        elif token.text == ",":
            opened[-1].begins.append(place + 1)
        elif token.text == opened[-1].closing:
            closed = opened.pop()
            opened[-1].inside += closed.closed(solid, place)
    while len(opened) > 1:  # a planner refuses it
        closed = opened.pop()
        opened[-1].inside += closed.closed(solid, len(solid))
    return opened[0].inside


def problem(predicate: str, columns: Sequence[str]) -> str:
    """Return why a predicate is refused for what it may make, "" if it is not. `columns`: of the table."""
    named, long = _NAMED.search(predicate), len(predicate) > TEXT and _COMPUTED.search(predicate)
    if not named and not long:
        return ""
    tokens = tokenize(predicate, columns)
    if any(token.kind == "gap" and token.text.count("/*") > 1 for token in tokens):
        return "it has a comment inside a comment; leave it out"
    solid = [token for token in tokens if token.kind != "gap"]
    found = growth(solid)
    if found > MOST:
        many = "any number of" if math.isinf(found) else f"{found:.0f}"
        return (
            f"its functions, such as {named[1] if named else ''}, may make values {many} times as long, at most {MOST} "
            "are allowed: write their numbers out, and smaller ones"
        )
    longest = max((len(token.text) for token in solid if token.kind in ("text", "double")), default=0)
    if _computes(solid) and longest > TEXT:
        return f"it computes with a text of more than {TEXT} characters; compare columns with such a text alone"
    if longest * found > TEXT:
        return (
            f"its functions may make {longest * found:.0f} characters of a text of {longest}, at most {TEXT} are "
            "allowed: write a shorter text, or smaller numbers"
        )
    return ""


_CLOSING = {"(": ")", "[": "]", "{": "}"}


def _name(token: Token) -> str:
    """Return the name of a function that a token before a parenthesis may be; in quotes, too."""
    return (token.column or token.text.strip('"')).lower()


def _computes(solid: Sequence[Token]) -> bool:
    """Whether something but comparisons, AND, OR, NOT and IN is in a predicate."""
    words = [token.lower for token in solid]
    calls = any(word == "(" and before not in _LISTS and before.isidentifier() for before, word in _pairs(words))
    return calls or "case" in words or ("|", "|") in _pairs(words)


def _pairs(words: Sequence[str]) -> list[tuple[str, str]]:
    return list(pairwise(words))


def number(argument: Sequence[Token]) -> float:
    """Return the number that an argument is, inf for anything else."""
    digits = argument[-1] if argument else NOTHING
    if digits.kind != "number" or [token.text for token in argument[:-1]] not in ([], ["-"], ["+"]):
        return math.inf
    try:
        return float(digits.text)
    except ValueError:
        return math.inf


def _length(argument: Sequence[Token]) -> float:
    """Return the characters of the text that an argument is; of anything else, as many as are allowed."""
    if len(argument) == 1 and argument[0].kind in ("text", "double"):
        return len(argument[0].text) - 2
    return MOST
