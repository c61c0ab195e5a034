"""The place of a part of a predicate, by its tokens: that of a truth value, or inside an expression."""

from __future__ import annotations

from collections.abc import Sequence

from memwal.memtable.filter.tokens import NOTHING, Token

_JOINS = frozenset(("and", "or"))


def closing(tokens: Sequence[Token], opening: int) -> int:
    """Place of the bracket that closes the one at `opening`; the end of `tokens` if none does."""
    depth = 0
    for place in range(opening, len(tokens)):
        depth += (tokens[place].text in ("(", "[")) - (tokens[place].text in (")", "]"))
        if not depth:
            return place
    return len(tokens)


def elements(tokens: Sequence[Token], first: int, end: int) -> list[Sequence[Token]]:
    """The elements of the list from `first` to before `end`, between its brackets."""
    found, depth, begin = [], 0, first
    for place in range(first, end):
        depth += (tokens[place].text in ("(", "[")) - (tokens[place].text in (")", "]"))
        if not depth and tokens[place].text == ",":
            found.append(tokens[begin:place])
            begin = place + 1
    return [*found, tokens[begin:end]]


def is_truth(tokens: Sequence[Token], first: int, last: int) -> bool:
    """Whether the tokens from `first` to `last` are the whole predicate, an operand of AND, OR or NOT, or one of these
    in parentheses; not an operand of a comparison, of IS or of a function.
    """
    while _at(tokens, first - 1).text == "(" and _at(tokens, last + 1).text == ")":
        if not _groups(tokens, first - 1):
            return False
        first, last = first - 1, last + 1
    before, after = _at(tokens, first - 1), _at(tokens, last + 1)
    begins = first == 0 or before.lower in (*_JOINS, "not") or (before.text == "(" and _groups(tokens, first - 1))
    ends = last + 1 >= len(tokens) or after.lower in _JOINS or after.text == ")"
    return begins and ends and not _is_bound(tokens, first - 1)


def _groups(tokens: Sequence[Token], opening: int) -> bool:
    """Whether a parenthesis groups, rather than holding the arguments of a function or the values of IN."""
    before = _at(tokens, opening - 1)
    return opening == 0 or before.kind in ("compare", "other") or before.lower in (*_JOINS, "not")


def _is_bound(tokens: Sequence[Token], place: int) -> bool:
    """Whether the AND at `place` belongs to a BETWEEN."""
    if _at(tokens, place).lower != "and":
        return False
    depth = 0
    for at in range(place - 1, -1, -1):
        depth += (tokens[at].text in (")", "]")) - (tokens[at].text in ("(", "["))
        if depth < 0 or (not depth and tokens[at].lower in _JOINS):
            return False
        if not depth and tokens[at].lower == "between":
            return True
    return False


def _at(tokens: Sequence[Token], place: int) -> Token:
    return tokens[place] if 0 <= place < len(tokens) else NOTHING
