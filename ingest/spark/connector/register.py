"""Register the data source in a Spark session. PySpark is imported only by the call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memwal.ingest.errors import Invalid, translate_errors

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@translate_errors
def register_spark(spark: SparkSession) -> None:
    """Let a Spark session know tables by the format "memwal". Every new session needs it once.

    For `spark.read` (rows), `spark.readStream` (changes) and `df.writeStream`, see `ingest/spark/connector/README.md`.
    Spark's Python workers must have memwal. In local mode they run the Python of this process, unless PYSPARK_PYTHON is
    set; otherwise a task checks them.
    Raises: Invalid if `spark` is not a session of PySpark, PySpark is not installed, or workers cannot import memwal.
    """
    from memwal.ingest.spark.connector.source import MemWalSource
    from memwal.ingest.spark.session import check_workers

    if not hasattr(spark, "dataSource"):
        raise Invalid(f"register_spark takes a SparkSession, not a {type(spark).__name__}")
    check_workers(spark)
    spark.dataSource.register(MemWalSource)
