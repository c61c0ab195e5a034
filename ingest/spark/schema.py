"""Types and column names in Spark: the Spark types of a table's columns, and the types of files that it reads into
them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from memwal.ingest.errors import Invalid
from memwal.memtable import is_list

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


# ---- types of files -------------------------------------------------------------------------------------------------


def readable(found: pa.DataType, wanted: pa.DataType) -> bool:
    """Return whether Spark reads a Parquet column of type `found` into a column of type `wanted` without loss."""
    types = pa.types
    if types.is_dictionary(found):
        found = found.value_type
    if types.is_integer(wanted):
        # Spark has no unsigned types: it reads them as the next wider signed type, which the sink narrows again.
        return bool(types.is_integer(found)) and _signed_bits(found) <= _signed_bits(wanted)
    if types.is_floating(wanted):  # the sink rounds float64 to a narrower column (`widened`)
        return bool(types.is_floating(found)) and found.bit_width > 16
    if types.is_timestamp(wanted):
        return bool(types.is_timestamp(found)) and found.unit != "ns" and (found.tz is None) == (wanted.tz is None)
    if is_list(wanted):
        # If one of the lists has no fixed length, only the values show whether they fit.
        both = types.is_fixed_size_list(found) and types.is_fixed_size_list(wanted)
        alike = is_list(found) and (not both or found.list_size == wanted.list_size)
        return alike and readable(found.value_type, wanted.value_type)
    if types.is_struct(wanted):
        return bool(types.is_struct(found)) and all(
            readable(found.field(each.name).type, each.type) for each in wanted if found.get_field_index(each.name) >= 0
        )
    if types.is_decimal(wanted):
        return bool(found == wanted)
    families = (
        (types.is_string, types.is_large_string, types.is_string_view),
        (types.is_binary, types.is_large_binary, types.is_binary_view, types.is_fixed_size_binary),
        (types.is_boolean,),
        (types.is_date32,),
    )
    return any(any(of(wanted) for of in family) and any(of(found) for of in family) for family in families)


def widened(kind: pa.DataType) -> pa.DataType:
    """Return `kind` with float64 in place of narrower floats.

    Spark reads narrower floats as float64, but never float64 as narrower floats. The sink rounds the values, and
    rejects those that would become infinite.
    """
    if pa.types.is_floating(kind):
        return pa.float64()
    if is_list(kind):
        return pa.list_(widened(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(widened(field.type)) for field in kind])
    return kind


def _signed_bits(kind: pa.DataType) -> int:
    unsigned = bool(pa.types.is_unsigned_integer(kind))
    return int(kind.bit_width) * (2 if unsigned else 1)
