"""Opening a region again: the time until the log of a previous writer is read back and can be queried.

The log is written once. A round copies it, opens the copy (timed), and reads all rows. Lance's ShardWriter refuses to
open a region with more than 100,000 rows or 8,000 batches that are not flushed, so the log is smaller.
"""

from __future__ import annotations

import shutil
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa

from bench import lance_side, memwal_side
from bench.benchmark import Benchmark, Contender, Parameter, Sample, Side, Values, Watch
from bench.digest import rows_digest
from bench.lance_side import SHARD, LanceShard
from bench.memwal_side import HOLD, MemwalTable
from bench.source_data import SEED, VECTOR_WIDTH
from memwal.memtable import row_schema
from memwal.wal import LocalStore, WalFormat, bucket_region, codec_for, find_tip, replay

KEY = "id"
ROWS = pa.schema(
    [pa.field(KEY, pa.int64(), nullable=False), pa.field("embedding", pa.list_(pa.float32(), VECTOR_WIDTH))]
)
_BYTES_PER_ROW = 4 * VECTOR_WIDTH


def vector_batches(batches: int, rows: int) -> list[pa.Table]:
    """Return `batches` tables of `rows` rows of ROWS, without duplicate keys."""
    rng = np.random.default_rng(SEED)
    ids = rng.permutation(batches * rows).reshape(batches, rows)
    return [_vectors(each, rng) for each in ids]


def _vectors(ids: Any, rng: np.random.Generator) -> pa.Table:
    values = pa.array(rng.random(len(ids) * VECTOR_WIDTH, dtype=np.float32))
    return pa.table([pa.array(ids), pa.FixedSizeListArray.from_arrays(values, VECTOR_WIDTH)], schema=ROWS)


class _Reopening(Contender):
    """Open a copy of the log that `write` left. `settings`: for writing the log and for opening it again."""

    def __init__(self, name: str, side: Side, settings: Mapping[str, Any], batches: Sequence[pa.Table]) -> None:
        super().__init__(name, side, settings)
        self.batches = batches
        self.rows = sum(batch.num_rows for batch in batches)
        self._log = Path()

    def prepare(self, at: Path) -> None:
        """Write the log."""
        self._log = at / "log"
        self.write(at)

    def round(self, at: Path, watch: Watch) -> Sample:
        """Open one copy once."""
        shutil.copytree(self._log, at, dirs_exist_ok=True)
        measures = self.measured_beside(at)
        found = self.opened(at, watch)
        megabytes = self.rows * _BYTES_PER_ROW / 1e6
        measures = {"vector MB/s": megabytes / watch.seconds, **measures}
        return Sample(np.asarray([watch.seconds]), watch.seconds, self.rows, rows_digest(found, [KEY]), measures)

    @abstractmethod
    def write(self, at: Path) -> None:
        """Write a log of all batches in the directory `at`/log."""

    @abstractmethod
    def opened(self, at: Path, watch: Watch) -> pa.Table:
        """Open the table in `at`, timed, and return all its rows."""

    def measured_beside(self, at: Path) -> dict[str, float]:  # noqa: ARG002 - of whoever has any
        """Return further figures, measured on the table in `at` before it is opened."""
        return {}


class _Memwal(_Reopening):
    def __init__(self, wal_format: WalFormat, batches: Sequence[pa.Table]) -> None:
        self._settings = {**HOLD, "wal": {"format": wal_format}}
        resolved = memwal_side.resolved(self._settings, regions=1)
        super().__init__(f"memwal, {wal_format} format", "memwal", resolved, batches)
        self._format = wal_format
        self._readers = int(resolved["wal"]["readers"])

    def write(self, at: Path) -> None:
        table = self._open(at / "log")
        for batch in self.batches:
            table.put(batch)
        table.close()

    def opened(self, at: Path, watch: Watch) -> pa.Table:
        with watch.timed():
            table = self._open(at)
        try:
            return table.rows()
        finally:
            table.close()

    def measured_beside(self, at: Path) -> dict[str, float]:
        """Measure reading alone: entries from storage, checked and decoded, in order, without applying them."""
        store, region = LocalStore(at / "table.lance"), bucket_region(0)
        codec = codec_for(self._format, row_schema(lance.dataset(str(at / "table.lance")).schema, [KEY]))
        watch = Watch()
        with watch.timed():
            tip = find_tip(store, region, codec.suffix, 0)
            entries = replay(store, region, codec, 0, tip, readers=self._readers)
        rows = sum(entry.rows.num_rows for entry in entries)
        return {"reading alone, vector MB/s": rows * _BYTES_PER_ROW / 1e6 / watch.seconds}

    def _open(self, at: Path) -> MemwalTable:
        return MemwalTable(at, ROWS.empty_table(), KEY, {}, settings=self._settings)


class _ShardWriter(_Reopening):
    def __init__(self, batches: Sequence[pa.Table]) -> None:
        super().__init__("ShardWriter", "lance", lance_side.DURABLE_BEST, batches)

    def write(self, at: Path) -> None:
        shard = LanceShard(at / "live", ROWS.empty_table(), KEY, {}, self.settings)
        for batch in self.batches:
            shard.put(batch)
        shutil.copytree(at / "live", at / "log")  # before closing, which flushes
        shard.close()

    def opened(self, at: Path, watch: Watch) -> pa.Table:
        with watch.timed():
            writer = lance.dataset(str(at / "table.lance")).mem_wal_writer(SHARD, **self.settings)
        try:
            return writer.lsm_scanner().to_table()
        finally:
            writer.close()


def _contenders(values: Values) -> list[Contender]:
    batches = vector_batches(values["entries"], values["rows"])
    return [_Memwal("lance", batches), _Memwal("arrow", batches), _ShardWriter(batches)]


BENCHMARKS = (
    Benchmark(
        "replay",
        "Opening a region again, 384 x float32 vectors in its log",
        "rows_per_second",
        {
            "entries": Parameter(3, 96, "entries in the log"),
            "rows": Parameter(50, 1000, "rows of an entry; 1,000 are 1.5 MB"),
        },
        _contenders,
    ),
)
