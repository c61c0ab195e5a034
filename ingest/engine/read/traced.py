"""Measure the steps of a read's view, for an explanation.

`Reader` creates a `TracedView` in place of a `MergedView` if the caller requested an explanation. It performs the same
steps and measures them. Without an explanation nothing in this module runs, and no step tests for one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from memwal.ingest.engine.api.ordering import Order, first_rows
from memwal.ingest.engine.read.base import DISTANCE, BaseReads
from memwal.ingest.engine.read.base_match import SCORE
from memwal.ingest.engine.read.beside import Beside
from memwal.ingest.engine.read.levels import Mask, Stack
from memwal.ingest.engine.read.merged import MergedView, Positions, Ranking
from memwal.ingest.engine.read.top_k import Candidates, Visible, concatenate
from memwal.ingest.engine.read.tracer import LevelTrace, SearchTrace, Trace
from memwal.memtable import TOMBSTONE, IndexSpec, Snapshot
from memwal.memtable.vector.index import Way

_KEY_INDEX = "key index"
_BY = {DISTANCE: "vector", SCORE: "text"}
WAYS: Mapping[Way, str] = {
    "quantiser": "IVF-PQ, its candidates compared exactly",
    "few": "every row compared: too few for the index",
    "untrained": "every row compared: the index is not trained yet",
    "filling": "every row compared: few of them are in the index yet",
    "metric": "every row compared: the index has another metric",
    "low": "every row compared: no index serves a lower limit of distance_range",
    "no index": "every row compared: the column has no vector index",
    "text": "text index",
}


@dataclass(frozen=True, kw_only=True)
class TracedView(MergedView):
    """A `MergedView` that measures its steps."""

    trace: Trace
    specs: tuple[IndexSpec, ...]

    # ---- by key, counts, scans -----------------------------------------------------------------------------------

    def _held_rows(self, level: Snapshot, keys: pa.Table, columns: list[str]) -> tuple[Mask, pa.Table | None]:
        with self.trace.timed(self._level(level).by("key")) as search:
            held, rows = super()._held_rows(level, keys, columns)
        deleted = 0 if rows is None else int(np.count_nonzero(rows.column(TOMBSTONE).to_numpy()))
        search.told[_KEY_INDEX] = search.indexes["key"] = None
        search.looked_at = (search.looked_at or 0) + keys.num_rows
        search.found += int(np.count_nonzero(held))
        search.deleted += deleted
        search.returned = search.found - search.deleted
        return held, rows

    def _base_rows_of(self, keys: pa.Table, columns: list[str]) -> tuple[pa.Table, Positions]:
        with self.trace.timed(self.trace.base.by("key")) as search:
            rows, at = super()._base_rows_of(keys, columns)
        search.found = search.returned = rows.num_rows
        return rows, at

    def _count_above(self, filter: str | None) -> int:
        total = 0
        for _, positions in self._visible_above(filter):
            self.trace.current.returned += len(positions)
            total += len(positions)
        return total

    def _count_base(self, filter: str | None) -> int:
        with self.trace.timed(self.trace.base.by("rows" if filter is None else "filter")) as search:
            search.returned = super()._count_base(filter)
        search.found = search.returned + search.hidden
        return search.returned

    def _held_in_base(self, keys: pa.Table, filter: str | None) -> int:
        self.trace.current.hidden = super()._held_in_base(keys, filter)
        return self.trace.current.hidden

    def _passing(self, stack: Stack, place: int, filter: str | None) -> Mask:
        level, trace = stack.levels[place], self._level(stack.levels[place])
        with self.trace.timed(SearchTrace("")) as seen:
            mask = super()._passing(stack, place, None)
        trace.before += seen.seconds
        trace.hidden += int(np.count_nonzero(level.live())) - int(np.count_nonzero(mask))
        if filter is None:
            return mask
        with self.trace.timed(trace.by("filter")) as search:
            # Before the filter is evaluated: `narrowed` may sort waiting rows into an index, which the filter then
            # uses.
            search.looked_at, columns = level.narrowed(filter, mask)
            mask = super()._passing(stack, place, filter)
        search.found = int(np.count_nonzero(mask))
        search.indexes |= dict.fromkeys(self._scalar_index(column) for column in columns)
        search.told[f"index of {', '.join(columns)}" if columns else "every row evaluated"] = None
        return mask

    def _rows_passing(self, stack: Stack, place: int, filter: str | None) -> Positions:
        rows = super()._rows_passing(stack, place, filter)
        if filter is None:
            with self.trace.timed(self._level(stack.levels[place]).by("rows")) as search:
                search.told["every row"] = None
                search.found = search.looked_at = len(rows)
        return rows

    def _taken(self, level: Snapshot, positions: Positions, columns: list[str]) -> pa.Table:
        with self.trace.timed(self.trace.current) as search:
            rows = super()._taken(level, positions, columns)
        search.returned += len(positions)
        self.trace.taken.append(search)
        return rows

    def visible_rows(self, columns: list[str], filter: str | None, limit: int | None) -> Iterator[pa.Table]:
        """As `MergedView.visible_rows`."""
        for rows in super().visible_rows(columns, filter, limit):
            if limit is not None:
                # The reader takes at most `limit` rows, and then no further rows.
                self.trace.current.returned -= max(0, rows.num_rows - limit)
                limit -= min(limit, rows.num_rows)
            yield rows

    def base_rows(self, columns: list[str], filter: str | None, most: int | None = None) -> Iterator[pa.Table]:
        """As `MergedView.base_rows`."""
        search, batches = self.trace.base.by("rows" if filter is None else "filter"), super().base_rows
        rows = batches(columns, filter, most)
        while True:
            with self.trace.timed(search):
                part = next(rows, None)
            if part is None:
                return
            search.returned += part.num_rows
            search.found += part.num_rows
            yield part

    def _hidden(self, keys: pa.Table) -> Mask:
        with self.trace.timed(self.trace.current):
            mask = super()._hidden(keys)
        hidden = int(np.count_nonzero(mask))
        self.trace.current.hidden += hidden
        self.trace.current.found += hidden
        return mask

    def _in_order(self, parts: Sequence[pa.Table], order: Order, limit: int | None) -> pa.Table:
        rows = concatenate(parts, parts[-1].schema)
        chosen = first_rows(rows, order, limit)
        of_part = np.repeat(np.arange(len(parts)), [part.num_rows for part in parts])
        counts = np.bincount(of_part[chosen.to_numpy()], minlength=len(parts)).tolist()
        for search in self.trace.taken:
            search.returned = 0
        for search, count in zip(self.trace.taken, counts, strict=True):
            search.returned += count
        return rows.take(chosen)

    # ---- rankings ------------------------------------------------------------------------------------------------

    def best(self, k: int, filter: str | None, columns: list[str], *rankings: Ranking) -> list[list[Visible]]:
        """As `MergedView.best`, one level after another."""
        for ranking in rankings:
            if ranking.exact is not None:
                search = self.trace.base.by(_BY[ranking.score])
                search.told[WAYS[ranking.exact]], search.why_exact = None, True
        return super().best(k, filter, columns, *rankings)

    def _beside(self, search: Callable[[], Visible]) -> Beside[Visible]:
        return Beside(search, alone=True)

    def _ranked(self, level: Snapshot, k: int, mask: Mask, columns: list[str], ranking: Ranking) -> Candidates:
        search = self._level(level).by(_BY[ranking.score])
        with self.trace.timed(search):
            candidates = super()._ranked(level, k, mask, columns, ranking)
        search.fetches, search.found = 1, len(candidates.scores)
        search.looked_at, way = ranking.way(level, k, mask)
        search.told = {WAYS[way]: None}
        kind = {"quantiser": "ivf_pq", "text": "fts"}.get(way)
        used = (spec.name for spec in self.specs if spec.kind == kind and spec.column in ranking.columns)
        search.indexes = dict.fromkeys(used)
        return self._counted(search, candidates)

    def _best_of_base(
        self,
        k: int,
        columns: list[str],
        ranked: Callable[[BaseReads, int, Sequence[str]], pa.Table],
        score: str | None,
        spare: int = 1,
    ) -> Visible:
        search = self.trace.base.by("order" if score is None else _BY[score])

        def measured(base: BaseReads, n: int, names: Sequence[str]) -> pa.Table:
            with self.trace.timed(search):
                rows = ranked(base, n, names)
            search.fetches += 1
            search.found = search.hidden = 0  # counts of an earlier fetch
            fetched.append(rows.num_rows)
            return rows

        fetched: list[int] = []
        visible = super()._best_of_base(k, columns, measured, score, spare)
        search.found = fetched[-1]
        return replace(visible, candidates=self._counted(search, visible.candidates))

    # ---- inside --------------------------------------------------------------------------------------------------

    def _level(self, level: Snapshot) -> LevelTrace:
        return self.trace.levels[id(level)]

    def _scalar_index(self, column: str) -> str:
        names = (spec.name for spec in self.specs if spec.kind == "btree" and spec.column == column)
        return next(names, "key")

    def _counted(self, search: SearchTrace, candidates: Candidates) -> Candidates:
        """Count the rows that are taken from `candidates`: those that are among the best of all levels."""

        def take(at: Positions) -> pa.Table:
            with self.trace.timed(search):
                rows = candidates.take(at)
            search.returned += len(at)
            self.trace.taken.append(search)
            return rows

        return replace(candidates, take=take)
