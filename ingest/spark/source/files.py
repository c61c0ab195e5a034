"""File sources: checks before the start, rows with their places, and the files of a micro-batch.

A file source has the table's schema (Spark's streaming requires one) and three more columns that form the place of a
row. The place and the row's number within its part of the file order all rows of the source. The sink sorts the rows of
each region by them, so the newest row of a key wins, independent of the shuffle and of how a replay is partitioned:

    _memwal_landed   modification time of the file (Spark reads files in this order; microseconds, UTC)
    _memwal_file     its path, for files of the same time
    _memwal_block    byte offset of the part of the file that the task reads

A Kafka row has its timestamp as `_memwal_landed`, and is ordered by its topic, partition and offset: the newest offset
of a key wins (`source.kafka.stream`). Any other source is ordered by `source.order_by`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq

from memwal.ingest.errors import Invalid
from memwal.ingest.secret_refs import resolve
from memwal.ingest.settings.sections import KAFKA, SourceSettings, is_remote, local_path
from memwal.ingest.spark.names import FILE_FORMATS
from memwal.ingest.spark.schema import quoted, readable, spark_schema
from memwal.ingest.spark.source.columns import BLOCK, FILE, LANDED, PROBLEM, RAW_VALUE
from memwal.ingest.spark.source.feed import feed_files, visible_files
from memwal.ingest.suggest import suggestion
from memwal.wal.errors import first_line

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


FILES_CHECKED = 256
"""Number of files whose schemas are read before the query starts (about 1 ms each). Others are checked while reading.
"""

NO_GLOB = ("__globPaths__", "false")
"""Reader option that treats paths as file names, whatever their characters, as Spark's file stream does."""
_ANY_AGE = f"{2**63 - 1}ms"
"""The longest time that Spark accepts, so that files of any age are read.

Spark silently ignores files that are older than the newest known file by more than `maxFileAge` (7 days by default):
one file with a time far in the future would hide all others. Spark starts with 1970 as the newest time, so the
difference cannot overflow.
"""
_STRICT = "FAILFAST"  # Spark's default replaces unreadable values with null

_PLACE = {LANDED: "file_modification_time", FILE: "file_path", BLOCK: "file_block_start"}
_UNREAD = "_memwal_unread"
UNREADABLE = "parse: malformed, or a value is of another type than its column"
"""`PROBLEM` of a JSON record that Spark could not read; `dlq.bad_rows` determines the reason."""
UNREADABLE_RECORD = "parse: the record has more or fewer values than there are columns, or quotes that do not match"
"""`PROBLEM` of text in a CSV file that is not a valid record."""


# ---- checks --------------------------------------------------------------------------------------------------------


