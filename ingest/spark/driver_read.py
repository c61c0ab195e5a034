"""The rows of a small micro-batch, read by the driver without a Spark job.

A job for a few hundred rows takes some 50 to 100 ms: Spark schedules it, sends its functions to a Python worker, moves
the rows there and back. Read here they take a third of that.

`foreachBatch` gets a frame whose rows are an RDD. It is computed here as Spark's tasks do it, by the same source with
the same options, but in the JVM's thread that called `foreachBatch` and with an empty task context. A function in
Python cannot run so; of a plan with one, only the scan below it is read. Spark's own converter makes an Arrow batch of
the rows. It goes through a file, because an answer of more than 8 KB over PySpark's socket waits 40 ms for an
acknowledgement of its first bytes (Nagle's algorithm).

All of this is inside Spark, so what it needs may be missing in another release: then nothing is read, and the caller
uses a job.
"""

from __future__ import annotations

import itertools
import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_LOG = logging.getLogger("memwal.spark")
_SCAN = "DataSourceRDD"
MOST_ROWS, MOST_BYTES = 100_000, 16 << 20
"""Most rows of a micro-batch that the driver reads. It is faster for more as well, but must hold them in memory."""
_NUMBERS = itertools.count(1)
_LENGTH = 4
"""Bytes before each batch in the file, as Spark writes to Python: its length."""


@dataclass(frozen=True, slots=True)
class DriverRead:
    """Reads the rows of a micro-batch's frame, or of the one scan below it.

    Thread safety. One thread, that of the query.
    """

    scan: DataFrame | None = None
    """The streaming frame of the source alone, to read what the scan yields; None to read the frame's own rows, in
    which Python must have no part."""
    most_rows: int = MOST_ROWS
    most_bytes: int = MOST_BYTES

    def read(self, frame: DataFrame) -> pa.RecordBatch | None:
        """Return all rows of a micro-batch, in the order of the source's parts; None where they are more than
        `most_rows` or `most_bytes`, where there is not one scan, and where reading failed: a job says why.
        """
        from py4j.protocol import Py4JError
        from pyspark.errors import PySparkException

        try:
            return self._read(frame)
        except (PySparkException, Py4JError, TypeError, OSError) as error:
            _LOG.debug("the driver could not read a micro-batch: %s", error)
            return None

    def _read(self, frame: DataFrame) -> pa.RecordBatch | None:
        jvm: Any = frame.sparkSession.sparkContext._jvm  # noqa: SLF001 - PySpark has no public way to a class of the JVM
        plan: Any = frame._jdf  # noqa: SLF001
        parts = plan.queryExecution().logical().rdd()
        if self.scan is not None:
            plan, parts = self.scan._jdf, _scan(parts)  # noqa: SLF001
        if parts is None:
            return None
        whole = parts.coalesce(1, False, jvm.scala.Option.empty(), None)
        # Readable by this user alone; Java writes into it by its name.
        with tempfile.NamedTemporaryFile(prefix="memwal-") as file, _task(jvm) as context:
            rows = _copied(jvm, whole).iterator(whole.partitions()[0], context)
            self._write(jvm, rows, plan.schema(), file.name)
            return None if rows.hasNext() else _batch(file.read())

    def _write(self, jvm: Any, rows: Any, schema: Any, path: str) -> None:
        """Write the first rows, as many as are wanted at most, to a file."""
        converters = _module(jvm.org.apache.spark.sql.execution.arrow, "ArrowConverters")
        limits = (self.most_rows, self.most_bytes)
        batches = converters.toBatchWithSchemaIterator(rows, schema, *limits, "UTC", True, False)
        out = jvm.java.io.DataOutputStream(jvm.java.io.FileOutputStream(path))
        try:
            jvm.org.apache.spark.api.python.PythonRDD.writeIteratorToStream(batches.take(1), out)
        finally:
            out.close()


def _batch(data: bytes) -> pa.RecordBatch:
    """Return the batch of an Arrow stream behind its length; one without columns if there is none."""
    return next(iter(pa.ipc.open_stream(data[_LENGTH:]))) if data else pa.RecordBatch.from_pydict({})


def _scan(rdd: Any) -> Any:
    """Return the RDD that yields the rows of the scan below `rdd`, and counts them for Spark; None if there is none."""
    above, below = list(_chain(rdd))[-2:]
    return above if below.getClass().getSimpleName() == _SCAN else None


def _chain(rdd: Any) -> Iterator[Any]:
    """Yield `rdd` and what it is computed from, up to the first RDD that is not computed from one other."""
    yield rdd
    while (parents := rdd.dependencies()).size() == 1:
        rdd = parents.head().rdd()
        yield rdd


def _copied(jvm: Any, rdd: Any) -> Any:
    """Return a copy of `rdd`, as each task of a job gets one: some kinds, once they were computed, hold what cannot be
    sent to a task, and the micro-batch may need a job all the same."""
    for _ in _chain(rdd):
        pass  # each RDD of the chain knows the next one now, which those of a copy cannot find
    kind = _module(jvm.scala.reflect, "ClassTag").Any()
    loader = jvm.java.lang.Thread.currentThread().getContextClassLoader()
    serializer = jvm.org.apache.spark.SparkEnv.get().closureSerializer().newInstance()
    return serializer.deserialize(serializer.serialize(rdd, kind), loader, kind)


@contextmanager
def _task(jvm: Any) -> Iterator[Any]:
    """While the context lasts, this thread of the JVM has a task context; at its end, what was opened with it is
    released."""
    spark = jvm.org.apache.spark
    number = -next(_NUMBERS)  # Spark's own are not negative
    tasks, blocks = _module(spark, "TaskContext"), spark.SparkEnv.get().blockManager()
    bare, properties = tasks.empty(), jvm.java.util.Properties()
    described = (properties, None, bare.taskMetrics(), 1, bare.resources())
    context = spark.TaskContextImpl(0, 0, 0, number, 0, 1, None, *described)
    tasks.setTaskContext(context)
    blocks.registerTask(number)
    try:
        yield context
    finally:
        try:
            context.markTaskCompleted(jvm.scala.Option.empty())
            _count(jvm, context)
        finally:
            blocks.releaseAllLocksForTask(number)
            tasks.unset()


def _count(jvm: Any, context: Any) -> None:
    """Add what the copies of Spark's metrics have counted, as a job does: the progress of the query shows it."""
    known = _module(jvm.org.apache.spark.util, "AccumulatorContext")
    counted = context.taskMetrics()._externalAccums()  # noqa: SLF001 - a public method of Scala's
    for at in range(counted.size()):
        if not (each := counted.apply(at)).isZero():
            known.get(each.id()).get().merge(each)


def _module(package: Any, name: str) -> Any:
    """Return the Scala object `name` of a package."""
    return getattr(getattr(package, f"{name}$"), "MODULE$")
