"""A table without a key whose regions are flushed by hand and committed, with the multiset of rows to expect."""

from __future__ import annotations

import copy
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa

from memwal import flush
from memwal.flush import BaseTable, CommitReport
from memwal.memtable import IndexSpec, MemTable, row_schema, with_tombstone
from memwal.wal import (
    Claim,
    LanceCodec,
    LocalStore,
    ManifestStore,
    ObjectStore,
    SystemClock,
    SystemIds,
    bucket_region,
    claim,
)
from tests.support.clock import FakeClock

WIDTH = 4
SCHEMA = pa.schema(
    [
        pa.field("n", pa.int64(), nullable=False),
        pa.field("note", pa.string(), metadata={"about": "anything"}),
        pa.field("vector", pa.list_(pa.float32(), WIDTH)),
    ]
)


class AppendWorld:
    """A table without a key, and the expected count of each `n`."""

    def __init__(
        self,
        uri: str,
        buckets: int = 2,
        indexes: Sequence[IndexSpec] = (),
        by: Sequence[str] = (),
        schema: pa.Schema = SCHEMA,
    ) -> None:
        self.uri, self.buckets = uri, buckets
        self.base = BaseTable.create(uri, schema, [], buckets, indexes, append_by=by)
        self.rows = row_schema(self.base.schema, ())
        self.store: ObjectStore = LocalStore(uri)
        self.oracle: Counter[int] = Counter()
        self.claims = [self._claim(bucket) for bucket in range(buckets)]

    def _claim(self, bucket: int) -> Claim:
        codec, ids = LanceCodec(self.rows), SystemIds()
        return claim(self.store, bucket_region(bucket), spec_id=1, codec=codec, ids=ids, clock=SystemClock())

    def copied(self, to: Path) -> AppendWorld:
        """Copy the table to another directory."""
        other = copy.copy(self)
        other.uri, other.oracle = str(to / "table"), Counter(self.oracle)
        shutil.copytree(self.uri, other.uri)
        other.store = LocalStore(other.uri)
        return other

    def table(self, numbers: Sequence[int]) -> pa.Table:
        """Return rows in the base schema; equal numbers give equal rows."""
        vectors = [np.random.default_rng(n).random(WIDTH, dtype=np.float32) for n in numbers]
        columns = {"n": numbers, "note": [f"note {n}" for n in numbers], "vector": vectors}
        return pa.Table.from_pydict(columns, schema=self.base.schema)

    def put(self, numbers: Sequence[int]) -> None:
        """Flush one generation in every region that gets rows."""
        rows = with_tombstone(self.table(numbers), self.rows)
        routed = self.base.route(rows)
        for bucket, each in enumerate(self.claims):
            part = rows.filter(pa.array(routed == bucket))
            manifest = self.manifests(bucket).latest()
            assert manifest is not None
            table = MemTable(self.rows, (), [], manifest.current_generation)
            if part.num_rows:
                table.apply(part)
            flush.flush(
                self.store,
                self.manifests(bucket),
                each.guard,
                table.snapshot(),
                flush.SstFormat.of(self.base),
                generation=table.generation,
                covers_position=manifest.replay_after + 1,
                ids=SystemIds(),
            )
        self.oracle.update(numbers)

    def manifests(self, bucket: int) -> ManifestStore:
        return ManifestStore(self.store, bucket_region(bucket))

    def commit(self, retries: int = 10, **more: Any) -> CommitReport:
        return flush.commit(self.uri, {}, self.store, clock=FakeClock(), retries=retries, **more)

    def found(self) -> Counter[int]:
        dataset = lance.dataset(self.uri)
        rows = dataset.to_table(columns=["n", "note", "vector"])
        for row in rows.slice(0, 50).to_pylist():
            assert row["note"] == f"note {row['n']}"
        return Counter(rows.column("n").to_pylist())

    def stranger(self, numbers: Sequence[int]) -> None:
        """Append rows as another program."""
        lance.write_dataset(self.table(numbers), self.uri, mode="append")
        self.oracle.update(numbers)

    def progress(self) -> tuple[dict[int, int], dict[int, int]]:
        """Return for each bucket the committed generation, and Lance's own marker."""
        base = BaseTable.open(self.uri)
        views = (base.committed, base.marked)
        buckets = range(self.buckets)
        ours, lances = ({b: view[bucket_region(b)] for b in buckets if bucket_region(b) in view} for view in views)
        return ours, lances

    def listed(self) -> list[int]:
        """Return the number of SSTs in the manifest of each bucket."""
        latest = [self.manifests(bucket).latest() for bucket in range(self.buckets)]
        return [len(manifest.ssts) for manifest in latest if manifest is not None]
