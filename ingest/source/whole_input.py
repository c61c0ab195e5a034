"""Proof that a task has all rows of its input: that an iterator ends proves nothing.

When Spark cancels a task, or loses its executor or the JVM, the Arrow stream into the Python worker ends between two
messages, which reads like the end of the rows. So the end comes as a row, which a real row is told from by its place:
a real row always has one (`place_column`).

1. *One task* (`ingest.sink.small`): the micro-batch ends with one row without a place (`ingest.sink.prepared` adds
   it in the JVM, behind all others). `until_end` takes it off, and raises where it has not come.
2. *Shuffled* (`ingest.sink.send`): `RouteTask` ends each part of the source with one row for each region that it has
   rows of: no place, and the number of these rows in `ROW`. Spark takes what such a task wrote only once its JVM has
   read the whole part. The sort brings these rows before the others of their region; `RegionRows` adds them up, and
   raises where there are fewer rows than they say.

Both come before anything is closed: a stream to a region, the letters of a micro-batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import chain, groupby

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from memwal.ingest.errors import Internal, Unavailable
from memwal.ingest.source.columns import BUCKET, ROW, place_column, runs


def until_end(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """`batches` without their last row, which ends them and is the only one without a place.

    Raises: Unavailable at the end, if that row has not come.
    """
    ended = False
    for batch in (each for each in batches if each.num_rows):
        if ended:
            raise Internal("rows of a micro-batch came behind the one that ends it; nothing was applied")
        ended = batch[place_column(batch.schema.names)].null_count > 0
        rows = batch.slice(0, batch.num_rows - 1) if ended else batch
        _expect_places(rows)
        if rows.num_rows:
            yield rows
    if not ended:
        raise Unavailable("a micro-batch was cut short before its end; nothing of it was applied, it comes again")


def with_counts(routed: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The routed rows of one part of the source, and behind them the count rows of their regions."""
    counts: Counter[int] = Counter()
    schema = pa.schema([])
    for batch in routed:
        schema = batch.schema
        buckets, rows = np.unique(batch[BUCKET].to_numpy(), return_counts=True)
        counts.update(dict(zip(buckets.tolist(), rows.tolist(), strict=True)))
        yield batch
    if counts:
        said = {BUCKET: pa.array(counts.keys(), pa.int32()), ROW: pa.array(counts.values(), pa.int64())}
        columns = [said[field.name] if field.name in said else pa.nulls(len(counts), field.type) for field in schema]
        yield pa.RecordBatch.from_arrays(columns, schema=schema)  # the same: Spark takes batches of one schema only


class RegionRows:
    """The rows of one region in their order; iterating raises Unavailable at the end where some have not come.

    `bucket`: of the region. `count`: rows that there are in all. `columns`: names.
    """

    def __init__(self, bucket: int, count: int, parts: Iterator[pa.RecordBatch]) -> None:
        """`parts`: rows of `bucket`, not empty. Raises: Unavailable where there is none."""
        self.bucket, self.count = bucket, count
        first = next(parts, None)
        if first is None:
            raise self._cut_short(0)
        self.columns: list[str] = first.schema.names
        self._parts = chain([first], parts)

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        rows = 0
        for part in self._parts:
            _expect_places(part)
            rows += part.num_rows
            yield part
        if rows != self.count:
            raise self._cut_short(rows)

    def _cut_short(self, rows: int) -> Unavailable:
        return Unavailable(
            f"of {self.count:,} rows for region number {self.bucket} {rows:,} arrived: the task was cut short; none of "
            "them was applied, the micro-batch comes again"
        )


def by_region(batches: Iterator[pa.RecordBatch]) -> Iterator[RegionRows]:
    """What comes of each region, in turn, from routed rows that are sorted by region, count rows first.

    Requires: one is iterated to its end before the next is asked for. Raises: as `RegionRows`.
    """
    parts = (
        batch.slice(start, end - start)
        for batch in batches
        for start, end in (runs(batch[BUCKET].to_numpy()) if batch.num_rows else ())
    )
    for bucket, of_region in groupby(parts, key=lambda part: part[BUCKET][0].as_py()):
        yield _counted(bucket, of_region)


def _counted(bucket: int, parts: Iterator[pa.RecordBatch]) -> RegionRows:
    """One region's rows, of parts that begin with its count rows."""
    count = 0
    for part in parts:
        said = part[place_column(part.schema.names)].null_count
        count += pc.sum(part[ROW].slice(0, said)).as_py() or 0
        if said < part.num_rows:
            parts = chain([part.slice(said)], parts)
            break
    return RegionRows(bucket, count, parts)


def _expect_places(batch: pa.RecordBatch) -> None:
    place = place_column(batch.schema.names)
    if batch[place].null_count:
        raise Internal(f"rows of a micro-batch came without {place}; nothing of them was applied")
