"""The read methods of every table, embedded, read from storage, or behind daemons."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import pyarrow as pa

from memwal.ingest.api.arguments import at_least_one, listed, sql
from memwal.ingest.api.arguments import text as a_text
from memwal.ingest.api.fusion import Rerank, checked_weights, fused
from memwal.ingest.errors import Invalid, translate_errors
from memwal.ingest.suggest import suggestion

Level = Literal["committed", "flushed", "durable", "latest"]
LEVELS: tuple[Level, ...] = get_args(Level)


@dataclass(frozen=True)
class ReadKind:
    """How a read travels to daemons, and how the answers of several owners become one.

    `sends`: the argument that travels as Arrow data; keys go to their owners only. `counts`: the answer is a number,
    and answers are added. `score`: the column that ranks rows, and `ascending`: whether the lowest is best; without it
    rows are concatenated, up to `limit`. `arms`: rows have two scores, and the best by either are kept.
    """

    sends: Literal["keys", "vector"] | None = None
    counts: bool = False
    score: str | None = None
    ascending: bool = True
    arms: bool = False


READS: Mapping[str, ReadKind] = {
    "get": ReadKind(sends="keys"),
    "scan": ReadKind(),
    "count": ReadKind(counts=True),
    "search": ReadKind(sends="vector", score="_distance"),
    "match": ReadKind(score="_score", ascending=False),
    "candidates": ReadKind(sends="vector", arms=True),
}
"""By the name of the method. Clients and daemons know reads by this alone."""


class Reads(ABC):
    """get, scan, count, search, match and hybrid at a level.

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

    @translate_errors
    def hybrid(
        self,
        vector: Any,
        text: str,
        k: int = 10,
        filter: str | None = None,
        columns: Sequence[str] | None = None,
        *,
        vector_column: str | None = None,
        text_column: str | None = None,
        weights: tuple[float, float] = (1.0, 1.0),
        candidates: int | None = None,
        rerank: Rerank | None = None,
        level: str = "latest",
    ) -> pa.Table:
        """Return the `k` rows that are best by `vector` and by `text` together and pass `filter`, best first.

        Reciprocal rank fusion of the `candidates` (None: 5 `k`, at least 50) nearest rows and best matches, which are
        of one moment. The last columns are `_distance` and `_score`, as of `search` and `match`, null where the row is
        no candidate by it, and `_relevance_score` (float32, descending).
        `vector_column`, `text_column`: may be left out where the table has one vector and one text index.
        `weights`: of the two rankings. `rerank`: a function of all candidates (an Arrow table as above, best first)
        that returns a relevance for each, by which they are ranked instead; -inf leaves a row out;
        `memwal.lancedb_reranker` makes one of a reranker of LanceDB.
        """
        most, both = at_least_one(k), checked_weights(weights)
        depth = max(5 * most, 50) if candidates is None else at_least_one(candidates, "candidates")
        found = self.candidates(
            vector, text, depth, filter, columns, vector_column=vector_column, text_column=text_column, level=level
        )
        return fused(found, most, both, rerank)

    @translate_errors
    def candidates(
        self,
        vector: Any,
        text: str,
        n: int = 50,
        filter: str | None = None,
        columns: Sequence[str] | None = None,
        *,
        vector_column: str | None = None,
        text_column: str | None = None,
        level: str = "latest",
    ) -> pa.Table:
        """Return the `n` nearest rows and the `n` best matches of one moment, each row once, in no order: what `hybrid`
        ranks, for a ranking of your own. Columns as there, without `_relevance_score`.
        """
        request: dict[str, Any] = {"vector": vector, "text": text, "n": n}
        for name, column, such in (("vector_column", vector_column, "embedding"), ("text_column", text_column, "body")):
            request[name] = None if column is None else a_text(name, column, such)
        rows: pa.Table = self._answer("candidates", level, **request, filter=sql(filter), columns=listed(columns))
        return rows


def check_level(level: str) -> Level:
    """Return `level`. Raises: Invalid with the nearest name if no level has this name."""
    for known in LEVELS:
        if level == known:
            return known
    raise Invalid(f"level '{level}' is unknown{suggestion(str(level), LEVELS)}")
