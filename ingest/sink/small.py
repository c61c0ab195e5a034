"""A small micro-batch in one task of one stage: checked, ordered and sent by one function.

A shuffle, Spark's sort and a second Python worker each take longer than some ten thousand rows do. So where few rows
are expected, one task reads all of them; `OneTask` keeps them until the last is checked, which is the barrier that the
shuffle is otherwise, brings them into the order in which Spark would have sorted them, and sends. The last is known by
the row behind it, which ends the micro-batch (`ingest.source.whole_input`). Nothing here imports Spark.

What is expected may be wrong: of more bytes than `most` the task sends nothing and says so, and the sink takes the
other way for this micro-batch.

Rows of files say where they lie in three columns, of which the path is longer than most rows are; that takes a quarter
of a micro-batch of 100,000. They tell the parts of files apart and order them, for which one number will do that holds
the file's moment and a hash of the rest (`PART`); where more is asked (a row is refused, or parts of one moment are
ordered) the task says so, and is run again with paths.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from memwal.ingest.errors import Invalid
from memwal.ingest.rpc.connection import BATCH_ROWS
from memwal.ingest.sink.receipts import without_ack
from memwal.ingest.sink.route import RouteTask
from memwal.ingest.sink.send import SendTask
from memwal.ingest.source.columns import (
    BLOCK,
    BUCKET,
    COORDINATES,
    FILE,
    LANDED,
    NOWHERE,
    OFFSET,
    PART,
    PLACE,
    ROW,
    runs,
)
from memwal.ingest.source.whole_input import RegionRows, until_end
from memwal.ingest.spark.task import task_edge
from memwal.wal import SystemClock

MOST_BYTES = 64 << 20
TOO_MANY = "too many rows for one task"
"""What a receipt says where nothing was sent."""
NAMELESS = "paths of files are wanted"
"""What a receipt says where rows came without the paths of their files, which are asked for; the others count for
nothing then."""

_HASH_BITS = 20
PACKED = f"shiftleft(unix_millis({LANDED}), {_HASH_BITS}) | (xxhash64({FILE}, {BLOCK}) & {(1 << _HASH_BITS) - 1})"
"""Spark's expression of `PART` (int64): the milliseconds of the file's moment, good until the year 2248, above a hash.
Of parts of one moment one pair in a million has the same; those are ordered as Spark reads them."""


@dataclass(frozen=True, slots=True)
class OneTask:
    """`route`, the order and `send` in one; yields what `send` does, or one receipt that says `TOO_MANY`.

    Requires: all rows of the micro-batch come to this task, and behind them the one that ends it. Raises (as
    TaskError): what the two tasks do; Unavailable where that row is missing.
    """

    route: RouteTask
    send: SendTask
    order_by: tuple[str, ...] = ()
    """Columns that order the rows of a region, before their place does."""
    most: int = MOST_BYTES

    nameless: bool = False
    """Rows come with `PART` in place of `PLACE`."""

    def of(self, sequence: int) -> OneTask:
        """This task for another micro-batch of its query."""
        return replace(self, send=replace(self.send, sequence=sequence))

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with task_edge():
            whole = until_end(batches)
            yield from self._or_names_wanted(whole) if self.nameless else self._receipts(whole)

    def _or_names_wanted(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        try:
            for receipt in self._receipts(map(unpacked, batches)):
                if receipt["said"][0].as_py() not in (None, TOO_MANY):
                    raise Invalid(NAMELESS)
                yield receipt
        except Invalid:  # its message, or the letters of rows that a region refused, would name files
            for _ in batches:
                pass
            yield without_ack(SystemClock().now(), said=NAMELESS)

    def _receipts(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        kept: list[pa.Table] = []
        size = 0
        # Batches are checked while Spark prepares the next ones. All are read, or Spark ends this worker.
        for batch in self.route.routed(batches):
            size += batch.nbytes
            if size <= self.most and batch.num_rows:
                kept.append(pa.Table.from_batches([batch]))
        if size > self.most:
            yield without_ack(SystemClock().now(), said=TOO_MANY)
            return
        # Batches with bad rows take null where others do not.
        rows = pa.concat_tables(kept, promote_options="default").combine_chunks() if kept else pa.table({})
        if self.nameless and wants_names(rows):
            raise Invalid(NAMELESS)
        yield from self.send.sent(self._regions(rows))

    def _regions(self, rows: pa.Table) -> Iterator[RegionRows]:
        for batch in rows.to_batches():
            ordered = in_order(batch, self.order_by)
            for start, end in runs(ordered[BUCKET].to_numpy()):
                parts = (ordered.slice(at, min(BATCH_ROWS, end - at)) for at in range(start, end, BATCH_ROWS))
                yield RegionRows(ordered[BUCKET][start].as_py(), end - start, parts)


def unpacked(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Rows with `PART` as rows with `PLACE`: a number stands for the path, and no part is behind another in it."""
    part = batch[PART].to_numpy()
    landed = pa.array((part >> _HASH_BITS) * 1000).cast(pa.timestamp("us", "UTC"))
    zeros = pa.array(np.zeros(len(part), dtype=np.int64))
    at = batch.schema.get_field_index(PART)
    placed = batch.set_column(at, FILE, batch[PART])
    return placed.append_column(LANDED, landed).append_column(BLOCK, zeros)


def wants_names(rows: pa.Table) -> bool:
    """Whether the paths of files are asked for: by dead letters, or by the order of files of one moment."""
    if FILE not in rows.column_names:
        return False
    files = rows.group_by(FILE).aggregate([(LANDED, "min")])
    alike = pc.count_distinct(files[f"{LANDED}_min"]).as_py() < files.num_rows
    return alike or bool(pc.any(pc.equal(rows[BUCKET], NOWHERE)).as_py())


def in_order(batch: pa.RecordBatch, order_by: Sequence[str]) -> pa.RecordBatch:
    """Rows with the columns of `RouteTask` as Spark sorts them: by region, by `order_by`, by their place; nulls first,
    NaN last.
    """
    names = batch.schema.names
    place = [name for name in (COORDINATES if OFFSET in names else PLACE) if name in names]
    # Rows of one part of a file come in their order, which the sort keeps: it is stable.
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
    """What to sort by for `column`: nothing where all its values are the same."""
    if pa.types.is_floating(column.type):
        yield pc.is_nan(column)  # Arrow puts NaN where it puts null
    elif not len(column) or (not column.null_count and pc.all(pc.equal(column, column[0])).as_py()):
        return
    yield column
