"""The parts of a predicate whose comparisons are joined to the whole by AND, OR and brackets only.

Only in these does Lance give a literal the type of the column beside it: nothing under a NOT, beside IS, in a function,
or in a comparison of truth values, such as `(price > 0.1) IS TRUE` or `b = (price > 0.1)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from memwal.memtable.filter.tokens import NOTHING, Token

_COMPARING = frozenset(("in", "between", "like", "ilike"))


def reached(tokens: Sequence[Token]) -> list[bool]:
    """Return for each token whether it is in such a part. `tokens`: without gaps."""
    flags = [True] * len(tokens)
    opened: list[tuple[int, _Term]] = []
    term = _Term(0)
    for place, token in enumerate(tokens):
        word = token.lower
        if word in ("(", "case"):
            opened.append((place, term))
            term = _Term(place + 1)
        elif word in (")", "end") and opened:
            term.end(flags, place)
            begin, term = opened.pop()
            term.close(flags, begin, place, tokens)
        elif word == "or" or (word == "and" and not term.is_between):
            term.end(flags, place)
            term = _Term(place + 1)
        else:
            after = tokens[place + 1] if place + 1 < len(tokens) else NOTHING
            term.take(place, token, after)
    term.end(flags, len(tokens))
    return flags


def _is_arithmetic(token: Token) -> bool:
    return token.kind == "number" or token.text in "()+-*/%|"


@dataclass(slots=True)
class _Term:
    """What stands between two AND or OR, from the token at `begin` on. `others`: tokens besides NOT and brackets."""

    begin: int
    others: int = 0
    comparisons: int = 0
    negated: int | None = None
    is_between: bool = False
    groups: list[tuple[int, int]] = field(default_factory=list)

    def take(self, place: int, token: Token, after: Token) -> None:
        word = token.lower
        if word == "not" and after.lower not in _COMPARING:
            self.negated = place if self.negated is None else self.negated
            return
        self.others += 1
        self.is_between = word == "between" or (self.is_between and word != "and")
        self.comparisons += token.kind == "compare" or word in _COMPARING
        self.comparisons += 2 * (word == "is")

    def close(self, flags: list[bool], begin: int, last: int, tokens: Sequence[Token]) -> None:
        """Take the brackets, or the CASE, from `begin` to `last`."""
        if tokens[begin].lower == "case":
            flags[begin:last] = [False] * (last - begin)
        elif (begin and tokens[begin - 1].lower == "in") or all(map(_is_arithmetic, tokens[begin:last])):
            self.others += 1
        else:
            self.groups.append((begin, last))

    def end(self, flags: list[bool], upto: int) -> None:
        parts = self.groups if self.others else []
        if self.negated is not None:
            parts = [*parts, (self.negated, upto)]
        if self.comparisons > 1:
            parts = [(self.begin, upto)]
        for first, last in parts:
            flags[first:last] = [False] * (last - first)
