"""Build the explanation of one read in this process: the moment that it reads, and how each level was searched."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import UUID

from memwal import flush
from memwal.flush import BaseTable
from memwal.ingest.engine.api.explanation import ExplainedLevel, ExplainedPart, ExplainedSearch
from memwal.ingest.engine.read.lance_scans import LanceScan, WatchedDataset
from memwal.ingest.engine.read.levels import RegionView, Stack
from memwal.ingest.engine.read.sst_cache import Load
from memwal.memtable import IndexSpec, MemTable, Snapshot
from memwal.wal import Clock, SsTable

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
        self.attempts, self._capturing, self._opening = 0, 0.0, 0.0
        self._views: Sequence[RegionView] = ()
        self._loads: dict[tuple[UUID, str], float] = {}
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
        self.attempts, self.levels, began = self.attempts + 1, {}, self.clock.monotonic()
        views = capture()
        self._views, self._capturing = views, self._capturing + self.clock.monotonic() - began
        return views

    def opened(self, open_base: Callable[[], BaseTable]) -> BaseTable:
        """Return the result of `open_base`."""
        began = self.clock.monotonic()
        base = open_base()
        self._opening += self.clock.monotonic() - began
        return base

    def loading(self, region: UUID, sst: SsTable, load: Load) -> Load:
        """Return a measured `load`, which is called if `sst` is not cached."""

        def measured(columns: frozenset[str]) -> MemTable:
            began = self.clock.monotonic()
            table = load(columns)
            self._loads[region, sst.path] = self.clock.monotonic() - began
            return table

        return measured

    def begin(self, base: BaseTable, stacks: tuple[Stack, ...]) -> BaseTable:
        """Record the levels of the read; return `base` with a dataset that reports Lance's scans to this trace."""
        self._base = base
        for view, stack in zip(self._views, stacks, strict=True):
            ssts = {sst.generation: sst for sst in view.ssts}
            for place, level in enumerate(stack.levels):
                of_memtable = place < len(view.memtables)
                about = self._memtable(view, level) if of_memtable else self._sst(view, level, ssts[level.generation])
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
        capture, opened = 1e3 * self._capturing, 1e3 * self._opening
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

    def _sst(self, view: RegionView, level: Snapshot, sst: SsTable) -> ExplainedLevel:
        loaded = self._loads.get((view.region, sst.path))
        return ExplainedLevel(
            "sst",
            level.n,
            str(view.region),
            sst.generation,
            "cached" if loaded is None else "loaded",
            sst.path,
            sst.in_memory_bytes,
            load_ms=1e3 * (loaded or 0.0),
        )

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
