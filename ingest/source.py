"""The source: what `[source]` says, as a streaming DataFrame, and the checks that come before anything is written.

A file source gets the table's schema (Spark's streaming demands one) and three columns more, which say where a row
lies; with the row's number inside its part of the file they order all rows of the source. The sink sorts each region's
rows by them, so the newest row of a key wins whatever the shuffle does and however a replay is partitioned:

    _memwal_landed   modification time of the file (Spark reads files in this order; microseconds, UTC)
    _memwal_file     its path, for files of one moment
    _memwal_block    byte offset of the part of the file that the task reads

A row of Kafka has its time as `_memwal_landed`, and its topic, partition and offset, which order it: the newest offset
of a key wins (`ingest.kafka_source`). Any other source is ordered by `source.order_by`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from ingest.errors import Invalid
from ingest.feed import feed_files, visible_files
from ingest.kafka_checks import KAFKA
from ingest.keys import nearest
from ingest.references import resolve
from ingest.settings import SourceSettings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import DataType, StructType

LANDED, FILE, BLOCK = "_memwal_landed", "_memwal_file", "_memwal_block"
PLACE = (LANDED, FILE, BLOCK)
"""Columns that say where a row of a file source lies, most significant first."""
PART = "_memwal_part"
"""One number in the place of `PLACE` (`ingest.spark_small`)."""
TOPIC, PARTITION, OFFSET = "_memwal_topic", "_memwal_partition", "_memwal_offset"
COORDINATES = (TOPIC, PARTITION, OFFSET)
"""Columns that say where a row of Kafka lies, most significant first. It has `LANDED` too, which does not order it."""
DELETE = "_memwal_delete"
"""Column of bools that a frame may have: the row deletes its key (null = false), and needs no other values."""
PROBLEM = "_memwal_problem"
"""Why a row cannot be used, behind its stage ("parse: …", "map: …"); null where it can."""
RAW_KEY, RAW_VALUE, RAW_HEADERS = "_memwal_raw_key", "_memwal_raw_value", "_memwal_raw_headers"
"""The record's own bytes, for its dead letter; a source has them or has not."""
BESIDE = (PROBLEM, RAW_KEY, RAW_VALUE, RAW_HEADERS)
"""Columns that end where rows are sorted out, before they are shuffled."""
OURS = (*PLACE, *COORDINATES, DELETE, *BESIDE)
"""Columns of a row on its way that are none of the table."""

FILE_FORMATS = ("parquet", "orc", "json", "csv", "text", "avro", "xml")
FILES_CHECKED = 256
"""Schemas read before the query starts: a footer costs about a millisecond; what lies behind is found while reading."""

_FAR = "36500d"  # Spark's default of 7 days makes it leave out, in silence, files older than that beside newer ones
_STRICT = "FAILFAST"  # where Spark's default puts nulls in the place of values that it cannot read

_UNREAD = "_memwal_unread"
UNREADABLE = "parse: malformed, or a value is of another type than its column"
"""`PROBLEM` of a record of JSON that Spark could not read; `ingest.file_rows` finds out why."""
_UNREADABLE_LINE = "parse: the line has more or fewer values than there are columns, or quotes that do not match"


# ---- checks --------------------------------------------------------------------------------------------------------


def check_source(source: SourceSettings, schema: pa.Schema) -> None:
    """Refuse a source that cannot be read into a table of `schema` (base schema). Reads only.

    Raises: Invalid naming the setting, or the file and the column.
    """
    if source.format not in FILE_FORMATS:
        return
    if not source.path:
        raise Invalid("source.path is not set; write the directory of your files")
    if is_remote(source.path):
        return
    files = feed_files(local_path(source.feed)) if source.feed else []
    files = sorted({*files, *_files_of(local_path(source.path), must_exist=not source.feed)})
    if source.format == "parquet":
        for file in files[:FILES_CHECKED]:
            _check_file(file, schema, source.schema_drift)


def is_remote(path: str) -> bool:
    """Whether a path is one that only Spark can read (`s3a://…`, `hdfs://…`)."""
    return "://" in path and not path.startswith("file://")


def reads_local(source: SourceSettings) -> bool:
    """Whether a source is known to read files of local disks only, or none."""
    return source.format == KAFKA or (source.format in FILE_FORMATS and not is_remote(source.path))


def local_path(path: str) -> Path:
    """A local path or `file:` URL as a Path."""
    return Path(path.removeprefix("file://") if path.startswith("file://") else path)


