"""A table without a key whose regions are flushed by hand and committed, with the multiset of rows to expect."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import lance
import numpy as np
import pyarrow as pa

from memwal.flush import BaseTable
from memwal.memtable import IndexSpec, with_tombstone
from memwal.wal import bucket_region
from tests.commit_world import World

WIDTH = 4
SCHEMA = pa.schema(
    [
        pa.field("n", pa.int64(), nullable=False),
        pa.field("note", pa.string(), metadata={"about": "anything"}),
        pa.field("vector", pa.list_(pa.float32(), WIDTH)),
    ]
)


class AppendWorld(World):
    """A table without a key, and the expected count of each `n`."""

    def __init__(
        self,
        uri: str,
        buckets: int = 2,
        indexes: Sequence[IndexSpec] = (),
        by: Sequence[str] = (),
        schema: pa.Schema = SCHEMA,
    ) -> None:
        self.oracle = Counter[int]()
        self.begin(BaseTable.create(uri, schema, [], buckets, indexes, append_by=by))

    def table(self, numbers: Sequence[int]) -> pa.Table:
        """Return rows in the base schema; equal numbers give equal rows."""
        vectors = [np.random.default_rng(n).random(WIDTH, dtype=np.float32) for n in numbers]
        columns = {"n": numbers, "note": [f"note {n}" for n in numbers], "vector": vectors}
        return pa.Table.from_pydict(columns, schema=self.base.schema)

    def put(self, numbers: Sequence[int]) -> None:  # type: ignore[override]
        self.flush(with_tombstone(self.table(numbers), self.rows))
        self.oracle.update(numbers)

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
