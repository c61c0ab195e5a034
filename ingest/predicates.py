"""What is wrong with a filter that Lance refused, in the words of the table."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ingest.keys import nearest

_TOKEN = re.compile(
    r"""(?P<text>'(?:[^']|'')*' | "(?:[^"]|"")*") | (?P<quoted>`[^`]*`) | (?P<number>\d[\w.]*)
      | (?P<word>[^\W\d]\w*) | (?P<other>\S)""",
    re.VERBOSE,
)
# Words of the grammar: never a column unless in backticks.
_GRAMMAR = """
    and or not in is null like ilike similar to rlike between escape true false case when then else end as cast try_cast
    distinct from interval at time zone
"""
_RESERVED = frozenset(_GRAMMAR.split())


def unknown_column(predicate: str, columns: Sequence[str], gone: Mapping[str, str] | None = None) -> str | None:
    """What to say of the first word that stands where a column may stand and names none, in any case; None:
    all do. `gone`: what to say of columns that the table had once.

    A guess by tokens, good for a message only: whether a filter is right is for Lance to say.
    """
    folded = {column.lower() for column in columns}
    tokens = list(_TOKEN.finditer(predicate))
    for before, token, after in zip([None, *tokens], tokens, [*tokens[1:], None], strict=False):
        name = token.group().strip("`")
        if _is_column(token, before, after) and name.lower() not in folded:
            return (gone or {}).get(name) or f"column '{name}' does not exist{nearest(name, columns)}"
    return None


def _is_column(token: re.Match[str], before: re.Match[str] | None, after: re.Match[str] | None) -> bool:
    """Whether a token stands for a column: not a word of the grammar, a function, a field of a struct, the
    type of a literal (`date '2013-01-31'`) or of a cast.
    """
    if before is not None and before.group().lower() in (".", "as"):
        return False
    if token.lastgroup != "word":
        return token.lastgroup == "quoted"
    if token.group().lower() in _RESERVED:
        return False
    return after is None or (after.group() != "(" and after.lastgroup != "text")
