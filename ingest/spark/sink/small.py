"""Write a small micro-batch in one task of one stage: a single function validates, orders and sends its rows.

`OneTask` reads all rows of the micro-batch and holds them until the last one is validated; this replaces the barrier of
a shuffle. The row behind the last one ends the micro-batch (`source.whole_input`). Then the task sorts the rows
as Spark would, and sends them. If they have more than `most` bytes, it sends nothing and returns `TOO_MANY`, and the
sink shuffles this micro-batch. This module does not import Spark.

The place of a row of a file has three columns, and the path is longer than most rows: it takes a quarter of the time of
a micro-batch of 100,000 rows. One number (`PART`) that contains the file's modification time and a hash of the rest
also distinguishes and orders parts of files. If that is insufficient (a row is refused, or parts with the same time
must be ordered), the task returns `PATHS_NEEDED`, and runs again with paths.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from memwal.ingest.errors import Invalid
from memwal.ingest.service.rpc.connection import BATCH_ROWS
from memwal.ingest.spark.sink.receipts import without_ack
from memwal.ingest.spark.sink.route import RouteTask
from memwal.ingest.spark.sink.send import SendTask
from memwal.ingest.spark.source.columns import (
    BLOCK,
    BUCKET,
    COORDINATES,
    FILE,
    LANDED,
    NO_REGION,
    OFFSET,
    PART,
    PLACE,
    ROW,
    runs,
)
from memwal.ingest.spark.source.whole_input import RegionRows, until_end
from memwal.ingest.spark.task import task_edge
from memwal.ingest.tracing import Headers
from memwal.wal import SystemClock

MOST_BYTES = 64 << 20
TOO_MANY = "too many rows for one task"
"""`said` of a receipt if nothing was sent because the rows have too many bytes."""
PATHS_NEEDED = "paths of files are wanted"
"""`said` of a receipt if the paths of files are needed and the rows came without them.

Other receipts are void then.
"""

_HASH_BITS = 20
_LAST = (1 << 63 - _HASH_BITS) - 1
_MILLIS = f"least(unix_millis({LANDED}), {_LAST})"
PACKED = f"shiftleft({_MILLIS}, {_HASH_BITS}) | (xxhash64({FILE}, {BLOCK}) & {(1 << _HASH_BITS) - 1})"
"""Spark's expression of `PART` (int64): the modification time of the file in milliseconds, above a hash.

Files dated after 2248 get the last time that fits; several such files need paths. Of two parts with the same time, one
pair in a million has the same number; such parts are ordered as Spark reads them.
"""


@dataclass(frozen=True, slots=True)
class OneTask:
    """Routes, orders and sends all rows of a micro-batch.

    Yields the receipts of `send`, or one receipt with `TOO_MANY`.

    Requires: this task gets all rows of the micro-batch, and behind them the row that ends it.
    Raises (as TaskError): errors of both tasks; Unavailable if the last row is missing.
    """

    route: RouteTask
    send: SendTask
    order_by: tuple[str, ...] = ()
    """Columns that order the rows of a region, more significant than their place."""
    most: int = MOST_BYTES

    without_paths: bool = False
    """Rows have `PART` in place of `PLACE`."""

    def of(self, sequence: int, trace: Headers = ()) -> OneTask:
        """Return this task for another micro-batch of its query, whose span `trace` names."""
        return replace(self, send=replace(self.send, sequence=sequence, trace=trace))

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with task_edge():
            whole = until_end(batches)
            yield from self._or_paths_needed(whole) if self.without_paths else self.receipts(whole)

    def _or_paths_needed(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        try:
            for receipt in self.receipts(map(unpacked, batches)):
                if receipt["said"][0].as_py() not in (None, TOO_MANY):
                    raise Invalid(PATHS_NEEDED)
                yield receipt
        except Invalid:  # its message, or the dead letters of refused rows, would name files
            for _ in batches:
                pass
            yield without_ack(SystemClock().now(), said=PATHS_NEEDED)

    def receipts(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """As a call, for all rows of the micro-batch without the row that ends it; raises errors unchanged."""
        kept: list[pa.Table] = []
        size = 0
        # Batches are validated while Spark prepares the next ones. All must be read, or Spark ends this worker.
        for batch in self.route.routed(batches):
            size += batch.nbytes
            if size <= self.most and batch.num_rows:
                kept.append(pa.Table.from_batches([batch]))
        if size > self.most:
            yield without_ack(SystemClock().now(), said=TOO_MANY)
            return
        # Columns of batches with bad rows are nullable; those of other batches may not be.
        rows = pa.concat_tables(kept, promote_options="default").combine_chunks() if kept else pa.table({})
        if self.without_paths and needs_paths(rows):
            raise Invalid(PATHS_NEEDED)
        yield from self.send.sent(self._regions(rows))

    def _regions(self, rows: pa.Table) -> Iterator[RegionRows]:
        for batch in rows.to_batches():
            ordered = in_order(batch, self.order_by)
            for start, end in runs(ordered[BUCKET].to_numpy()):
                parts = (ordered.slice(at, min(BATCH_ROWS, end - at)) for at in range(start, end, BATCH_ROWS))
                yield RegionRows(ordered[BUCKET][start].as_py(), end - start, parts)


def unpacked(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return rows with `PART` as rows with `PLACE`: the number replaces the path, and every block is 0."""
    part = batch[PART].to_numpy()
    landed = pa.array((part >> _HASH_BITS) * 1000).cast(pa.timestamp("us", "UTC"))
    zeros = pa.array(np.zeros(len(part), dtype=np.int64))
    at = batch.schema.get_field_index(PART)
    placed = batch.set_column(at, FILE, batch[PART])
    return placed.append_column(LANDED, landed).append_column(BLOCK, zeros)


def needs_paths(rows: pa.Table) -> bool:
    """Return whether the paths of files are needed: for dead letters, or to order files with the same time."""
    if FILE not in rows.column_names:
        return False
    files = rows.group_by(FILE).aggregate([(LANDED, "min")])
    alike = pc.count_distinct(files[f"{LANDED}_min"]).as_py() < files.num_rows
    return alike or bool(pc.any(pc.equal(rows[BUCKET], NO_REGION)).as_py())


def in_order(batch: pa.RecordBatch, order_by: Sequence[str]) -> pa.RecordBatch:
    """Return routed rows in Spark's order: by region, `order_by` and place; nulls first, NaN last."""
    names = batch.schema.names
    place = [name for name in (COORDINATES if OFFSET in names else PLACE) if name in names]
    # Rows of one part of a file arrive in order, and the sort is stable.
    last = () if _ascends(batch[ROW]) else (ROW,)
    keys = [key for name in (BUCKET, *order_by, *place, *last) for key in _keys(batch[name])]
    if not keys:
        return batch
    by = pa.table(keys, names=[str(at) for at in range(len(keys))])
    sort_keys = [(name, "ascending", "at_start") for name in by.column_names]
    return batch.take(pc.sort_indices(by, sort_keys=sort_keys))


def _ascends(column: pa.Array) -> bool:
    numbers = column.to_numpy()
    return bool((numbers[1:] >= numbers[:-1]).all())


def _keys(column: pa.Array) -> Iterator[pa.Array]:
    """Yield the sort keys for `column`; none if all its values are equal."""
    if pa.types.is_floating(column.type):
        yield pc.is_nan(column)  # Arrow sorts NaN next to null
    elif not len(column) or (not column.null_count and pc.all(pc.equal(column, column[0])).as_py()):
        return
    yield column
