"""Tokens of an SQL predicate: just enough to tell names, strings and numbers apart."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_TOKEN = re.compile(
    r"""(?P<text>'(?:[^']|'')*') | (?P<double>"(?:[^"]|"")*") | (?P<backtick>`(?:[^`]|``)*`)
      | (?P<gap>\s+ | --[^\n]* | /\*.*?(?:\*/|\Z)) | (?P<number>(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?\w*)
      | (?P<name>[^\W\d][\w$]*) | (?P<compare><= | >= | <> | != | == | [=<>]) | .""",
    re.VERBOSE | re.DOTALL,
)
# A column of such a name needs backticks, as in Lance.
_GRAMMAR = """
    and or not in is null like ilike between true false case when then else end as cast escape similar to distinct from
    exists interval
"""
_WORDS = frozenset(_GRAMMAR.split())


@dataclass(frozen=True)
class Token:
    """One token. `kind` is a group of _TOKEN, or "column" with its exact name, or "other"."""

    kind: str
    text: str
    column: str = ""

    @property
    def lower(self) -> str:
        """The text in lower case."""
        return self.text.lower()


NOTHING = Token("other", "")


def tokenize(predicate: str, columns: Sequence[str]) -> list[Token]:
    """All tokens, gaps included, so that their joined texts equal the predicate; columns are recognised."""
    tokens = [Token(m.lastgroup or "other", m.group()) for m in _TOKEN.finditer(predicate)]
    solid = [place for place, token in enumerate(tokens) if token.kind != "gap"]
    around = [NOTHING, *(tokens[place] for place in solid), NOTHING]
    for index, place in enumerate(solid):
        tokens[place] = _recognised(tokens[place], around[index], around[index + 2], columns)
    return tokens


def _recognised(token: Token, before: Token, after: Token, columns: Sequence[str]) -> Token:
    """The token, as a column if it is one."""
    if token.kind == "backtick":
        name = token.text[1:-1].replace("``", "`")
        return Token("column", token.text, name)
    if token.kind != "name" or token.lower in _WORDS:
        return token
    if before.text == ".":  # a field of a struct: taken literally, as Lance does
        return Token("column", token.text, token.text)
    # A function, a type, or the prefix of a literal (date '2024-01-01', x'00').
    if after.text == "(" or before.lower == "as" or before.text == ":" or after.kind in ("text", "double"):
        return token
    column = _resolved(token.text, columns)
    return Token("column", token.text, column) if column else token


def _resolved(name: str, columns: Sequence[str]) -> str | None:
    """The column of that name: exactly, or else without regard to case."""
    if name in columns:
        return name
    return next((column for column in columns if column.lower() == name.lower()), None)
