"""An SST made into a memtable: its rows by key, and the indexes that a read asks for."""

from __future__ import annotations

from collections.abc import Container
from uuid import UUID

import flush
from flush import BaseTable
from memtable import MemTable, row_schema
from wal import ObjectStore, SsTable


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
