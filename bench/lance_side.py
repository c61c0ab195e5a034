"""Lance's side: `ShardWriter` and the LSM readers of pylance, on a table with one shard.

A durable put of ShardWriter does not fsync: a system-call trace of pylance 14.0.2 on local files shows rename and link,
but no fsync and no fdatasync. memwal syncs the entry and its directory before it acknowledges. The comparison does not
correct for that: each side does what it promises, and the floor in the same chart shows the cost of the sync.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import lance
import pyarrow as pa
from lance.mem_wal import LsmPointLookupPlanner, LsmScanner, LsmVectorSearchPlanner, ShardSnapshot, ShardWriter

Planner = TypeVar("Planner")

SHARD = "4a388480-a25b-59a8-b058-24217f980256"
"""The id that LanceDB gives to bucket 0."""
PRIMARY_KEY = {b"lance-schema:unenforced-primary-key": b"true"}
_KINDS: Mapping[str, Any] = {"btree": "BTREE", "fts": "INVERTED"}

DEFAULT: Mapping[str, Any] = {}
DURABLE_BEST: Mapping[str, Any] = {"max_wal_buffer_size": 1}
"""A buffer of one byte is always full, so a put does not wait for the timer. Measured against timers of 1, 2, 5 and 100
ms: as fast as the best (1 ms) with one caller, 1.2 to 1.6 times as fast with 32.
"""
FAST: Mapping[str, Any] = {"durable_write": False}
FAST_BEST: Mapping[str, Any] = {**FAST, "max_wal_flush_interval_ms": 1000, "max_wal_buffer_size": 1 << 30}
"""The fewest possible WAL writes. Measured: equal to the default within the noise."""


class LanceShard:
    """A Lance table with one shard and its writer.

    Thread safety. `put` from any thread (ShardWriter serialises puts); everything else from one thread.
    """

    def __init__(
        self,
        at: Path,
        base: pa.Table,
        key: str | Sequence[str],
        indexes: Mapping[str, Mapping[str, Any]],
        writer: Mapping[str, Any],
    ) -> None:
        """Create the table with the rows of `base` and `indexes`, and claim its shard.

        `writer`: settings of ShardWriter.
        """
        self._settings = dict(writer)
        names = [key] if isinstance(key, str) else list(key)
        fields = [each.with_metadata(PRIMARY_KEY) if each.name in names else each for each in base.schema]
        self._schema = pa.schema(fields)
        self.dataset = lance.write_dataset(base.cast(self._schema), str(at / "table.lance"))
        for column, index in indexes.items():
            self._create_index(column, dict(index))
        one = {"bucket_column": names[0], "num_buckets": 1} if len(names) == 1 else {"unsharded": True}
        self.dataset.initialize_mem_wal(**one)
        self._path = at / "table.lance" / "_mem_wal" / SHARD
        self._planners: dict[str, Any] = {}
        self.writer: ShardWriter = self._claim()

    def put(self, rows: pa.Table) -> None:
        """Put rows; returns when ShardWriter has acknowledged them."""
        self.writer.put(rows)

    def rows(self) -> pa.Table:
        """Return all rows of the base table, SSTs and memtable."""
        return self.scanner().to_table()

    def scanner(self) -> LsmScanner:
        """Return a scanner that sees the memtable, like memwal's level `latest`."""
        return self.writer.lsm_scanner()

    def flush(self) -> None:
        """Flush the memtable to an SST by closing ShardWriter, which has no flush call, and claim the shard again."""
        self.writer.close()
        self.writer = self._claim()
        self._planners.clear()

    def lookups(self) -> LsmPointLookupPlanner:
        """Return a planner of point lookups in base and SSTs, like memwal's level `flushed`.

        It is rebuilt only after a flush.
        """
        return self._planner("lookup", lambda: LsmPointLookupPlanner(self.dataset, [self._snapshot()]))

    def searches(self, column: str) -> LsmVectorSearchPlanner:
        """Return a planner of vector searches in base and SSTs; rebuilt only after a flush."""
        return self._planner(column, lambda: LsmVectorSearchPlanner(self.dataset, [self._snapshot()], column))

    def _planner(self, name: str, make: Callable[[], Planner]) -> Planner:
        if name not in self._planners:
            self._planners[name] = make()
        planner: Planner = self._planners[name]
        return planner

    def _snapshot(self) -> ShardSnapshot:
        """Return the shard's SSTs in the form that the planners take."""
        names = sorted(each.name for each in self._path.iterdir() if "_gen_" in each.name)
        found = ShardSnapshot(SHARD).with_spec_id(1).with_current_generation(len(names) + 1)
        for name in names:
            found = found.with_sstable(int(name.rpartition("_")[2]), name)
        return found

    def close(self) -> None:
        """Release the shard; ShardWriter flushes its memtable."""
        self.writer.close()

    def _claim(self) -> ShardWriter:
        return self.dataset.mem_wal_writer(SHARD, **self._settings)

    def _create_index(self, column: str, index: dict[str, Any]) -> None:
        kind = index.pop("type")
        if kind == "ivf_pq":
            index.pop("train_rows", None)  # only memwal has it: Lance trains on the rows of the base
            self.dataset.create_index(column, "IVF_PQ", name=f"{column}_idx", metric="l2", **index)
        else:
            self.dataset.create_scalar_index(column, _KINDS[kind], name=f"{column}_idx", **index)
