"""The columns of the files of a micro-batch, for formats whose files have a schema: Parquet and ORC.

Spark reads the schema of each file as it will read the file: from any storage, and in Spark's types. Types that Spark
or a table does not have become the kind `ANY`, and so do columns that have different types in two files.
"""

from __future__ import annotations

import os
from functools import lru_cache
from typing import TYPE_CHECKING

import pyarrow as pa

from memwal.ingest.secret_refs import resolve
from memwal.ingest.settings.sections import SourceSettings
from memwal.ingest.spark.drift.kinds import ANY, Kinds, widen
from memwal.ingest.spark.errors import of_spark
from memwal.ingest.spark.schema import spark_type
from memwal.ingest.spark.source.files import NO_GLOB, files_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType

OWN_SCHEMA = ("parquet", "orc")
"""Formats of files that have a schema."""
_PLAIN = (
    *(pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.float32(), pa.float64(), pa.bool_(), pa.string()),
    *(pa.binary(), pa.date32(), pa.timestamp("us"), pa.timestamp("us", "UTC")),
)


def fields_of_files(frame: DataFrame, source: SourceSettings, known: frozenset[str]) -> Kinds:
    """Return the kinds of the columns of a micro-batch's files that are not in `known`.

    Names are compared without case, as Spark does. Raises: Invalid for a file whose columns Spark cannot read.
    """
    there = {name.lower() for name in known}
    reader = frame.sparkSession.read.format(source.format)
    reader = reader.options(**resolve(source.options, os.environ, "[source] options")).option(*NO_GLOB)
    found: Kinds = {}
    for path in files_of(frame):
        try:
            columns = reader.load(path).schema.fields
        except Exception as error:  # noqa: BLE001 - Spark's errors do not name the file
            why = of_spark(error)
            raise type(why)(f"{path}: {why.message}", why.details) from None
        widen(found, {each.name: kind_of(each.dataType) for each in columns if each.name.lower() not in there})
    return found


def kind_of(kind: DataType) -> pa.DataType:
    """Return the column type for a type of Spark; `ANY` if there is none."""
    from pyspark.sql import types as spark

    if isinstance(kind, spark.ArrayType):
        inner = kind_of(kind.elementType)
        return ANY if inner == ANY else pa.list_(inner)
    if isinstance(kind, spark.StructType) and kind.fields:
        below = [pa.field(each.name, kind_of(each.dataType)) for each in kind.fields]
        return ANY if any(each.type == ANY for each in below) else pa.struct(below)
    if isinstance(kind, spark.DecimalType):
        return pa.decimal128(kind.precision, kind.scale)
    return _plain().get(kind, ANY)


@lru_cache(maxsize=1)
def _plain() -> dict[DataType, pa.DataType]:
    return {spark_type(kind): kind for kind in _PLAIN}
