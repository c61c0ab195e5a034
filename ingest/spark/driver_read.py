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
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from memwal.wal.codec.scratch_file import open_scratch

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_LOG = logging.getLogger("memwal.spark")
_SCAN = "DataSourceRDD"
MOST_ROWS, MOST_BYTES = 100_000, 16 << 20
"""Most rows of a micro-batch that the driver reads. It is faster for more as well, but must hold them in memory."""
_NUMBERS = itertools.count(1 << 40)
"""Of tasks; taken negative, since Spark's own are not. Spark's block manager gives -1 and -1024 a meaning."""
_LENGTH = 4
"""Bytes before each batch in the file, as Spark writes to Python: its length."""


@dataclass
class DriverRead:
    """Reads the rows of a micro-batch's frame, or of the one scan below it.

    Thread safety. One thread, that of the query. All frames are of one Spark.
    """

    scan: DataFrame | None = None
    """The streaming frame of the source alone, to read what the scan yields; None to read the frame's own rows, in
    which Python must have no part."""
    most_rows: int = MOST_ROWS
    most_bytes: int = MOST_BYTES
    _inside: _Inside | None = None

    def read(self, frame: DataFrame) -> pa.RecordBatch | None:
        """Return all rows of a micro-batch, in the order of the source's parts; a batch without columns if it has none.
        None where they are more than `most_rows` or `most_bytes`, where there is not one scan, and where reading
        failed: a job says why.
        """
        from py4j.protocol import Py4JError
        from pyspark.errors import PySparkException

        try:
            return self._read(frame)
        except (PySparkException, Py4JError, TypeError, OSError) as error:
            _LOG.debug("the driver could not read a micro-batch: %s", error)
            return None

    def _read(self, frame: DataFrame) -> pa.RecordBatch | None:
        inside = self._inside = self._inside or _Inside.of(frame)
        plan: Any = frame._jdf  # noqa: SLF001
        parts = plan.queryExecution().logical().rdd()
        if self.scan is not None:
            plan, parts = self.scan._jdf, _scan(parts)  # noqa: SLF001
        if parts is None:
            return None
        whole = parts.coalesce(1, False, inside.none, None)
        if not len(whole.partitions()):
            return _batch(b"")
        file, path = open_scratch(os.getpid())  # Java writes into it
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
    """Return the batch of an Arrow stream behind its length; one without columns if there is none."""
    return next(iter(pa.ipc.open_stream(data[_LENGTH:]))) if data else pa.RecordBatch.from_pydict({})


def _scan(rdd: Any) -> Any:
    """Return the RDD that yields the rows of the scan below `rdd`, and counts them for Spark; None if there is none."""
    above, below = list(chain(rdd))[-2:]
    return above if below.getClass().getSimpleName() == _SCAN else None


def chain(rdd: Any) -> Iterator[Any]:
    """Yield `rdd` and what it is computed from, up to the first RDD that is not computed from one other."""
    yield rdd
    while (parents := rdd.dependencies()).size() == 1:
        rdd = parents.head().rdd()
        yield rdd


@dataclass(frozen=True, slots=True)
class _Inside:
    """What is used of Spark's inside, looked up once: every dot in the name of a class is a call to the JVM."""

    zone: str
    """The session's, in which a job's times come as well."""
    none: Any
    properties: Any
    thread: Any
    file_stream: Any
    data_stream: Any
    any_class: Any
    environment: Any
    contexts: Any
    context: Any
    accumulators: Any
    python_rdd: Any
    converters: Any

    @classmethod
    def of(cls, frame: DataFrame) -> _Inside:
        """Look it up. Raises: Py4JError and TypeError where this Spark does not have it."""
        jvm: Any = frame.sparkSession.sparkContext._jvm  # noqa: SLF001 - PySpark has no public way to a class of the JVM
        spark, java = jvm.org.apache.spark, jvm.java
        return cls(
            zone=str(frame.sparkSession.conf.get("spark.sql.session.timeZone")),
            none=jvm.scala.Option.empty(),
            properties=java.util.Properties,
            thread=java.lang.Thread,
            file_stream=java.io.FileOutputStream,
            data_stream=java.io.DataOutputStream,
            any_class=_module(jvm.scala.reflect, "ClassTag").Any(),
            environment=spark.SparkEnv.get(),
            contexts=_module(spark, "TaskContext"),
            context=spark.TaskContextImpl,
            accumulators=_module(spark.util, "AccumulatorContext"),
            python_rdd=spark.api.python.PythonRDD,
            converters=_module(spark.sql.execution.arrow, "ArrowConverters"),
        )

    def copied(self, rdd: Any) -> Any:
        """Return a copy of `rdd`, as each task of a job gets one: RDDs of files, once they were computed, hold what
        cannot be sent to a task, and the micro-batch may need a job all the same."""
        for _ in chain(rdd):
            pass  # each RDD of the chain knows the next one now, which those of a copy cannot find
        serializer = self.environment.closureSerializer().newInstance()
        loader = self.thread.currentThread().getContextClassLoader()
        return serializer.deserialize(serializer.serialize(rdd, self.any_class), loader, self.any_class)

    def write(self, batches: Any, path: str) -> None:
        """Write batches to a file, each behind its length."""
        out = self.data_stream(self.file_stream(path))
        try:
            self.python_rdd.writeIteratorToStream(batches, out)
        finally:
            out.close()

    @contextmanager
    def task(self) -> Iterator[Any]:
        """While the context lasts, this thread of the JVM has a task context; at its end, what was opened with it is
        released."""
        number, bare = -next(_NUMBERS), self.contexts.empty()  # Spark's own numbers are not negative
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
        """Add what copies of Spark's metrics have counted, as a job does: the progress of the query shows it."""
        counted = context.taskMetrics()._externalAccums()  # noqa: SLF001 - a public method of Scala's
        for at in range(counted.size()):
            if not (each := counted.apply(at)).isZero():
                self.accumulators.get(each.id()).get().merge(each)


def _module(package: Any, name: str) -> Any:
    """Return the Scala object `name` of a package."""
    return getattr(getattr(package, f"{name}$"), "MODULE$")
