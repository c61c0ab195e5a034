"""Build the explanation of one read in this process: the moment that it reads, and how each level was searched.

`Reader` creates a `TracedView` in place of a `MergedView` if the caller requested an explanation. It performs the same
steps and measures them. Without an explanation nothing in this module runs, and no step tests for one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from memwal import flush
from memwal.ingest.engine.api.explanation import ExplainedLevel, ExplainedPart, ExplainedSearch
from memwal.ingest.engine.api.fusion import DISTANCE, SCORE
from memwal.ingest.engine.api.ordering import Order, Places, first_rows
from memwal.ingest.engine.read.base import BaseReads
from memwal.ingest.engine.read.lance_scans import LanceScan, WatchedDataset
from memwal.ingest.engine.read.levels import Mask, RegionView, Stack
from memwal.ingest.engine.read.merged import Fetch, MergedView, Ranking
from memwal.ingest.engine.read.top_k import Candidates, Visible, concatenate
from memwal.ingest.threads import SideTask
from memwal.memtable import TOMBSTONE, IndexSpec, Snapshot
from memwal.memtable.vector.index import Way
from memwal.wal import Clock

_KIND_FOR = {"vector": "ivf_pq", "text": "fts"}
_KINDS = {"btree": "B-tree", "ivf_pq": "IVF-PQ", "fts": "text index"}
_WITHOUT_INDEX = {
    "key": "the key column of every row read: no B-tree on it",
    "rows": "every row read",
    "filter": "every row evaluated: no index serves the filter",
    "order": "every row sorted",
    "vector": "every row compared: the index is not built yet",
    "text": "every row read and indexed in memory: no index serves the query",
}
_BESIDE_INDEX = _WITHOUT_INDEX | {
    "vector": "every row compared: the index named too few",
    "text": "rows without it read and indexed in memory",
}
"""Texts for a scan without an index, if other scans of the same search used one."""


@dataclass
class SearchTrace:
    """How one level was searched so far. Fields as `ExplainedSearch`.

    `why_exact`: whether `told` explains why no index is used. `timed`: whether its time is being measured.
    """

    by: str
    told: dict[str, None] = field(default_factory=dict)
    indexes: dict[str, None] = field(default_factory=dict)
    looked_at: int | None = 0
    unindexed: int = 0
    found: int = 0
    hidden: int = 0
    deleted: int = 0
    returned: int = 0
    fetches: int = 0
    seconds: float = 0.0
    timed: bool = False
    scans: list[LanceScan] = field(default_factory=list)
    why_exact: bool = False

    def explained(self) -> ExplainedSearch:
        """Return its present state."""
        counts = {name: getattr(self, name) for name in ("unindexed", "found", "hidden", "deleted", "returned")}
        return ExplainedSearch(
            self.by,
            "; ".join(self.told),
            tuple(self.indexes),
            looked_at=self.looked_at,
            fetches=self.fetches,
            ms=1e3 * self.seconds,
            requests=sum(scan.requests for scan in self.scans),
            bytes_read=sum(scan.bytes_read for scan in self.scans),
            lance=tuple(scan.plan for scan in self.scans),
            **counts,
        )


class LevelTrace:
    """One level and its searches, by the kind of search.

    `before`, `hidden`: seconds and hidden rows that the next search adds to its own.
    """

    def __init__(self, about: ExplainedLevel) -> None:
        self.about, self.searches = about, dict[str, SearchTrace]()
        self.before, self.hidden = 0.0, 0

    def by(self, what: str) -> SearchTrace:
        """Return the search of kind `what`, the same object each time."""
        search = self.searches.setdefault(what, SearchTrace(what))
        search.seconds, self.before = search.seconds + self.before, 0.0
        search.hidden, self.hidden = search.hidden + self.hidden, 0
        return search

    def explained(self) -> ExplainedLevel:
        """Return the level with the present state of its searches."""
        return replace(self.about, searches=tuple(search.explained() for search in self.searches.values()))


class Trace:
    """Measure one read.

    Thread safety. One thread at a time.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.attempts, self._views = 0, list[RegionView]()
        self._seconds: dict[Hashable, float] = {}
        self.levels: dict[int, LevelTrace] = {}
        self.current = SearchTrace("")
        """The search in progress."""
        self.taken: list[SearchTrace] = []
        """The searches of the parts that an ordered scan merges."""

    @contextmanager
    def timed(self, search: SearchTrace) -> Iterator[SearchTrace]:
        """Add the time inside to `search`, without counting nested calls twice, and make it the current search."""
        outer, search.timed = search.timed, True
        self.current, began = search, self.clock.monotonic()
        try:
            yield search
        finally:
            search.timed = outer
            if not outer:
                search.seconds += self.clock.monotonic() - began

    # ---- the moment ----------------------------------------------------------------------------------------------

    def captured(self, capture: Callable[[], list[RegionView]]) -> list[RegionView]:
        """Return the result of `capture`; begins an attempt."""
        self.attempts, self.levels = self.attempts + 1, {}
        self._views = self.measured("capture", capture)
        return self._views

    def measured(self, what: Hashable, call: Callable[[], T]) -> T:
        """Return the result of `call`; add its time to that of `what`: "capture", "open", or the path of an SST."""
        began = self.clock.monotonic()
        result = call()
        self._seconds[what] = self._seconds.get(what, 0.0) + self.clock.monotonic() - began
        return result

    def begin(self, base: flush.BaseTable, stacks: tuple[Stack, ...]) -> flush.BaseTable:
        """Record the levels of the read; return `base` with a dataset that reports Lance's scans to this trace."""
        self._base = base
        for view, stack in zip(self._views, stacks, strict=True):
            for place, level in enumerate(stack.levels):
                about = self._memtable(view, level) if place < len(view.memtables) else self._sst(view, level)
                self.levels[id(level)] = LevelTrace(about)
        fragments = base.dataset.get_fragments()
        sizes = [file.file_size_bytes or 0 for each in fragments for file in each.metadata.files]
        self.base = LevelTrace(
            ExplainedLevel("base", base.dataset.count_rows(), bytes=sum(sizes), fragments=len(fragments))
        )
        watched: Any = WatchedDataset(base.dataset, self._scanned)
        return replace(base, dataset=watched)

    def part(self, ms: float) -> ExplainedPart:
        """Return the explanation of this process's answer. `ms`: of the whole read."""
        waiting = {index["name"]: index["rows_waiting"] for index in flush.list_indexes(self._base)}
        for search in self.base.searches.values():
            _summarise(search, self.base.about.rows, self._base.indexes, waiting)
        levels = tuple(level.explained() for level in (*self.levels.values(), self.base))
        inside = sum(level.load_ms + sum(search.ms for search in level.searches) for level in levels)
        capture, opened = (1e3 * self._seconds.get(what, 0.0) for what in ("capture", "open"))
        return ExplainedPart(
            self._base.uri,
            self._base.version,
            tuple(str(view.region) for view in self._views),
            levels,
            attempts=self.attempts,
            capture_ms=capture,
            open_ms=opened,
            merge_ms=max(0.0, ms - capture - opened - inside),
            ms=ms,
        )

    def _memtable(self, view: RegionView, level: Snapshot) -> ExplainedLevel:
        region = str(view.region)
        if view.tail is not None:
            return ExplainedLevel("wal", level.n, region, positions=view.tail)
        state = "active" if level.generation == view.active else "frozen"
        return ExplainedLevel("memtable", level.n, region, level.generation, state)

    def _sst(self, view: RegionView, level: Snapshot) -> ExplainedLevel:
        sst = next(sst for sst in view.ssts if sst.generation == level.generation)
        loaded, region, path = self._seconds.get((view.region, sst.path)), str(view.region), sst.path
        about = ExplainedLevel("sst", level.n, region, sst.generation, "cached", path, sst.in_memory_bytes)
        return about if loaded is None else replace(about, state="loaded", load_ms=1e3 * loaded)

    def _scanned(self, scan: LanceScan) -> None:
        """Record a base scan for the current search."""
        self.current.scans.append(scan)


