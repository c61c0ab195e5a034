"""Write the data file of an SST: the newest rows of a frozen memtable, passed to Lance without needless copies.

If no row was superseded, nothing is copied. Otherwise batches that mix superseded and current rows are copied, one at a
time: a flush needs the memory of one batch and of Lance's pages, not of all rows again. Large batches are passed in
slices (SLICE_BYTES): a slice is still in the processor's cache when Lance writes it, which halves the time. Columns
that Lance cannot import as slices (`wal.codec.lance_arrays`) are copied slice by slice.

On a local disk the file is synced while it grows, so that `sync_tree` at the end of the flush, which alone makes it
durable, has little left to write.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor
from threading import Event
from typing import Any

import lance
import pyarrow as pa

from memwal.flush.base.fsync import sync_files
from memwal.flush.sst.file_options import FileOptions
from memwal.memtable import Snapshot
from memwal.memtable.arrays import Mask
from memwal.wal import ObjectStore
from memwal.wal.codec.lance_arrays import delicate_columns, importable

SLICE_BYTES = 4 << 20
SYNC_EVERY = 0.003
"""Seconds. A flush of 51 MB takes 62 ms unsynced; synced every 4 ms 64, every 10 ms 68, only at its end 80."""

_ROWS_OF_A_FILE, _BYTES_OF_A_FILE = 2**31 - 1, 2**62
"""More than any memtable has, because an SST has exactly one fragment. Lance keeps 32 bits of the row limit."""


def write_data(
    snapshot: Snapshot,
    mask: Mask,
    directory: str,
    store: ObjectStore,
    options: FileOptions,
    storage_version: str | None,
    beside: Executor,
) -> tuple[int, int]:
    """Write the rows of `mask`, at least one, as version 1 of the dataset at `directory`, in one fragment.

    Returns the number of rows and their bytes. `storage_version`: the base table's. `beside`: one thread for syncing.
    Raises OSError; what Lance raises for rows that it cannot write.
    """
    handed = _HandedRows(snapshot, mask, options.schema(snapshot.schema))
    version: Any = options.version(storage_version)  # pylance's type is a list of literals
    done = Event()
    syncing = beside.submit(_sync_until, done, f"{directory}/data")
    try:
        lance.write_dataset(
            handed.reader(),
            directory,
            schema=handed.schema,
            mode="create",
            max_rows_per_file=_ROWS_OF_A_FILE,
            max_bytes_per_file=_BYTES_OF_A_FILE,
            data_cache_bytes=options.page_size * len(handed.schema),
            data_storage_version=version,
            storage_options=store.storage_options,
        )
    finally:
        done.set()
    syncing.result()  # raise its error: the system reports a write error only to the first fsync
    return handed.rows, handed.bytes


def _sync_until(done: Event, path: str) -> None:
    while not done.wait(SYNC_EVERY):
        sync_files(path)


class _HandedRows:
    """Passes rows to Lance and counts them: `rows`, `bytes`. Thread safety. One thread at a time."""

    def __init__(self, snapshot: Snapshot, mask: Mask, schema: pa.Schema) -> None:
        self.schema, self.rows, self.bytes = schema, 0, 0
        self._snapshot, self._mask, self._delicate = snapshot, mask, delicate_columns(schema)

    def reader(self) -> pa.RecordBatchReader:
        """Return a reader of the rows; it can be read once."""
        if self._delicate or not self._mask.all():
            return pa.RecordBatchReader.from_batches(self.schema, self._batches())
        # Arrow's own reader does not need the interpreter, which computes the bloom filter meanwhile.
        rows = pa.Table.from_batches(self._snapshot.batches(self._mask), schema=self._snapshot.schema)
        self.rows, self.bytes = rows.num_rows, rows.nbytes
        rows = pa.Table.from_arrays(rows.columns, schema=self.schema)
        return rows.to_reader(max_chunksize=_slice_rows(self.rows, self.bytes))

    def _batches(self) -> Iterator[pa.RecordBatch]:
        for stored in self._snapshot.batches(self._mask):
            rows, size = stored.num_rows, stored.nbytes
            batch = pa.RecordBatch.from_arrays(stored.columns, schema=self.schema)
            self.rows, self.bytes, step = self.rows + rows, self.bytes + size, _slice_rows(rows, size)
            for start in range(0, rows, step):
                yield importable(batch.slice(start, step), self._delicate)


def _slice_rows(rows: int, size: int) -> int:
    return max(1, rows * SLICE_BYTES // max(size, 1))
