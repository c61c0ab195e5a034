"""Write a small micro-batch in one task of one stage: a single function validates, orders and sends its rows.

`OneTask` reads all rows of the micro-batch and holds them until the last one is validated; this replaces the barrier of
a shuffle. The row behind the last one ends the micro-batch (`source.whole_input`). Then the task sorts the rows
as Spark would, and sends them. If they have more than `most` bytes, it sends nothing and returns `TOO_MANY`, and the
sink shuffles this micro-batch.

The place of a row of a file has three columns, and the path is longer than most rows: it takes a quarter of the time of
a micro-batch of 100,000 rows. One number (`PART`) that contains the file's modification time and a hash of the rest
also distinguishes and orders parts of files. If that is insufficient (a row is refused, or parts with the same time
must be ordered), the task returns `PATHS_NEEDED`, and runs again with paths.

**The task is kept in Spark's JVM** (`PreparedTask`). Spark's Python API builds `frame.mapInArrow(task, …)` with about
fifty calls over a socket for each micro-batch, although only the batch_id differs: the pickled task, its input columns
and its output types stay the same. Therefore these JVM objects are kept, a micro-batch takes a few calls, and the task
reads its batch_id from a local property of the job.

The row that ends a micro-batch (`source.whole_input`) is a separate partition behind those of the frame. If one
task processes all partitions, Spark reads them in order, except that a partition with a preferred host may come first;
the partition of that row has none.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from memwal.ingest.errors import Invalid
from memwal.ingest.service.rpc.connection import BATCH_ROWS
from memwal.ingest.spark.schema import quoted
from memwal.ingest.spark.sink.receipts import receipt_schema, without_ack
from memwal.ingest.spark.sink.route import RouteTask
from memwal.ingest.spark.sink.send import SendTask
from memwal.ingest.spark.source import columns as col
from memwal.ingest.spark.source.whole_input import RegionRows, until_end
from memwal.ingest.spark.task import task_edge
from memwal.ingest.tracing import Headers
from memwal.wal import SystemClock

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

MOST_BYTES = 64 << 20
TOO_MANY = "too many rows for one task"
"""`said` of a receipt if nothing was sent because the rows have too many bytes."""
PATHS_NEEDED = "paths of files are wanted"
"""`said` of a receipt if the paths of files are needed and the rows came without them.

Other receipts are void then.
"""

_HASH_BITS = 20
_LAST = (1 << 63 - _HASH_BITS) - 1
_MILLIS = f"least(unix_millis({col.LANDED}), {_LAST})"
PACKED = f"shiftleft({_MILLIS}, {_HASH_BITS}) | (xxhash64({col.FILE}, {col.BLOCK}) & {(1 << _HASH_BITS) - 1})"
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
            if not self.without_paths:
                yield from self.receipts(whole)
                return
            try:
                for receipt in self.receipts(map(unpacked, whole)):
                    if receipt["said"][0].as_py() not in (None, TOO_MANY):
                        raise Invalid(PATHS_NEEDED)
                    yield receipt
            except Invalid:  # its message, or the dead letters of refused rows, would name files
                for _ in whole:
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
            for start, end in col.runs(ordered[col.BUCKET].to_numpy()):
                parts = (ordered.slice(at, min(BATCH_ROWS, end - at)) for at in range(start, end, BATCH_ROWS))
                yield RegionRows(ordered[col.BUCKET][start].as_py(), end - start, parts)


def unpacked(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return rows with `PART` as rows with `PLACE`: the number replaces the path, and every block is 0."""
    part = batch[col.PART].to_numpy()
    landed = pa.array((part >> _HASH_BITS) * 1000).cast(pa.timestamp("us", "UTC"))
    zeros = pa.array(np.zeros(len(part), dtype=np.int64))
    at = batch.schema.get_field_index(col.PART)
    placed = batch.set_column(at, col.FILE, batch[col.PART])
    return placed.append_column(col.LANDED, landed).append_column(col.BLOCK, zeros)


def needs_paths(rows: pa.Table) -> bool:
    """Return whether the paths of files are needed: for dead letters, or to order files with the same time."""
    if col.FILE not in rows.column_names:
        return False
    files = rows.group_by(col.FILE).aggregate([(col.LANDED, "min")])
    alike = pc.count_distinct(files[f"{col.LANDED}_min"]).as_py() < files.num_rows
    return alike or bool(pc.any(pc.equal(rows[col.BUCKET], col.NO_REGION)).as_py())


def in_order(batch: pa.RecordBatch, order_by: Sequence[str]) -> pa.RecordBatch:
    """Return routed rows in Spark's order: by region, `order_by` and place; nulls first, NaN last."""
    numbers = batch[col.ROW].to_numpy()
    # Rows of one part of a file arrive in order, and the sort is stable.
    last = () if (numbers[1:] >= numbers[:-1]).all() else (col.ROW,)
    names = (col.BUCKET, *order_by, *col.places(batch.schema.names), *last)
    keys = [key for name in names for key in _keys(batch[name])]
    if not keys:
        return batch
    by = pa.table(keys, names=[str(at) for at in range(len(keys))])
    sort_keys = [(name, "ascending", "at_start") for name in by.column_names]
    return batch.take(pc.sort_indices(by, sort_keys=sort_keys))


def _keys(column: pa.Array) -> Iterator[pa.Array]:
    """Yield the sort keys for `column`; none if all its values are equal."""
    if pa.types.is_floating(column.type):
        yield pc.is_nan(column)  # Arrow sorts NaN next to null
    elif not len(column) or (not column.null_count and pc.all(pc.equal(column, column[0])).as_py()):
        return
    yield column


