"""Rows of a table in Spark's form: the schema of a read, and Arrow batches of exactly that schema."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from memwal.ingest.engine.read.request import checked_columns
from memwal.ingest.errors import Invalid
from memwal.ingest.spark.schema import spark_type

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

ROWS_PER_BATCH = 65_536
"""Maximum rows of an Arrow batch. Spark copies the rows of a batch one by one, so this limits memory only."""


def schema_of_columns(schema: pa.Schema, columns: Sequence[str] | None) -> StructType:
    """Return the Spark schema of `columns` (None: all) of a table.

    Raises: Invalid for an unknown column, and with one line for each column whose type Spark lacks.
    """
    from pyspark.sql.types import StructField, StructType

    fields, problems = [], []
    for name in checked_columns(columns, schema, what="option columns"):
        try:
            fields.append(StructField(name, spark_type(schema.field(name).type), True))
        except Invalid:
            problems.append(
                f"column '{name}': Spark has no type for {schema.field(name).type}; name the other columns in the "
                "option columns"
            )
    if problems:
        raise Invalid.of(problems)
    return StructType(fields)


def expect_types(asked: StructType, schema: pa.Schema) -> None:
    """Check a schema that the user gave. Raises: Invalid for a column that is unknown or has another type."""
    own = schema_of_columns(schema, asked.fieldNames())
    problems = [
        f"column '{field.name}': the schema says {field.dataType.simpleString()}, the table has "
        f"{own[field.name].dataType.simpleString()}; correct it, or read without a schema and cast the column"
        for field in asked.fields
        if field.dataType != own[field.name].dataType
    ]
    if problems:
        raise Invalid.of(problems)


def arrow_schema(schema: StructType) -> pa.Schema:
    """Return the Arrow schema that Spark expects from a reader of `schema`."""
    from pyspark.sql.pandas.types import to_arrow_schema

    return to_arrow_schema(schema, timezone="UTC")


def spark_batches(tables: Iterator[pa.Table], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield `tables` as batches of `schema` (from `arrow_schema`): vectors as lists, half floats as floats.

    Raises: Invalid with the column of a value that Spark cannot represent exactly, such as a time in nanoseconds.
    """
    for table in tables:
        columns = [_converted(table.column(field.name), field) for field in schema]
        yield from pa.Table.from_arrays(columns, schema=schema).to_batches(max_chunksize=ROWS_PER_BATCH)


def _converted(column: pa.ChunkedArray, field: pa.Field) -> pa.ChunkedArray:
    if column.type == field.type:
        return column
    try:
        return column.cast(field.type)
    except pa.ArrowInvalid as error:
        raise Invalid(
            f"column '{field.name}': Spark's type {field.type} cannot hold a value of {column.type} exactly ({error}); "
            "name the other columns in the option columns"
        ) from None
