"""Find the best rows of each level: the nearest to a vector, the best matches of a text."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from memwal.flush import BaseTable
from memwal.ingest.engine.read.base import DISTANCE, BaseReads
from memwal.ingest.engine.read.base_match import SCORE
from memwal.ingest.engine.read.levels import Mask
from memwal.ingest.engine.read.merged import Positions, Ranking, Scores
from memwal.ingest.engine.read.request import KnownColumns, VectorQuery, checked_text, expect_indexed, vector_query
from memwal.memtable import Snapshot
from memwal.memtable.vector.index import Way

_LOG = logging.getLogger("memwal.read")
TEXT_SPARE = 16
"""Rows of a match that are fetched beyond the best, because short texts often tie. 16 rows with vectors take 0.3 ms, a
further fetch 1.2 ms.
"""
EXACT_ROWS_QUIET = 100_000
"""Maximum rows of the base table for a search without an index and without a warning: about 0.1 s on a local disk."""


class Nearness:
    """Create rankings by distance, and warn once per column about searches that no index serves.

    Thread safety. Any thread; two searches that begin at once may both warn.
    """

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def ranking(
        self,
        what: str,
        base: BaseTable,
        known: KnownColumns,
        column: str,
        vector: Any,
        filter: str | None,
        how: Mapping[str, Any],
    ) -> Ranking:
        """Rank by distance. `what`: the read or its argument, for messages. `how`: see `vector_query`.

        Raises: Invalid.
        """
        query = vector_query(what, column, vector, known, **how)
        if query.exact:
            self._warn(base, query)

        def above(level: Snapshot, n: int, mask: Mask) -> tuple[Positions, Scores]:
            rows, scores = level.search(column, query.vector, n, mask, query.metric, query.low)
            near = query.within(scores)
            return rows[near], scores[near]

        def way(level: Snapshot, n: int, mask: Mask) -> tuple[int, Way]:
            return level.way(column, n, mask, query.metric, query.low)

        def below(rows: BaseReads, n: int, names: Sequence[str]) -> pa.Table:
            return rows.search(query, n, filter, names)

        exact: Way | None = None if query.low is None else "low"
        if not query.indexed:
            has_index = any((spec.column, spec.kind) == (column, "ivf_pq") for spec in known.indexes)
            exact = "metric" if has_index else "no index"
        return Ranking(above, below, DISTANCE, (column,), way, exact)

    def _warn(self, base: BaseTable, query: VectorQuery) -> None:
        if query.column in self._warned or (rows := base.dataset.count_rows()) < EXACT_ROWS_QUIET:
            return
        self._warned.add(query.column)
        reason = f"it has no index of the metric {query.metric}; table.create_index or `memwal index add` makes one"
        if query.indexed:
            reason = "no index serves a lower limit of distance_range"
        where = (base.uri, query.column, rows, reason)
        _LOG.warning("%s: a search of column %s compares all %d rows of the base table: %s", *where)


def relevance(what: str, known: KnownColumns, boosts: Mapping[str, float], text: str, filter: str | None) -> Ranking:
    """Rank by BM25, summed over the columns. `what`: the read or its argument, for messages. Raises: Invalid."""
    for column in boosts:
        expect_indexed(column, "fts", what, known)
    query = checked_text(text, boosts, known.parsers)
    return Ranking(
        lambda level, n, mask: level.match_columns(query, n, mask),
        lambda base, n, names: base.match(query, n, filter, names),
        SCORE,
        tuple(boosts),
        lambda *_: (None, "text"),
        spare=TEXT_SPARE,
    )
