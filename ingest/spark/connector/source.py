"""Spark's data source `memwal`, and its reads: one moment of the table, divided into partitions.

    memwal.register_spark(spark)
    spark.read.format("memwal").option("level", "durable").load("s3://bucket/table.lance")

Spark creates a `MemWalSource` for each `load()`, in a Python worker on the driver's machine, and sends it to executors
as a pickle. The README has the steps of a read, and the reason why filters are an option.

`spark.readStream.format("memwal")` is the change feed as a stream of micro-batches. Spark keeps one
`MemWalStreamReader` per running query, in a Python worker on the driver's machine, and sends it to executors as a
pickle. Its offsets are positions of the feed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from uuid import UUID

import pyarrow as pa
from pyspark.sql import datasource as spark
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import AtomicType, StructField, StructType

from memwal import wal
from memwal.flush import BaseTable
from memwal.ingest.engine.api.changes import Position
from memwal.ingest.engine.changes.reader import ChangeRanges, Part, expect_names_free
from memwal.ingest.engine.changes.region import change_schema
from memwal.ingest.engine.read.base import BaseReads
from memwal.ingest.engine.read.pinned import Fragment, Pinned, PinnedReads, pin
from memwal.ingest.engine.read.request import check_filter, checked_columns
from memwal.ingest.engine.table import owner_notes as owners
from memwal.ingest.errors import Invalid, Unavailable, translate_errors
from memwal.ingest.service.client.connect import served_table
from memwal.ingest.spark.connector.options import (
    SINCE,
    ChangeOptions,
    ReadOptions,
    TableOptions,
    WriteOptions,
    opened_table,
    resolved,
)
from memwal.ingest.spark.connector.writer import MemWalStreamWriter, MemWalWriter
from memwal.ingest.spark.schema import spark_type
from memwal.ingest.spark.task import source_edge

FORMAT = "memwal"
ROWS_PER_BATCH = 65_536
"""Maximum rows of an Arrow batch. Spark copies the rows of a batch one by one, so this limits memory only."""
BYTES_PER_PARTITION = 256 << 20
Offset = dict[str, Any]
_OF_CATALOG, _OPTIONS = ("location", "owner", "provider"), "memwal.options"
_READ = "__CHAR_VARCHAR_TYPE_STRING"
"""Spark's name for the declared type of a column, in its metadata. Spark removes it where it converts the columns of a
query to those of a table; so its presence shows that metadata are those of a table that the query reads."""
_START = "start"
"""Field in the end of the first micro-batch: the position where that micro-batch begins.

