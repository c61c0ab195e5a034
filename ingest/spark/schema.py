"""Convert Arrow types and column names to Spark."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from memwal.ingest.errors import Invalid

if TYPE_CHECKING:
    from pyspark.sql.types import DataType, StructType


def spark_schema(schema: pa.Schema) -> StructType:
    """Return the Spark schema for a table's columns.

    Vectors become arrays, unsigned integers the next wider signed type.
    """
    from pyspark.sql.types import StructField, StructType

    return StructType([StructField(field.name, spark_type(field.type), True) for field in schema])


def spark_type(kind: pa.DataType) -> DataType:
    """Return the Spark type for a column of an Arrow type. Raises: Invalid for a type that Spark cannot read."""
    from pyspark.sql import types as spark

    if pa.types.is_fixed_size_list(kind) or pa.types.is_list(kind):
        return spark.ArrayType(spark_type(kind.value_type), True)
    if pa.types.is_struct(kind):
        return spark_schema(pa.schema(list(kind)))
    if pa.types.is_timestamp(kind):
        return spark.TimestampNTZType() if kind.tz is None else spark.TimestampType()
    if pa.types.is_decimal128(kind):
        return spark.DecimalType(kind.precision, kind.scale)
    simple: dict[pa.DataType, DataType] = {
        pa.int8(): spark.ByteType(),
        pa.int16(): spark.ShortType(),
        pa.int32(): spark.IntegerType(),
        pa.int64(): spark.LongType(),
        pa.uint8(): spark.ShortType(),
        pa.uint16(): spark.IntegerType(),
        pa.uint32(): spark.LongType(),
        pa.uint64(): spark.DecimalType(20, 0),
        pa.float16(): spark.FloatType(),
        pa.float32(): spark.FloatType(),
        pa.float64(): spark.DoubleType(),
        pa.bool_(): spark.BooleanType(),
        pa.string(): spark.StringType(),
        pa.large_string(): spark.StringType(),
        pa.binary(): spark.BinaryType(),
        pa.large_binary(): spark.BinaryType(),
        pa.date32(): spark.DateType(),
    }
    if kind not in simple:
        raise Invalid(f"Spark cannot read a column of type {kind}; choose another type in [table] columns")
    return simple[kind]


def quoted(name: str) -> str:
    """Return the name of a column quoted for Spark, so that any character is allowed."""
    return f"`{name}`"
