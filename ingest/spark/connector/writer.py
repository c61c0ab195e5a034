"""`df.writeStream.format("memwal")`: tasks stage rows, the driver sends them. The README has the steps.

Spark creates a `MemWalStreamWriter` for each micro-batch in a Python worker on the driver's machine, sends it to
executors as a pickle, and creates another one on the driver for the commit. Only the messages of the tasks survive.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage

from memwal import wal
from memwal.ingest.engine.api.missing import OPTION, CallersColumns, choices, missing_rule
from memwal.ingest.engine.table.owner_notes import NotesFinder
from memwal.ingest.errors import Invalid, Unavailable, translate_errors
from memwal.ingest.spark.connector.options import WriteOptions, opened_table, resolved
from memwal.ingest.spark.sink.receipts import refuse_older
from memwal.ingest.spark.sink.route import RouteTask
from memwal.ingest.spark.sink.send import SendTask, required_of
from memwal.ingest.spark.sink.staged import Staged, StageTask, delete_staged, send_staged
from memwal.ingest.spark.source.columns import of_table
from memwal.ingest.spark.task import source_edge
from memwal.wal.retries import with_retried_reads

_QUERY = "sql.streaming.queryId"
"""Local property of Spark's tasks: the id of their query, which the checkpoint stores."""


@dataclass
class StagedRows(WriterCommitMessage):
    """The rows that one task has staged."""

    query: str
    partition: int
    routing: int
    """Version of the routing that divided the rows into regions."""
    staged: tuple[Staged, ...]


class MemWalStreamWriter(DataSourceStreamArrowWriter):
    """Writes one micro-batch into a table.

    Thread safety. One thread. Raises: `ingest.errors` kinds, which Spark wraps.
    Invariants. See the README.
    """

    def __init__(self, options: WriteOptions, columns: Sequence[str]) -> None:
        """Find the table and its daemons. `columns`: of the frame. Raises: Invalid, Unavailable."""
        base = opened_table(options.uri, options.storage_options())
        self._options, self._routing = options, base.routing_version
        self._uri = base.uri  # absolute: an executor has another working directory
        self._regions, self._id = base.regions, base.table_id
        self._columns, self._schema, self._key = tuple(columns), base.schema, base.key
        self._required = required_of(columns, base.required)
        self._rule = missing_rule(options.missing, base.key, base.rules.upsert)
        self._find = NotesFinder(base.uri, options.storage, base.regions)
        self._endpoint = ",".join(options.endpoints or self._find())
        if not self._endpoint:
            raise Unavailable(
                f"no daemon serves {base.uri}: start `memwal serve`, or use foreachBatch(memwal.MemWalSink(config)), "
                "which starts one"
            )

    def write(self, iterator: Iterator[pa.RecordBatch]) -> StagedRows:
        """Stage the rows of a partition, on an executor. Raises: Invalid with the place of a refused row."""
        context: Any = TaskContext.get()
        partition, query = context.partitionId(), context.getLocalProperty(_QUERY)
        with source_edge():
            if not query:
                raise Invalid("rows are written by name in streams only: use df.writeStream")
            task = StageTask(RouteTask(self._uri, self._options.storage, self._routing), self._store(), partition)
            return StagedRows(query, partition, self._routing, task.stage(iterator))

    @translate_errors
    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Send the staged rows of all tasks, on the driver; return when they are durable.

        Raises: errors that the owners return; Unavailable if the table was resized or staged rows are missing.
        """
        told = _in_order(messages)
        if batchId == 0:
            self._expect_columns()
        staged = [each for message in told for each in message.staged]
        if len(told) < len(messages):
            raise Unavailable("Spark has lost the message of a task; start the query again, it replays the micro-batch")
        if not staged:
            return
        if any(message.routing != self._routing for message in told):
            raise Unavailable(
                f"{self._uri} was resized while a micro-batch was written; start the query again, it replays the "
                "micro-batch"
            )
        send = self._send(told[0].query, batchId)
        refuse_older(batchId, send.applied().newest)
        send_staged(send, self._store(), staged)
        delete_staged(self._store(), staged)

    @translate_errors
    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Delete the staged rows of these tasks. Garbage collection deletes those of other tasks."""
        del batchId
        staged = [each for message in _in_order(messages) for each in message.staged]
        if staged:
            delete_staged(self._store(), staged)

    # ---- inside --------------------------------------------------------------------------------------------------

    def _send(self, query: str, number: int) -> SendTask:
        options = self._options
        return SendTask(
            self._endpoint,
            self._regions,
            query,
            number,
            options.stream_timeout,
            options.in_flight_max,
            options.access,
            self._routing,
            find=self._find,
            table=self._id or None,
            # Columns that are added while the query runs must not end it. No writer outlives a micro-batch, so only the
            # first micro-batch of a query checks the columns (`_expect_columns`); later ones keep stored values.
            known=tuple(self._schema.names) if options.missing == "null" else (),
            missing=options.missing,
            form=OPTION,
        )

    def _expect_columns(self) -> None:
        """Raise Invalid if the frame lacks columns of the table, and `missing` does not decide their values."""
        of = (of_table(self._columns), self._schema, self._key, self._required, self._rule)
        CallersColumns(self._schema.names).nulls(*of, remedy=choices(OPTION))

    def _store(self) -> wal.ObjectStore:
        return _opened(self._uri, self._options.storage)


def _in_order(messages: Sequence[WriterCommitMessage | None]) -> list[StagedRows]:
    """Return the messages of tasks by the number of their partition."""
    return sorted((each for each in messages if isinstance(each, StagedRows)), key=lambda each: each.partition)


@lru_cache(maxsize=2)
def _opened(uri: str, storage: tuple[tuple[str, str], ...]) -> wal.ObjectStore:
    """Return the table's storage. A Python worker caches it for its tasks."""
    store = wal.open_store(uri, resolved(storage))
    return with_retried_reads(store, wal.SystemClock(), wal.WalOptions())
