"""The rows of a source: a streaming frame, a faster way to read few rows, a check before rows are sent; and how every
source except Kafka is read."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from memwal.ingest.secret_refs import resolve
from memwal.ingest.settings.sections import SourceSettings, is_remote, local_path
from memwal.ingest.spark.names import FILE_FORMATS
from memwal.ingest.spark.reading import DriverRead
from memwal.ingest.spark.schema import widened
from memwal.ingest.spark.source.feed import visible_files
from memwal.ingest.spark.source.files import FILES_CHECKED, rows_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


SmallReader = Callable[["DataFrame"], pa.RecordBatch | None]
"""Reads all rows of a small micro-batch in the driver, without a Spark job (`ingest.spark.reading`).

Returns a batch without columns for an empty micro-batch; None if there are many rows, or if the driver cannot read
them.
"""


@dataclass(frozen=True, slots=True)
class SourceRows:
    """What a streaming query reads."""

    frame: DataFrame
    small: SmallReader | None = None
    """Reads small micro-batches of `frame`."""


class SourceGuard(Protocol):
    """Checks in each micro-batch that the source is still the one that the checkpoint refers to. Raises: MemWalError.

    The sink calls `check` once all rows are read and before it sends any. Rows that are read again are checked again.
    """

    def begin(self, batch_id: int) -> None:
        """Prepare micro-batch `batch_id`, before its rows are read."""

    def check(self) -> None:
        """Raise an error unless the rows that were read since `begin` may be sent."""


def read_stream(spark: SparkSession, source: SourceSettings, schema: pa.Schema) -> SourceRows:
    """Return the rows of `source`: the table's columns, and `PLACE` for a file source.

    JSON and CSV records that cannot be used are rows with a `PROBLEM`; they raise no error here. For CSV with a header
    the frame has only the column `FILE`: `source.csv_header` reads the files of each micro-batch.
    """
    from memwal.ingest.spark.source.csv_header import has_header, names_only

    if has_header(source):
        return SourceRows(names_only(spark.readStream, source))
    reader = spark.readStream.format(source.format)
    frame = rows_of(reader, source, schema, stored=stored_types(spark, source, schema))
    return SourceRows(frame, DriverRead().read if _by_driver(spark, source) else None)


def _by_driver(spark: SparkSession, source: SourceSettings) -> bool:
    """Return whether the driver may read micro-batches of `source`: files only, as their plans contain no Python.

    False if Spark skips files that it cannot read: stopping the query interrupts the driver's read, and Spark would
    treat the interruption as the end of a file.
    """
    given = {name.lower(): value.get_secret_value() for name, value in source.options.items()}
    skipping = {"ignoreCorruptFiles", "ignoreMissingFiles"}
    set_to = [given.get(name.lower()) or spark.conf.get(f"spark.sql.files.{name}") for name in skipping]
    return source.format in FILE_FORMATS and all(str(each).strip().lower() != "true" for each in set_to)


def stored_types(spark: SparkSession, source: SourceSettings, schema: pa.Schema) -> pa.Schema:
    """Return `schema` with the types that Spark must use to read Parquet files.

    If files may contain float64, narrower floats become float64.
    """
    wide = pa.schema([field.with_type(widened(field.type)) for field in schema])
    if source.format != "parquet" or wide == schema:
        return schema
    return wide if _holds_float64(spark, source, schema) else schema


def _holds_float64(spark: SparkSession, source: SourceSettings, schema: pa.Schema) -> bool:
    """Return whether a Parquet file has float64 where the table has narrower floats; True if no file can be read."""
    if is_remote(source.path):
        try:
            found = spark.read.options(**resolve(source.options, os.environ, "[source] options")).parquet(source.path)
            return any("DoubleType" in str(field.dataType) for field in found.schema if field.name in schema.names)
        except Exception:  # noqa: BLE001 - for example, no file yet; the stream reports other errors
            return True
    paths = [local_path(each) for each in (source.path, source.feed) if each]
    files = [file for path in paths if path.is_dir() for file in visible_files(path)][:FILES_CHECKED]
    footers = [pq.read_schema(file) for file in files]
    narrow = [field.name for field in schema if widened(field.type) != field.type]
    kinds = [each.field(name).type for name in narrow for each in footers if name in each.names]
    return not footers or any("double" in str(kind) for kind in kinds)
