"""The read methods of every table, embedded, read from storage, or behind daemons."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import pyarrow as pa

from memwal.ingest.api.arguments import listed, sql
from memwal.ingest.api.arguments import text as a_text
from memwal.ingest.errors import Invalid, translate_errors
from memwal.ingest.suggest import suggestion

Level = Literal["committed", "flushed", "durable", "latest"]
LEVELS: tuple[Level, ...] = get_args(Level)


@dataclass(frozen=True)
class ReadKind:
    """How a read travels to daemons, and how the answers of several owners become one.

    `sends`: the argument that travels as Arrow data; keys go to their owners only. `counts`: the answer is a number,
    and answers are added. `score`: the column that ranks rows, and `ascending`: whether the lowest is best; without it
    rows are concatenated, up to `limit`.
    """

    sends: Literal["keys", "vector"] | None = None
    counts: bool = False
    score: str | None = None
    ascending: bool = True


READS: Mapping[str, ReadKind] = {
    "get": ReadKind(sends="keys"),
    "scan": ReadKind(),
    "count": ReadKind(counts=True),
    "search": ReadKind(sends="vector", score="_distance"),
    "match": ReadKind(score="_score", ascending=False),
}
"""By the name of the method. Clients and daemons know reads by this alone."""


class Reads(ABC):
    """get, scan, count, search and match at a level.

    `level`: "committed" (base table) < "flushed" (+ SSTs) < "durable" (+ rows of the WAL) < "latest" (+ rows in the
    owners' memory).
    Thread safety. Every method from any thread. Errors. Only `ingest.errors` kinds.
    """

    schema: pa.Schema
    """Base schema."""
    key: tuple[str, ...]

    @abstractmethod
    def _answer(self, read: str, level: str, /, **request: Any) -> Any:
        """Return the result of the method `read` of `ingest.read.reader.Reader` with `request`."""

    @translate_errors
    def get(self, keys: Any, columns: Sequence[str] | None = None, *, level: str = "latest") -> pa.Table:
        """Return the rows of `keys`, in the order of the keys; missing and deleted keys are left out.

        `keys`: a scalar or a list of them (one key column), tuples or dicts (several), or an Arrow table of the key.
        Raises: Invalid if the table has no key.
        """
        rows: pa.Table = self._answer("get", level, keys=keys, columns=listed(columns))
        return rows

    @translate_errors
    def scan(
        self,
        columns: Sequence[str] | None = None,
        filter: str | None = None,
        limit: int | None = None,
        *,
        level: str = "latest",
    ) -> pa.Table:
        """Return rows whose newest version passes `filter` (SQL), at most `limit`."""
        rows: pa.Table = self._answer("scan", level, columns=listed(columns), filter=sql(filter), limit=limit)
        return rows

    @translate_errors
    def count(self, filter: str | None = None, *, level: str = "latest") -> int:
        """Return the number of rows whose newest version passes `filter`."""
        return int(self._answer("count", level, filter=sql(filter)))

    @translate_errors
    def search(
        self,
        column: str,
        vector: Any,
        k: int = 10,
        filter: str | None = None,
        columns: Sequence[str] | None = None,
        *,
        level: str = "latest",
    ) -> pa.Table:
        """Return the `k` rows nearest to `vector` that pass `filter`, with `_distance` (float32, ascending)."""
        request: dict[str, Any] = {"column": a_text("column", column, "embedding"), "vector": vector, "k": k}
        request |= {"filter": sql(filter), "columns": listed(columns)}
        rows: pa.Table = self._answer("search", level, **request)
        return rows

    @translate_errors
    def match(
        self,
        column: str,
        text: str,
        k: int = 10,
        filter: str | None = None,
        columns: Sequence[str] | None = None,
        *,
        level: str = "latest",
    ) -> pa.Table:
        """Return the `k` rows that match `text` best and pass `filter`, with `_score` (float32, descending)."""
        request: dict[str, Any] = {"column": a_text("column", column, "body"), "text": text, "k": k}
        request |= {"filter": sql(filter), "columns": listed(columns)}
        rows: pa.Table = self._answer("match", level, **request)
        return rows


def check_level(level: str) -> Level:
    """Return `level`. Raises: Invalid with the nearest name if no level has this name."""
    for known in LEVELS:
        if level == known:
            return known
    raise Invalid(f"level '{level}' is unknown{suggestion(str(level), LEVELS)}")
