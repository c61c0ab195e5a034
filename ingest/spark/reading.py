"""Read the rows of a micro-batch before any of them is sent: in the driver, or in the map stage of a shuffle.

**In the driver, without a job**, for a small micro-batch. A job for a few hundred rows takes about 50 to 100 ms: Spark
schedules it, sends its functions to a Python worker, and moves the rows there and back. Reading in the driver takes a
third of that.

1. `foreachBatch` receives a frame whose rows are an RDD. This module computes the RDD as Spark's tasks do, with the
   same source and options, but in the JVM thread that called `foreachBatch` and with an empty task context. Python
   functions cannot run this way; of a plan that contains one, only the scan below it is read.
2. Spark's own converter makes one Arrow batch of the rows.
3. The batch goes through a file: over PySpark's socket, an answer of more than 8 KB waits 40 ms for an acknowledgement
   of its first bytes (Nagle's algorithm).

All of this uses internals of Spark, which another release may lack. Then nothing is read, and the caller runs a job.

**In the map stage of a shuffle.** A job runs both stages without a pause. With adaptive execution Spark first submits
the map stage by itself; `rows_read` does the same, so that a `TopicGuard` can check the source after all rows are
read and before any row is sent. The second stage reads the same shuffle files.

Spark repeats tasks of the map stage if shuffle files are lost, for example with an executor. A repeated task would read
the source again, after the check. Therefore jobs over the frame that `rows_read` returns have the property
`WITHOUT_READING`, and the task that reads the source raises an error if it is set (`refuse_reading_again`). The caller
then starts the micro-batch again.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa

from memwal.ingest.errors import Unavailable
from memwal.ingest.spark.task import JobProperty
from memwal.wal.codec.lance import open_scratch

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_LOG = logging.getLogger("memwal.spark")
_SCAN = "DataSourceRDD"
MOST_ROWS, MOST_BYTES = 100_000, 16 << 20
"""Limits of a micro-batch that the driver reads.

The driver is faster for larger micro-batches too, but must hold them in memory.
"""
_NUMBERS = itertools.count(1 << 40)
"""Task numbers. They are negated, since Spark's own are not negative; Spark's block manager reserves -1 and -1024."""
_LENGTH = 4
"""Bytes of the length prefix that Spark writes before each batch in the file."""


SmallReader = Callable[["DataFrame"], pa.RecordBatch | None]
"""Reads all rows of a small micro-batch in the driver, without a Spark job.

