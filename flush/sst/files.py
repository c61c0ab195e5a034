"""Write, check and read one SST: an immutable Lance dataset with the newest row of each key of one memtable.

    {table}/_mem_wal/{region}/{8 hex}_gen_{generation}/
        _versions/  _transactions/  data/{one file}        a Lance dataset of one fragment: the row schema, in the base
                                                           table's storage version, rows in order of arrival
        _indices/{uuid}/                                   flush.sst.indexes; each is one more version
        bloom_filter.bin                                   flush.sst.bloom
        _pk_index/page_data.lance, page_lookup.lance       flush.sst.key_sidecar

 1. Write the data (flush.sst.data); in parallel, threads compute the bloom filter and the sorted keys if the table has
    a key.
 2. Write the base table's field ids into the manifest.
 3. Write the bloom filter and the key sidecar; neither if the table has no key (Lance's readers accept no such table).
 4. Build the indexes. Only these may be missing.
 5. Fsync everything; read back and compare the counts, or every value (flush.sst.read_back).
*Crash at any point: a directory that no manifest lists.*

Superseded rows are left out instead of being masked by a deletion vector. No reader sees them either way, and row
offsets, sidecar and row count then agree. Tombstones are stored like other rows. Nothing here makes an SST visible; see
flush.sst.flusher.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from uuid import UUID

import lance
import pyarrow as pa
import pyarrow.compute as pc

from memwal.flush.base.fsync import sync_tree
from memwal.flush.base.manifest import renumber_fields
from memwal.flush.base.open import read_again
from memwal.flush.base.shape import column_ids
from memwal.flush.base.table import BaseTable
from memwal.flush.errors import SstInvalid
from memwal.flush.sst.bloom import BLOOM_NAME, bloom_bytes
from memwal.flush.sst.data import write_data
from memwal.flush.sst.file_options import FileOptions
from memwal.flush.sst.indexes import SstIndexes
from memwal.flush.sst.key_sidecar import page_data, sidecar_rows, write_key_sidecar
from memwal.flush.sst.read_back import ReadBacks, expect_same
from memwal.memtable import TOMBSTONE, Snapshot
from memwal.wal import Corrupt, Ids, ObjectStore, PutOutcome, SsTable, StoreUnavailable, WalError
from memwal.wal.codec.columns import field_ids, sources
from memwal.wal.errors import first_line
from memwal.wal.layout import sst_key, sst_name
from memwal.wal.panics import RustPanic, panics_as_errors

_BATCH_ROWS, _BATCH_BYTES = 8192, 4 << 20
_NOT_WRITTEN = (pa.ArrowException, ValueError, TypeError, RuntimeError)
"""Errors of Lance for rows that pass memwal's checks but that Lance cannot write. A RustPanic is a RuntimeError."""
_READ_AHEAD, _READ_BUFFER = 4, 64 << 20
"""Batches, and bytes of files, that Lance reads ahead; its defaults are 16 batches and 2 GiB."""


@dataclass(frozen=True)
class SstFormat:
    """The common properties of all SSTs of a table.

    Thread safety. Immutable.
    """

    key: Sequence[str]
    """() for a table without a key."""
    storage_version: str | None
    """The base table's ("2.1"); None for Lance's default. `files` may override it."""
    field_ids: Sequence[int] | None = None
    """Of the row schema (`BaseTable.row_field_ids`); None if they count from 0 without a gap."""
    files: FileOptions = field(default_factory=FileOptions)
    indexes: SstIndexes = field(default_factory=SstIndexes)
    read_backs: ReadBacks = field(default_factory=ReadBacks, compare=False)
    """Which SSTs are read back in full: the first of this object, and a part of the others."""

    @classmethod
    def of(cls, base: BaseTable, files: FileOptions | None = None, indexes: SstIndexes | None = None) -> SstFormat:
        """Return the format for the open version of `base`; without indexes unless they are given."""
        own = files or FileOptions(), indexes or SstIndexes()
        return cls(base.key, base.storage_version, base.row_field_ids, *own)


def write_sst(
    store: ObjectStore,
    region_id: UUID,
    snapshot: Snapshot,
    format: SstFormat,
    *,
    generation: int,
    ids: Ids,
    name: str | None = None,
) -> SsTable:
    """Write and verify the SST of a frozen memtable under a fresh random name. No manifest lists it yet.

    `name`: of its directory, never used before; None for a random one. `snapshot` holds at least one row.
    Thread safety. Any thread.
    Durability. The SST survives a power cut once the call returns.
    Raises SstInvalid if Lance cannot write it or its rows cannot be read back; OSError, StoreUnavailable, StoreRefused
    of storage.
    """
    sst = SsTable(generation, name or sst_name(ids.token(), generation))
    directory, mask = sst_key(region_id, sst.path), snapshot.newest()
    url = store.url(directory)
    try:
        with panics_as_errors, ThreadPoolExecutor(2, "memwal-flush") as beside:
            keys = _Keys(snapshot.keys(mask).select(list(format.key)), beside) if format.key else None
            rows, size = write_data(snapshot, mask, url, store, format.files, format.storage_version, beside)
            key_bytes = 0 if keys is None else keys.keys.nbytes
            sst = replace(sst, in_memory_bytes=size, physical_rows=rows, primary_key_bytes=key_bytes)
            if format.field_ids is not None:
                renumber_fields(store, directory, format.field_ids)
            if keys is not None:
                keys.write(store, region_id, sst)
        format.indexes.build(url, store.storage_options, rows)
        sync_tree(url)
        verify(store, region_id, sst, keyed=bool(format.key))
        if format.read_backs.due:
            _read_back(store, region_id, sst, format, snapshot.batches(mask))
    except _NOT_WRITTEN as error:
        discard(store, region_id, sst)
        raise SstInvalid(f"{directory}: cannot be written: {first_line(error)}; its rows stay in the log") from error
    except BaseException:
        discard(store, region_id, sst)
        raise
    return sst


