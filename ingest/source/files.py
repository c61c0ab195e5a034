"""The source: what `[source]` says, as a streaming DataFrame, and the checks that come before anything is written.

A file source gets the table's schema (Spark's streaming demands one) and three columns more, which say where a row
lies; with the row's number inside its part of the file they order all rows of the source. The sink sorts each region's
rows by them, so the newest row of a key wins whatever the shuffle does and however a replay is partitioned:

    _memwal_landed   modification time of the file (Spark reads files in this order; microseconds, UTC)
    _memwal_file     its path, for files of one moment
    _memwal_block    byte offset of the part of the file that the task reads

A row of Kafka has its time as `_memwal_landed`, and its topic, partition and offset, which order it: the newest offset
of a key wins (`ingest.source.kafka.stream`). Any other source is ordered by `source.order_by`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from memwal.ingest.errors import Invalid
from memwal.ingest.secret_refs import resolve
from memwal.ingest.settings.load import SourceSettings
from memwal.ingest.settings.paths import is_remote, local_path
from memwal.ingest.settings.process_sections import KAFKA
from memwal.ingest.source.batch_files import file_limits
from memwal.ingest.source.columns import BLOCK, FILE, LANDED, PROBLEM, RAW_VALUE
from memwal.ingest.source.feed import feed_files, visible_files
from memwal.ingest.source.file_types import readable
from memwal.ingest.spark.schema import quoted, spark_schema
from memwal.ingest.suggest import suggestion
from memwal.wal.errors import first_line

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


FILE_FORMATS = ("parquet", "orc", "json", "csv", "text", "avro", "xml")
FILES_CHECKED = 256
"""Schemas read before the query starts: a footer costs about a millisecond; what lies behind is found while reading."""

_STRICT = "FAILFAST"  # where Spark's default puts nulls in the place of values that it cannot read

_UNREAD = "_memwal_unread"
UNREADABLE = "parse: malformed, or a value is of another type than its column"
"""`PROBLEM` of a record of JSON that Spark could not read; `ingest.dlq.file_rows` finds out why."""
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


def reads_local(source: SourceSettings) -> bool:
    """Whether a source is known to read files of local disks only, or none."""
    return source.format == KAFKA or (source.format in FILE_FORMATS and not is_remote(source.path))


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
        reason = first_line(error)
        raise Invalid(f"source.path: {file} is no readable Parquet file ({reason}); remove or replace it") from None
    for name in schema.names:
        # Where columns come up while a stream runs, files from before do not have them.
        if name not in found.names and (drift == "ignore" or not schema.field(name).nullable):
            raise Invalid(
                f"source.path: {file} has no column {name!r}; add it to the files or take it out of [table] columns"
                f"{suggestion(name, found.names)}"
            )
    for field in found:
        if field.name not in schema.names and drift != "fail":
            continue
        if field.name not in schema.names:
            raise Invalid(
                f"source.path: {file} has a column {field.name!r} that the table has not; take it out of the files or "
                f"add it to [table] columns{suggestion(field.name, schema.names)}"
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


# ---- the stream ----------------------------------------------------------------------------------------------------


def rows_of(
    reader: Any, source: SourceSettings, schema: pa.Schema, *, stored: pa.Schema, paths: Any = None
) -> DataFrame:
    """As `read_stream`, by a reader of Spark that has its format. `stored`: the columns of the files as they are read,
    for JSON and CSV in the order of the file; `paths`: what to load, None for `source.path`.
    """
    from pyspark.sql import functions

    from memwal.ingest.source.strict_texts import STRICT, as_read, columns, read_type

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
