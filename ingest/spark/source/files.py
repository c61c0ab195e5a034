"""File sources: checks before the start, the places of their rows, and the files of a micro-batch.

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
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq

from memwal.ingest.errors import Invalid
from memwal.ingest.secret_refs import resolve
from memwal.ingest.settings.sections import KAFKA, SourceSettings, is_remote, local_path
from memwal.ingest.spark.names import FILE_FORMATS
from memwal.ingest.spark.schema import readable
from memwal.ingest.spark.source.columns import FILE
from memwal.ingest.spark.source.feed import feed_files, visible_files
from memwal.ingest.suggest import suggestion
from memwal.wal.errors import first_line

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


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
STRICT = ("json", "csv")
"""File formats that are read strictly."""
ALL_TEXT = ("csv",)
"""Strict formats that have text values only."""
_OF_SPARKS_READER = ("multiline", "encoding", "charset", "mode", "columnnameofcorruptrecord", "wholetext")
"""Options of JSON files, in lower case, that Spark's text reader lacks or interprets differently."""
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


def columns_of_files(source: SourceSettings) -> pa.Schema | None:
    """Return the columns of the first Parquet file of `source`, all nullable.

    None for files on S3, and without a file. Raises: Invalid for a file that cannot be read.
    """
    if not source.path or is_remote(source.path):
        return None
    files = feed_files(local_path(source.feed)) if source.feed else _files_of(local_path(source.path), must_exist=False)
    if not files:
        return None
    return pa.schema([pa.field(field.name, field.type) for field in _footer(min(files)).schema.to_arrow_schema()])


def reads_local(source: SourceSettings) -> bool:
    """Return whether a source is known to read only files on local disks, or no files."""
    return source.format == KAFKA or (source.format in FILE_FORMATS and not is_remote(source.path))


def given_options(source: SourceSettings) -> dict[str, str]:
    """Return the options of `source` by their names in lower case; secrets stay references."""
    return {name.lower(): value.get_secret_value() for name, value in source.options.items()}


def resolved_options(source: SourceSettings) -> dict[str, str]:
    """Return the options of `source` with every secret resolved in this process. Raises: Invalid."""
    return resolve(source.options, os.environ, "[source] options")


def has_header(source: SourceSettings) -> bool:
    """Return whether `source` is CSV files with a header, which is the default."""
    return source.format == "csv" and given_options(source).get("header", "true").strip().lower() != "false"


def has_lines(form: str, options: Iterable[str]) -> bool:
    """Return whether files of format `form` are read as lines: JSON, unless an option requires Spark's own reader."""
    return form == "json" and not any(name.lower() in _OF_SPARKS_READER for name in options)


def _files_of(path: Path, *, must_exist: bool) -> list[Path]:
    if not must_exist and not path.exists():
        return []
    try:
        if path.is_file():
            raise Invalid(f"source.path: {path} is a file; name the directory that holds it")
        return visible_files(path)
    except OSError as error:
        raise Invalid(f"source.path: {path}: {error.strerror}; name a directory that can be read") from None


def _footer(file: Path) -> pq.FileMetaData:
    try:
        return pq.read_metadata(file)
    except (OSError, pa.ArrowException) as error:
        reason = first_line(error)
        raise Invalid(f"source.path: {file} is no readable Parquet file ({reason}); remove or replace it") from None


def _check_file(file: Path, schema: pa.Schema, drift: str) -> None:
    footer = _footer(file)
    found = footer.schema.to_arrow_schema()
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
