"""Produce the rows of a scan as they are consumed.

Until its end a stream holds the memtables and loaded SSTs of its view in memory, and the version of the base table,
whose files are opened one after another. Flushes, commits and collections change none of these; a writer never waits
for a reader. If maintenance removes a base version while it is read, the stream ends with Unavailable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import pyarrow as pa

from memwal.flush import BaseTable
from memwal.ingest.engine.api.results import RowStream
from memwal.ingest.engine.read.merged import ROWS_PER_STEP, MergedView
from memwal.ingest.errors import Unavailable
from memwal.wal.panics import RustPanic, panics_as_errors


def batches_of(view: MergedView, schema: pa.Schema, filter: str | None, limit: int | None) -> Iterator[pa.RecordBatch]:
    """Yield at most `limit` visible rows of `view` that pass `filter`, newest levels first; no batch is empty.

    `schema`: of the wanted columns; batches have at most ROWS_PER_STEP rows.
    """
    if limit == 0:
        return
    for rows in view.visible_rows(schema.names, filter, limit):
        part = rows if limit is None else rows.slice(0, limit)
        limit = None if limit is None else limit - part.num_rows
        alike = pa.Table.from_arrays(part.select(schema.names).columns, schema=schema)
        yield from (batch for batch in alike.to_batches(ROWS_PER_STEP) if batch.num_rows)
        if limit == 0:
            return


def streamed(
    schema: pa.Schema, batches: Iterator[pa.RecordBatch], explain: Callable[[Exception], BaseException]
) -> RowStream:
    """Return `batches` as a result. The first batch is read here, while the read can still be repeated.

    `explain`: returns or raises the meaning of an error in a later batch, when the read cannot be repeated.
    """
    first = next(batches, None)
    return RowStream(schema, iter(()) if first is None else _rest(first, batches, explain))


class Checks(Protocol):
    """Explains a failed read of the base table; implemented by `read.reader.Reader`."""

    def ask_storage(self) -> None: ...

    def raise_filter_error(self, filter: str | None) -> None: ...


def after_first_batch(base: BaseTable, filter: str | None, checks: Checks, error: Exception) -> Exception:
    """Return or raise the meaning of `error` for a stream that reads `base` and has already returned rows."""
    checks.ask_storage()
    checks.raise_filter_error(filter)
    if base.is_kept():
        return error
    text = f"{base.uri}: version {base.version} was removed while it was read; read again, and take the rows faster"
    return Unavailable(text)


def _rest(
    first: pa.RecordBatch, batches: Iterator[pa.RecordBatch], explain: Callable[[Exception], BaseException]
) -> Iterator[pa.RecordBatch]:
    yield first
    del first
    try:
        with panics_as_errors:
            yield from batches
    except (pa.ArrowInvalid, OSError, RustPanic) as error:
        raise explain(error) from error
