"""Read the SSTs that a commit takes, and reduce them to keys to delete and rows to upsert."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from uuid import UUID

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from memwal.flush.commits.plan import RegionPlan
from memwal.flush.commits.report import FAILURES
from memwal.flush.sst.files import read_sst
from memwal.memtable import TOMBSTONE
from memwal.memtable.arrays import Mask
from memwal.wal import ObjectStore, SsTable
from memwal.wal.panics import panics_as_errors
from memwal.wal.parallel_map import each

_READERS = 4
"""SSTs read concurrently. On an object store, opening one takes a few round trips; on a disk, Lance uses all cores for
each, and more readers gain nothing.
"""


@dataclass(frozen=True)
class Changes:
    """Keys to delete and rows to upsert; each key at most once in the two together.

    `deletes` has the key columns; `upserts` has the base schema with its nullability and field metadata, without
    `_tombstone`. `taken`: rows of the SSTs, superseded ones included. `failed`: regions whose changes are missing
    because an SST cannot be read or does not fit the base table, with the error.
    """

    deletes: pa.Table
    upserts: pa.Table
    taken: int
    failed: Mapping[UUID, BaseException] = field(default_factory=dict)

    def keys(self, key: Sequence[str]) -> pa.Table:
        """Return the key columns of both."""
        return pa.concat_tables([self.deletes, self.upserts.select(list(key))])


def read_changes(
    store: ObjectStore,
    plans: Sequence[RegionPlan],
    base_schema: pa.Schema,
    key: Sequence[str],
    rows: pa.Schema | None = None,
) -> Changes:
    """Return the newest row of each key over the SSTs of `plans`, tombstones as deletes. No key is in two regions.

    `rows`: the row schema with field ids (`Shape.rows`), which finds columns that were renamed since an SST was
    written; None matches columns by name.

    Every SST is opened once and read whole. Reading the keys first and then only the newest rows would skip rows that a
    later generation replaces, but would cost every other commit a second opening. Errors in `failed`: Corrupt if an SST
    is missing or short; ValueError if a row is null in a column that the base table declares not null; errors of
    storage.
    """
    key_schema = pa.schema([base_schema.field(name) for name in key])
    deletes, upserts = [key_schema.empty_table()], [base_schema.empty_table()]
    columns = [*base_schema.names, TOMBSTONE] if rows is None else rows
    tables = _read_all(store, [(plan.region, sst) for plan in plans for sst in plan.ssts], columns)
    taken, failed = 0, dict[UUID, BaseException]()
    for plan in plans:
        of_region, tables = tables[: len(plan.ssts)], tables[len(plan.ssts) :]
        try:
            region_deletes, region_upserts = _of_region(of_region, key_schema, base_schema)
        except FAILURES as error:
            failed[plan.region] = error
            continue
        deletes += region_deletes
        upserts += region_upserts
        taken += sum(table.num_rows for table in of_region if isinstance(table, pa.Table))
    return Changes(pa.concat_tables(deletes), pa.concat_tables(upserts), taken, failed)


def _of_region(
    read: Sequence[pa.Table | BaseException], key_schema: pa.Schema, base_schema: pa.Schema
) -> tuple[list[pa.Table], list[pa.Table]]:
    """Return the keys to delete and the rows to upsert, per SST. Raises the first error in `read`."""
    key, deletes, upserts = key_schema.names, list[pa.Table](), list[pa.Table]()
    ssts = [_table(result) for result in read]
    # A single SST holds every key once: memwal writes it so, and in an SST of Lance the deletion vector ensures it.
    kept = newest_per_key(ssts, key) if len(ssts) > 1 else [all_newest(ssts[0])]
    for sst, newest in zip(ssts, kept, strict=True):
        deletes.append(_kept(sst.select(key), newest.deletes).cast(key_schema))
        upserts.append(_kept(sst.select(base_schema.names), newest.upserts).cast(base_schema))
    return deletes, upserts


def _table(read: pa.Table | BaseException) -> pa.Table:
    if isinstance(read, BaseException):
        raise read
    return read


def _read_all(
    store: ObjectStore, ssts: Sequence[tuple[UUID, SsTable]], columns: Sequence[str] | pa.Schema
) -> list[pa.Table | BaseException]:
    def read(region_sst: tuple[UUID, SsTable]) -> pa.Table | BaseException:
        region, sst = region_sst
        try:
            with panics_as_errors:
                return read_sst(store, region, sst, columns)
        except FAILURES as error:
            return error

    return list(each(read, ssts, _READERS))


def _kept(rows: pa.Table, mask: Mask) -> pa.Table:
    """Return the rows in `mask`. Copies no row if the mask selects all of them (most SSTs) or none."""
    if mask.all():
        return rows
    return rows.filter(pa.array(mask)) if mask.any() else rows.slice(0, 0)


Codes = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Newest:
    """The current rows of one SST. `deletes` and `upserts` are disjoint masks over its rows."""

    deletes: Mask
    upserts: Mask


def newest_per_key(generations: Sequence[pa.Table], key: Sequence[str]) -> list[Newest]:
    """Return, for each table, the rows that no later row of the same or a later table replaces.

    `generations`: ascending, each with the key columns and `_tombstone`. A newest row that is a tombstone is a delete,
    any other an upsert. A key that is in several tables is selected in one.
    """
    if not generations:
        return []
    rows = pa.concat_tables([table.select([*key, TOMBSTONE]) for table in generations])
    newest = np.zeros(rows.num_rows, dtype=bool)  # the last row of each distinct key
    if rows.num_rows:
        # A code per row, equal for equal keys. Arrow's hash of one column takes a third of the time of its `group_by`.
        # Further columns are added one by one, and the codes are renumbered each time, so that they stay below rows
        # squared.
        (codes, count), *others = (_codes(rows.column(name)) for name in key)
        for column_codes, width in others:
            codes, count = _codes(pa.chunked_array([pa.array(codes * width + column_codes)]))
        last = np.empty(count, dtype=np.int64)
        last[codes] = np.arange(rows.num_rows)  # of several rows with one code NumPy keeps the last
        newest[last] = True
    tombstone = rows.column(TOMBSTONE).to_numpy().astype(bool)
    bounds = np.cumsum([table.num_rows for table in generations])[:-1]
    deletes = np.split(newest & tombstone, bounds)
    upserts = np.split(newest & ~tombstone, bounds)
    return [Newest(d, u) for d, u in zip(deletes, upserts, strict=True)]


def all_newest(generation: pa.Table) -> Newest:
    """Return `newest_per_key` of one table that holds every key once, without reading its keys."""
    tombstone = generation.column(TOMBSTONE).to_numpy().astype(bool)
    return Newest(tombstone, ~tombstone)


def _codes(column: pa.ChunkedArray) -> tuple[Codes, int]:
    encoded = column.combine_chunks().dictionary_encode()
    encoded = encoded.combine_chunks() if isinstance(encoded, pa.ChunkedArray) else encoded
    return encoded.indices.to_numpy().astype(np.int64), len(encoded.dictionary)