def _read_back(
    store: ObjectStore, region_id: UUID, sst: SsTable, format: SstFormat, written: Iterable[pa.RecordBatch]
) -> None:
    """Compare every value of the SST with `written`. Raises SstInvalid."""
    directory, passed = sst_key(region_id, sst.path), False
    try:
        dataset = lance.dataset(store.url(directory), storage_options=store.storage_options)
        expect_same(dataset, written, _rows_at_once(sst))
        passed = True
    except SstInvalid as error:
        raise SstInvalid(
            f"{directory}: {error}; it is not published, and its rows stay in the log: flush again, and if that fails "
            "choose another [flush] storage_version or compression"
        ) from error
    finally:
        format.read_backs.done(passed=passed)


class _Keys:
    """The parts of an SST that only a table with a key has, computed while its data is written."""

    def __init__(self, keys: pa.Table, beside: Executor) -> None:
        self.keys = keys
        self._bloom = beside.submit(bloom_bytes, keys)
        self._pages = beside.submit(page_data, keys)

    def write(self, store: ObjectStore, region_id: UUID, sst: SsTable) -> None:
        bloom = sst_key(region_id, sst.path, BLOOM_NAME)
        # The directory's name is new and random: any outcome but CREATED is a storage failure.
        if (outcome := store.put_if_absent(bloom, self._bloom.result())) is not PutOutcome.CREATED:
            raise StoreUnavailable(f"{bloom}: {outcome.value}; the SST was not published, flush again")
        write_key_sidecar(store.url(sst_key(region_id, sst.path)), self._pages.result(), store.storage_options)


def discard(store: ObjectStore, region_id: UUID, sst: SsTable) -> bool:
    """Remove an SST that no manifest lists or can list: its objects, and on a local disk its directories.

    Returns False if storage failed; the next attempt, or the collector, removes the rest. A repeated flush writes
    another SST, and without this removal the leftovers could fill the disk.
    """
    directory = f"{sst_key(region_id, sst.path)}/"  # with the slash: "…_gen_4" alone is a prefix of "…_gen_41"
    try:
        for key in store.list(directory):
            store.delete(key)
        store.remove_leftovers(directory)
    except (WalError, OSError):
        return False
    return True


def verify(store: ObjectStore, region_id: UUID, sst: SsTable, *, keyed: bool = True) -> None:
    """Check that data and, if `keyed`, bloom filter and sidecar exist and hold `sst.physical_rows` rows.

    Raises SstInvalid.
    """
    directory = sst_key(region_id, sst.path)
    try:
        with panics_as_errors:
            dataset = lance.dataset(store.url(directory), storage_options=store.storage_options)
            fragments = len(dataset.get_fragments())
            rows = dataset.to_table(columns=[TOMBSTONE]).num_rows  # read, not counted from the manifest
            indexed = sidecar_rows(store.url(directory), store.storage_options) if keyed else rows
    except (OSError, ValueError, RustPanic) as error:
        raise SstInvalid(f"{directory}: cannot be read back: {first_line(error)}; flush again") from error
    bloom = len(store.get(sst_key(region_id, sst.path, BLOOM_NAME)) or b"") if keyed else 32
    wanted = sst.physical_rows
    if fragments != 1 or rows != wanted or indexed != wanted or not bloom or bloom % 32:
        raise SstInvalid(
            f"{directory}: {fragments} fragments, {rows} rows, {indexed} rows in the sidecar, {bloom} bytes "
            f"of bloom filter; expected 1 fragment and {wanted} rows; flush again"
        )


