"""Spark's data source `memwal`.

    memwal.register_spark(spark)
    spark.read.format("memwal").option("level", "durable").load("s3://bucket/table.lance")

Spark creates a `MemWalSource` for each `load()`, in a Python worker on the driver's machine, and sends it to executors
as a pickle. The README has the steps of a read, and the reason why filters are an option.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NoReturn

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    InputPartition,
)
from pyspark.sql.types import StructType

from memwal.ingest.engine.read.pinned import Pinned, PinnedReads
from memwal.ingest.errors import Invalid, translate_errors
from memwal.ingest.spark.connector.options import SINCE, ChangeOptions, ReadOptions, WriteOptions, resolved
from memwal.ingest.spark.connector.planning import Moment, Share, captured, shares
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