Spark requests the initial offset again whenever it plans or repeats the first micro-batch, and "latest" would be
another position each time.
"""


class MemWalSource(spark.DataSource):
    """One `load()` or `start()`: its options, and the moment of the table that all reads of its frame see.

    Raises: `ingest.errors` kinds, which Spark wraps.
    """

    _moment: Moment | None = None
    _follows_columns = False
    """Whether this is a stream with every column of the table."""

    @classmethod
    @translate_errors
    def name(cls) -> str:
        """Return the name of the format."""
        return FORMAT

    def __init__(self, options: MutableMapping[str, str]) -> None:
        """Store the options. The first method that uses them checks them.

        Only that method knows whether Spark reads or writes.
        """
        super().__init__({})  # only `_given` has secrets: no text of Spark shows it
        self._given = _Given(options)

    @translate_errors
    def schema(self) -> StructType:
        """Return the columns to read; capture the moment. Raises: Invalid, Unavailable.

        Spark does not say whether it reads rows or a stream of changes; the option `since` decides.
        """
        if SINCE in self._given and not self._given.in_catalog:
            changes = ChangeOptions.of(self._given)
            self._follows_columns = changes.columns is None
            return schema_of_changes(changes)
        options = ReadOptions.of(self._given.known(ReadOptions))
        moment = self._captured(options)
        schema = schema_of_columns(moment.schema, options.columns)
        return self._given.kept_in(schema, moment.schema) if self._given.in_catalog else schema

    @translate_errors
    def reader(self, schema: StructType) -> spark.DataSourceReader:
        """Return a reader of the columns in `schema`. Captures the moment if the user gave the schema."""
        options = ReadOptions.of(self._given.or_kept(ReadOptions, schema))
        moment = self._captured(options)
        expect_types(schema, moment.schema)
        return MemWalReader(moment.pinned, options, schema)

    @translate_errors
    def streamReader(self, schema: StructType) -> spark.DataSourceStreamReader:  # noqa: N802 - Spark's name
        """Return a reader of the change feed. Raises: Invalid."""
        if SINCE not in self._given:
            raise Invalid(
                "option since is missing: a stream reads the changes of a table; write "
                '.option("since", "earliest"), "latest", or a position'
            )
        return MemWalStreamReader(ChangeOptions.of(self._given), schema, follows_columns=self._follows_columns)

    @translate_errors
    def writer(self, schema: StructType, overwrite: bool) -> spark.DataSourceWriter:
        """Return a writer of one frame. Raises: Invalid, Unavailable."""
        if overwrite:
            raise Invalid(
                'mode "overwrite" replaces the table; delete its rows by table.delete(filter="true"), and append'
            )
        return MemWalWriter(WriteOptions.of(self._given.or_kept(WriteOptions, schema)), schema.names)

    @translate_errors
    def streamWriter(self, schema: StructType, overwrite: bool) -> spark.DataSourceStreamWriter:  # noqa: N802 - Spark's name
        """Return a writer of micro-batches. Raises: Invalid, Unavailable."""
        if overwrite:
            raise Invalid('outputMode "complete" replaces the table; use "append" or "update"')
        return MemWalStreamWriter(WriteOptions.of(self._given), schema.names)

    def _captured(self, options: ReadOptions) -> Moment:
        if self._moment is None:
            self._moment = captured(options)
        return self._moment


class _Given(dict[str, str]):
    """Options as given. `repr` shows no value, since a value may be a secret."""

    def __init__(self, options: Mapping[str, str]) -> None:
        given = {name.lower(): text for name, text in options.items()}
        self.in_catalog = "provider" in given
        """Whether CREATE TABLE gives them."""
        if self.in_catalog:  # CREATE TABLE adds names, and a copy of each option, and makes an address of a path
            given = {name: text for name, text in given.items() if name not in _OF_CATALOG and "option." not in name}
            given["path"] = given.get("path", "").removeprefix("file:")
        super().__init__(given)

    def known(self, use: type[TableOptions]) -> Mapping[str, str]:
        """Return the options for `use`: of a table in the catalog, without those that only another use knows."""
        others = {*ReadOptions.NAMES, *WriteOptions.NAMES} - {*use.NAMES} if self.in_catalog else ()
        return {name: text for name, text in self.items() if name not in others}

    def kept_in(self, schema: StructType, table: pa.Schema) -> StructType:
        """Return the columns of a table that CREATE TABLE defines, with the options in the metadata of a column.

        Spark gives the options of a table in a catalog to no read and no write, but the columns with their metadata.
        INSERT passes the columns of its query as they are, if their names, types and nulls fit. Therefore columns
        without nulls have none here either: a query with nulls does not fit, and Spark converts it.
        """
        for field in schema:
            field.nullable = table.field(field.name).nullable
        simple = next((field for field in schema if isinstance(field.dataType, AtomicType)), schema[0])
        simple.metadata = {_OPTIONS: json.dumps(dict(self)), _READ: simple.dataType.simpleString()}
        return schema

    def or_kept(self, use: type[TableOptions], schema: StructType) -> Mapping[str, str]:
        """Return the options for `use`, with those in `schema` of a table in the catalog unless a table is named.

        Raises: Invalid if Spark passes no options, or those of a table that the query of an INSERT reads.
        """
        metadata = next((field.metadata for field in schema if _OPTIONS in field.metadata), None)
        if {"path", "config"} & {*self}:
            return self
        if metadata is None:
            hint = f"; in INSERT, {_WITH}" if use is WriteOptions else ""
            raise Invalid(f"option path is missing: write {use.USE}{hint}; {_WITHOUT}")
        if use is WriteOptions and _READ in metadata:
            raise Invalid(f"option path is missing: Spark passes that of a table that the query reads; {_WITH}")
        kept = _Given({**json.loads(metadata[_OPTIONS]), "provider": FORMAT})
        return {**kept.known(use), **self}

    def __repr__(self) -> str:
        return f"<options {', '.join(self)}>"

    def __reduce__(self) -> tuple[object, ...]:
        return _Given, (dict(self),)


_WITHOUT = "Spark keeps no options of a table of its catalog whose CREATE TABLE lists columns: leave the columns out"
_WITH = "name the table: INSERT INTO t WITH (path = 's3://bucket/table.lance') SELECT …"


@dataclass
class Share(spark.InputPartition):
    """The rows of one partition: those above the base of one region, or those of some fragments of the base."""

    region: UUID | None = None
    fragments: tuple[int, ...] = ()


class MemWalReader(spark.DataSourceReader):
    """Reads the partitions of a moment. Raises: `ingest.errors` kinds, which Spark wraps.

    `pushFilters` is not implemented on purpose: see the README.
    """

    def __init__(self, pinned: Pinned, options: ReadOptions, schema: StructType) -> None:
        self._pinned, self._options, self._schema = pinned, options, schema

    def partitions(self) -> list[spark.InputPartition]:
        """Return the partitions, on the driver."""
        return [*shares(self._pinned, self._options.rows_per_partition)]

    def read(self, partition: spark.InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a partition, on an executor."""
        if not isinstance(partition, Share):  # Spark's own partition, for a table without rows
            return
        columns, filter = self._schema.fieldNames(), self._options.filter
        with source_edge():
            reads = _pinned_reads(self._pinned, self._options.storage)
            if partition.region is not None:
                tables = reads.above(partition.region, columns, filter)
            else:
                tables = reads.below(partition.fragments, columns, filter)
            yield from spark_batches(tables, arrow_schema(self._schema))


