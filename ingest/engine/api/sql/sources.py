"""Provide the rows of a table to DataFusion while a query runs.

DataFusion requests rows in threads of its pool, which may be few, and which a scan may need too (memtables evaluate
filters with DataFusion). Therefore no thread of the pool waits for rows: another thread reads the scan (`Handover`),
and if no rows have arrived yet, DataFusion gets a batch without rows and does other work.
"""

from __future__ import annotations

import ctypes
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, Generic, TypeVar

import pyarrow as pa
import pyarrow.dataset

from memwal.ingest.errors import Internal, Invalid
from memwal.ingest.threads import Worker
from memwal.memtable.filter.predicate import with_null_fields

T = TypeVar("T")

CLOSED = "the result was closed; make the read again"
PATIENCE = 0.02
"""Seconds that a thread of DataFusion waits for rows."""
AHEAD = 2
"""Batches of a scan that are read before DataFusion takes them."""
IN_MEMORY = 64 << 20
"""Bytes of a table's rows kept in memory if a query reads them several times; larger rows go to a file."""
ROWS_PER_BATCH = 1 << 16


class Provider(pyarrow.dataset.Dataset):  # type: ignore[misc]  # pyarrow publishes no types
    """A table of a session: DataFusion accepts subclasses of pyarrow's Dataset as a TableProvider.

    `source`: set before the query runs.
    """

    def __init__(self, schema: pa.Schema) -> None:
        # Not super().__init__: pyarrow forbids constructing a Dataset, and nothing of it is used.
        self._schema = schema
        self.source: Source | None = None

    @property
    def schema(self) -> pa.Schema:
        return self._schema

    def get_fragments(self, filter: Any = None) -> list[Provider]:
        del filter
        return [self]

    def scanner(self, *_: Any, columns: Sequence[str] | None = None, filter: Any = None, **__: Any) -> SimpleNamespace:
        """Return the part of a Scanner that DataFusion uses."""
        if filter is not None:
            # A pyarrow expression would mean something else: NULL NOT IN (1) is true, NaN > 1 is false.
            raise Internal(f"DataFusion hands a condition to a scan: {filter}")
        names = self._schema.names if columns is None else columns
        projected = pa.schema([self._schema.field(name) for name in names])
        return SimpleNamespace(projected_schema=projected, to_batches=lambda: self._read(names))

    def _read(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        if self.source is None:
            raise Internal("a query read a table that is not among its scans")
        return self.source.read(columns)


class Interrupted(BaseException):
    """Ends the thread of a closed handover. No other thread sees it."""


class Handover(Generic[T]):
    """Items that a separate thread produces, at most `ahead` before they are taken.

    Thread safety. One thread takes; `close` from any thread, which makes a waiting `take` raise Invalid.
    Errors. `take` raises the iterator's error, after the items before it.
    """

    def __init__(self, name: str, items: Iterator[T], ahead: int, cancel: Callable[[], object] = lambda: None) -> None:
        """`cancel`: makes a waiting `next` of `items` return soon."""
        self._items, self._ahead, self._cancel = items, ahead, cancel
        self._ready: deque[T] = deque()
        self._changed = threading.Condition()
        self._closed = self._ended = False
        self._failure: BaseException | None = None
        self._thread: int | None = None
        Worker(name, self._run)

    def take(self, within: float | None = None) -> T | None:
        """Return the next item; None if none arrives `within` these seconds. Raises: StopIteration after the last."""
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._ended or self._closed, within)
            if self._closed:
                raise Invalid(CLOSED)
            if self._ready:
                item = self._ready.popleft()
                self._changed.notify_all()
                return item
            if self._ended:
                raise self._failure or StopIteration
            return None

    def close(self, *, interrupt: bool = False) -> None:
        """Release the items; the thread ends as soon as it can. Returns at once.

        `interrupt`: end a computation of DataFusion. DataFusion checks its thread for exceptions once a second, and
        cannot be cancelled from outside in any other way.
        """
        with self._changed:
            closed, self._closed = self._closed, True
            self._ready.clear()
            self._changed.notify_all()
            if interrupt and not closed and self._thread is not None:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), ctypes.py_object(Interrupted))
        self._cancel()

    # ---- in its thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        with suppress(Interrupted):  # one that was sent while the thread ended
            try:
                self._produce()
            except BaseException as error:  # noqa: BLE001 - raised in the thread that takes
                self._failure = error
            try:
                getattr(self._items, "close", lambda: None)()  # if it is a generator
            finally:
                del self._items
                with self._changed:
                    self._ended = True
                    self._changed.notify_all()

    def _produce(self) -> None:
        try:
            self._thread = threading.get_ident()
            for item in self._items:
                with self._changed:
                    self._ready.append(item)
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: self._closed or len(self._ready) < self._ahead)
                    if self._closed:
                        return
                del item
        finally:
            with self._changed:
                self._thread = None


