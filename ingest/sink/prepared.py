"""A task that takes whole micro-batches, put into Spark's JVM once for all of them.

Spark's Python API builds `frame.mapInArrow(task, …)` by some fifty calls over a socket, for each micro-batch anew, and
all of it but a number is the same: the pickled task, the columns that it reads, the types that it yields. So these are
kept as the JVM has them, a micro-batch is a handful of calls, and its number comes to the task beside the rows, as a
local property of the job.

The row that ends a micro-batch (`ingest.source.whole_input`) is a part of its own behind the parts of the frame. Where
all parts go into one task Spark reads them in their order, but for one that lies on a known host, which may come first;
the part with that row lies on none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa

from memwal.ingest.sink.receipts import receipt_schema
from memwal.ingest.sink.small import PACKED, OneTask
from memwal.ingest.source.columns import BLOCK, OFFSET, PART, PLACE
from memwal.ingest.spark.schema import quoted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

_NUMBER = "memwal.micro_batch"
"""Local property of Spark: the number of the micro-batch that a job is for."""
_LIMIT, _NO_LIMIT = "spark.sql.execution.arrow.maxBytesPerBatch", str(2**31 - 1)
"""Spark adds the bytes of a batch up anew for every row, a quarter of what it takes to hand narrow ones over."""
_NUMBERS = {"byte", "short", "integer", "long", "float", "double", "decimal"}
_FIXED = {*_NUMBERS, "boolean", "date", "timestamp", "timestamp_ntz"}
"""Spark's types whose values all take the same bytes."""


@dataclass(frozen=True, slots=True)
class Numbered:
    """`task`, of the micro-batch that the job says."""

    task: OneTask

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        running: Any = TaskContext.get()
        return self.task.of(int(running.getLocalProperty(_NUMBER)))(batches)


class PreparedTask:
    """`task` for frames of `schema`; a `nameless` one gets `PART` in place of `PLACE`.

    Thread safety. As its Spark session. Errors. As Spark's.
    """

    def __init__(self, task: OneTask, schema: StructType, frame: DataFrame) -> None:
        """`frame`: any of the Spark that is to run it."""
        from pyspark.sql import functions
        from pyspark.sql.pandas.functions import pandas_udf
        from pyspark.sql.types import LongType
        from pyspark.util import PythonEvalType

        self.task, self._schema, self._spark = task.of(0), schema, frame.sparkSession.sparkContext
        given = [field for field in schema.fields if not (task.nameless and field.name in PLACE)]
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
        self._call: Any = call(*read)._jc  # noqa: SLF001 - PySpark's public ways make everything anew
        # Rows of which 4,096 cannot be too many bytes need not be measured.
        narrow = task.nameless and all(field.dataType.typeName() in _FIXED for field in given)
        self._limit = frame.sparkSession.conf.get(_LIMIT) if narrow else None

    def serves(self, task: OneTask, schema: StructType, frame: DataFrame) -> bool:
        """Whether this is `task`, but for the number of its micro-batch, and for such frames."""
        alike = self._spark is frame.sparkSession.sparkContext and self._schema == schema
        return alike and self.task == task.of(0)

    def collected(self, frame: DataFrame, number: int) -> list[dict[str, Any]]:
        """What the task answers to micro-batch `number`, one dict per row of `RECEIPT`."""
        from pyspark.sql.classic.dataframe import DataFrame as Classic

        spark = frame.sparkSession
        spark.sparkContext.setLocalProperty(_NUMBER, str(number))
        plan: Any = frame._jdf  # noqa: SLF001
        if self._chosen is not None:
            plan = plan.select(self._chosen)
        plan = plan.union(self._end).coalesce(1).mapInArrow(self._call, False, None)
        with self.unmeasured(spark):
            return [row.asDict() for row in Classic(plan, spark).collect()]

    @contextmanager
    def unmeasured(self, spark: SparkSession) -> Iterator[None]:
        """Within it Spark hands over narrow rows by their number alone."""
        if self._limit is None:
            yield
            return
        spark.conf.set(_LIMIT, _NO_LIMIT)
        try:
            yield
        finally:
            spark.conf.set(_LIMIT, self._limit)


def _missing_place(task: OneTask, columns: Sequence[str]) -> tuple[str, str] | None:
    """The column that says where a row lies, if it has to be added, and Spark's expression of its values."""
    if task.nameless:
        return PART, PACKED
    return None if {OFFSET, BLOCK} & set(columns) else (BLOCK, "bigint(spark_partition_id())")
