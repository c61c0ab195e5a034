"""Read every source except Kafka: the rows of a stream, and CSV files by the column names in their first line.

Spark reads CSV by position, with one order for all files of a stream. Therefore the stream of CSV files with a header
yields only the file names of a micro-batch. Their headers are read before anything is written, and files with the same
header are read together (`ByHeader`):

1. Every table column must be in the header of every file; otherwise nothing of the micro-batch is written.
2. Columns that the table lacks are ignored, and logged once.

Files without a header (`header = "false"` in [source.options]) are read by position.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name in Spark's documentation

from memwal.ingest.errors import Invalid, MemWalError
from memwal.ingest.settings.sections import SourceSettings, is_remote, local_path
from memwal.ingest.spark.errors import of_spark
from memwal.ingest.spark.names import FILE_FORMATS
from memwal.ingest.spark.reading import DriverRead, SourceRows
from memwal.ingest.spark.schema import quoted, spark_schema, widened
from memwal.ingest.spark.source import files, texts
from memwal.ingest.spark.source.columns import BLOCK, FILE, LANDED, PROBLEM, RAW_VALUE
from memwal.ingest.spark.source.feed import visible_files
from memwal.ingest.suggest import suggestion

_LOG = logging.getLogger("memwal.pipeline")
_PLACE = {LANDED: "file_modification_time", FILE: "file_path", BLOCK: "file_block_start"}
_STRICT = "FAILFAST"  # Spark's default replaces unreadable values with null
_WILD = "*?[]{}\\"


def read_stream(spark: SparkSession, source: SourceSettings, schema: pa.Schema) -> SourceRows:
    """Return the rows of `source`: the table's columns, and `PLACE` for a file source.

    JSON and CSV records that cannot be used are rows with a `PROBLEM`; they raise no error here. For CSV with a header
    the frame has only the column `FILE`, once for each line: `ByHeader` reads the files of each micro-batch.
    """
    if files.has_header(source):
        reader = spark.readStream.format("text").options(**_csv_options(source) | files.file_limits(source))
        return SourceRows(reader.load(source.path).select(F.col("_metadata.file_path").alias(FILE)))
    reader = spark.readStream.format(source.format)
    frame = _rows_of(reader, source, schema, stored=stored_types(spark, source, schema))
    return SourceRows(frame, DriverRead().read if _by_driver(spark, source) else None)


def _rows_of(
    reader: Any, source: SourceSettings, schema: pa.Schema, *, stored: pa.Schema, paths: Any = None
) -> DataFrame:
    """As `read_stream`, for a Spark reader whose format is set.

    `stored`: the columns of the files as they are read; for JSON and CSV in the order of the file. `paths`: the files
    to load; None loads `source.path`.
    """
    options, path = files.resolved_options(source), source.path if paths is None else paths
    if source.format not in FILE_FORMATS:
        frame: DataFrame = reader.options(**options).load(*([path] if path else []))
        return frame
    given = (files.file_limits(source) if paths is None else {}) | options
    place = [F.col(f"_metadata.{name}").alias(column) for column, name in _PLACE.items()]
    if source.format not in files.STRICT:
        frame = reader.schema(spark_schema(stored)).options(mode=_STRICT).options(**given).load(path)
        return frame.select(*(F.col(quoted(name)) for name in schema.names), *place)
    frame, unreadable, raw = texts.rows_of_texts(reader, source.format, given, path, schema, stored)
    values, problem = texts.columns(schema, source.format, options)
    said = F.lit(files.UNREADABLE if source.format == "json" else files.UNREADABLE_RECORD)
    problem = F.coalesce(F.when(unreadable, said), problem)
    return frame.select(*values, *place, problem.alias(PROBLEM), F.when(problem.isNotNull(), raw).alias(RAW_VALUE))


def _by_driver(spark: SparkSession, source: SourceSettings) -> bool:
    """Return whether the driver may read micro-batches of `source`: files only, as their plans contain no Python.

    False if Spark skips files that it cannot read: stopping the query interrupts the driver's read, and Spark would
    treat the interruption as the end of a file.
    """
    given = files.given_options(source)
    skipping = {"ignoreCorruptFiles", "ignoreMissingFiles"}
    set_to = [given.get(name.lower()) or spark.conf.get(f"spark.sql.files.{name}") for name in skipping]
    return source.format in FILE_FORMATS and all(str(each).strip().lower() != "true" for each in set_to)


def stored_types(spark: SparkSession, source: SourceSettings, schema: pa.Schema) -> pa.Schema:
    """Return `schema` with the types that Spark must use to read Parquet files.

    If files may contain float64, or no file can be read, narrower floats become float64.
    """
    wide = pa.schema([field.with_type(widened(field.type)) for field in schema])
    if source.format != "parquet" or wide == schema:
        return schema
    if is_remote(source.path):
        try:
            found = spark.read.options(**files.resolved_options(source)).parquet(source.path)
            double = any("DoubleType" in str(field.dataType) for field in found.schema if field.name in schema.names)
            return wide if double else schema
        except Exception:  # noqa: BLE001 - for example, no file yet; the stream reports other errors
            return wide
    paths = [local_path(each) for each in (source.path, source.feed) if each]
    there = [file for path in paths if path.is_dir() for file in visible_files(path)][: files.FILES_CHECKED]
    footers = [pq.read_schema(file) for file in there]
    narrow = [field.name for field in schema if widened(field.type) != field.type]
    kinds = [each.field(name).type for name in narrow for each in footers if name in each.names]
    return wide if not footers or any("double" in str(kind) for kind in kinds) else schema


# ---- CSV by its header ----------------------------------------------------------------------------------------------


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
            rows = self._rows(frame.sparkSession, files.files_of(frame))
        except Exception as error:  # noqa: BLE001 - raised again as one of the six kinds
            self.failure = of_spark(error)
            raise self.failure from None
        if rows is not None:
            self._sink(rows, batch_id)

    def _rows(self, spark: SparkSession, paths: Sequence[str]) -> DataFrame | None:
        alike: dict[tuple[str, ...], list[str]] = {}
        for file in sorted(paths):
            alike.setdefault(self._header(spark, file), []).append(file)
        frames, at = [], self._schema.get_field_index
        for header, same in ((header, same) for header, same in alike.items() if header):
            stored = pa.schema([self._schema.field(n) if at(n) >= 0 else pa.field(n, pa.string()) for n in header])
            reader = spark.read.format("csv").options(header="true", enforceSchema="true").option(*files.NO_GLOB)
            frames.append(_rows_of(reader, self._source, self._schema, stored=stored, paths=same))
        return reduce(lambda one, two: one.unionByName(two), frames) if frames else None

    def _header(self, spark: SparkSession, file: str) -> tuple[str, ...]:
        """Return the names in the first line of a file; () for an empty file. Raises: Invalid."""
        options = texts.options_of(_csv_options(self._source))
        reader = spark.read.options(**options).option(*files.NO_GLOB)
        # With multiLine, Spark treats a name like [x].csv as a pattern here, and reads the header of x.csv.
        odd = any(letter in file for letter in _WILD)
        names = (reader.options(multiLine="false") if odd else reader).csv(file).columns
        names[-1:] = [name.removesuffix("\r") for name in names[-1:]]  # the line ends with \r\n
        if names and (odd or any("\n" in name for name in names)) and texts.is_checked(options):
            # With an unclosed quote in the header, the last name would include rows of the file.
            columns = pa.schema([(f"_{at}", pa.string()) for at in range(len(names))])
            csv = spark.read.format("csv").option(*files.NO_GLOB)
            rows = texts.rows_of_records(csv, {**options, "header": "false"}, file, columns)
            if rows.select(texts.UNREADABLE).head() != (False,):
                raise Invalid(
                    f'{file}: its header has quotes that do not match; write names as "…", and " in them as ""'
                )
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


def _csv_options(source: SourceSettings) -> dict[str, str]:
    return files.resolved_options(source) | {"header": "true"}
