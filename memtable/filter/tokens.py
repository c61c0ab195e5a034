"""Tokens of an SQL predicate: names, texts, numbers and signs."""

from __future__ import annotations

import re
from dataclasses import dataclass

_TOKEN = re.compile(
    r"""(?P<text>'(?:[^']|'')*') | (?P<double>"(?:[^"]|"")*") | (?P<backtick>`(?:[^`]|``)*`)
      | (?P<gap>\s+ | --[^\n]* | /\*.*?(?:\*/|\Z)) | (?P<number>(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?\w*)
      | (?P<name>[^\W\d][\w$]*) | <= | >= | <> | != | == | << | >> | :: | \|\| | .""",
    re.VERBOSE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Token:
    """One token. `kind`: a group of _TOKEN, or "other". `lower`: the text in lower case."""

    kind: str
    text: str
    lower: str


NOTHING = Token("", "", "")


def tokenize(predicate: str) -> list[Token]:
    """Return the tokens of a predicate without gaps. Raises: ValueError for a comment inside a comment."""
    tokens = list[Token]()
    for match in _TOKEN.finditer(predicate):
        kind, text = match.lastgroup or "other", match.group()
        if kind != "gap":
            tokens.append(Token(kind, text, text.lower()))
        elif text.count("/*") > 1:
            raise ValueError("it has a comment inside a comment; leave it out")
    return tokens
