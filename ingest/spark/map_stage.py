"""The map stage of a shuffle, run before the stage that reads its output.

A job runs both stages, and nothing can happen in between. With adaptive execution Spark submits the map stage by itself
first; `rows_read` does the same, so that the driver can check something after all rows were read (`ingest.source`) and
before any of them is sent. The second stage reads the same shuffle files.

Spark repeats tasks of the map stage if files of the shuffle are lost, such as with an executor. Such a task would read
the source again, behind the check. So while a frame of `rows_read` is used, jobs run with the property
`WITHOUT_READING`, and the task that reads the source refuses to run with it (`refuse_reading_again`). The caller then
begins anew.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from memwal.ingest.errors import Unavailable
from memwal.ingest.spark.driver_read import chain
from memwal.ingest.spark.job_property import JobProperty

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

READ_AGAIN = "read_again"
"""`details["reason"]` of the error if Spark would read the source again."""
WITHOUT_READING = JobProperty("memwal.rows_read")
"""The job may not read the source."""


def rows_read(frame: DataFrame) -> DataFrame:
    """Run the map stage of the last shuffle of `frame`; return a frame of its rows that reads the output of that stage.

    Raises: what the tasks raise.
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
    """Raise Unavailable, on an executor, if the job may not read the source."""
    if WITHOUT_READING.is_on():
        raise Unavailable(
            "Spark has lost rows of a micro-batch that it had read, such as with an executor; they are read again",
            {"reason": READ_AGAIN},
        )
