"""What a commit does to the base table, read from the SSTs it takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from uuid import UUID

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from memwal.flush.commits.held_back import is_failure
from memwal.flush.commits.plan import RegionPlan
from memwal.flush.sst.files import read_sst
from memwal.memtable import TOMBSTONE
from memwal.wal import ObjectStore, SsTable

_READERS = 4
"""SSTs read side by side: on an object store opening one is a few round trips; on a disk Lance uses all cores for
each, and more readers than these are no faster."""


@dataclass(frozen=True)
class Changes:
    """Keys to delete and rows to upsert, each key at most once in the two together.

    `deletes` has the key columns, `upserts` the base schema with its nullability and field metadata, no
    `_tombstone`. `taken`: rows of the SSTs, the superseded ones too. `failed`: regions of which nothing is
    among them, since an SST cannot be read, or does not fit the base table, and why.
    """

    deletes: pa.Table
    upserts: pa.Table
    taken: int
    failed: Mapping[UUID, BaseException] = field(default_factory=dict)

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
    that a later generation replaces, and cost every other commit a second opening. In `failed`: Corrupt where an SST is
    missing or short; ValueError where a row is null in a column that the base table declares not null; errors of
    storage.
    """
    key_schema = pa.schema([base_schema.field(name) for name in key])
    deletes, upserts = [key_schema.empty_table()], [base_schema.empty_table()]
    columns = [*base_schema.names, TOMBSTONE] if rows is None else rows
    tables = _read_all(store, [(plan.region, sst) for plan in plans for sst in plan.ssts], columns)
    taken, failed = 0, dict[UUID, BaseException]()
    for plan in plans:
        own, tables = tables[: len(plan.ssts)], tables[len(plan.ssts) :]
        try:
            gone, put = _of_region(own, key_schema, base_schema)
        except BaseException as error:
            if not is_failure(error):
                raise
            failed[plan.region] = error
            continue
        deletes += gone
        upserts += put
        taken += sum(table.num_rows for table in own if isinstance(table, pa.Table))
    return Changes(pa.concat_tables(deletes), pa.concat_tables(upserts), taken, failed)


def _of_region(
    read: Sequence[pa.Table | BaseException], key_schema: pa.Schema, base_schema: pa.Schema
) -> tuple[list[pa.Table], list[pa.Table]]:
    """Keys to delete and rows to upsert, by SST. Raises the first error among `read`."""
    key, deletes, upserts = key_schema.names, list[pa.Table](), list[pa.Table]()
    own = [_table(each) for each in read]
    # An SST by itself holds every key once: ours by how it is written, Lance's by its deletion vector.
    kept = newest_per_key(own, key) if len(own) > 1 else [all_newest(own[0])]
    for sst, newest in zip(own, kept, strict=True):
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
    def read(each: tuple[UUID, SsTable]) -> pa.Table | BaseException:
        region, sst = each
        try:
            return read_sst(store, region, sst, columns)
        except BaseException as error:
            if not is_failure(error):
                raise
            return error

    if len(ssts) < 2 or _READERS < 2:
        return [read(each) for each in ssts]
    with ThreadPoolExecutor(_READERS, thread_name_prefix="commit-read") as readers:
        return list(readers.map(read, ssts))


def _kept(rows: pa.Table, mask: Mask) -> pa.Table:
    """Most SSTs are taken whole or give no deletes: neither copies a row."""
    if mask.all():
        return rows
    return rows.filter(pa.array(mask)) if mask.any() else rows.slice(0, 0)


Mask = npt.NDArray[np.bool_]
Codes = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Newest:
    """Which rows of one SST count. `deletes` and `upserts` are disjoint masks over its rows."""

    deletes: Mask
    upserts: Mask


def newest_per_key(generations: Sequence[pa.Table], key: Sequence[str]) -> list[Newest]:
    """For each table the rows that no later row, in it or in a later table, replaces.

    `generations`: ascending, each with the key columns and `_tombstone`. A newest row that is a tombstone is
    a delete, any other an upsert; keys of distinct tables never count twice.
    """
    if not generations:
        return []
    rows = pa.concat_tables([table.select([*key, TOMBSTONE]) for table in generations])
    newest = _last_of_each(rows.select(list(key)))
    tombstone = rows.column(TOMBSTONE).to_numpy().astype(bool)
    bounds = np.cumsum([table.num_rows for table in generations])[:-1]
    deletes = np.split(newest & tombstone, bounds)
    upserts = np.split(newest & ~tombstone, bounds)
    return [Newest(d, u) for d, u in zip(deletes, upserts, strict=True)]


def all_newest(generation: pa.Table) -> Newest:
    """As `newest_per_key` of one table that holds every key once, without a look at its keys."""
    tombstone = generation.column(TOMBSTONE).to_numpy().astype(bool)
    return Newest(tombstone, ~tombstone)


def _last_of_each(keys: pa.Table) -> Mask:
    """True at the last row of each distinct key."""
    mask = np.zeros(keys.num_rows, dtype=bool)
    if keys.num_rows:
        codes, count = _coded(keys)
        last = np.empty(count, dtype=np.int64)
        last[codes] = np.arange(keys.num_rows)  # of several with one code NumPy keeps the last
        mask[last] = True
    return mask


def _coded(keys: pa.Table) -> tuple[Codes, int]:
    """A number below the count for every row, the same for equal keys. At least one row.

    Arrow's hash of one column takes a third of the time of its `group_by`; further columns are folded in one by one,
    the numbers coded anew each time, so that they stay below rows squared.
    """
    first, *others = (_codes(column) for column in keys.columns)
    codes, count = first
    for more, width in others:
        codes, count = _codes(pa.chunked_array([pa.array(codes * width + more)]))
    return codes, count


def _codes(column: pa.ChunkedArray) -> tuple[Codes, int]:
    encoded = column.combine_chunks().dictionary_encode()
    encoded = encoded.combine_chunks() if isinstance(encoded, pa.ChunkedArray) else encoded
    return encoded.indices.to_numpy().astype(np.int64), len(encoded.dictionary)
