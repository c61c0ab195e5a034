"""A large table at rest whose files memwal and Lance both read: a base, four SSTs and a memtable.

Lance writes the base and builds its indexes. memwal adopts the table, flushes SSTs that consist half of new rows and
half of newer versions, and holds as many rows again in its memtable. Vectors are those of `bench.mixtures`, cut to
their first components; texts are words from the descriptions of the packages, with the frequency that they have there.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
from lance.mem_wal import LsmPointLookupPlanner, LsmScanner, LsmVectorSearchPlanner, ShardSnapshot

import memwal
from bench.benchmark import Values
from bench.lance_side import PRIMARY_KEY
from bench.mixtures import Ids, Vectors, column, mixed
from bench.source_data import SEED, packages
from memwal import wal
from memwal.ingest.engine.table.create import initialise
from memwal.ingest.settings.load import load

KEY, WIDTH, WORDS, SSTS = "id", 128, 12, 4
PRICES = 1_000_000
SCHEMA = pa.schema(
    [
        pa.field(KEY, pa.int64(), nullable=False, metadata=PRIMARY_KEY),
        pa.field("price", pa.int64()),
        pa.field("weight", pa.float64()),
        pa.field("body", pa.string()),
        pa.field("vector", pa.list_(pa.float32(), WIDTH)),
    ]
)
PARTITIONS, SUB_VECTORS = 256, 16
_ROWS_OF_A_BATCH = 50_000
_STILL = {
    "wal": {"format": "arrow"},
    "memtable": {"age_max": "1h", "size_max": "4GiB", "unflushed_max": "8GiB"},
    "commit": {"interval": "0s"},
    "gc": {"interval": "0s"},
}
"""Keeps rows at the level that they were written to while queries are measured."""


class LargeTable:
    """The table, with the ways of both sides to read it.

    `flushed`, `latest`: the newest vector of each id, float32 [ids, WIDTH], without and with the memtable. `datasets`:
    the base and each SST as Lance datasets.

    Thread safety. One thread.
    """

    def __init__(self, at: Path, values: Values) -> None:
        """Create the table below `at`. `values`: `base`, rows of the base; `above`, rows of each level above."""
        self._base, self._above = values["base"], values["above"]
        uri = str(at / "table.lance")
        self.latest = np.empty((self._base + (SSTS + 1) * (self._above // 2), WIDTH), np.float32)
        self._write_base(uri)
        initialise(load(_STILL, {}, {"table": {"uri": uri, "key": [KEY]}, "regions": {"count": 1}}), {})
        self.table = memwal.open(uri, settings=_STILL)
        for level in range(1, SSTS + 1):
            self._put(level)
            self.table.flush()
        self.flushed = self.latest[: self._first(SSTS + 1)].copy()
        self._put(SSTS + 1)
        self.dataset, self._shards = lance.dataset(uri), _snapshots(uri)
        self.lookups = LsmPointLookupPlanner(self.dataset, self._shards)
        self.searches = LsmVectorSearchPlanner(self.dataset, self._shards, "vector")
        self.datasets = [self.dataset, *(lance.dataset(str(path)) for path in Path(uri).glob("_mem_wal/*/*_gen_*"))]

    def scanner(self) -> LsmScanner:
        """Return Lance's scanner of base and SSTs."""
        return LsmScanner.from_snapshots(self.dataset, self._shards)

    def close(self) -> None:
        """Release the region."""
        self.table.close()

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _first(self, level: int) -> int:
        """Return the first of the new ids of a level above the base."""
        return self._base + (level - 1) * (self._above // 2)

    def _write_base(self, uri: str) -> None:
        batches = self._batches(np.arange(self._base), 0)
        dataset = lance.write_dataset(pa.RecordBatchReader.from_batches(SCHEMA, batches), uri)
        for name in (KEY, "price"):
            dataset.create_scalar_index(name, "BTREE", name=f"{name}_idx")
        dataset.create_scalar_index("body", "INVERTED", name="body_idx", with_position=True)
        partitions = min(PARTITIONS, max(1, self._base // 64))
        sizes: dict[str, Any] = {"num_partitions": partitions, "num_sub_vectors": SUB_VECTORS, "sample_rate": 64}
        dataset.create_index("vector", "IVF_PQ", name="vector_idx", metric="l2", **sizes)

    def _put(self, level: int) -> None:
        first, half = self._first(level), self._above // 2
        updated = np.random.default_rng((SEED, level)).choice(first, self._above - half, replace=False)
        for batch in self._batches(np.concatenate([updated, np.arange(first, first + half)]), level):
            self.table.put(batch)

    def _batches(self, ids: Ids, level: int) -> Iterator[pa.RecordBatch]:
        for at in range(0, len(ids), _ROWS_OF_A_BATCH):
            some, seed = ids[at : at + _ROWS_OF_A_BATCH], 1000 * level + at // _ROWS_OF_A_BATCH
            vectors = vectors_of(len(some), seed)
            self.latest[some] = vectors
            rng = np.random.default_rng((SEED, level, at))
            prices, weights = rng.integers(0, PRICES, len(some)), rng.random(len(some))
            bodies = [" ".join(words) for words in _words()[rng.integers(0, len(_words()), (len(some), WORDS))]]
            columns = [pa.array(some), pa.array(prices), pa.array(weights), pa.array(bodies), column(vectors)]
            yield pa.record_batch(columns, schema=SCHEMA)


def vectors_of(count: int, seed: int) -> Vectors:
    """Return `count` generated vectors of WIDTH components, float32; equal for equal seeds."""
    return np.ascontiguousarray(mixed(count, seed)[:, :WIDTH])


@cache
def _words() -> np.ndarray:
    """Return every word of the packages' descriptions, with repetitions."""
    return np.array(" ".join(packages().column("description").to_pylist()).split(), dtype=object)


def _snapshots(uri: str) -> list[ShardSnapshot]:
    """Return the SSTs that memwal has published in the form that Lance's planners take."""
    store, found = wal.open_store(uri, {}), []
    for region in wal.regions(store):
        manifest = wal.ManifestStore(store, region).latest()
        assert manifest is not None
        shard = ShardSnapshot(str(region)).with_current_generation(manifest.current_generation)
        for sst in manifest.ssts:
            shard = shard.with_sstable(sst.generation, sst.path)
        found.append(shard)
    return found
