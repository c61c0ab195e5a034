"""Move applied rows into the key, vector and text indexes of one region's memtables.

Reads examine each row that is not indexed yet, or index its key first, so indexing changes the cost of an answer but
never the answer. Therefore:

1. `memtable.index_mode` decides when rows are indexed. With "sync" the region's thread indexes before it acknowledges a
   write; with "async", or if only keys are indexed, another thread indexes whenever rows wait. Replayed rows are
   indexed after the whole replay, not entry by entry.
2. The newest memtable goes first. A flushed memtable goes last, while readers still keep it in place of its SST.
3. A failed step (also one that ran out of memory) ends nothing: the reason is logged once, and exact reads cover the
   rows of that memtable. The next generation is tried again.
"""

from __future__ import annotations

from collections import deque
from uuid import UUID
from weakref import ReferenceType, ref

from memwal.ingest.engine.region.state import RegionLevels
from memwal.ingest.log_limit import Log
from memwal.memtable import MemTable
from memwal.wal import named
from memwal.wal.panics import as_exception


class RegionIndexes:
    """Call `MemTable.index_step` for a region, and count the rows that wait for it.

    Thread safety. `step` from one thread at a time; `waiting` from any.
    """

    def __init__(self, region: UUID, levels: RegionLevels, log: Log) -> None:
        self._region, self._levels, self._log = region, levels, log
        self._done: dict[int, tuple[int, bool]] = {}
        """By generation: number of indexed rows, and whether the memtable was frozen at that time."""
        self._failed: set[int] = set()
        self._flushed: deque[ReferenceType[MemTable]] = deque()

    def go_on(self, table: MemTable) -> None:
        """Index the remaining rows of a flushed memtable while a reader keeps it. Any thread."""
        self._flushed.append(ref(table))

    def step(self) -> bool:
        """Index one block of waiting rows, newest memtable first; return False if no indexable row waits."""
        for table in self._levels.memtables():
            generation, state = table.generation, (table.rows, table.frozen)
            if state == self._done.get(generation, (0, False)) or generation in self._failed:
                continue
            if not self._more(table) and generation not in self._failed:
                self._done[generation] = state
                oldest = min(memtable.generation for memtable in self._levels.memtables())
                self._done = {number: state for number, state in self._done.items() if number >= oldest}
                self._failed = {number for number in self._failed if number >= oldest}
            self._levels.measure()
            return True
        while self._flushed:
            flushed = self._flushed[0]()
            if flushed is not None and self._more(flushed):
                return True
            self._flushed.popleft()
        return False

    def waiting(self) -> int:
        """Return the number of rows not indexed yet, including those of a memtable whose indexing failed."""
        done = ((table, self._done.get(table.generation, (0, False))[0]) for table in self._levels.memtables())
        return sum(max(0, table.rows - rows) for table, rows in done)

    def _more(self, table: MemTable) -> bool:
        """Index one block of a memtable; return whether more rows wait and the step succeeded."""
        try:
            return table.index_step()
        except BaseException as error:  # noqa: BLE001 - reads find the rows without the index
            self._failed.add(table.generation)
            reason = as_exception(error)
            text = "%s: generation %d is not indexed any further, searches look at each of its rows: %s: %s"
            self._log.warning(text, named(self._region), table.generation, type(reason).__name__, reason)
            return False
