"""Read CSV files by the column names in their first line, in whatever order a file has them.

Spark reads CSV by position, with one order for all files of a stream. Therefore the stream yields only the file names
of a micro-batch. Their headers are read before anything is written, and files with the same header are read together:

1. Every table column must be in the header of every file; otherwise nothing of the micro-batch is written.
2. Columns that the table lacks are ignored, and logged once.

Files without a header (`header = "false"` in [source.options]) are read by position.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from memwal.ingest.errors import Invalid, MemWalError
from memwal.ingest.secret_refs import resolve
from memwal.ingest.settings.sections import SourceSettings
from memwal.ingest.spark.errors import of_spark
from memwal.ingest.spark.source import csv_records
from memwal.ingest.spark.source.columns import FILE
from memwal.ingest.spark.source.files import NO_GLOB, file_limits, files_of, rows_of
from memwal.ingest.suggest import suggestion

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_LOG = logging.getLogger("memwal.pipeline")
_WILD = "*?[]{}\\"


def has_header(source: SourceSettings) -> bool:
    """Return whether `source` is CSV files with a header, which is the default."""
    given = {name.lower(): value.get_secret_value() for name, value in source.options.items()}
    return source.format == "csv" and given.get("header", "true").strip().lower() != "false"


def names_only(stream: Any, source: SourceSettings) -> DataFrame:
    """Return a stream of the files of `source`: a row with `FILE` for each line."""
    from pyspark.sql import functions

    reader = stream.format("text").options(**_options(source) | file_limits(source))
    lines: DataFrame = reader.load(source.path)
    return lines.select(functions.col("_metadata.file_path").alias(FILE))


class ByHeader:
    """Wraps the sink of a query: reads the files that Spark names, and passes their rows to the sink.

    Thread safety. As the sink. Raises: as the sink, and Invalid for a header; `failure` keeps the latter.
    """

    def __init__(self, source: SourceSettings, schema: pa.Schema, sink: Callable[[DataFrame, int], None]) -> None:
        """`schema`: the columns that are written."""
        self._source, self._schema, self._sink = source, schema, sink
        self._told: set[str] = set()
        self.failure: MemWalError | None = None

    def __call__(self, frame: DataFrame, batch_id: int) -> None:
        """Read the files of a micro-batch and write their rows; Spark calls this."""
        self.failure = None
        try:
            rows = self._rows(frame.sparkSession, files_of(frame))
        except Exception as error:  # noqa: BLE001 - raised again as one of the six kinds
            self.failure = of_spark(error)
            raise self.failure from None
        if rows is not None:
            self._sink(rows, batch_id)

    def _rows(self, spark: SparkSession, files: Sequence[str]) -> DataFrame | None:
        alike: dict[tuple[str, ...], list[str]] = {}
        for file in sorted(files):
            alike.setdefault(self._header(spark, file), []).append(file)
        frames = [self._of_header(spark, header, paths) for header, paths in alike.items() if header]
        return reduce(lambda one, two: one.unionByName(two), frames) if frames else None

    def _header(self, spark: SparkSession, file: str) -> tuple[str, ...]:
        """Return the names in the first line of a file; () for an empty file. Raises: Invalid."""
        options = csv_records.options_of(_options(self._source))
        reader = spark.read.options(**options).option(*NO_GLOB)
        # With multiLine, Spark treats a name like [x].csv as a pattern here, and reads the header of x.csv.
        odd = any(letter in file for letter in _WILD)
        names = (reader.options(multiLine="false") if odd else reader).csv(file).columns
        names[-1:] = [name.removesuffix("\r") for name in names[-1:]]  # the line ends with \r\n
        if names and (odd or any("\n" in name for name in names)) and csv_records.is_checked(options):
            _check_quotes(spark, file, options, len(names))
        missing = [name for name in self._schema.names if name not in names]
        if names and missing:
            raise Invalid(
                f"{file}: its header has no column {missing[0]!r}{suggestion(missing[0], names)}; add it, or write the "
                "columns that the files have in [table] columns and set sink.missing; files without a header are read "
                'by position with header = "false" in [source.options]'
            )
        more = [name for name in names if name not in self._schema.names and name not in self._told]
        if more:
            self._told |= set(more)
            _LOG.warning("%s: columns that the table does not have are left out: %s", file, ", ".join(more))
        return tuple(names)

    def _of_header(self, spark: SparkSession, header: Sequence[str], files: Sequence[str]) -> DataFrame:
        at = self._schema.get_field_index
        stored = pa.schema([self._schema.field(n) if at(n) >= 0 else pa.field(n, pa.string()) for n in header])
        reader = spark.read.format("csv").options(header="true", enforceSchema="true").option(*NO_GLOB)
        return rows_of(reader, self._source, self._schema, stored=stored, paths=list(files))


def _check_quotes(spark: SparkSession, file: str, options: Mapping[str, str], columns: int) -> None:
    """Raise Invalid if a quote in the header is unclosed: the last name would include rows of the file."""
    reader = spark.read.format("csv").option(*NO_GLOB)
    texts = pa.schema([(f"_{at}", pa.string()) for at in range(columns)])
    rows, unreadable, _ = csv_records.rows_of_records(reader, {**options, "header": "false"}, file, texts)
    if rows.select(unreadable).head() != (False,):
        raise Invalid(f'{file}: its header has quotes that do not match; write names as "…", and " in them as ""')


def _options(source: SourceSettings) -> dict[str, str]:
    return resolve(source.options, os.environ, "[source] options") | {"header": "true"}