def check_source(source: SourceSettings, schema: pa.Schema) -> None:
    """Raise Invalid if the source cannot be read into a table of `schema` (base schema). Reads only.

    The message names the setting, or the file and the column.
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
    """Return whether a source is known to read only files on local disks, or no files."""
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
        # If columns are added while a stream runs, older files lack them.
        if name not in found.names and (drift == "ignore" or not schema.field(name).nullable):
            raise Invalid(
                f"source.path: {file} has no column {name!r}{suggestion(name, found.names)}; add it to the files, or "
                "write the columns that they have in [table] columns and set sink.missing"
            )
    for field in found:
        if field.name not in schema.names and drift != "fail":
            continue
        if field.name not in schema.names:
            raise Invalid(
                f"source.path: {file} has a column {field.name!r} that the table does not have; remove it from the "
                f"files or add it to [table] columns{suggestion(field.name, schema.names)}"
            )
        _check_type(file, field, schema.field(field.name).type)
    _check_nulls(file, footer, [field.name for field in schema if not field.nullable])


def _check_nulls(file: Path, footer: pq.FileMetaData, names: Sequence[str]) -> None:
    """Raise Invalid if the footer counts nulls in a column that must not be null. Runs before the first row is read."""
    for group in range(footer.num_row_groups):
        chunks = (footer.row_group(group).column(at) for at in range(footer.num_columns))
        for chunk in chunks:
            counted = chunk.statistics is not None and chunk.statistics.has_null_count
            if chunk.path_in_schema in names and counted and chunk.statistics.null_count:
                raise Invalid(
                    f"source.path: {file}: column {chunk.path_in_schema!r} is null in {chunk.statistics.null_count} of "
                    f"the rows of row group {group}; give every row a value: it is part of the key or not nullable"
                )


def _check_type(file: Path, found: pa.Field, wanted: pa.DataType) -> None:
    if not readable(found.type, wanted):
        raise Invalid(
            f"source.path: {file}: column {found.name!r} is {found.type}, but the table has {wanted}; "
            "convert the files or correct [table] columns"
        )


# ---- the files of a micro-batch ------------------------------------------------------------------------------------


def file_limits(source: SourceSettings) -> dict[str, str]:
    """Return the options of a file stream: the number of files per micro-batch, and no limit of their age."""
    return {"maxFilesPerTrigger": str(source.files_per_trigger), "maxFileAge": _ANY_AGE}


def files_of(frame: DataFrame) -> list[str]:
    """Return the paths of the files of a micro-batch, as readers accept them (Spark percent-encodes them)."""
    return [unquote(row[0]) for row in frame.select(FILE).distinct().collect()]


# ---- the stream ----------------------------------------------------------------------------------------------------


def rows_of(
    reader: Any, source: SourceSettings, schema: pa.Schema, *, stored: pa.Schema, paths: Any = None
) -> DataFrame:
    """As `read_stream`, for a Spark reader whose format is set.

    `stored`: the columns of the files as they are read; for JSON and CSV in the order of the file. `paths`: the files
    to load; None loads `source.path`.
    """
    from pyspark.sql import functions as F  # noqa: N812 - the name in Spark's documentation

    from memwal.ingest.spark.source.strict_texts import STRICT, columns

    options, path = resolve(source.options, os.environ, "[source] options"), source.path if paths is None else paths
    if source.format not in FILE_FORMATS:
        frame: DataFrame = reader.options(**options).load(*([path] if path else []))
        return frame
    given = (file_limits(source) if paths is None else {}) | options
    place = [F.col(f"_metadata.{name}").alias(column) for column, name in _PLACE.items()]
    if source.format not in STRICT:
        frame = reader.schema(spark_schema(stored)).options(mode=_STRICT).options(**given).load(path)
        return frame.select(*(F.col(quoted(name)) for name in schema.names), *place)
    frame, unreadable, raw = _texts(reader, source.format, given, path, schema, stored)
    values, problem = columns(schema, source.format, options)
    said = F.lit(UNREADABLE if source.format == "json" else UNREADABLE_RECORD)
    problem = F.coalesce(F.when(unreadable, said), problem)
    return frame.select(*values, *place, problem.alias(PROBLEM), F.when(problem.isNotNull(), raw).alias(RAW_VALUE))


def _texts(
    reader: Any, form: str, options: Mapping[str, str], path: Any, schema: pa.Schema, stored: pa.Schema
) -> tuple[DataFrame, Column, Column]:
    """Return the rows of JSON or CSV files with `read_type` types, whether a row is unreadable, and its raw bytes."""
    from pyspark.sql import functions as F  # noqa: N812

    from memwal.ingest.spark.source import csv_records, json_lines
    from memwal.ingest.spark.source.strict_texts import as_read, read_type

    if json_lines.has_lines(form, options):
        rows = json_lines.rows_of_lines(reader, options, path, schema)
        return rows, F.col(json_lines.UNREADABLE), F.col(json_lines.LINE).cast("binary")
    if form == "csv":
        options = csv_records.options_of(options)
        if csv_records.is_checked(options):
            rows, unreadable, record = csv_records.rows_of_records(reader, options, path, stored)
            return rows, unreadable, F.when(unreadable, record).otherwise(as_read(stored))
    stored = pa.schema([field.with_type(read_type(field.type, form)) for field in stored])
    read = spark_schema(stored.append(pa.field(_UNREAD, pa.string())))
    reader = reader.schema(read).options(mode="PERMISSIVE", columnNameOfCorruptRecord=_UNREAD)
    unread = F.col(_UNREAD)
    return reader.options(**options).load(path), unread.isNotNull(), F.coalesce(unread.cast("binary"), as_read(stored))