@lru_cache(maxsize=2)
def _pinned_reads(pinned: Pinned, storage: tuple[tuple[str, str], ...]) -> PinnedReads:
    """Return the reads of a moment.

    A Python worker caches them for its partitions, so it reads the keys above the base once.
    """
    return PinnedReads(pinned, resolved(storage))


# ---- the driver's part of a read ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Moment:
    """A moment of a table, and its columns then. Can be pickled; contains no secret."""

    pinned: Pinned
    schema: pa.Schema


def captured(options: ReadOptions) -> Moment:
    """Return the current moment of the table. The room's README has the steps.

    Raises: Invalid for an unknown table, a wrong filter or rejected credentials; Unavailable.
    """
    storage = options.storage_options()
    base = opened_table(options.uri, storage)
    store = wal.open_store(options.uri, storage)
    if options.level == "latest":
        # A read at level `durable` makes the owners append rows that they have acknowledged and not yet appended: it
        # answers at a moment when every visible row is on storage.
        served = served_table(base, store, options.access.options, options.endpoints, lambda: _noted(base, store))
        if served is None and options.endpoints:
            endpoints = ", ".join(options.endpoints)
            raise Unavailable(f"{endpoints}: no daemon that serves {base.uri} answers; correct the option endpoint")
        if served is not None:
            with closing(served):
                served.scan(columns=base.schema.names[:1], limit=0, level="durable")
    pinned, newest = pin(base, store, options.level)
    if options.filter is not None:
        check_filter(options.filter, BaseReads(newest).check, newest.schema.names)
    return Moment(pinned, newest.schema)


def _noted(base: BaseTable, store: wal.ObjectStore) -> Sequence[str]:
    """Return the endpoints in the notes of the table's owners."""
    notes = owners.find(store, base.regions)
    return () if notes is None else notes.endpoints


def shares(pinned: Pinned, rows_per_partition: int) -> list[Share]:
    """Divide the rows of a moment: first one share per region with rows above the base, then groups of fragments.

    A group has at most `rows_per_partition` rows and `BYTES_PER_PARTITION` bytes, or one fragment with more.
    """
    above = [Share(region=region.region) for region in pinned.regions]
    return [*above, *(Share(fragments=group) for group in _groups(pinned.fragments, rows_per_partition))]


def _groups(fragments: Sequence[Fragment], most: int) -> Iterator[tuple[int, ...]]:
    group: list[int] = []
    rows = size = 0
    for fragment in fragments:
        if group and (rows + fragment.rows > most or size + fragment.bytes > BYTES_PER_PARTITION):
            yield tuple(group)
            group, rows, size = [], 0, 0
        group.append(fragment.id)
        rows, size = rows + fragment.rows, size + fragment.bytes
    if group:
        yield tuple(group)


# ---- the change feed ------------------------------------------------------------------------------------------------


@dataclass
class ChangesPartition(spark.InputPartition):
    """A partition of a micro-batch. `uri`: absolute, because an executor has another working directory."""

    uri: str
    part: Part


