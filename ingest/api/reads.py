"""The reads that every table has, whoever answers them: this process, storage, or a daemon."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal, get_args

import pyarrow as pa

from memwal.ingest.api.arguments import listed, sql
from memwal.ingest.api.arguments import text as a_text
from memwal.ingest.errors import Invalid, translate_errors
from memwal.ingest.suggest import suggestion

Level = Literal["committed", "flushed", "durable", "latest"]
LEVELS: tuple[Level, ...] = get_args(Level)


class Reads(ABC):
    """get, scan, count, search and match at a level.

    `level`: "committed" (base table) < "flushed" (+ SSTs) < "durable" (+ what is in the WAL) < "latest" (+ what the
    owners have in memory).
    Thread safety. Every method from any thread. Errors. Only `ingest.errors` kinds.
    """

    schema: pa.Schema
    """Base schema."""
    key: tuple[str, ...]

    @abstractmethod
    def _answer(self, read: str, level: str, /, **request: Any) -> Any:
        """The result of the method `read` of `ingest.read.reader.Reader` with `request`."""

    @translate_errors
    def get(self, keys: Any, columns: Sequence[str] | None = None, *, level: str = "latest") -> pa.Table:
        """The rows of `keys`, in the order in which these are named; missing and deleted keys are left out.

        `keys`: a scalar or a list of them (one key column), tuples or dicts (several), or an Arrow table of the key.
        Raises: Invalid where the table has no key.
        """
        found: pa.Table = self._answer("get", level, keys=keys, columns=listed(columns))
        return found

    @translate_errors
    def scan(
        self,
        columns: Sequence[str] | None = None,
        filter: str | None = None,
        limit: int | None = None,
        *,
        level: str = "latest",
    ) -> pa.Table:
        """Rows whose newest version passes `filter` (SQL), at most `limit`."""
        found: pa.Table = self._answer("scan", level, columns=listed(columns), filter=sql(filter), limit=limit)
        return found

    @translate_errors
    def count(self, filter: str | None = None, *, level: str = "latest") -> int:
        """Number of rows whose newest version passes `filter`."""
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
        """The `k` rows nearest to `vector` with `_distance` (float32, ascending), among rows that pass `filter`."""
        request: dict[str, Any] = {"column": a_text("column", column, "embedding"), "vector": vector, "k": k}
        request |= {"filter": sql(filter), "columns": listed(columns)}
        found: pa.Table = self._answer("search", level, **request)
        return found

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
        """The `k` rows that match the words of `text` best, with `_score` (float32, descending)."""
        request: dict[str, Any] = {"column": a_text("column", column, "body"), "text": text, "k": k}
        request |= {"filter": sql(filter), "columns": listed(columns)}
        found: pa.Table = self._answer("match", level, **request)
        return found


def check_level(level: str) -> Level:
    """`level` itself. Raises: Invalid with the nearest name when there is no such level."""
    for known in LEVELS:
        if level == known:
            return known
    raise Invalid(f"level '{level}' is unknown{suggestion(str(level), LEVELS)}")