class Source:
    """A scan that is read once, as it arrives. `failure`: the first error, because DataFusion changes errors."""

    def __init__(self, schema: pa.Schema, batches: Iterator[pa.RecordBatch], cancel: Callable[[], object]) -> None:
        """`batches`: have at least the columns of `schema`. `cancel`: as for Handover."""
        self.failure: BaseException | None = None
        self._schema = schema
        self._handover = Handover("sql-scan", batches, AHEAD, cancel)
        self._reading = False

    def read(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Return the rows with `columns`; batches without rows if none have arrived yet."""
        if self._reading:
            raise self._failed(Internal("a query read the rows of a table twice"))
        self._reading = True
        return (alike(batch, self._schema, columns) for batch in iter(self._next, None))

    def close(self) -> None:
        """Release the rows; any thread."""
        self._handover.close()

    def _next(self) -> pa.RecordBatch | None:
        """Return a batch, one without rows if none has arrived yet; None after the last."""
        try:
            batch = self._handover.take(PATIENCE)
        except StopIteration:
            return None
        except BaseException as error:  # noqa: BLE001 - DataFusion would change it
            raise self._failed(error) from None
        return pa.RecordBatch.from_pylist([], self._schema) if batch is None else batch

    def _failed(self, error: BaseException) -> BaseException:
        self.failure = self.failure or error
        return error


class Kept(Source):
    """A scan that is kept until the end of the query, for a query that reads it several times.

    Thread safety. Any number of threads read.
    """

    def __init__(self, schema: pa.Schema, batches: Iterator[pa.RecordBatch], cancel: Callable[[], object]) -> None:
        super().__init__(schema, batches, cancel)
        self._lock = threading.Lock()
        self._file = tempfile.SpooledTemporaryFile(IN_MEMORY, prefix="memwal-sql-")  # noqa: SIM115 - closed in `close`
        self._places = list[int]()
        self._ended = False

    def read(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        read = 0
        while True:
            with self._lock:
                batch = None
                if read == len(self._places) and not self._ended:
                    batch = self._keep()
                if read < len(self._places):
                    self._file.seek(self._places[read])
                    batch, read = pa.ipc.open_stream(self._file).read_next_batch(), read + 1
                if batch is None:
                    return
            yield alike(batch, self._schema, columns)

    def close(self) -> None:
        super().close()
        with self._lock:
            self._places, self._ended = [], True
            self._file.close()

    def _keep(self) -> pa.RecordBatch | None:
        """Append the next batch to the file as a separate stream, because its dictionaries may differ."""
        batch = self._next()
        self._ended = batch is None
        if batch is not None and batch.num_rows:
            self._file.seek(0, 2)
            self._places.append(self._file.tell())
            with pa.ipc.new_stream(self._file, batch.schema) as writer:
                writer.write_batch(batch)
        return batch


def counted(rows: int) -> Iterator[pa.RecordBatch]:
    """Yield `rows` rows for a query that reads no column of a table."""
    for at in range(0, rows, ROWS_PER_BATCH):
        yield pa.RecordBatch.from_arrays([pa.nulls(min(ROWS_PER_BATCH, rows - at))], names=["row"])


def alike(batch: pa.RecordBatch, schema: pa.Schema, columns: Sequence[str]) -> pa.RecordBatch:
    """Return the columns of a batch with DataFusion's schema, without the metadata of batches.

    Fields of null structs become null, as DataFusion reads them.
    """
    if not columns:
        return batch.select([])
    fields = [schema.field(name) for name in columns]
    arrays = [with_null_fields(batch.column(name)) for name in columns]
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))