class MemWalStreamReader(spark.DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Divides the feed into micro-batches, and reads their partitions.

    Thread safety. One thread. Raises: `ingest.errors` kinds, which Spark wraps.
    Invariants. The rows of a micro-batch depend only on its offsets and the schema.
    """

    def __init__(self, options: ChangeOptions, schema: StructType, *, follows_columns: bool) -> None:
        """`follows_columns`: the stream has every column of the table, so it ends when a column is added."""
        self._options, self._schema, self._follows_columns = options, schema, follows_columns
        self._target: Position | None = None

    @translate_errors
    def initialOffset(self) -> Offset:  # noqa: N802 - Spark's name
        """Return the option `since`. The first `latestOffset` resolves it once."""
        since = self._options.since
        return {SINCE: since if isinstance(since, str) else since.to_json()}

    @translate_errors
    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Return the limit from the options."""
        most = self._options.max_rows_per_batch
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    @translate_errors
    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Fix the end of the query. Raises: Invalid, Unavailable."""
        self._target = self._opened().position("latest")

    @translate_errors
    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802
        """Return the end of the micro-batch that begins at `start`; `start` if nothing has changed since.

        Raises: Invalid, also if columns of the stream were changed; Unavailable.
        """
        ranges, first = self._opened(), SINCE in start
        begin = self._begin(start[SINCE]) if first else Position.of_json(start, "offset")
        until = self._target or ranges.position("latest")
        end = ranges.end(begin, until, limit.max_rows if isinstance(limit, ReadMaxRows) else None)
        self._expect_columns(ranges.base)  # opened after `end`: no entry before `end` has a column that this base lacks
        if first:
            return {**end.to_json(), _START: begin.to_json()}
        return start if end is begin else end.to_json()

    @translate_errors
    def partitions(self, start: Offset, end: Offset) -> list[spark.InputPartition]:
        """Return the partitions of a micro-batch, on the driver. Raises: Invalid."""
        begin, names = Position.of_json(end[_START] if SINCE in start else start, "offset"), self._columns()
        ranges = self._opened()
        parts = ranges.parts(begin, Position.of_json(end, "offset"), self._options.images, names)
        return [ChangesPartition(ranges.uri, part) for part in parts]

    def read(self, partition: spark.InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the changes of a partition, on an executor."""
        if not isinstance(partition, ChangesPartition):  # Spark's own partition, for a micro-batch without rows
            return
        with source_edge():
            ranges = _ranges(partition.uri, self._options.storage)
            yield from spark_batches(ranges.changes(partition.part), arrow_schema(self._schema))

    # ---- inside --------------------------------------------------------------------------------------------------

    def _opened(self) -> ChangeRanges:
        return _ranges(self._options.uri, self._options.storage)

    def _begin(self, since: str | Offset) -> Position:
        return self._opened().position(since) if isinstance(since, str) else Position.of_json(since, SINCE)

    def _columns(self) -> tuple[str, ...] | None:
        """Return the columns of the table in this stream."""
        heads = change_schema(pa.schema([])).names
        return tuple(name for name in self._schema.fieldNames() if name not in heads) or None

    def _expect_columns(self, base: BaseTable) -> None:
        """Raise Invalid if the table lacks columns of the stream, or has columns that a stream of all columns lacks."""
        if self._follows_columns:
            added = [name for name in base.schema.names if name not in self._schema.fieldNames()]
            if added:
                raise Invalid(
                    f"{base.uri}: column {added[0]!r} was added since this stream was loaded; load it again to read "
                    "the column, or name the columns to read in the option columns"
                )
        expect_types(self._schema, change_schema(base.schema))


@lru_cache(maxsize=2)
def _ranges(uri: str, storage: tuple[tuple[str, str], ...]) -> ChangeRanges:
    """Return the change ranges of a table. A Python worker caches them for its micro-batches."""
    options = resolved(storage)
    return ChangeRanges(opened_table(uri, options), wal.open_store(uri, options))


def schema_of_changes(options: ChangeOptions) -> StructType:
    """Return the columns of a stream. Raises: Invalid for an unknown table or column, or a type that Spark lacks."""
    base = opened_table(options.uri, options.storage_options())
    expect_names_free(base.schema)
    named = {*checked_columns(options.columns, base.schema, what="option columns"), *base.key}
    changes = change_schema(base.schema)
    heads = changes.names[: len(changes) - len(base.schema)]
    return schema_of_columns(changes, [*heads, *(name for name in base.schema.names if name in named)])


# ---- rows in Spark --------------------------------------------------------------------------------------------------


def schema_of_columns(schema: pa.Schema, columns: Sequence[str] | None) -> StructType:
    """Return the Spark schema of `columns` (None: all) of a table.

    Raises: Invalid for an unknown column, and with one line for each column whose type Spark lacks.
    """
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
