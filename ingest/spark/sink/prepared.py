"""Keep the task for whole micro-batches in Spark's JVM.

Spark's Python API builds `frame.mapInArrow(task, …)` with about fifty calls over a socket for each micro-batch,
although only the batch_id differs: the pickled task, its input columns and its output types stay the same. Therefore
these JVM objects are kept, a micro-batch takes a few calls, and the task reads its batch_id from a local property of
the job.

The row that ends a micro-batch (`source.whole_input`) is a separate partition behind those of the frame. If one
task processes all partitions, Spark reads them in order, except that a partition with a preferred host may come first;
the partition of that row has none.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa

from memwal.ingest.spark.schema import quoted
from memwal.ingest.spark.sink.receipts import receipt_schema
from memwal.ingest.spark.sink.small import PACKED, OneTask
from memwal.ingest.spark.source.columns import BLOCK, COORDINATES, OFFSET, PART, PLACE
from memwal.ingest.tracing import Headers

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

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
        given = [field for field in schema.fields if not (task.without_paths and field.name in PLACE)]
        kinds = {field.name: field.dataType for field in given}
        read = [functions.col(quoted(name)) for name in kinds]
        place = _missing_place(task, schema.names)
        self._chosen: Any = None
        if place is not None:
            name, value = place
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


def _missing_place(task: OneTask, columns: Sequence[str]) -> tuple[str, str] | None:
    """Return the name and Spark expression of the place column to add; None if the rows have one."""
    if task.without_paths:
        return PART, PACKED
    return None if {OFFSET, BLOCK} & set(columns) else (BLOCK, "bigint(spark_partition_id())")


def fits_one_task(schema: StructType, task: OneTask) -> bool:
    """Return whether one task may process rows of these columns."""
    from pyspark.sql import types as spark

    # Ids of dead letters for rows without a place depend on the task that read them; here one task reads all rows.
    if task.route.letters != "fail" and not places(schema.names):
        return False
    ordered_alike = (
        *(spark.ByteType, spark.ShortType, spark.IntegerType, spark.LongType, spark.FloatType, spark.DoubleType),
        *(spark.DecimalType, spark.BinaryType, spark.BooleanType),
        *(spark.DateType, spark.TimestampType, spark.TimestampNTZType),
    )
    kinds = {field.name: field.dataType for field in schema.fields if field.name in task.order_by}
    alike = all(isinstance(kind, ordered_alike) or kind == spark.StringType() for kind in kinds.values())
    return alike and len(kinds) == len(task.order_by)


def places(columns: Sequence[str]) -> list[str]:
    """Return the columns among `columns` that form the place of a row, most significant first."""
    return [name for name in (COORDINATES if OFFSET in columns else PLACE) if name in columns]
