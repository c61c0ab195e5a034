"""Run the map stage of a shuffle before the stage that reads its output.

A job runs both stages without a pause. With adaptive execution Spark first submits the map stage by itself; `rows_read`
does the same, so that the driver can check the source (`source`) after all rows are read and before any row is
sent. The second stage reads the same shuffle files.

Spark repeats tasks of the map stage if shuffle files are lost, for example with an executor. A repeated task would read
the source again, after the check. Therefore jobs over the frame that `rows_read` returns have the property
`WITHOUT_READING`, and the task that reads the source raises an error if it is set (`refuse_reading_again`). The caller
then starts the micro-batch again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from memwal.ingest.errors import Unavailable
from memwal.ingest.spark.driver_read import chain
from memwal.ingest.spark.job_property import JobProperty

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

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
