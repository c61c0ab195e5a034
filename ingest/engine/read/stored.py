"""Capture the levels above the base table from storage alone: no claim, no request to an owner, no write.

The tail of the WAL is replayed into one memtable per region. Rows that an owner holds only in memory are missing.
`StoredLevels` keeps these memtables between captures. A later capture, a *look*, reads only the entries written since
the previous one. The following holds whatever writers, flushes, commits, collections, take-overs and resizes do between
two looks:

1. A look sees every row that was acknowledged as durable before it began; `wal.log_tail` proves this for a region.
2. The levels of a look equal those of a capture from scratch at that moment, or just before the last flush: the SSTs of
   a manifest, and above them the rows of exactly the entries after its `replay_after`.
3. After a flush the region is captured anew: its rows leave the memtable. A commit overtakes the view
   (`RegionView.unflushed`), and the next look finds the flush before it.
4. New regions appear only with a new routing, which the base table has before any of them accepts a row. A look at the
   regions of a routing records that routing, and a base version of another routing overtakes the view
   (`RegionView.routing`).
5. After a change of shape, for a region that has never been claimed, and after every error, the next capture is from
   scratch.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, replace
from uuid import UUID

from memwal import wal
from memwal.flush import BaseTable
from memwal.ingest.engine.api.reads import Level
from memwal.ingest.engine.read.levels import RegionView
from memwal.memtable import MemTable, row_schema
from memwal.wal.parallel_map import AT_ONCE, each

# The rows of the tail may belong to several generations, and storage does not show which: a claim that replays them may
# number them differently. The tail therefore counts as newer than any committed generation and is never skipped;
# skipping could lose the rows of a later generation. If the first unflushed generation of a view was committed in the
# meantime, the view is captured again (`RegionView.unflushed`); otherwise a batch that is partly in the base table
# would be shown in part.
TAIL_GENERATION = 2**63 - 1

_CAPTURES = 5
"""Attempts to read a tail before it is collected; entries stay for minutes, so a second attempt is rare."""
_READ_OPTIONS = wal.WalOptions(readers=8)


@dataclass(frozen=True)
class _Known:
    """The state that the next look continues from: the tails of all regions, replayed for the shape and routing of
    `base`.

    `views`: of the last look, shared with readers that waited for it.
    """

    base: BaseTable
    tails: dict[UUID, _Tail]
    views: list[RegionView]

    def goes_on(self, base: BaseTable) -> bool:
        """Return whether `base` would replay the same rows per region as the own base version did."""
        same = base.shape == self.base.shape and base.routing_version == self.base.routing_version
        return same and all(region in self.tails for region in base.regions)


class StoredLevels:
    """The levels above the base table, read repeatedly from storage.

    Thread safety. Any thread; looks run one at a time, and readers that wait for the same look share it.
    Invariants. See the module docstring. Writes nothing and claims nothing.
    Memory. The rows of the tails, until the next look after their flush, or `forget`.
    """

    def __init__(self, store: wal.ObjectStore) -> None:
        self._store, self._at_once = store, AT_ONCE if store.remote else 1
        self._turn, self._begun = threading.Lock(), 0
        self._known: _Known | None = None

    def views(self, base: BaseTable, level: Level) -> list[RegionView]:
        """Capture the levels above the base table for reads of `level`; the caller opens the base table only
        afterwards.

        `base`: any version; its schema, key and indexes are used. `latest` equals `durable` here: the newest rows on
        storage. Safe while writers run. Raises: wal errors, including Corrupt with the object's name.
        """
        if level == "committed":
            return []
        if level == "flushed":
            found = each(self._flushed, wal.regions(self._store), self._at_once)
            return [view for view in found if view is not None]
        arrived = self._begun
        with self._turn:
            known, self._known = self._known, None  # after an error the next capture is from scratch
            shared = self._begun > arrived  # a look by another thread that began after this call
            if known is None or not known.goes_on(base):
                self._begun += 1
                known = self._captured(base)
            elif not shared:
                self._begun += 1
                known = self._looked(known)
            self._known = known
            return known.views

    def forget(self) -> None:
        """Release the memory."""
        with self._turn:
            self._known = None

    # ---- inside --------------------------------------------------------------------------------------------------

    def _flushed(self, region: UUID) -> RegionView | None:
        manifest = wal.ManifestStore(self._store, region).latest()
        return None if manifest is None else RegionView(region, (), manifest.ssts)

    def _captured(self, base: BaseTable) -> _Known:
        """Capture every region on storage from scratch."""
        tails = {region: _Tail(base, self._store, region) for region in wal.regions(self._store)}
        views = list(each(_Tail.begin, tails.values(), self._at_once))
        claimed = {region: tail for region, tail in tails.items() if tail.view is not None}
        return _Known(base, claimed, [view for view in views if view is not None])

    def _looked(self, known: _Known) -> _Known:
        """Look again at the regions of the known routing. A resize drained all other regions."""
        routed = [known.tails[region] for region in known.base.regions]
        list(each(_Tail.look, routed, self._at_once))
        views, routing = (tail.view for tail in known.tails.values()), known.base.routing_version
        return replace(known, views=[replace(view, routing=routing) for view in views if view is not None])


class _Tail:
    """The unflushed rows of one region in a memtable, and its view. One thread at a time."""

    def __init__(self, base: BaseTable, store: wal.ObjectStore, region: UUID) -> None:
        self._base, self._region = base, region
        self._log = wal.LogTail(store, region, base.codec, options=_READ_OPTIONS)
        self._memtable = self._empty()
        self.view: RegionView | None = None
        """None if the region was never claimed."""

    def begin(self) -> RegionView | None:
        """Replay the tail from scratch. Raises: wal errors."""
        for _ in range(_CAPTURES - 1):
            try:
                return self._begun()
            except wal.Overtaken:
                continue  # flushed and collected between the two reads: the next manifest has these rows in an SST
        return self._begun()

    def look(self) -> RegionView | None:
        """Replay the entries written since the previous look. Raises: wal errors."""
        try:
            return self._replayed(self._log.look())
        except wal.Overtaken:
            return self.begin()

    def _begun(self) -> RegionView | None:
        entries, self._memtable = self._log.begin(self._log.manifest), self._empty()
        return self._replayed(entries)

    def _replayed(self, entries: Iterable[wal.Entry]) -> RegionView | None:
        manifest, table = self._log.manifest, self._memtable
        if manifest is None:
            return None
        for entry in entries:
            if entry.rows.num_rows:
                table.restore(entry.rows)
        memtables = (table.snapshot(),) if table.rows else ()
        first, last = manifest.replay_after + 1, self._log.position
        self.view = RegionView(
            self._region,
            memtables,
            manifest.ssts,
            manifest.current_generation,
            (self._base.shape,),
            tail=(first, last) if first <= last else None,
        )
        return self.view

    def _empty(self) -> MemTable:
        rows = row_schema(self._base.schema, self._base.key)
        return MemTable(rows, self._base.key, self._base.indexes, TAIL_GENERATION)