# ---- in Spark -------------------------------------------------------------------------------------------------------


_NUMBER = "memwal.micro_batch"
"""Local property of Spark: the batch_id of the micro-batch that a job processes."""
_TRACE = "memwal.trace"
"""Local property of Spark: the headers that name the span of the micro-batch, as JSON."""
_LIMIT, _NO_LIMIT = "spark.sql.execution.arrow.maxBytesPerBatch", str(2**31 - 1)
"""With a limit, Spark sums the bytes of a batch again for every row, a quarter of the time to pass narrow rows on."""
_NUMBERS = {"byte", "short", "integer", "long", "float", "double", "decimal"}
_FIXED = {*_NUMBERS, "boolean", "date", "timestamp", "timestamp_ntz"}
"""Spark types whose values all have the same size."""


@dataclass(frozen=True, slots=True)
class Numbered:
    """`task` for the micro-batch that the job's local properties name."""

    task: OneTask

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        running: Any = TaskContext.get()
        trace = json.loads(running.getLocalProperty(_TRACE) or "[]")
        numbered = self.task.of(int(running.getLocalProperty(_NUMBER)), tuple(map(tuple, trace)))
        return numbered(batches)


class PreparedTask:
    """`task` for frames of `schema`. A `without_paths` task gets `PART` in place of `PLACE`.

    Thread safety. As its Spark session. Raises: errors of Spark.
    """

    def __init__(self, task: OneTask, schema: StructType, frame: DataFrame) -> None:
        """`frame`: any frame of the Spark that will run the task."""
        from pyspark.sql import functions
        from pyspark.sql.pandas.functions import pandas_udf
        from pyspark.sql.types import LongType
        from pyspark.util import PythonEvalType

        self.task, self._schema, self._spark = task.of(0), schema, frame.sparkSession.sparkContext
        given = [field for field in schema.fields if not (task.without_paths and field.name in col.PLACE)]
        kinds = {field.name: field.dataType for field in given}
        read = [functions.col(quoted(name)) for name in kinds]
        self._chosen: Any = None
        if task.without_paths or not {col.OFFSET, col.BLOCK} & set(schema.names):
            name, value = (col.PART, PACKED) if task.without_paths else (col.BLOCK, "bigint(spark_partition_id())")
            self._chosen = cast("Any", frame)._jcols(*read, functions.expr(value).alias(name))  # noqa: SLF001
            read.append(functions.col(name))
            kinds[name] = LongType()
        nothing = [functions.lit(None).cast(kind).alias(name) for name, kind in kinds.items()]
        self._end: Any = frame.sparkSession.range(0, 1, 1, 1).select(*nothing)._jdf  # noqa: SLF001
        kind = PythonEvalType.SQL_MAP_ARROW_ITER_UDF
        call = cast("Any", pandas_udf)(Numbered(self.task), returnType=receipt_schema(), functionType=kind)
        self._call: Any = call(*read)._jc  # noqa: SLF001 - PySpark's public API builds everything again
        # 4,096 rows of fixed-size values cannot exceed the limit, so their bytes need not be summed.
        narrow = task.without_paths and all(field.dataType.typeName() in _FIXED for field in given)
        self._limit = frame.sparkSession.conf.get(_LIMIT) if narrow else None

    def serves(self, task: OneTask, schema: StructType, frame: DataFrame) -> bool:
        """Return whether this object can run `task` (except for its batch_id and trace) on frames with `schema`."""
        alike = self._spark is frame.sparkSession.sparkContext and self._schema == schema
        return alike and self.task == task.of(0)

    def collected(self, frame: DataFrame, number: int, trace: Headers = ()) -> list[dict[str, Any]]:
        """Run the task for micro-batch `number`, whose span `trace` names. Return one dict per row of `RECEIPT`."""
        from pyspark.sql.classic.dataframe import DataFrame as Classic

        spark = frame.sparkSession
        spark.sparkContext.setLocalProperty(_NUMBER, str(number))
        if trace:
            spark.sparkContext.setLocalProperty(_TRACE, json.dumps(trace))
        plan: Any = frame._jdf  # noqa: SLF001
        if self._chosen is not None:
            plan = plan.select(self._chosen)
        plan = plan.union(self._end).coalesce(1).mapInArrow(self._call, False, None)
        with self.unmeasured(spark):
            return [row.asDict() for row in Classic(plan, spark).collect()]

    @contextmanager
    def unmeasured(self, spark: SparkSession) -> Iterator[None]:
        """While the context is open, Spark limits batches of narrow rows by their number of rows only."""
        if self._limit is None:
            yield
            return
        spark.conf.set(_LIMIT, _NO_LIMIT)
        try:
            yield
        finally:
            spark.conf.set(_LIMIT, self._limit)


def fits_one_task(schema: StructType, task: OneTask) -> bool:
    """Return whether one task may process rows of these columns."""
    from pyspark.sql import types as spark

    # Ids of dead letters for rows without a place depend on the task that read them; here one task reads all rows.
    if task.route.letters != "fail" and not col.places(schema.names):
        return False
    ordered_alike = (
        *(spark.ByteType, spark.ShortType, spark.IntegerType, spark.LongType, spark.FloatType, spark.DoubleType),
        *(spark.DecimalType, spark.BinaryType, spark.BooleanType),
        *(spark.DateType, spark.TimestampType, spark.TimestampNTZType),
    )
    kinds = {field.name: field.dataType for field in schema.fields if field.name in task.order_by}
    alike = all(isinstance(kind, ordered_alike) or kind == spark.StringType() for kind in kinds.values())
    return alike and len(kinds) == len(task.order_by)
