"""Registers the data source in a Spark session. Imports PySpark only when it is called."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memwal.ingest.errors import Invalid, translate_errors

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@translate_errors
def register_spark(spark: SparkSession) -> None:
    """Let a Spark session know tables by the format "memwal". Every new session needs it once.

    For `spark.read` (rows), `spark.readStream` (changes) and `df.writeStream`, see `ingest/connector/README.md`.
    Raises: Invalid if `spark` is no session of PySpark, or PySpark is not installed.
    """
    from memwal.ingest.connector.source import MemWalSource

    if not hasattr(spark, "dataSource"):
        raise Invalid(f"register_spark takes a SparkSession, not a {type(spark).__name__}")
    spark.dataSource.register(MemWalSource)
