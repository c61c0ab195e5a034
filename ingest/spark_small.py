"""A small micro-batch in one task of one stage: checked, ordered and sent by one function.

A shuffle, Spark's sort and a second Python worker each take longer than some ten thousand rows do. So where few rows
are expected, one task reads all of them; `OneTask` keeps them until the last is checked, which is the barrier that the
shuffle is otherwise, brings them into the order in which Spark would have sorted them, and sends. Nothing here imports
Spark.

What is expected may be wrong: of more bytes than `most` the task sends nothing and says so, and the sink takes the
other way for this micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from ingest.connection import BATCH_ROWS
from ingest.source import COORDINATES, OFFSET, PLACE
from ingest.spark_tasks import BUCKET, ROW, RouteTask, SendTask, without_ack
from ingest.task_errors import task_edge
from wal import SystemClock

MOST_BYTES = 64 << 20
TOO_MANY = "too many rows for one task"
"""What a receipt says where nothing was sent."""


@dataclass(frozen=True, slots=True)
class OneTask:
    """`route`, the order and `send` in one; yields what `send` does, or one receipt that says `TOO_MANY`.

    Requires: all rows of the micro-batch are in this task. Raises (as TaskError): what the two tasks do.
    """

    route: RouteTask
    send: SendTask
    order_by: tuple[str, ...] = ()
    """Columns that order the rows of a region, before their place does."""
    most: int = MOST_BYTES

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with task_edge():
            rows = _gathered(batches, self.most)
            if rows is None:
                yield without_ack(SystemClock().now(), said=TOO_MANY)
            else:
                yield from self.send(self._sorted_parts(rows))

    def _sorted_parts(self, rows: Sequence[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for routed in self.route(iter(rows)):
            ordered = in_order(routed, self.order_by)
            for start in range(0, ordered.num_rows, BATCH_ROWS):
                yield ordered.slice(start, BATCH_ROWS)


def _gathered(batches: Iterator[pa.RecordBatch], most: int) -> list[pa.RecordBatch] | None:
    """All rows as one batch (none: no batch), None where they have more than `most` bytes; reads to the end."""
    kept: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        size += batch.nbytes
        if size > most:
            kept.clear()
        elif batch.num_rows:
            kept.append(batch)
    if size > most:
        return None
    return pa.Table.from_batches(kept).combine_chunks().to_batches() if kept else []


def in_order(batch: pa.RecordBatch, order_by: Sequence[str]) -> pa.RecordBatch:
    """Rows with the columns of `RouteTask` as Spark sorts them: by region, by `order_by`, by their place; nulls first,
    NaN last.
    """
    names = batch.schema.names
    place = [name for name in (COORDINATES if OFFSET in names else PLACE) if name in names]
    keys = [key for name in (BUCKET, *order_by, *place, ROW) for key in _keys(batch[name])]
    if not keys:
        return batch
    by = pa.table(keys, names=[str(at) for at in range(len(keys))])
    sort_keys = [(name, "ascending", "at_start") for name in by.column_names]
    return batch.take(pc.sort_indices(by, sort_keys=sort_keys))


def _keys(column: pa.Array) -> Iterator[pa.Array]:
    """What to sort by for `column`: nothing where all its values are the same."""
    if pa.types.is_floating(column.type):
        yield pc.is_nan(column)  # Arrow puts NaN where it puts null
    elif not len(column) or (not column.null_count and pc.all(pc.equal(column, column[0])).as_py()):
        return
    yield column
