"""The flush path: how fast a full memtable becomes an SST, without its publication.

A round fills a memtable, waits until its rows are indexed, and times only the writing of the SST: data, bloom filter,
key sidecar, indexes. memwal syncs all of it before it is published; ShardWriter does not (see `bench.lance_side`), so
the same flush without syncs is measured too. All rounds are flushes of one open table: the first flush, and every 32nd
after it, reads all rows back (`flush.sst.read_back`). The digest covers the rows of the SST, read by pylance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lance
import numpy as np
import pyarrow as pa

from bench import lance_side
from bench.benchmark import Benchmark, Contender, Parameter, Sample, Values, Watch
from bench.digest import rows_digest
from bench.lance_side import LanceShard
from bench.memtable_data import VECTORS, in_batches, many_vectors, vector_rows
from bench.memtable_puts import LARGE
from bench.memtable_side import BareMemTable, Shape
from bench.memwal_side import MemwalTable
from bench.put_path import PACKAGE_INDEXES
from bench.source_data import PACKAGES_KEY, package_updates, packages
from memwal.flush import BaseTable, SstFormat, SstIndexes, write_sst
from memwal.flush.sst.read_back import ReadBacks
from memwal.memtable import TOMBSTONE, VectorModel, with_tombstone
from memwal.wal import SystemIds, bucket_region, open_store

LOGGED: Mapping[str, Any] = {**LARGE, **lance_side.DURABLE_BEST, "durable_write": True}
"""Every put is in the log before its acknowledgement, so that closing only flushes."""
SYNCS = ("memwal.flush.sst.files.sync_tree", "memwal.flush.sst.data.sync_files")


def _digest(directory: Path, key: Sequence[str]) -> str:
    return rows_digest(lance.dataset(str(directory)).to_table().drop_columns([TOMBSTONE]), key)


class Flushes(Contender):
    """memwal: write the SST of one memtable each round. `base`: rows of the base table that train its indexes."""

    def __init__(
        self,
        name: str,
        shape: Shape,
        batches: Sequence[pa.Table],
        base: pa.Table | None = None,
        *,
        syncing: bool = True,
    ) -> None:
        super().__init__(f"memwal, {name}", "memwal", {**shape.settings(), "syncing": syncing})
        self._shape, self._batches, self._base, self._syncing = shape, batches, base, syncing
        self._models: Mapping[str, VectorModel] = {}
        self._format = SstFormat(list(shape.key), "2.2", indexes=SstIndexes(shape.specs(), lambda: self._models))

    def read_back(self) -> None:
        """Read all rows back in the next round."""
        self._format = replace(self._format, read_backs=ReadBacks())

    def prepare(self, at: Path) -> None:
        """Build the indexes of the base table, if any."""
        if self._base is not None:
            MemwalTable(at, self._base, self._shape.key[0], self._shape.indexes).close()
            self._models = BaseTable.open(str(at / "table.lance")).vector_models()

    def round(self, at: Path, watch: Watch) -> Sample:
        """Flush one memtable."""
        table = BareMemTable(self._shape, self._models)
        try:
            for batch in self._batches:
                table.put(with_tombstone(batch, self._shape.row_schema))
            table.indexed()
        finally:
            table.close()
        table.table.freeze()
        store, key = open_store(str(at / "table.lance"), {}), list(self._shape.key)
        with ExitStack() as patches:
            for name in () if self._syncing else SYNCS:
                patches.enter_context(patch(name, lambda _: None))
            with watch.timed():
                sst = write_sst(store, bucket_region(0), table.snapshot(), self._format, generation=1, ids=SystemIds())
        rows = sum(batch.num_rows for batch in self._batches)
        found = _digest(Path(store.url(f"_mem_wal/{bucket_region(0)}/{sst.path}")), key)
        return Sample(np.asarray([watch.seconds]), watch.seconds, rows, found)


class Closes(Contender):
    """ShardWriter: one memtable each round, flushed by closing."""

    def __init__(
        self,
        name: str,
        settings: Mapping[str, Any],
        shape: Shape,
        batches: Sequence[pa.Table],
        base: pa.Table,
        **more: Any,
    ) -> None:
        super().__init__(f"ShardWriter.close, {name}", "lance", settings, **more)
        self._shape, self._batches, self._base = shape, batches, base

    def round(self, at: Path, watch: Watch) -> Sample:
        """Flush one memtable."""
        key = list(self._shape.key)
        shard = LanceShard(at, self._base, key, self._shape.indexes, self.settings)
        for batch in self._batches:
            shard.put(batch)
        with watch.timed():
            shard.close()
        (sst,) = at.glob("table.lance/_mem_wal/*/*_gen_1")
        rows = sum(batch.num_rows for batch in self._batches)
        return Sample(np.asarray([watch.seconds]), watch.seconds, rows, _digest(sst, key))


def _vectors(values: Values) -> list[Contender]:
    batches = in_batches(vector_rows(many_vectors(values["held"])), values["rows"])
    shape, nothing = Shape(VECTORS, ["id"]), VECTORS.empty_table()
    return [
        Flushes("default", shape, batches),
        Flushes("not synced", shape, batches, syncing=False),
        Closes("best", LOGGED, shape, batches, nothing),
        Closes("its log behind", LARGE, shape, batches, nothing, note="closing writes what is left of its log, too"),
    ]


def _packages(values: Values) -> list[Contender]:
    base = packages().slice(0, values["base"])
    stream = pa.concat_tables([packages().slice(values["base"]), package_updates()]).slice(0, values["stream"])
    shape, batches = Shape(base.schema, [PACKAGES_KEY], PACKAGE_INDEXES), in_batches(stream, values["rows"])
    return [Flushes("default", shape, batches, base), Closes("best", LOGGED, shape, batches, base)]


BENCHMARKS = (
    Benchmark(
        "flush_vectors",
        "Memtable to SST, 128-d vectors, no index but the key's",
        "rows_per_second",
        {
            "held": Parameter(2000, 100_000, "rows of the memtable"),
            "rows": Parameter(100, 1000, "rows of a put"),
        },
        _vectors,
    ),
    Benchmark(
        "flush_packages",
        "Memtable to SST, real packages, ivf_pq + fts + btree kept",
        "rows_per_second",
        {
            "base": Parameter(256, 1000, "packages in the base table, on which the vector index is trained"),
            "stream": Parameter(200, 3900, "rows that are put: the other packages, then the updates"),
            "rows": Parameter(100, 500, "rows of a put"),
        },
        _packages,
    ),
)
