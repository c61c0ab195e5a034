"""Writing and reading one SST: an immutable Lance dataset with the newest row of each key of one memtable.

    {table}/_mem_wal/{region}/{8 hex}_gen_{generation}/
        _versions/  _transactions/  data/{one file}        a Lance dataset of one fragment, in the row schema
        _indices/{uuid}/                                   flush.sst.indexes; each is one more version
        bloom_filter.bin                                   flush.sst.bloom
        _pk_index/page_data.lance, page_lookup.lance       flush.sst.key_sidecar

 1. Data (flush.sst.data); beside it, in a thread, bloom filter and sorted keys are computed, where there is a key.
 2. The base table's field ids, put into the manifest.
 3. Bloom filter, key sidecar; neither where the table has no key (Lance's readers take no such table).
 4. Indexes. They alone may be missing.
 5. Fsync of everything; read back and compare the counts.
 *Crash anywhere: a directory that nothing refers to.*

Superseded rows are left out instead of being masked by a deletion vector: no reader can see them either way,
and row offsets, sidecar and row count are then the same thing. Tombstones are rows like any other. Nothing
here makes an SST visible; see flush.sst.flusher.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from uuid import UUID

import lance
import pyarrow as pa
import pyarrow.compute as pc

from memwal.flush.base.field_ids import column_ids
from memwal.flush.base.fsync import sync_tree
from memwal.flush.base.manifest import renumber_fields
from memwal.flush.base.open import read_again
from memwal.flush.errors import SstInvalid
from memwal.flush.sst.bloom import BLOOM_NAME, bloom_bytes
from memwal.flush.sst.data import write_data
from memwal.flush.sst.file_options import FileOptions
from memwal.flush.sst.indexes import SstIndexes
from memwal.flush.sst.key_sidecar import page_data, sidecar_rows, write_key_sidecar
from memwal.memtable import TOMBSTONE, Snapshot
from memwal.wal import Corrupt, Ids, ObjectStore, PutOutcome, SsTable, StoreUnavailable, WalError
from memwal.wal.codec.columns import field_ids, sources
from memwal.wal.errors import first_line
from memwal.wal.layout import sst_key, sst_name
from memwal.wal.panics import RustPanic, panics_as_errors

_BATCH_ROWS, _BATCH_BYTES = 8192, 4 << 20
_NOT_WRITTEN = (pa.ArrowException, ValueError, TypeError, RuntimeError)
"""What Lance raises for rows that it cannot write: of its own, they are fine by our checks. A RustPanic is one."""
_READ_AHEAD, _READ_BUFFER = 4, 64 << 20
"""Batches, and bytes of files, that Lance reads ahead of who takes them; of its own accord 16 batches and 2 GiB."""


def write_sst(
    store: ObjectStore,
    region_id: UUID,
    snapshot: Snapshot,
    *,
    generation: int,
    key: Sequence[str],
    storage_version: str | None,
    ids: Ids,
    field_ids: Sequence[int] | None = None,
    files: FileOptions | None = None,
    indexes: SstIndexes | None = None,
    name: str | None = None,
) -> SsTable:
    """Write and verify the SST of a frozen memtable under a fresh random name; nothing refers to it yet.

    `name`: that of its directory, never used before; None: one is drawn. `snapshot` holds at least one row. `key`: ()
    where there is none. `storage_version`: the base table's ("2.1").
    `field_ids`: those of the row schema (`BaseTable.row_field_ids`), None where they count from 0 without a gap.
    `files`, `indexes`: None for the defaults, and for none. Thread safety: any thread. Durability. Survives a power cut
    once it returns. Raises SstInvalid where Lance cannot write it or what was written does not read back; OSError,
    StoreUnavailable, StoreRefused of storage.
    """
    sst = SsTable(generation, name or sst_name(ids.token(), generation))
    directory, options = sst_key(region_id, sst.path), files or FileOptions()
    url, mask = store.url(directory), snapshot.newest()
    try:
        with panics_as_errors, ThreadPoolExecutor(2, "memwal-flush") as beside:
            keys = _Keys(snapshot.keys(mask).select(list(key)), beside) if key else None
            rows, size = write_data(snapshot, mask, url, store, options, storage_version, beside)
            key_bytes = 0 if keys is None else keys.keys.nbytes
            sst = replace(sst, in_memory_bytes=size, physical_rows=rows, primary_key_bytes=key_bytes)
            if field_ids is not None:
                renumber_fields(store, directory, field_ids)
            if keys is not None:
                keys.write(store, region_id, sst)
        if indexes is not None:
            indexes.build(url, store.storage_options)
        sync_tree(url)
        verify(store, region_id, sst, keyed=bool(key))
    except _NOT_WRITTEN as error:
        discard(store, region_id, sst)
        raise SstInvalid(f"{directory}: cannot be written: {first_line(error)}; its rows stay in the log") from error
    except BaseException:
        discard(store, region_id, sst)
        raise
    return sst


class _Keys:
    """The parts of an SST that only a table with a key has, computed while its data is written."""

    def __init__(self, keys: pa.Table, beside: Executor) -> None:
        self.keys = keys
        self._bloom = beside.submit(bloom_bytes, keys)
        self._pages = beside.submit(page_data, keys, keys.column_names)

    def write(self, store: ObjectStore, region_id: UUID, sst: SsTable) -> None:
        _put_bloom(store, sst_key(region_id, sst.path, BLOOM_NAME), self._bloom.result())
        url, pages = store.url(sst_key(region_id, sst.path)), self._pages.result()
        write_key_sidecar(url, self.keys, self.keys.column_names, store.storage_options, pages=pages)


def discard(store: ObjectStore, region_id: UUID, sst: SsTable) -> bool:
    """Remove an SST that no manifest lists, nor can: its objects, and on a local disk its directories.

    False where storage did not let us; what is left is for the next attempt, or for the collector. A flush that is
    tried again writes another SST, and the leftovers would fill the disk that it waits for.
    """
    directory = f"{sst_key(region_id, sst.path)}/"  # with the slash: without it "…_gen_4" is a prefix of "…_gen_41"
    try:
        for key in store.list(directory):
            store.delete(key)
        store.remove_leftovers(directory)
    except (WalError, OSError):
        return False
    return True


def verify(store: ObjectStore, region_id: UUID, sst: SsTable, *, keyed: bool = True) -> None:
    """Check that data and, where the table has a key, bloom filter and sidecar exist and hold the rows the entry `sst`
    promises. Raises SstInvalid.
    """
    directory = sst_key(region_id, sst.path)
    try:
        with panics_as_errors:
            found = lance.dataset(store.url(directory), storage_options=store.storage_options)
            fragments = len(found.get_fragments())
            rows = found.to_table(columns=[TOMBSTONE]).num_rows  # read, not counted from the manifest
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
    """The SST's rows in order of arrival, tombstones included; `columns` None for the whole row schema.

    `columns`: names as the SST has them; or the table's row schema with field ids (`Shape.rows`), and columns that were
    renamed since the SST was written are found by their ids. Schema metadata is left out. SSTs of Lance's own writer,
    which hide superseded rows behind a deletion vector, are read too. A column that was added to the base table after
    the SST was written is null, of Arrow's null type, as Lance has it. Raises Corrupt where the SST is missing,
    unreadable or short of rows; StoreUnavailable, StoreRefused, OSError of storage.
    """
    directory = sst_key(region_id, sst.path)

    def read() -> tuple[int, list[str], pa.Table]:
        found = lance.dataset(store.url(directory), storage_options=store.storage_options)
        physical = sum(fragment.physical_rows for fragment in found.get_fragments())
        if isinstance(columns, pa.Schema):
            from_columns = sources(columns, field_ids(columns), found.schema, column_ids(found))
            rows = found.to_table(columns=list(dict.fromkeys(from_columns.values())))
            return physical, columns.names, rows.select(list(from_columns.values())).rename_columns(list(from_columns))
        wanted = found.schema.names if columns is None else list(columns)
        return physical, wanted, found.to_table(columns=[name for name in wanted if name in found.schema.names])

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
    """The SST's rows but tombstones in order of arrival, in batches of `schema` (base schema); columns that it lacks
    are null.

    `rows`: the row schema with field ids (`Shape.rows`), by which renamed columns are found. Holds about _READ_BUFFER
    and some batches in memory, not the SST. Raises as `read_sst`, before the first batch; Corrupt behind the last where
    rows are missing.
    """
    directory, count = sst_key(region_id, sst.path), 0
    scan = _Scan(store, directory, rows, _rows_at_once(sst))
    try:
        while (read := read_again(store, f"{directory}/", scan.following)) is not None:
            count += read.num_rows
            there = scan.columns
            deletes = read.column(there[TOMBSTONE])
            batch = read.filter(pc.invert(deletes)) if pc.any(deletes).as_py() else read
            columns = [batch.column(there[f.name]) if f.name in there else pa.nulls(len(batch), f.type) for f in schema]
            yield pa.RecordBatch.from_arrays(columns, names=schema.names).cast(schema)
    except ValueError as error:
        raise _unreadable(directory, sst, error) from error
    if sst.physical_rows is not None and count != sst.physical_rows:
        raise _short(directory, sst, count)


class _Scan:
    """The batches of one SST, in order; a batch that cannot be read is read again by a new scan that begins with it."""

    def __init__(self, store: ObjectStore, directory: str, rows: pa.Schema, batch_size: int) -> None:
        self._store, self._directory, self._rows, self._batch_size = store, directory, rows, batch_size
        self._batches: Iterator[pa.RecordBatch] | None = None
        self._done = 0
        self.columns: dict[str, str] = {}
        """Names in the SST of the columns that it has, by their names in the table."""

    def following(self) -> pa.RecordBatch | None:
        """The next batch, None behind the last. Raises ValueError, OSError of Lance; then it may be called again."""
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
        found = lance.dataset(self._store.url(self._directory), storage_options=self._store.storage_options)
        self.columns = sources(self._rows, field_ids(self._rows), found.schema, column_ids(found))
        scanner = found.scanner(
            columns=list(dict.fromkeys(self.columns.values())),
            offset=self._done or None,
            scan_in_order=True,
            batch_size=self._batch_size,
            batch_readahead=_READ_AHEAD,
            io_buffer_size=_READ_BUFFER,
        )
        return iter(scanner.to_batches())


def _rows_at_once(sst: SsTable) -> int:
    """Rows of a batch of _BATCH_BYTES, by what the manifest says of the SST."""
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


def _put_bloom(store: ObjectStore, key: str, data: bytes) -> None:
    """The directory's name is fresh and random, so the key is ours: another outcome than CREATED is storage's
    fault.
    """
    outcome = store.put_if_absent(key, data)
    if outcome is not PutOutcome.CREATED:
        raise StoreUnavailable(f"{key}: {outcome.value}; the SST was not published, flush again")
