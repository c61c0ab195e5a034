"""Cache SSTs as memtable snapshots: memtables flushed by this process, and SSTs loaded at their first read.

An SST never changes and its directory name is never reused, so a loaded SST stays valid. Readers drop committed SSTs
(`drop`); a limit of bytes bounds the others. Loading costs as much as putting the rows again: for 16,000 packages with
vectors of 384 dimensions the rows by key take 24 ms and 29 MB, with the vectors to search 49 ms and 53 MB, with the
text index 190 ms. An SST is therefore loaded only with the indexes that a read needs; the first read that needs another
index loads it again, with that index added.

A memtable that this process flushed enters the cache with all its indexes (`keep`), so a flush adds no cost to later
reads. When the SST had to be loaded, the first search of 5,000 rows took 25 ms, and all others waited for it.

No thread indexes the loaded rows: an SST may be read only once, and its rows are in the base table within seconds. Each
read that needs an index moves one block of rows into it, and reads the other rows one by one.
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

from memwal.flush import BaseTable, read_sst
from memwal.memtable import MemTable, Snapshot, row_schema
from memwal.wal import ObjectStore, SsTable

CACHE_BYTES = 1 << 30
Columns = frozenset[str]
Load = Callable[[Columns], MemTable]
"""Loads an SST with indexes on these columns."""


class SstId(NamedTuple):
    """Identity of an SST loaded in one shape of the table.

    The path alone identifies the SST only by its random token; with the region the identity is certain.
    """

    shape: int
    """The first base version of that shape that was read."""
    region: UUID
    path: str
    generation: int


@dataclass(frozen=True, slots=True)
class _Kept:
    """One SST, loaded or being loaded, with indexes on `columns`."""

    columns: Columns
    loaded: Future[tuple[MemTable, Snapshot]] = field(default_factory=Future)

    @property
    def bytes(self) -> int:
        """Size of the loaded SST; 0 until it is loaded."""
        succeeded = self.loaded.done() and self.loaded.exception() is None
        return self.loaded.result()[0].bytes if succeeded else 0


class SstCache:
    """Snapshots by SST. Above `limit` bytes the least recently used are dropped, but not the newest.

    Thread safety. Any thread. Threads that need one SST with the same indexes load it once; other threads do not wait.
    Invariants. (1) An SST is kept once, with every index needed since it was first loaded. (2) `bytes` is the sum over
    the kept SSTs. (3) A failed load is forgotten, so the next read tries again.
    """

    def __init__(self, limit: int = CACHE_BYTES) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._kept: OrderedDict[Hashable, _Kept] = OrderedDict()

    def get(self, sst: Hashable, columns: Columns, load: Load) -> Snapshot:
        """Return the snapshot of `sst` (an `SstId`) with indexes on at least `columns`.

        `load` is called with the columns to index if the cache lacks them. Raises: the errors of `load`.
        """
        with self._lock:
            kept = self._kept.get(sst)
            must_load = kept is None or not columns <= kept.columns
            if kept is None or must_load:
                kept = self._kept[sst] = _Kept(columns if kept is None else kept.columns | columns)
            self._kept.move_to_end(sst)
        if must_load:
            try:
                table = load(kept.columns)
                kept.loaded.set_result((table, table.snapshot()))
            except BaseException as error:  # noqa: BLE001 - waiting threads must get any error
                with self._lock:
                    # A load with more indexes may have replaced it.
                    if self._kept.get(sst) is kept:
                        del self._kept[sst]
                kept.loaded.set_exception(error)
            self._evict(self._limit)
        table, snapshot = kept.loaded.result()
        if columns:
            with suppress(Exception):  # for example MemoryError: this read and the next ones then read each row
                table.index_step()
        return snapshot

    def keep(self, sst: Hashable, columns: Columns, table: MemTable) -> None:
        """Add the memtable flushed as `sst`, with indexes on `columns`, unless a read has loaded the SST already."""
        kept = _Kept(columns)
        kept.loaded.set_result((table, table.snapshot()))
        with self._lock:
            self._kept.setdefault(sst, kept)
        self._evict(self._limit)

    def drop(self, dead: Callable[[SstId], bool]) -> None:
        """Drop every SST if `dead` returns true for it; reads in progress keep their snapshots."""
        with self._lock:
            for sst in [sst for sst in self._kept if isinstance(sst, SstId) and dead(sst)]:
                del self._kept[sst]

    def shrink(self, most: int) -> int:
        """Drop the least recently used SSTs until at most `most` bytes remain; return the remaining bytes."""
        self._evict(most, 0)
        return self.bytes

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def bytes(self) -> int:
        """Bytes of the rows and indexes of all loaded SSTs."""
        return sum(kept.bytes for kept in list(self._kept.values()))

    def _evict(self, limit: int, least: int = 1) -> None:
        with self._lock:
            while len(self._kept) > least and self.bytes > limit:
                oldest = next((sst for sst, kept in self._kept.items() if kept.loaded.done()), None)
                if oldest is None:
                    return
                del self._kept[oldest]


def load_sst(base: BaseTable, store: ObjectStore, region: UUID, sst: SsTable, columns: Container[str]) -> MemTable:
    """Load `sst` as a frozen memtable, with the vector and text indexes on `columns` only.

    All B-trees are included: they cost nothing until a filter uses them. `base`: any version; its schema, key and
    indexes are used. Raises: the errors of flush.read_sst.
    """
    specs = [spec for spec in base.indexes if spec.kind == "btree" or spec.column in columns]
    rows = row_schema(base.schema, base.key)
    table = MemTable(rows, base.key, specs, sst.generation)
    table.restore(read_sst(store, region, sst, base.shape.rows).cast(rows))
    table.freeze()
    return table