Returns a batch without columns for an empty micro-batch; None if there are many rows, or if the driver cannot read
them.
"""


@dataclass(frozen=True, slots=True)
class SourceRows:
    """What a streaming query reads."""

    frame: DataFrame
    small: SmallReader | None = None
    """Reads small micro-batches of `frame`."""


@dataclass
class DriverRead:
    """Reads the rows of a micro-batch's frame, or of the single scan below it.

    Thread safety. One thread, that of the query. All frames belong to one Spark.
    """

    scan: DataFrame | None = None
    """The source's streaming frame, to read the rows that its scan yields.

    None reads the rows of the micro-batch's frame, whose plan must not contain Python.
    """
    most_rows: int = MOST_ROWS
    most_bytes: int = MOST_BYTES
    _inside: _Inside | None = None

    def read(self, frame: DataFrame) -> pa.RecordBatch | None:
        """Return all rows of a micro-batch in the order of the source's partitions.

        A batch without columns if the micro-batch is empty. None if it has more than `most_rows` rows or `most_bytes`
        bytes, if its plan does not have exactly one scan, or if reading fails. The caller then runs a job, which
        reports the error.
        """
        from py4j.protocol import Py4JError
        from pyspark.errors import PySparkException

        try:
            return self._read(frame)
        except (PySparkException, Py4JError, TypeError, OSError) as error:
            _LOG.debug("the driver could not read a micro-batch: %s", error)
            return None

    def _read(self, frame: DataFrame) -> pa.RecordBatch | None:
        inside = self._inside = self._inside or _Inside(frame)
        plan: Any = frame._jdf  # noqa: SLF001
        parts = plan.queryExecution().logical().rdd()
        if self.scan is not None:
            plan, parts = self.scan._jdf, _scan(parts)  # noqa: SLF001
        if parts is None:
            return None
        whole = parts.coalesce(1, False, inside.none, None)
        if not len(whole.partitions()):
            return _batch(b"")
        file, path = open_scratch(os.getpid())  # the JVM writes into this file
        with file, inside.task() as context:
            computed = inside.copied(whole) if self.scan is None else whole
            rows = computed.iterator(whole.partitions()[0], context)
            limits = (self.most_rows, self.most_bytes)
            batches = inside.converters.toBatchWithSchemaIterator(
                rows, plan.schema(), *limits, inside.zone, True, False
            )
            inside.write(batches.take(1), path)
            if rows.hasNext():
                return None
            inside.count(context)
            return _batch(file.read())


def _batch(data: bytes) -> pa.RecordBatch:
    """Return the batch of a length-prefixed Arrow stream; a batch without columns if `data` is empty."""
    return next(iter(pa.ipc.open_stream(data[_LENGTH:]))) if data else pa.RecordBatch.from_pydict({})


def _scan(rdd: Any) -> Any:
    """Return the RDD that yields the rows of the scan below `rdd` and counts them for Spark; None without a scan."""
    above, below = list(chain(rdd))[-2:]
    return above if below.getClass().getSimpleName() == _SCAN else None


def chain(rdd: Any) -> Iterator[Any]:
    """Yield `rdd` and its ancestors, up to the first RDD that does not have exactly one parent."""
    yield rdd
    while (parents := rdd.dependencies()).size() == 1:
        rdd = parents.head().rdd()
        yield rdd


class _Inside:
    """Spark's internal classes and objects, resolved once: each dot in a class name is a call to the JVM."""

    def __init__(self, frame: DataFrame) -> None:
        """Resolve the classes. Raises: Py4JError or TypeError if this Spark does not have them."""
        jvm: Any = frame.sparkSession.sparkContext._jvm  # noqa: SLF001 - PySpark has no public access to JVM classes
        spark, java = jvm.org.apache.spark, jvm.java
        self.zone = str(frame.sparkSession.conf.get("spark.sql.session.timeZone"))
        """The session's time zone, which jobs use for timestamps too."""
        self.none = jvm.scala.Option.empty()
        self.properties = java.util.Properties
        self.thread = java.lang.Thread
        self.file_stream = java.io.FileOutputStream
        self.data_stream = java.io.DataOutputStream
        self.any_class = _module(jvm.scala.reflect, "ClassTag").Any()
        self.environment = spark.SparkEnv.get()
        self.contexts = _module(spark, "TaskContext")
        self.context = spark.TaskContextImpl
        self.accumulators = _module(spark.util, "AccumulatorContext")
        self.python_rdd = spark.api.python.PythonRDD
        self.converters = _module(spark.sql.execution.arrow, "ArrowConverters")

    def copied(self, rdd: Any) -> Any:
        """Return a copy of `rdd`, as each task of a job receives one.

        After it was computed, an RDD of files holds objects that cannot be serialized, and the micro-batch may still
        need a job.
        """
        for _ in chain(rdd):
            pass  # resolve the parent of each RDD in the chain: RDDs of a copy cannot
        serializer = self.environment.closureSerializer().newInstance()
        loader = self.thread.currentThread().getContextClassLoader()
        return serializer.deserialize(serializer.serialize(rdd, self.any_class), loader, self.any_class)

    def write(self, batches: Any, path: str) -> None:
        """Write batches to the file `path`, each with its length prefix."""
        out = self.data_stream(self.file_stream(path))
        try:
            self.python_rdd.writeIteratorToStream(batches, out)
        finally:
            out.close()

    @contextmanager
    def task(self) -> Iterator[Any]:
        """Give this JVM thread a task context. When the context exits, release the resources opened with it."""
        number, bare = -next(_NUMBERS), self.contexts.empty()  # negative: Spark's own numbers are not
        described = (self.properties(), None, bare.taskMetrics(), 1, bare.resources())
        context, blocks = self.context(0, 0, 0, number, 0, 1, None, *described), self.environment.blockManager()
        self.contexts.setTaskContext(context)
        try:
            blocks.registerTask(number)
            try:
                yield context
            finally:
                try:
                    context.markTaskCompleted(self.none)
                finally:
                    blocks.releaseAllLocksForTask(number)
        finally:
            self.contexts.unset()

    def count(self, context: Any) -> None:
        """Add the counts of the task's metrics to Spark's metrics, as a job does, for the progress of the query."""
        counted = context.taskMetrics()._externalAccums()  # noqa: SLF001 - a public method in Scala
        for at in range(counted.size()):
            if not (each := counted.apply(at)).isZero():
                self.accumulators.get(each.id()).get().merge(each)


def _module(package: Any, name: str) -> Any:
    """Return the Scala object `name` of a package."""
    return getattr(getattr(package, f"{name}$"), "MODULE$")


# ---- the map stage of a shuffle -------------------------------------------------------------------------------------


READ_AGAIN = "read_again"
"""`details["reason"]` of the error raised when Spark would read the source again."""
WITHOUT_READING = JobProperty("memwal.rows_read")
"""The job must not read the source."""


def rows_read(frame: DataFrame) -> DataFrame:
    """Run the map stage of the last shuffle in `frame`; return a frame that reads the output of that stage.

    Raises: the errors of the tasks.
    """
    from pyspark.sql.classic.dataframe import DataFrame as Classic

    session, plan = cast("Any", frame.sparkSession), cast("Any", frame)._jdf  # noqa: SLF001
    rows = plan.queryExecution().toRdd()
    shuffle = next(each for rdd in chain(rows) if (each := rdd.dependencies().head()).getClass().getName() == _SHUFFLE)
    if len(shuffle.rdd().partitions()):  # an empty topic has none, and Spark runs no map stage without partitions
        session.sparkContext._jsc.sc().submitMapStage(shuffle).get()  # noqa: SLF001 - PySpark has no public way
    read = session._jsparkSession.internalCreateDataFrame(rows, plan.schema(), False)  # noqa: SLF001
    return Classic(read, frame.sparkSession)


_SHUFFLE = "org.apache.spark.ShuffleDependency"


def refuse_reading_again() -> None:
    """Raise Unavailable, on an executor, if the job must not read the source."""
    if WITHOUT_READING.is_on():
        raise Unavailable(
            "Spark has lost rows of a micro-batch that it had read, such as with an executor; they are read again",
            {"reason": READ_AGAIN},
        )
