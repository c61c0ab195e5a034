"""The fields of a source that has schemas, with the kinds of their columns: Avro writers, and Parquet and ORC files.

**Avro**, exactly, and without reading a record: int, long, float, double, bool, bytes and text have columns of the same
type; so do dates, timestamps, decimals and lists of one kind of scalar. A union with null has the kind of its other
type; a union of int and a float type is float64. Enums, UUIDs and times of day are text. Records, maps and other
unions, such as long with double, are `kinds.ANY`.

**Parquet and ORC**: Spark reads the schema of each file of a micro-batch as it will read the file: from any storage,
and in Spark's types. Types that Spark or a table does not have become the kind `ANY`, and so do columns that have
different types in two files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from memwal.ingest.settings.sections import SourceSettings
from memwal.ingest.spark.drift.kinds import ANY, DIGITS, Kind, Kinds, common, listed, widen
from memwal.ingest.spark.errors import of_spark
from memwal.ingest.spark.schema import spark_type
from memwal.ingest.spark.source.files import NO_GLOB, files_of, resolved_options

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType

_PLAIN: Mapping[str, Kind] = {
    "null": None,
    "boolean": pa.bool_(),
    "int": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "bytes": pa.binary(),
    "fixed": pa.binary(),
    "string": pa.string(),
    "enum": pa.string(),
    "map": ANY,
    "record": ANY,
    "error": ANY,
}
_LOGICAL: Mapping[tuple[str, str], pa.DataType] = {
    ("int", "date"): pa.date32(),
    ("int", "time-millis"): pa.string(),
    ("long", "time-micros"): pa.string(),
    ("long", "timestamp-millis"): pa.timestamp("us", "UTC"),
    ("long", "timestamp-micros"): pa.timestamp("us", "UTC"),
    ("long", "local-timestamp-millis"): pa.timestamp("us"),
    ("long", "local-timestamp-micros"): pa.timestamp("us"),
}
_SIDES = ("after", "before")


def fields_of_schema(schema: Any, envelope: str = "none") -> Kinds:
    """Return the fields of rows written with `schema`, a result of `fastavro.parse_schema`."""
    names: dict[str, Any] = {}
    for each in schema if isinstance(schema, list) else [schema]:
        names |= each.get("__named_schemas", {}) if isinstance(each, dict) else {}
    reader = _Reader(names)
    if envelope == "none":
        return reader.fields(schema)
    whole = reader.types(schema)
    inside = reader.types(whole["payload"]) if "payload" in whole else {}
    found: Kinds = {}
    for side in _SIDES:
        widen(found, reader.fields((inside or whole).get(side)))
    return found


@dataclass(frozen=True, slots=True)
class _Reader:
    names: Mapping[str, Any]

    def types(self, schema: Any) -> dict[str, Any]:
        """Return the schemas of the fields of the records that `schema` allows."""
        records = (each for each in self._branches(schema) if _type(each) in ("record", "error"))
        return {field["name"]: field["type"] for record in records for field in record["fields"]}

    def fields(self, schema: Any) -> Kinds:
        """Return the kinds of the fields of the records that `schema` allows."""
        return {name: self.kind(each) for name, each in self.types(schema).items()}

    def kind(self, schema: Any) -> Kind:
        """Return the kind of the values of `schema`."""
        return common(self._alone(each) for each in self._branches(schema))

    def _branches(self, schema: Any) -> Iterator[Any]:
        """Yield the alternatives of a schema, with names resolved."""
        if isinstance(schema, list):
            for each in schema:
                yield from self._branches(each)
        elif isinstance(schema, dict) and not isinstance(schema["type"], str):
            yield from self._branches(schema["type"])
        elif schema is not None:
            yield self.names.get(_type(schema), schema)

    def _alone(self, schema: Any) -> Kind:
        written = _type(schema)
        if written == "array":
            return listed(self.kind(schema["items"]))
        logical = schema.get("logicalType") if isinstance(schema, dict) else None
        if logical == "decimal" and written in ("bytes", "fixed"):
            return _decimal(schema)
        return _LOGICAL.get((written, str(logical)), _PLAIN.get(written, ANY))


def _type(schema: Any) -> str:
    return str(schema["type"] if isinstance(schema, dict) else schema)


def _decimal(schema: Mapping[str, Any]) -> pa.DataType:
    digits, scale = int(schema.get("precision") or 0), int(schema.get("scale") or 0)
    return pa.decimal128(digits, scale) if 0 < digits <= DIGITS else pa.string()


# ---- Parquet and ORC ------------------------------------------------------------------------------------------------


OWN_SCHEMA = ("parquet", "orc")
"""Formats of files that have a schema."""
_COLUMN_TYPES = (
    *(pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.float32(), pa.float64(), pa.bool_(), pa.string()),
    *(pa.binary(), pa.date32(), pa.timestamp("us"), pa.timestamp("us", "UTC")),
)


def fields_of_files(frame: DataFrame, source: SourceSettings, known: frozenset[str]) -> Kinds:
    """Return the kinds of the columns of a micro-batch's files that are not in `known`.

    Names are compared without case, as Spark does. Raises: Invalid for a file whose columns Spark cannot read.
    """
    there = {name.lower() for name in known}
    reader = frame.sparkSession.read.format(source.format)
    reader = reader.options(**resolved_options(source)).option(*NO_GLOB)
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
    return {spark_type(each): each for each in _COLUMN_TYPES}.get(kind, ANY)