def read_sst(
    store: ObjectStore, region_id: UUID, sst: SsTable, columns: Sequence[str] | pa.Schema | None = None
) -> pa.Table:
    """Return the SST's rows in order of arrival, tombstones included, without schema metadata.

    `columns`: None for the whole row schema; names as in the SST; or the table's row schema with field ids
    (`Shape.rows`), which also finds columns that were renamed since the SST was written. A column added to the base
    table later is null, of Arrow's null type, as in Lance. Also reads SSTs of Lance's own writer, which mask superseded
    rows by a deletion vector.
    Raises Corrupt if the SST is missing, unreadable or short of rows; StoreUnavailable, StoreRefused, OSError of
    storage.
    """
    directory = sst_key(region_id, sst.path)

    def read() -> tuple[int, list[str], pa.Table]:
        dataset = lance.dataset(store.url(directory), storage_options=store.storage_options)
        physical = sum(fragment.physical_rows for fragment in dataset.get_fragments())
        if isinstance(columns, pa.Schema):
            from_columns = sources(columns, field_ids(columns), dataset.schema, column_ids(dataset))
            rows = dataset.to_table(columns=list(dict.fromkeys(from_columns.values())))
            return physical, columns.names, rows.select(list(from_columns.values())).rename_columns(list(from_columns))
        wanted = dataset.schema.names if columns is None else list(columns)
        return physical, wanted, dataset.to_table(columns=[name for name in wanted if name in dataset.schema.names])

    try:
        physical, wanted, rows = read_again(store, f"{directory}/", read)
    except (ValueError, RustPanic) as error:
        raise _unreadable(directory, sst, error) from error
    if sst.physical_rows is not None and physical != sst.physical_rows:
        raise _short(directory, sst, physical)
    for place, name in enumerate(wanted):
        if name not in rows.column_names:
            rows = rows.add_column(place, name, pa.nulls(rows.num_rows))
    return rows.replace_schema_metadata(None)


def sst_batches(
    store: ObjectStore, region_id: UUID, sst: SsTable, schema: pa.Schema, rows: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """Yield the SST's rows without tombstones, in order of arrival, in batches of `schema` (the base schema).

    Columns missing in the SST are null. `rows`: the row schema with field ids (`Shape.rows`), which finds renamed
    columns. Memory holds about _READ_BUFFER bytes and a few batches, not the SST. Raises as `read_sst` before the first
    batch; Corrupt after the last one if rows are missing.
    """
    directory, count = sst_key(region_id, sst.path), 0
    scan = _Scan(store, directory, rows, _rows_at_once(sst))
    try:
        while (read := read_again(store, f"{directory}/", scan.following)) is not None:
            count += read.num_rows
            names = scan.columns
            deletes = read.column(names[TOMBSTONE])
            batch = read.filter(pc.invert(deletes)) if pc.any(deletes).as_py() else read
            columns = [batch.column(names[f.name]) if f.name in names else pa.nulls(len(batch), f.type) for f in schema]
            yield pa.RecordBatch.from_arrays(columns, names=schema.names).cast(schema)
    except ValueError as error:
        raise _unreadable(directory, sst, error) from error
    if sst.physical_rows is not None and count != sst.physical_rows:
        raise _short(directory, sst, count)


class _Scan:
    """The batches of one SST, in order. After a failed read, a new scan begins with the batch that failed."""

    def __init__(self, store: ObjectStore, directory: str, rows: pa.Schema, batch_size: int) -> None:
        self._store, self._directory, self._rows, self._batch_size = store, directory, rows, batch_size
        self._batches: Iterator[pa.RecordBatch] | None = None
        self._done = 0
        self.columns: dict[str, str] = {}
        """Name in the table -> name in the SST, of the columns that the SST has."""

    def following(self) -> pa.RecordBatch | None:
        """Return the next batch; None after the last.

        Raises ValueError, OSError of Lance; the call may then be repeated.
        """
        if self._batches is None:
            self._batches = self._opened()
        try:
            read = next(self._batches, None)
        except BaseException:
            self._batches = None
            raise
        self._done += 0 if read is None else read.num_rows
        return read

    def _opened(self) -> Iterator[pa.RecordBatch]:
        dataset = lance.dataset(self._store.url(self._directory), storage_options=self._store.storage_options)
        self.columns = sources(self._rows, field_ids(self._rows), dataset.schema, column_ids(dataset))
        scanner = dataset.scanner(
            columns=list(dict.fromkeys(self.columns.values())),
            offset=self._done or None,
            scan_in_order=True,
            batch_size=self._batch_size,
            batch_readahead=_READ_AHEAD,
            io_buffer_size=_READ_BUFFER,
        )
        return iter(scanner.to_batches())


def _rows_at_once(sst: SsTable) -> int:
    """Return the rows in a batch of _BATCH_BYTES, by the SST's size in the manifest."""
    rows, size = sst.physical_rows or 1, sst.in_memory_bytes or 0
    return max(1, min(_BATCH_ROWS, rows * _BATCH_BYTES // max(size, 1)))


def _unreadable(directory: str, sst: SsTable, error: Exception) -> Corrupt:
    return Corrupt(
        f"{directory}: published as generation {sst.generation}, cannot be read ({first_line(error)}); "
        "restore the directory from a backup"
    )


def _short(directory: str, sst: SsTable, rows: int) -> Corrupt:
    return Corrupt(
        f"{directory}: holds {rows} rows, the manifest says {sst.physical_rows}; restore the directory from a backup"
    )
