"""Spark's data source `memwal`, and its reads: one moment of the table, divided into partitions.

    memwal.register_spark(spark)
    spark.read.format("memwal").option("level", "durable").load("s3://bucket/table.lance")

Spark creates a `MemWalSource` for each `load()`, in a Python worker on the driver's machine, and sends it to executors
as a pickle. The README has the steps of a read, and the reason why filters are an option.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from typing import NoReturn
from uuid import UUID

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    InputPartition,
)
from pyspark.sql.types import StructType

from memwal import wal
from memwal.flush import BaseTable
from memwal.ingest.engine.read.base import BaseReads
from memwal.ingest.engine.read.pinned import Fragment, Pinned, PinnedReads, pin
from memwal.ingest.engine.read.request import check_filter
from memwal.ingest.engine.table import owner_notes as owners
from memwal.ingest.errors import Invalid, Unavailable, translate_errors
from memwal.ingest.service.client.connect import served_table
from memwal.ingest.spark.connector.options import (
    SINCE,
    ChangeOptions,
    ReadOptions,
    WriteOptions,
    opened_table,
    resolved,
)
from memwal.ingest.spark.connector.spark_rows import arrow_schema, expect_types, schema_of_columns, spark_batches
from memwal.ingest.spark.connector.stream import MemWalStreamReader, schema_of_changes
from memwal.ingest.spark.connector.writer import MemWalStreamWriter
from memwal.ingest.spark.task import source_edge

FORMAT = "memwal"
_WRITES = "use df.writeStream, or memwal.connect(uri).put(rows, token=…)"


class MemWalSource(DataSource):
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
        if SINCE in self._given:
            changes = ChangeOptions.of(self._given)
            self._follows_columns = changes.columns is None
            return schema_of_changes(changes)
        options = ReadOptions.of(self._given)
        return schema_of_columns(self._captured(options).schema, options.columns)

    @translate_errors
    def reader(self, schema: StructType) -> DataSourceReader:
        """Return a reader of the columns in `schema`. Captures the moment if the user gave the schema."""
        options = ReadOptions.of(self._given)
        moment = self._captured(options)
        expect_types(schema, moment.schema)
        return MemWalReader(moment.pinned, options, schema)

    @translate_errors
    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        """Return a reader of the change feed. Raises: Invalid."""
        if SINCE not in self._given:
            raise Invalid(
                'a stream reads the changes of a table and needs the option since: "earliest", "latest", or a position'
            )
        return MemWalStreamReader(ChangeOptions.of(self._given), schema, follows_columns=self._follows_columns)

    @translate_errors
    def writer(self, schema: StructType, overwrite: bool) -> NoReturn:
        """Raise Invalid: tables are written by name in streams only."""
        del schema, overwrite
        raise Invalid(f"tables are written by name in streams only; {_WRITES}")

    @translate_errors
    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802 - Spark's name
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
        super().__init__((name.lower(), text) for name, text in options.items())

    def __repr__(self) -> str:
        return f"<options {', '.join(self)}>"

    def __reduce__(self) -> tuple[object, ...]:
        return _Given, (dict(self),)


@dataclass
class SharePartition(InputPartition):
    """A partition of a read."""

    share: Share


class MemWalReader(DataSourceReader):
    """Reads the partitions of a moment. Raises: `ingest.errors` kinds, which Spark wraps.

    `pushFilters` is not implemented on purpose: see the README.
    """

    def __init__(self, pinned: Pinned, options: ReadOptions, schema: StructType) -> None:
        self._pinned, self._options, self._schema = pinned, options, schema

    def partitions(self) -> list[InputPartition]:
        """Return the partitions, on the driver."""
        return [SharePartition(share) for share in shares(self._pinned, self._options.rows_per_partition)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a partition, on an executor."""
        if not isinstance(partition, SharePartition):  # Spark's own partition, for a table without rows
            return
        share, columns, filter = partition.share, self._schema.fieldNames(), self._options.filter
        with source_edge():
            reads = _opened(self._pinned, self._options.storage)
            if share.region is not None:
                tables = reads.above(share.region, columns, filter)
            else:
                tables = reads.below(share.fragments, columns, filter)
            yield from spark_batches(tables, arrow_schema(self._schema))


@lru_cache(maxsize=2)
def _opened(pinned: Pinned, storage: tuple[tuple[str, str], ...]) -> PinnedReads:
    """Return the reads of a moment.

    A Python worker caches them for its partitions, so it reads the keys above the base once.
    """
    return PinnedReads(pinned, resolved(storage))


# ---- the driver's part of a read ------------------------------------------------------------------------------------


BYTES_PER_PARTITION = 256 << 20


@dataclass(frozen=True, slots=True)
class Moment:
    """A moment of a table, and its columns then. Can be pickled; contains no secret."""

    pinned: Pinned
    schema: pa.Schema


@dataclass(frozen=True, slots=True)
class Share:
    """The rows of one partition: those above the base of one region, or those of some fragments of the base."""

    region: UUID | None = None
    fragments: tuple[int, ...] = ()


def captured(options: ReadOptions) -> Moment:
    """Return the current moment of the table. The room's README has the steps.

    Raises: Invalid for an unknown table, a wrong filter or rejected credentials; Unavailable.
    """
    storage = options.storage_options()
    base = opened_table(options.uri, storage)
    store = wal.open_store(options.uri, storage)
    if options.level == "latest":
        _make_durable(base, store, options)
    pinned, newest = pin(base, store, options.level)
    if options.filter is not None:
        check_filter(options.filter, BaseReads(newest).check, newest.schema.names)
    return Moment(pinned, newest.schema)


def _make_durable(base: BaseTable, store: wal.ObjectStore, options: ReadOptions) -> None:
    """If daemons own the table, make the owners append rows that they have acknowledged and not yet appended.

    A read at level `durable` does this: it answers at a moment when every visible row is on storage.
    """

    def find() -> Sequence[str]:
        notes = owners.find(store, base.regions)
        return () if notes is None else notes.endpoints

    served = served_table(base, store, options.access.options, options.endpoints, find)
    if served is None and options.endpoints:
        endpoints = ", ".join(options.endpoints)
        raise Unavailable(f"{endpoints}: no daemon that serves {base.uri} answers; correct the option endpoint")
    if served is not None:
        with closing(served):
            served.scan(columns=base.schema.names[:1], limit=0, level="durable")


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
