"""The text of a query: what is refused before DataFusion sees it, and the name `table`, which is a keyword of SQL."""

from __future__ import annotations

import re
from dataclasses import dataclass

from memwal.ingest.errors import Invalid

SELF = "table"
_TOKEN = re.compile(
    r"""[eE]'(?:[^'\\]|\\.|'')*' | '(?:[^']|'')*' | "(?:[^"]|"")*" | `[^`]*` | --[^\n]* | /\*.*?\*/
      | \$(\w*)\$.*?\$\1\$ | \w+ | \s+ | <= | >= | <> | != | == | :: | \|\| | << | >> | .""",
    re.VERBOSE | re.DOTALL,
)
_GAP = re.compile(r"\s|--|/\*")
_BEFORE_TABLE = frozenset(("from", "join", "describe", "desc", ",", "("))
_OTHERS = """
    alter analyze attach begin call comment commit copy create deallocate delete detach drop execute explain export
    grant insert install kill load lock merge optimize prepare refresh replace reset revoke rollback savepoint set show
    start truncate unload update use vacuum
"""
_REFUSED = frozenset(_OTHERS.split())


@dataclass(frozen=True, slots=True)
class Statement:
    """A query as DataFusion gets it. `inserted`: (line, column) of characters in it that were not typed, from 1."""

    text: str
    inserted: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, query: str) -> Statement:
        """Put `table` in quotes where it names a table. Raises: Invalid for an empty query, and for other statements
        than queries.
        """
        tokens = _split(query)
        solid = [at for at, token in enumerate(tokens) if not _GAP.match(token)]
        _expect_reading(tokens[solid[0]] if solid else "")
        named = set()
        for before, at, after in zip([None, *solid], solid, [*solid[1:], None], strict=False):
            follows = "" if after is None else tokens[after]
            placed = before is not None and tokens[before].lower() in _BEFORE_TABLE and follows != "("
            if tokens[at].lower() == SELF and (placed or follows == "."):
                named.add(at)
        text, inserted = "", list[tuple[int, int]]()
        for at, token in enumerate(tokens):
            if at in named:
                line, column = text.count("\n") + 1, len(text) - text.rfind("\n")
                inserted += [(line, column), (line, column + len(SELF) + 1)]
            text += f'"{SELF}"' if at in named else token
        return cls(text, tuple(inserted))

    def typed(self, line: int, column: int) -> int:
        """Return the column in the query as it was typed."""
        return column - sum(each[0] == line and each[1] < column for each in self.inserted)


def _split(query: str) -> list[str]:
    return [match.group() for match in _TOKEN.finditer(query)]


def words_of(query: str) -> list[str]:
    """Return the tokens of a query without gaps. Raises: Invalid for a comment inside a comment."""
    tokens = _split(query)
    if any(token.startswith("/*") and "/*" in token[2:] for token in tokens):
        raise Invalid("sql: the query has a comment inside a comment; leave it out")
    return [token for token in tokens if not _GAP.match(token)]


def _expect_reading(first: str) -> None:
    if not first:
        raise Invalid("sql: the query is empty; write one such as select count(*) from table")
    word = first.lower()
    if word == "explain":
        raise Invalid("sql: EXPLAIN is refused: it would not show what the owners of the table do")
    if word in _REFUSED:
        raise Invalid(f"sql: {word.upper()} is refused: sql only reads; put and delete change a table")
