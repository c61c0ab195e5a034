"""The rows of a table, as DataFusion takes them while a query runs.

DataFusion asks for them in threads of its pool, which may be few, and which a scan may need too (memtables evaluate
filters by DataFusion). So no thread of the pool waits for rows: a scan is read by a thread of ours, and where no rows
have come yet, DataFusion gets a batch without rows and does something else.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.dataset

from memwal.ingest.api.sql.handover import Handover
from memwal.ingest.errors import Internal
from memwal.memtable.filter.struct_nulls import with_null_fields

PATIENCE = 0.02
"""Seconds that a thread of DataFusion waits for rows."""
AHEAD = 2
"""Batches of a scan that are read before DataFusion takes them."""
IN_MEMORY = 64 << 20
"""Bytes of the rows of a table that are kept in memory if a query reads them several times; more are in a file."""
ROWS_PER_BATCH = 8192


class Source(Protocol):
    """The rows of one table in one query."""

    @property
    def failure(self) -> BaseException | None:
        """The first error; DataFusion changes those that it is given."""

    def read(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield the rows with `columns`; batches without rows if none have come yet."""

    def close(self) -> None:
        """Let the rows go; any thread."""


class Provider(pyarrow.dataset.Dataset):  # type: ignore[misc]  # pyarrow publishes no types
    """A table of a session: DataFusion takes subclasses of pyarrow's Dataset as what it calls a TableProvider."""

    def __init__(self, schema: pa.Schema) -> None:
        # Not super().__init__: pyarrow forbids to construct a Dataset, and nothing of it is used.
        self._schema = schema
        self.source: Source | None = None

    @property
    def schema(self) -> pa.Schema:
        return self._schema

    def get_fragments(self, filter: Any = None) -> list[_Fragment]:
        del filter
        return [_Fragment(self)]

    def scanner(self, columns: Sequence[str] | None = None, filter: Any = None, **_: Any) -> _Scanner:
        if filter is not None:
            # As pyarrow's expression it would mean something else: NULL NOT IN (1) is true, NaN > 1 is false.
            raise Internal(f"DataFusion hands a condition to a scan: {filter}")
        return _Scanner(self, self._schema.names if columns is None else columns)


class _Fragment:
    def __init__(self, provider: Provider) -> None:
        self._provider = provider

    def scanner(self, schema: pa.Schema, columns: Sequence[str] | None = None, **options: Any) -> _Scanner:
        del schema
        return self._provider.scanner(columns, options.get("filter"))


class _Scanner:
    def __init__(self, provider: Provider, columns: Sequence[str]) -> None:
        self._provider, self._columns = provider, columns
        self.projected_schema = pa.schema([provider.schema.field(name) for name in columns])

    def to_batches(self) -> Iterator[pa.RecordBatch]:
        source = self._provider.source
        if source is None:
            raise Internal("a query read a table that is not among its scans")
        return source.read(self._columns)


class Once:
    """A scan that is read once, as it comes."""

    def __init__(self, schema: pa.Schema, batches: Iterator[pa.RecordBatch], cancel: Callable[[], object]) -> None:
        """`batches`: have at least the columns of `schema`. `cancel`: as for Handover."""
        self.failure: BaseException | None = None
        self._schema = schema
        self._handover = Handover("sql-scan", batches, AHEAD, cancel)
        self._reading = False

    def read(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        if self._reading:
            raise self._failed(Internal("a query read the rows of a table twice"))
        self._reading = True
        return self._batches(columns)

    def _batches(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        while (batch := self.next()) is not None:
            yield alike(batch, self._schema, columns)

    def next(self) -> pa.RecordBatch | None:
        """Return a batch, one without rows if none has come yet; None after the last."""
        try:
            batch = self._handover.take(PATIENCE)
        except StopIteration:
            return None
        except BaseException as error:  # noqa: BLE001 - DataFusion would change it
            raise self._failed(error) from None
        return empty(self._schema) if batch is None else batch

    def close(self) -> None:
        self._handover.close()

    def _failed(self, error: BaseException) -> BaseException:
        self.failure = self.failure or error
        return error


class Kept:
    """A scan that is read once and kept until the end of the query, for a query that reads it several times.

    Thread safety. Any number of threads read.
    """

    def __init__(self, rows: Once, schema: pa.Schema) -> None:
        self._rows, self._schema = rows, schema
        self._lock = threading.Lock()
        self._batches: list[pa.RecordBatch | tuple[int, int]] = []
        self._bytes = self._written = 0
        self._file: Any = None
        self._ended = False

    @property
    def failure(self) -> BaseException | None:
        return self._rows.failure

    def read(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        at = 0
        while True:
            with self._lock:
                if at == len(self._batches) and not self._ended:
                    self._keep(self._rows.next())
                if at == len(self._batches):
                    if self._ended:
                        return
                    batch = None
                else:
                    batch = self._kept(self._batches[at])
                    at += 1
            yield alike(empty(self._schema) if batch is None else batch, self._schema, columns)

    def close(self) -> None:
        self._rows.close()
        with self._lock:
            self._batches, self._ended = [], True
            if self._file is not None:
                self._file.close()

    def _keep(self, batch: pa.RecordBatch | None) -> None:
        if batch is None:
            self._ended = True
        elif batch.num_rows:
            self._bytes += batch.nbytes
            self._batches.append(batch if self._bytes <= IN_MEMORY else self._write(batch))

    def _write(self, batch: pa.RecordBatch) -> tuple[int, int]:
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix="memwal-sql-")  # noqa: SIM115 - closed with the query
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as writer:  # a stream each, for the sake of dictionaries
            writer.write_batch(batch)
        place = (self._written, self._file.write(sink.getvalue()))
        self._file.flush()
        self._written += place[1]
        return place

    def _kept(self, batch: pa.RecordBatch | tuple[int, int]) -> pa.RecordBatch:
        if isinstance(batch, pa.RecordBatch):
            return batch
        at, size = batch
        return pa.ipc.open_stream(os.pread(self._file.fileno(), size, at)).read_next_batch()


class Counted:
    """Rows of which a query reads no column: their number."""

    def __init__(self, rows: int) -> None:
        self.failure: BaseException | None = None
        self._rows = rows

    def read(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        del columns
        for at in range(0, self._rows, ROWS_PER_BATCH):
            nulls = pa.nulls(min(ROWS_PER_BATCH, self._rows - at))
            yield pa.RecordBatch.from_arrays([nulls], names=["row"]).select([])

    def close(self) -> None:
        self._rows = 0


def alike(batch: pa.RecordBatch, schema: pa.Schema, columns: Sequence[str]) -> pa.RecordBatch:
    """Return the columns of a batch as DataFusion was told of them, without the metadata that batches have, and as it
    reads them: fields of null structs are null.
    """
    if not columns:
        return batch.select([])
    fields = [schema.field(name) for name in columns]
    arrays = [with_null_fields(batch.column(name)) for name in columns]
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))


def empty(schema: pa.Schema) -> pa.RecordBatch:
    """Return a batch without rows."""
    return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in schema], schema=schema)
