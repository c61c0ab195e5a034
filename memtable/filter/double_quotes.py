"""Texts in double quotes where a column is meant: a text for Lance, a column for the rest of SQL.

`"name" != 'x'` compares two texts, so it passes every row, and a delete would take all of them. So such a text is
refused where it is the name of a column, or stands in front of a comparison.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from memwal.memtable.filter.tokens import NOTHING, tokenize

_COMPARES = frozenset(("in", "like", "ilike", "is", "between", "not", "similar", "=", "==", "<", ">"))
_COMPARES |= {"<=", ">=", "<>", "!="}


def problem(predicate: str, columns: Sequence[str]) -> str:
    """Return why a predicate is refused for one, "" if it has none. `columns`: of the table."""
    if '"' not in predicate:
        return ""
    names = {name.lower() for name in columns}
    solid = [token for token in tokenize(predicate, columns) if token.kind != "gap"]
    for token, after in pairwise([*solid, NOTHING]):
        if token.kind == "double":
            text = token.text[1:-1].replace('""', '"')
            if text.lower() in names or after.lower in _COMPARES:
                literal = "'" + text.replace("'", "''") + "'"
                return f"{token.text} is a text, as in Lance: write `{text}` for the column, or {literal}"
    return ""
