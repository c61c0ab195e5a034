"""Prove that a task has received all rows of its input.

The end of an iterator proves nothing (reasons: `spark/sink/README.md`). Therefore the end is marked by a row without a
place; every real row has a place (`place_column`).

1. *One task* (`sink.small`): `PreparedTask` adds one row without a place in the JVM, behind all rows of the
   micro-batch. `until_end` removes this row, and raises an error if it is missing.
2. *Shuffled* (`sink.send`): `RouteTask` ends each partition of the source with one count row per region of its
   rows. A count row has no place, and the number of rows in `ROW`. The sort puts count rows before the other rows of
   their region; `RegionRows` adds the counts up, and raises an error if fewer rows arrive.

Both checks run before a stream to a region is closed and before dead letters are appended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import chain, groupby

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from memwal.ingest.errors import Internal, Unavailable
from memwal.ingest.spark.source.columns import BUCKET, ROW, place_column, runs


def until_end(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield `batches` without the last row, which ends the micro-batch and is the only row without a place.

    Raises: Unavailable at the end of `batches` if that row is missing; Internal if rows follow it.
    """
    ended = False
    for batch in (each for each in batches if each.num_rows):
        if ended:
            raise Internal("rows of a micro-batch came behind the row that ends it; nothing was applied")
        ended = batch[place_column(batch.schema.names)].null_count > 0
        rows = batch.slice(0, batch.num_rows - 1) if ended else batch
        _expect_places(rows)
        if rows.num_rows:
            yield rows
    if not ended:
        raise Unavailable("a micro-batch was cut short before its end; nothing of it was applied, Spark replays it")


def with_counts(routed: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the routed rows of one partition of the source, then the count rows of their regions."""
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
        yield pa.RecordBatch.from_arrays(columns, schema=schema)  # the same schema: Spark accepts no other


class RegionRows:
    """The rows of one region in order. Iterating raises Unavailable at the end if rows are missing.

    `bucket`: number of the region. `count`: number of all its rows. `columns`: names.
    """

    def __init__(self, bucket: int, count: int, parts: Iterator[pa.RecordBatch]) -> None:
        """`parts`: non-empty batches of rows of `bucket`. Raises: Unavailable if `parts` is empty."""
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
            f"{rows:,} of {self.count:,} rows for region number {self.bucket} arrived: the task was cut short; none of "
            "them was applied, Spark replays the micro-batch"
        )


def by_region(batches: Iterator[pa.RecordBatch]) -> Iterator[RegionRows]:
    """Yield the rows of each region in turn, from routed rows that are sorted by region, count rows first.

    Requires: the caller iterates each region to its end before the next one. Raises: as `RegionRows`.
    """
    parts = (
        batch.slice(start, end - start)
        for batch in batches
        for start, end in (runs(batch[BUCKET].to_numpy()) if batch.num_rows else ())
    )
    for bucket, of_region in groupby(parts, key=lambda part: part[BUCKET][0].as_py()):
        yield _counted(bucket, of_region)


def _counted(bucket: int, parts: Iterator[pa.RecordBatch]) -> RegionRows:
    """Return the rows of one region, whose `parts` begin with the count rows."""
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
        raise Internal(f"rows of a micro-batch came without {place}; none of them was applied")
