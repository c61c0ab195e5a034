"""Placeholders, and literals that Lance's planner does not know: it ends in a panic, at every level.

Found with pylance 14.0.2: `?`, `$1`, `$$text$$`, `:name` where a value should stand, and texts with a letter in front
(`N'text'`, `b'text'`, `r'text'`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

from memwal.memtable.filter.tokens import NOTHING, Token, tokenize

_MAY = re.compile(r"""[?$:]|\b[nbr]['"]""", re.IGNORECASE)
_LETTERS = ("n", "b", "r")
_VALUES = ("column", "number", "text", "double", "name")


def problem(predicate: str, columns: Sequence[str]) -> str:
    """Return why a predicate is refused for one, "" if it has none. `columns`: of the table."""
    if not _MAY.search(predicate):
        return ""
    tokens = tokenize(predicate, columns)
    for letter, text in pairwise(tokens):
        if text.kind in ("text", "double") and letter.lower in _LETTERS:
            return f"{letter.text}{text.text} is no text that Lance knows: write {text.text}"
    solid = [NOTHING, *(token for token in tokens if token.kind != "gap")]
    for before, token in pairwise(solid):
        if token.text in ("?", "$") or (token.text == ":" and not _follows_a_value(before)):
            return f"{token.text!r} begins a placeholder, for which a filter has no value: write the value in its place"
    return ""


def _follows_a_value(before: Token) -> bool:
    """Whether `:` behind a token is of a cast (`x::int`), a slice, or a path."""
    return before.kind in _VALUES or before.text in (")", "]", ":", "[")