def _files_of(path: Path, *, must_exist: bool) -> list[Path]:
    if not must_exist and not path.exists():
        return []
    try:
        if path.is_file():
            raise Invalid(f"source.path: {path} is a file; name the directory that holds it")
        return visible_files(path)
    except OSError as error:
        raise Invalid(f"source.path: {path}: {error.strerror}; name a directory that can be read") from None


def _check_file(file: Path, schema: pa.Schema, drift: str) -> None:
    try:
        footer = pq.read_metadata(file)
        found = footer.schema.to_arrow_schema()
    except (OSError, pa.ArrowException) as error:
        reason = str(error).splitlines()[0]
        raise Invalid(f"source.path: {file} is no readable Parquet file ({reason}); remove or replace it") from None
    for name in schema.names:
        # Where columns come up while a stream runs, files from before do not have them.
        if name not in found.names and (drift == "ignore" or not schema.field(name).nullable):
            raise Invalid(
                f"source.path: {file} has no column {name!r}; add it to the files or take it out of [table] columns"
                f"{nearest(name, found.names)}"
            )
    for field in found:
        if field.name not in schema.names and drift != "fail":
            continue
        if field.name not in schema.names:
            raise Invalid(
                f"source.path: {file} has a column {field.name!r} that the table has not; take it out of the files or "
                f"add it to [table] columns{nearest(field.name, schema.names)}"
            )
        _check_type(file, field, schema.field(field.name).type)
    _check_nulls(file, footer, [field.name for field in schema if not field.nullable])


def _check_nulls(file: Path, footer: pq.FileMetaData, names: Sequence[str]) -> None:
    """Refuse nulls in columns that take none, where the footer counts them: before the first row is read."""
    for group in range(footer.num_row_groups):
        chunks = (footer.row_group(group).column(at) for at in range(footer.num_columns))
        for chunk in chunks:
            counted = chunk.statistics is not None and chunk.statistics.has_null_count
            if chunk.path_in_schema in names and counted and chunk.statistics.null_count:
                raise Invalid(
                    f"source.path: {file}: column {chunk.path_in_schema!r} is null in {chunk.statistics.null_count} of "
                    f"the rows of row group {group}; give every row a value, it is part of the key or declared not null"
                )


def _check_type(file: Path, found: pa.Field, wanted: pa.DataType) -> None:
    if not readable(found.type, wanted):
        raise Invalid(
            f"source.path: {file}: column {found.name!r} is {found.type}, the table wants {wanted}; "
            "convert the files or correct [table] columns"
        )


