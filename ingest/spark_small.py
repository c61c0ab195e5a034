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
            kept: list[pa.Table] = []
            size = 0
            # Batches are checked while Spark prepares the next ones. All are read, or Spark ends this worker.
            for batch in self.route(batches):
                size += batch.nbytes
                if size <= self.most and batch.num_rows:
                    kept.append(pa.Table.from_batches([batch]))
            if size > self.most:
                yield without_ack(SystemClock().now(), said=TOO_MANY)
            else:
                yield from self.send(self._sorted_parts(kept))

    def _sorted_parts(self, kept: Sequence[pa.Table]) -> Iterator[pa.RecordBatch]:
        # Batches with bad rows take null where others do not.
        rows = pa.concat_tables(kept, promote_options="default").combine_chunks() if kept else pa.table({})
        for batch in rows.to_batches():
            ordered = in_order(batch, self.order_by)
            for start in range(0, ordered.num_rows, BATCH_ROWS):
                yield ordered.slice(start, BATCH_ROWS)


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
