"""SSTs as snapshots: loaded when first read, with the indexes that reads ask for, kept while there is room.

An SST never changes and its directory name is never used again, so what was loaded stays right for ever. Who reads says
which SSTs are committed (`drop`); the rest is bounded by memory. Loading costs as much as putting the rows again. Of
16,000 packages with vectors of 384 dimensions the rows by key take 24 ms and 29 MB; with the vectors to search it is
49 ms and 53 MB, with the text index 190 ms. So an SST is loaded with no index but those asked for, and anew, with one
more, by the first read that asks for that one.

No thread indexes what was loaded: it may be asked once, and its rows are in the base table within seconds. Each read
that asks for an index moves one block of rows into it, and looks at each of the others.

An SST made into a memtable: its rows by key, and the indexes that a read asks for.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Container, Hashable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple
from uuid import UUID

from memwal import flush
from memwal.flush import BaseTable
from memwal.memtable import MemTable, Snapshot, row_schema
from memwal.wal import ObjectStore, SsTable

CACHE_BYTES = 512 << 20
Columns = frozenset[str]


class SstId(NamedTuple):
    """Which SST, loaded in which shape of the table. The path alone tells the SST only by its random token; the region
    makes it certain.
    """

    shape: int
    """The first base version of that shape that was met."""
    region: UUID
    path: str
    generation: int


@dataclass(frozen=True, slots=True)
class _Loaded:
    table: MemTable
    snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class _Kept:
    """One SST, perhaps still being loaded, with indexes on `columns`."""

    columns: Columns
    loaded: Future[_Loaded] = field(default_factory=Future)

    @property
    def bytes(self) -> int:
        """0 until it is loaded."""
        there = self.loaded.done() and self.loaded.exception() is None
        return self.loaded.result().table.bytes if there else 0


class SstCache:
    """Snapshots by SST, least recently used ones dropped beyond `limit` bytes (the newest always stays).

    Thread safety. Any thread; those that ask for one SST with the same indexes load it once, others are not held up.
    Invariants. (1) An SST is kept once, with every index asked for since it came. (2) `bytes` is the sum over what is
    kept. (3) A load that failed is forgotten, so the next one tries again.
    """

    def __init__(self, limit: int = CACHE_BYTES) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._kept: OrderedDict[Hashable, _Kept] = OrderedDict()

    def get(self, sst: Hashable, columns: Columns, load: Callable[[Columns], MemTable]) -> Snapshot:
        """The snapshot of `sst` (an `SstId`) with indexes on at least `columns`.

        `load` is called when it is not there, with the columns to index. Raises: what `load` raises.
        """
        with self._lock:
            kept = self._kept.get(sst)
            mine = kept is None or not columns <= kept.columns
            if kept is None or mine:
                kept = self._kept[sst] = _Kept(columns if kept is None else kept.columns | columns)
            self._kept.move_to_end(sst)
        if mine:
            self._fill(sst, kept, load)
        found = kept.loaded.result()
        if columns:
            with suppress(Exception):  # of memory, say: then this read and the next look at each row
                found.table.index_step()
        return found.snapshot

    def drop(self, dead: Callable[[SstId], bool]) -> None:
        """Forget every SST of which `dead` holds; whoever reads one now keeps its snapshot until it is done."""
        with self._lock:
            for sst in [sst for sst in self._kept if isinstance(sst, SstId) and dead(sst)]:
                del self._kept[sst]

    def __len__(self) -> int:
        with self._lock:
            return len(self._kept)

    @property
    def bytes(self) -> int:
        """Bytes of rows and indexes of everything loaded."""
        with self._lock:
            return self._bytes()

    def _fill(self, sst: Hashable, kept: _Kept, load: Callable[[Columns], MemTable]) -> None:
        try:
            table = load(kept.columns)
            kept.loaded.set_result(_Loaded(table, table.snapshot()))
        except BaseException as error:  # noqa: BLE001 - those who wait must hear of it, whatever it is
            with self._lock:
                # A load with more indexes may have taken its place meanwhile.
                if self._kept.get(sst) is kept:
                    del self._kept[sst]
            kept.loaded.set_exception(error)
            return
        self._evict()

    def _evict(self) -> None:
        with self._lock:
            while len(self._kept) > 1 and self._bytes() > self._limit:
                oldest = next((sst for sst, kept in self._kept.items() if kept.loaded.done()), None)
                if oldest is None:
                    return
                del self._kept[oldest]

    def _bytes(self) -> int:
        return sum(kept.bytes for kept in self._kept.values())


def load_sst(base: BaseTable, store: ObjectStore, region: UUID, sst: SsTable, columns: Container[str]) -> MemTable:
    """The rows of `sst` as a frozen memtable; of its vector and text indexes only those on `columns`.

    B-trees are always there: they cost nothing before a filter uses them. `base`: any version; its schema, key and
    indexes are used. Raises: what flush.read_sst raises.
    """
    specs = [spec for spec in base.indexes if spec.kind == "btree" or spec.column in columns]
    rows = row_schema(base.schema, base.key)
    table = MemTable(rows, base.key, specs, sst.generation)
    table.apply(flush.read_sst(store, region, sst, base.shape.rows).cast(rows))
    table.freeze()
    return table