def readable(found: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether Spark reads a Parquet column of type `found` into a column of type `wanted`, losing nothing."""
    types = pa.types
    if types.is_dictionary(found):
        found = found.value_type
    if types.is_integer(wanted):
        # Spark has no unsigned types: it reads one into the next wider signed one, which the sink narrows again.
        return bool(types.is_integer(found)) and _signed_bits(found) <= _signed_bits(wanted)
    if types.is_floating(wanted):  # float64 in a narrower column is rounded by the sink (`widened`)
        return bool(types.is_floating(found)) and found.bit_width > 16
    if types.is_timestamp(wanted):
        return bool(types.is_timestamp(found)) and found.unit != "ns" and (found.tz is None) == (wanted.tz is None)
    if _is_list(wanted):
        return _is_list(found) and _as_wide(found, wanted) and readable(found.value_type, wanted.value_type)
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
    """`kind` with float64 in the place of narrower floats: Spark reads those as such too, but never float64 as
    narrower ones. The sink rounds them, and refuses what would become infinite.
    """
    if pa.types.is_floating(kind):
        return pa.float64()
    if _is_list(kind):
        return pa.list_(widened(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(widened(field.type)) for field in kind])
    return kind


def _signed_bits(kind: pa.DataType) -> int:
    unsigned = bool(pa.types.is_unsigned_integer(kind))
    return int(kind.bit_width) * (2 if unsigned else 1)


def _as_wide(found: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether lists may be as long as those of `wanted` are; of lists of any length only their values tell."""
    both = pa.types.is_fixed_size_list(found) and pa.types.is_fixed_size_list(wanted)
    return not both or bool(found.list_size == wanted.list_size)


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


# ---- the stream ----------------------------------------------------------------------------------------------------


def read_stream(spark: SparkSession, source: SourceSettings, schema: pa.Schema) -> DataFrame:
    """The streaming DataFrame of `source`: the table's columns, and `PLACE` for a file source.

    Records of JSON and CSV that cannot be used are rows with a `PROBLEM`, and end nothing here. CSV with a header comes
    as `FILE` alone: who is given a micro-batch reads its files (`ingest.csv_header`).
    """
    from ingest.csv_header import has_header, names_only

    if has_header(source):
        return names_only(spark.readStream, source)
    reader = spark.readStream.format(source.format)
    return rows_of(reader, source, schema, stored=stored_types(spark, source, schema))


def stored_types(spark: SparkSession, source: SourceSettings, schema: pa.Schema) -> pa.Schema:
    """`schema` with the types as which Spark reads the columns of Parquet files: float64 in the place of narrower
    floats, where files may hold that.
    """
    wide = pa.schema([field.with_type(widened(field.type)) for field in schema])
    if source.format != "parquet" or wide == schema:
        return schema
    return wide if _holds_float64(spark, source, schema) else schema


def _holds_float64(spark: SparkSession, source: SourceSettings, schema: pa.Schema) -> bool:
    """Whether any Parquet file has float64 where the table has narrower floats; True where none can be looked at."""
    if is_remote(source.path):
        try:
            found = spark.read.options(**resolve(source.options, os.environ, "[source] options")).parquet(source.path)
            return any("DoubleType" in str(field.dataType) for field in found.schema if field.name in schema.names)
        except Exception:  # noqa: BLE001 - no file yet, for example; the stream says whatever else is wrong
            return True
    paths = [local_path(each) for each in (source.path, source.feed) if each]
    files = [file for path in paths if path.is_dir() for file in visible_files(path)][:FILES_CHECKED]
    footers = [pq.read_schema(file) for file in files]
    narrow = [field.name for field in schema if widened(field.type) != field.type]
    kinds = [each.field(name).type for name in narrow for each in footers if name in each.names]
    return not footers or any("double" in str(kind) for kind in kinds)


def file_limits(source: SourceSettings) -> dict[str, str]:
    """Options of a stream of files: how many a micro-batch has, and that none is too old."""
    return {"maxFilesPerTrigger": str(source.files_per_trigger), "maxFileAge": _FAR}


def rows_of(
    reader: Any, source: SourceSettings, schema: pa.Schema, *, stored: pa.Schema, paths: Any = None
) -> DataFrame:
    """As `read_stream`, by a reader of Spark that has its format. `stored`: the columns of the files as they are read,
    for JSON and CSV in the order of the file; `paths`: what to load, None for `source.path`.
    """
    from pyspark.sql import functions

    from ingest.strict_texts import STRICT, as_read, columns, read_type

    options = resolve(source.options, os.environ, "[source] options")
    strict, is_file = source.format in STRICT, source.format in FILE_FORMATS
    if strict:
        stored = pa.schema([field.with_type(read_type(field.type, source.format)) for field in stored])
        reader = reader.option("columnNameOfCorruptRecord", _UNREAD)
    if is_file:
        read = stored.append(pa.field(_UNREAD, pa.string())) if strict else stored
        reader = reader.schema(spark_schema(read)).options(mode="PERMISSIVE" if strict else _STRICT)
        if paths is None:
            reader = reader.options(**file_limits(source))
    reader = reader.options(**options)
    path: Any = source.path if paths is None else paths
    frame: DataFrame = reader.load(path) if path else reader.load()
    if not is_file:
        return frame
    values, problem = [functions.col(quoted(name)) for name in schema.names], None
    if strict:
        values, problem = columns(schema, source.format, options)
        unread, said = functions.col(_UNREAD), UNREADABLE if source.format == "json" else _UNREADABLE_LINE
        problem = functions.coalesce(functions.when(unread.isNotNull(), functions.lit(said)), problem)
        raw = functions.when(problem.isNotNull(), functions.coalesce(unread.cast("binary"), as_read(stored)))
    return frame.select(
        *values,
        functions.col("_metadata.file_modification_time").alias(LANDED),
        functions.col("_metadata.file_path").alias(FILE),
        functions.col("_metadata.file_block_start").alias(BLOCK),
        *([] if problem is None else [problem.alias(PROBLEM), raw.alias(RAW_VALUE)]),
    )


def spark_schema(schema: pa.Schema) -> StructType:
    """The Spark schema to read a table's columns with; vectors as arrays, unsigned numbers one size wider."""
    from pyspark.sql.types import StructField, StructType

    return StructType([StructField(field.name, spark_type(field.type), True) for field in schema])


def spark_type(kind: pa.DataType) -> DataType:
    """The Spark type that a column of an Arrow type is read as. Raises: Invalid for a type Spark cannot read."""
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
    """The name of a column as Spark takes it for one, whatever is in it."""
    return f"`{name}`"
