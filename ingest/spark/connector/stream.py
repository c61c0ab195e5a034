"""`spark.readStream.format("memwal")`: the change feed as a stream of micro-batches. The README has the steps.

Spark keeps one `MemWalStreamReader` per running query, in a Python worker on the driver's machine, and sends it to
executors as a pickle. Its offsets are positions of the feed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from memwal import wal
from memwal.flush import BaseTable
from memwal.ingest.engine.api.changes import Position
from memwal.ingest.engine.changes.reader import ChangeRanges, Part, expect_names_free
from memwal.ingest.engine.changes.region import change_schema
from memwal.ingest.engine.read.request import checked_columns
from memwal.ingest.errors import Invalid, translate_errors
from memwal.ingest.spark.connector.options import SINCE, ChangeOptions, opened_table, resolved
from memwal.ingest.spark.connector.spark_rows import arrow_schema, expect_types, schema_of_columns, spark_batches
from memwal.ingest.spark.task import source_edge

Offset = dict[str, Any]
_START = "start"
"""Field in the end of the first micro-batch: the position where that micro-batch begins.

Spark requests the initial offset again whenever it plans or repeats the first micro-batch, and "latest" would be
another position each time.
"""


@dataclass
class ChangesPartition(InputPartition):
    """A partition of a micro-batch. `uri`: absolute, because an executor has another working directory."""

    uri: str
    part: Part


class MemWalStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
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
    def partitions(self, start: Offset, end: Offset) -> list[InputPartition]:
        """Return the partitions of a micro-batch, on the driver. Raises: Invalid."""
        begin, names = Position.of_json(end[_START] if SINCE in start else start, "offset"), self._columns()
        ranges = self._opened()
        parts = ranges.parts(begin, Position.of_json(end, "offset"), self._options.images, names)
        return [ChangesPartition(ranges.uri, part) for part in parts]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
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
