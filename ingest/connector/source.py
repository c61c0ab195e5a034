"""Spark's data source `memwal`.

    memwal.register_spark(spark)
    spark.read.format("memwal").option("level", "durable").load("s3://bucket/table.lance")

Spark makes a `MemWalSource` for each `load()`, in a Python worker on the driver's machine, and sends it to executors in
a pickle. The README has the steps of a read, and why filters are an option.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NoReturn

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from memwal.ingest.connector.options import ReadOptions
from memwal.ingest.connector.planning import Moment, Share, captured, shares
from memwal.ingest.connector.spark_rows import arrow_schema, expect_types, schema_of_columns, spark_batches
from memwal.ingest.errors import Invalid, classify, translate_errors
from memwal.ingest.read.pinned import Pinned, PinnedReads
from memwal.ingest.spark.task import freeze_imports, on_executor

FORMAT = "memwal"
_WRITES = 'use df.writeStream.foreachBatch(memwal.MemWalSink("config.toml")), or memwal.connect(uri).put(rows)'


class MemWalSource(DataSource):
    """One `load()`: its options, and the moment of the table that all reads of its frame see.

    Errors. `ingest.errors` kinds, which Spark wraps.
    """

    _moment: Moment | None = None

    @classmethod
    @translate_errors
    def name(cls) -> str:
        """Return the name of the format."""
        return FORMAT

    def __init__(self, options: MutableMapping[str, str]) -> None:
        """Keep the options of a read; what is wrong with them is raised by the first method that reads."""
        super().__init__({})  # secrets are in `_options` only, which no text of Spark shows
        self._options: ReadOptions | Invalid
        try:
            self._options = ReadOptions.of(options)
        except Invalid as problem:
            self._options = problem

    @translate_errors
    def schema(self) -> StructType:
        """Return the columns to read. Captures the moment. Raises: Invalid, Unavailable."""
        options = self._checked()
        return schema_of_columns(self._captured(options).schema, options.columns)

    @translate_errors
    def reader(self, schema: StructType) -> DataSourceReader:
        """Return a reader of the columns in `schema`. Captures the moment if the user gave the schema."""
        options = self._checked()
        moment = self._captured(options)
        expect_types(schema, moment.schema)
        return MemWalReader(moment.pinned, options, schema)

    @translate_errors
    def writer(self, schema: StructType, overwrite: bool) -> NoReturn:
        """Raises: Invalid."""
        del schema, overwrite
        raise Invalid(f"tables are not written by name; {_WRITES}")

    @translate_errors
    def streamWriter(self, schema: StructType, overwrite: bool) -> NoReturn:  # noqa: N802 - Spark's signature
        """Raises: Invalid."""
        del schema, overwrite
        raise Invalid(f"streams are not written by name; {_WRITES}")

    def _checked(self) -> ReadOptions:
        if isinstance(self._options, Invalid):
            raise self._options
        return self._options

    def _captured(self, options: ReadOptions) -> Moment:
        if self._moment is None:
            self._moment = captured(options)
        return self._moment


@dataclass
class SharePartition(InputPartition):
    """A partition of a read."""

    share: Share


class MemWalReader(DataSourceReader):
    """Reads the partitions of a moment.

    `pushFilters` is left alone on purpose: see the README. Errors. `ingest.errors` kinds, which Spark wraps.
    """

    def __init__(self, pinned: Pinned, options: ReadOptions, schema: StructType) -> None:
        self._pinned, self._options, self._schema = pinned, options, schema

    def partitions(self) -> list[InputPartition]:
        """Return the partitions, on the driver."""
        return [SharePartition(share) for share in shares(self._pinned, self._options.rows_per_partition)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a partition, on an executor."""
        if not isinstance(partition, SharePartition):  # Spark's own, of a table without rows
            return
        share, columns, filter = partition.share, self._schema.fieldNames(), self._options.filter
        try:
            reads = _opened(self._pinned, self._options.storage)
            if share.region is not None:
                tables = reads.above(share.region, columns, filter)
            else:
                tables = reads.below(share.fragments, columns, filter)
            yield from spark_batches(tables, arrow_schema(self._schema))
        except GeneratorExit:  # Spark has enough rows
            raise
        except BaseException as error:
            from memwal.wal.panics import as_exception

            raise on_executor(classify(as_exception(error))) from error
        finally:
            freeze_imports()


@lru_cache(maxsize=2)
def _opened(pinned: Pinned, storage: tuple[tuple[str, str], ...]) -> PinnedReads:
    """Return the reads of a moment, kept by a Python worker for its partitions: it reads the keys above once."""
    return PinnedReads(pinned, ReadOptions(pinned.uri, storage=storage).storage_options())
