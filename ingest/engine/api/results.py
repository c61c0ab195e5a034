"""Define the result of a read of many rows, and convert its columns to Python values.

The result is a stream of Arrow batches, which are read as the caller consumes them. Arrow and Lance hold times of any
year, and nanoseconds; `datetime` has the years 1 to 9999 and microseconds. A time outside this range becomes text: it
must not end a command that prints rows, or a task that writes a dead letter.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Self

import numpy as np
import pyarrow as pa

from memwal.ingest.errors import Invalid, MemWalError, classify

_CLOSED = "the result was closed; make the read again"
_READ = "the rows of this result were read already, and it gives them once; make the read again"


# A pyarrow.RecordBatchReader returns an empty table on a second read, cannot be closed while another thread waits in
# it, and loses the kind of an error on its way through C.
class RowStream:
    """The rows of one read, in the manner of `pyarrow.RecordBatchReader`: batch by batch, each row once.

    Rows are read while the caller consumes them, so memory holds a few batches, however large the answer. All rows are
    of the moment of the read; `close`, the last row, an error, or dropping the result releases that moment.
    Any Arrow library accepts a result directly (`__arrow_c_stream__`): DuckDB, Polars, DataFusion, pyarrow.
    Thread safety. One thread at a time; `close` from any thread, also while another one reads.
    Errors. Only `ingest.errors` kinds, also from the iteration; an incomplete answer always raises. Through
    `__arrow_c_stream__` the other library raises its own error with the same text.
    """

    schema: pa.Schema

    def __init__(
        self, schema: pa.Schema, batches: Iterator[pa.RecordBatch], cancel: Callable[[], object] | None = None
    ) -> None:
        """`batches`: of `schema`; dropping the iterator releases its resources.

        `cancel`: makes a `next` that waits in another thread return soon.
        """
        self.schema = schema
        self._batches: Iterator[pa.RecordBatch] | None = batches
        self._cancel, self._closing = cancel, False
        self._reading = threading.Lock()
        self._failure: MemWalError | None = None

    # ---- as pyarrow.RecordBatchReader ----------------------------------------------------------------------------

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        return self

    def __next__(self) -> pa.RecordBatch:
        try:
            with self._reading:
                return self._next()
        finally:
            if self._closing:
                self.close()

    def read_next_batch(self) -> pa.RecordBatch:
        """Return the next batch. Raises: StopIteration after the last one."""
        return next(self)

    def read_all(self) -> pa.Table:
        """Return all remaining rows as a table in memory. Raises also: Invalid if every row was read before."""
        self._refuse_if_read()
        return pa.Table.from_batches(list(self), schema=self.schema)

    def read_pandas(self, **options: Any) -> Any:
        """As `to_pandas`; `options`: those of `pyarrow.Table.to_pandas`."""
        _expect_installed("pandas")
        return self.read_all().to_pandas(**options)

    def close(self) -> None:
        """Release the moment. Returns at once, from any thread; another thread that waits for rows gets Invalid."""
        self._closing = True
        cancel, self._cancel = self._cancel, None
        if cancel is not None:
            cancel()
        if self._reading.acquire(blocking=False):  # otherwise the reading thread ends it
            try:
                if self._batches is not None:
                    self._end(Invalid(_CLOSED))
            finally:
                self._reading.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        """Stream the rows to another Arrow library.

        `requested_schema`: the wanted types, used if Arrow can cast to them. Raises: Invalid if every row was read
        before.
        """
        return self.to_reader().__arrow_c_stream__(requested_schema)

    # ---- other forms ---------------------------------------------------------------------------------------------

    def to_reader(self) -> pa.RecordBatchReader:
        """Return the rows as a `pyarrow.RecordBatchReader`, which releases the moment when it is dropped."""
        self._refuse_if_read()
        return pa.RecordBatchReader.from_batches(self.schema, _HandedOver(self))

    def to_table(self) -> pa.Table:
        """As `read_all`."""
        return self.read_all()

    def to_pandas(self) -> Any:
        """Return all remaining rows as a pandas frame. Raises: Invalid if pandas is not installed."""
        return self.read_pandas()

    def to_polars(self) -> Any:
        """Return all remaining rows as a Polars frame. Raises: Invalid if Polars is not installed."""
        return _expect_installed("polars").from_arrow(self.read_all())

    def __repr__(self) -> str:
        columns = ", ".join(f"{field.name}: {field.type}" for field in self.schema)
        return f"<memwal.RowStream {columns}>"

    # ---- inside --------------------------------------------------------------------------------------------------

    def _next(self) -> pa.RecordBatch:
        if self._batches is None:
            if self._failure is not None:
                raise self._failure.with_traceback(None)
            raise StopIteration
        try:
            return next(self._batches)
        except StopIteration:
            self._end(None)
            raise
        except BaseException as error:
            # Imported only here: it imports Lance, and a daemon starts without pandas.
            from memwal.wal.panics import as_exception, is_panic

            if not isinstance(error, Exception) and not is_panic(error):  # an interrupt
                self._end(Invalid(_CLOSED))
                raise
            failure = Invalid(_CLOSED) if self._closing else classify(as_exception(error))
            # Keep a copy: the error's traceback refers to the frames of the read, and would keep its moment.
            self._end(type(failure)(failure.message, failure.details))
            raise failure from error

    def _end(self, failure: MemWalError | None) -> None:
        """Release the rows; later reads raise `failure`, or return no more rows for None."""
        batches, self._batches, self._failure = self._batches, None, failure
        self._cancel = None
        close = getattr(batches, "close", None)  # if it is a generator
        if close is not None:
            close()

    def _refuse_if_read(self) -> None:
        # pyarrow's reader returns an empty table here, which looks like an answer without rows.
        if self._batches is None:
            raise self._failure.with_traceback(None) if self._failure is not None else Invalid(_READ)

    def __del__(self) -> None:
        if hasattr(self, "_failure"):  # otherwise __init__ failed
            with suppress(Exception):
                self.close()


def gathered(rows: pa.Table) -> RowStream:
    """Return rows that are in memory as a result."""
    return RowStream(rows.schema, iter(rows.to_batches()))


def trimmed(rows: RowStream, columns: list[str] | None, skipped: int) -> RowStream:
    """Return `rows` with `columns` only (None: all), without the first `skipped`."""
    if not skipped and columns in (None, rows.schema.names):
        return rows
    names = rows.schema.names if columns is None else list(dict.fromkeys(columns))
    schema = pa.schema([rows.schema.field(name) for name in names], rows.schema.metadata)

    def batches(left: int) -> Iterator[pa.RecordBatch]:
        with rows:
            for batch in rows:
                part = batch.slice(left).select(names)
                left = max(0, left - batch.num_rows)
                if part.num_rows:
                    yield part

    return RowStream(schema, batches(skipped), rows.close)


class _HandedOver:
    """The rows for another library; closes the result when that library drops them.

    Not a generator: one that was never started would not detect the drop.
    """

    def __init__(self, rows: RowStream) -> None:
        self._rows = rows

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        return self

    def __next__(self) -> pa.RecordBatch:
        return next(self._rows)

    def __del__(self) -> None:
        self._rows.close()


def _expect_installed(library: str) -> Any:
    from importlib import import_module

    try:
        return import_module(library)
    except ModuleNotFoundError as error:
        if error.name != library:
            raise
        raise Invalid(f"to_{library}: {library} is not installed; pip install {library}") from None


def python_values(column: pa.ChunkedArray | pa.Array) -> list[Any]:
    """Return the values of a column; if Python cannot hold one of its times, all are ISO 8601 text (UTC if zoned).

    Raises: UnicodeDecodeError for text that is not UTF-8.
    """
    try:
        return list(column.to_pylist())
    except UnicodeDecodeError:
        raise
    except (ValueError, OverflowError):
        chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
        return [value for chunk in chunks for value in _texts(chunk)]


def python_rows(rows: pa.Table) -> list[dict[str, Any]]:
    """Return `rows` as dicts of `python_values`."""
    columns = [python_values(column) for column in rows.columns]
    return [dict(zip(rows.column_names, values, strict=True)) for values in zip(*columns, strict=True)]


def _texts(values: pa.Array) -> list[str | None]:
    kind = values.type
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        unit = "D" if pa.types.is_date32(kind) else "ms" if pa.types.is_date64(kind) else kind.unit
        numbers = values.view(pa.int32() if pa.types.is_date32(kind) else pa.int64())
        times = numbers.fill_null(0).to_numpy(zero_copy_only=False).astype(f"datetime64[{unit}]")
        texts = np.datetime_as_string(times).tolist()
        zone = "Z" if getattr(kind, "tz", None) is not None else ""
        valid = values.is_valid().to_pylist()
        return [f"{text}{zone}" if given else None for text, given in zip(texts, valid, strict=True)]
    # A list or struct with a time that Python cannot hold, or a duration that is too long: the text is Arrow's.
    alone = (values.slice(row, 1) for row in range(len(values)))
    return [" ".join(value.to_string().split())[2:-2] if value[0].is_valid else None for value in alone]