def _summarise(search: SearchTrace, rows: int, specs: Sequence[IndexSpec], waiting: Mapping[str, int]) -> None:
    """Describe in words how Lance searched the base table.

    `rows`: of the base table. `waiting`: by index, the rows that it does not cover yet.
    """
    used = [spec for scan in search.scans for spec in scan.indexes(specs)]
    search.indexes = dict.fromkeys(spec.name for spec in used)
    search.unindexed = max((waiting[name] for name in search.indexes), default=0)
    search.told |= {f"{_KINDS[spec.kind]} {spec.name}": None for spec in used}
    if search.unindexed:
        search.told[f"{search.unindexed:,} rows without it read one by one"] = None
    kind = _KIND_FOR.get(search.by)
    served = [any(kind in (None, spec.kind) for spec in scan.indexes(specs)) for scan in search.scans]
    if not search.scans:
        search.told["counted from metadata"] = None
    elif not any(served) and not search.why_exact:
        search.told[_WITHOUT_INDEX[search.by]] = None
    elif any(served) and not all(served):
        search.told[_BESIDE_INDEX[search.by]] = None
    search.looked_at = sum(scan.rows_scanned for scan in search.scans)
    if any(not scan.counted for scan in search.scans):  # a count, or a scan that was not read to its end
        search.looked_at = None if used else rows
    elif search.by == "vector" and any(served):
        search.looked_at += search.unindexed


T = TypeVar("T")
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

    def _base_rows_of(self, keys: pa.Table, columns: list[str]) -> tuple[pa.Table, Places]:
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
        names = {spec.column: spec.name for spec in self.specs if spec.kind == "btree"}
        search.indexes |= dict.fromkeys(names.get(column, "key") for column in columns)
        search.told[f"index of {', '.join(columns)}" if columns else "every row evaluated"] = None
        return mask

    def _rows_passing(self, stack: Stack, place: int, filter: str | None) -> Places:
        rows = super()._rows_passing(stack, place, filter)
        if filter is None:
            with self.trace.timed(self._level(stack.levels[place]).by("rows")) as search:
                search.told["every row"] = None
                search.found = search.looked_at = len(rows)
        return rows

    def _taken(self, level: Snapshot, positions: Places, columns: list[str]) -> pa.Table:
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

    def _beside(self, search: Callable[[], Visible]) -> SideTask[Visible]:
        return SideTask(search, alone=True)

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

    def _best_of_base(self, k: int, columns: list[str], ranked: Fetch, score: str | None, spare: int = 1) -> Visible:
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

    def _counted(self, search: SearchTrace, candidates: Candidates) -> Candidates:
        """Count the rows that are taken from `candidates`: those that are among the best of all levels."""

        def take(at: Places) -> pa.Table:
            with self.trace.timed(search):
                rows = candidates.take(at)
            search.returned += len(at)
            self.trace.taken.append(search)
            return rows

        return replace(candidates, take=take)
