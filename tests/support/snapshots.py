"""A memtable's rows as a read sees them."""

from __future__ import annotations

import pyarrow as pa

from memwal.memtable import IndexSpec, MemTable, Snapshot, row_schema, with_tombstone


def snapshot(rows: pa.Table, *indexed: str) -> Snapshot:
    """Return the snapshot of a memtable with `rows`, the key `id`, and a B-tree on each of the columns `indexed`."""
    table = MemTable(row_schema(rows.schema, ["id"]), ["id"], [IndexSpec(name, "btree") for name in indexed], 1)
    table.apply(with_tombstone(rows, table.schema))
    return table.snapshot()
