"""The records of a small micro-batch, read by the driver without a Spark job.

A job for a few hundred records takes some 100 ms: Spark schedules it, sends its functions to a Python worker, moves the
rows there and back. Read here they take a third of that.

`foreachBatch` gets a frame whose rows are an RDD. Below Spark's functions of the plan lies the RDD of the scan, which
is all that is read here, by Spark's own source with its own options: in the JVM's thread that called `foreachBatch`,
with an empty task context, as Spark's tasks do it. Spark's own converter makes an Arrow batch of the records. It goes
through a file, because an answer of more than 8 KB over PySpark's socket waits 40 ms for an acknowledgement of its
first bytes (Nagle's algorithm).

All of this is inside Spark, so what it needs may be missing in another release: then nothing is read, and the caller
uses a job.
"""

from __future__ import annotations

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
MOST_ROWS, MOST_BYTES = 10_000, 4 << 20
"""Most records of a micro-batch that the driver reads. From some ten thousand on, a job on two cores is faster."""
_LENGTH = 4
"""Bytes before each batch in the file, as Spark writes to Python: its length."""


@dataclass(frozen=True, slots=True)
class DriverRead:
    """Reads what the one scan below a micro-batch's frame yields.

    Thread safety. One thread, that of the query.
    """

    records: DataFrame
    """The streaming frame of the source alone: names and types of what the scan yields."""
    most_rows: int = MOST_ROWS
    most_bytes: int = MOST_BYTES

    def read(self, frame: DataFrame) -> pa.RecordBatch | None:
        """Return all records of a micro-batch, in the order of the scan's parts; None where they are more than
        `most_rows` or `most_bytes`, where the plan is not one scan, and where reading failed: a job says why.
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
        scan = _scan(plan.queryExecution().logical().rdd())
        if scan is None:
            return None
        # Readable by this user alone; Java writes into it by its name.
        with tempfile.NamedTemporaryFile(prefix="memwal-") as file, _task(jvm) as context:
            whole = scan.coalesce(1, False, jvm.scala.Option.empty(), None)
            rows = whole.iterator(whole.partitions()[0], context)
            self._write(jvm, rows, file.name)
            return None if rows.hasNext() else _batch(file.read())

    def _write(self, jvm: Any, rows: Any, path: str) -> None:
        """Write the first records, as many as are wanted at most, to a file."""
        schema: Any = self.records._jdf.schema()  # noqa: SLF001
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
    """Return the RDD that yields the records of the scan below `rdd`, and counts them for Spark; None if there is
    none."""
    above, below = None, rdd
    while (parents := below.dependencies()).size() == 1:
        above, below = below, parents.head().rdd()
    return above if below.getClass().getSimpleName() == _SCAN else None


@contextmanager
def _task(jvm: Any) -> Iterator[Any]:
    """While the context lasts, this thread of the JVM has an empty task context; at its end, what was opened with it is
    released."""
    tasks = _module(jvm.org.apache.spark, "TaskContext")
    context = tasks.empty()
    tasks.setTaskContext(context)
    try:
        yield context
    finally:
        try:
            context.markTaskCompleted(jvm.scala.Option.empty())
        finally:
            tasks.unset()


def _module(package: Any, name: str) -> Any:
    """Return the Scala object `name` of a package."""
    return getattr(getattr(package, f"{name}$"), "MODULE$")
