"""What a commit does to the base table, read from the SSTs it takes."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from uuid import UUID

import pyarrow as pa

from flush.commit_plan import RegionPlan
from flush.newest import Mask, all_newest, newest_per_key
from flush.sst import read_sst
from memtable import TOMBSTONE
from wal import ObjectStore, SsTable

_READERS = 4
"""SSTs read side by side: on an object store opening one is a few round trips; on a disk Lance uses all cores for
each, and more readers than these are no faster."""


@dataclass(frozen=True)
class Changes:
    """Keys to delete and rows to upsert, each key at most once in the two together.

    `deletes` has the key columns, `upserts` the base schema with its nullability and field metadata, no
    `_tombstone`. `taken`: rows of the SSTs, the superseded ones too.
    """

    deletes: pa.Table
    upserts: pa.Table
    taken: int

    def keys(self, key: Sequence[str]) -> pa.Table:
        """The key columns of both."""
        return pa.concat_tables([self.deletes, self.upserts.select(list(key))])


def read_changes(
    store: ObjectStore,
    plans: Sequence[RegionPlan],
    base_schema: pa.Schema,
    key: Sequence[str],
    rows: pa.Schema | None = None,
) -> Changes:
    """The newest row of each key over the SSTs of `plans`, tombstones apart. One key never is in two regions.

    `rows`: the row schema with field ids (`Shape.rows`), by which columns that were renamed since an SST was written
    are found; None matches them by name.

    Every SST is opened and read once, whole. To read keys first and then the newest rows only would spare the rows
    that a later generation replaces, and cost every other commit a second opening. Raises Corrupt where an SST is
    missing or short; ValueError where a row is null in a column that the base table declares not null.
    """
    key_schema = pa.schema([base_schema.field(name) for name in key])
    deletes, upserts = [key_schema.empty_table()], [base_schema.empty_table()]
    columns = [*base_schema.names, TOMBSTONE] if rows is None else rows
    tables = _read_all(store, [(plan.region, sst) for plan in plans for sst in plan.ssts], columns)
    taken = sum(table.num_rows for table in tables)
    for plan in plans:
        own, tables = tables[: len(plan.ssts)], tables[len(plan.ssts) :]
        # An SST by itself holds every key once: ours by how it is written, Lance's by its deletion vector.
        kept = newest_per_key(own, key) if len(own) > 1 else [all_newest(own[0])]
        for sst, newest in zip(own, kept, strict=True):
            deletes.append(_kept(sst.select(list(key)), newest.deletes).cast(key_schema))
            upserts.append(_kept(sst.select(base_schema.names), newest.upserts).cast(base_schema))
    return Changes(pa.concat_tables(deletes), pa.concat_tables(upserts), taken)


def _read_all(
    store: ObjectStore, ssts: Sequence[tuple[UUID, SsTable]], columns: Sequence[str] | pa.Schema
) -> list[pa.Table]:
    def read(each: tuple[UUID, SsTable]) -> pa.Table:
        region, sst = each
        return read_sst(store, region, sst, columns)

    if len(ssts) < 2 or _READERS < 2:
        return [read(each) for each in ssts]
    with ThreadPoolExecutor(_READERS, thread_name_prefix="commit-read") as readers:
        return list(readers.map(read, ssts))


def _kept(rows: pa.Table, mask: Mask) -> pa.Table:
    """Most SSTs are taken whole or give no deletes: neither copies a row."""
    if mask.all():
        return rows
    return rows.filter(pa.array(mask)) if mask.any() else rows.slice(0, 0)
