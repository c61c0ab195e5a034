"""`df.writeStream.format("memwal")`, `df.write`: tasks stage rows, the driver sends them. The README has the steps.

Spark creates a `MemWalStreamWriter` for each micro-batch in a Python worker on the driver's machine, sends it to
executors as a pickle, and creates another one on the driver for the commit. Only the messages of the tasks survive.

This writer cannot let Spark shuffle rows by region. A task stages its rows with `StageTask` as objects on the table's
storage; an object is an Arrow IPC stream of routed rows of one region. The driver sends the rows of all tasks with
`send_staged`, through the task that sends shuffled rows.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from memwal import wal
from memwal.ingest.engine.api.missing import OPTION
from memwal.ingest.engine.table.owner_notes import NotesFinder
from memwal.ingest.errors import Unavailable, translate_errors
from memwal.ingest.spark.connector.options import WriteOptions, opened_table, resolved
from memwal.ingest.spark.sink.receipts import refuse_older
from memwal.ingest.spark.sink.route import RouteTask
from memwal.ingest.spark.sink.send import SendTask, nulls_of
from memwal.ingest.spark.source.columns import BLOCK, BUCKET, place_column, runs
from memwal.ingest.spark.source.whole_input import RegionRows
from memwal.ingest.spark.task import source_edge
from memwal.wal.layout import staged_key
from memwal.wal.retries import with_retried_reads
from memwal.wal.slot import put_until_known

_QUERY = "sql.streaming.queryId"
"""Local property of Spark's tasks: the id of their query, which the checkpoint stores."""
_HELD = 64 << 20
"""Bytes of rows that a task holds in memory before it stages them."""
_AT_ONCE = 8
"""Number of objects that a process writes or deletes concurrently; it mostly waits for storage."""
_WRITTEN = pa.ipc.IpcWriteOptions(compression="lz4")


@dataclass(frozen=True, slots=True)
class Staged:
    """One staged object: rows of one region in order. Can be pickled."""

    key: str
    bucket: int
    rows: int
    crc: int
    """CRC-32 of the object."""


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
        self._columns = (tuple(columns), base.schema, base.key, base.required, base.rules.upsert)
        self._known = tuple(base.schema.names)
        self._find = NotesFinder(base.uri, options.storage, base.regions)
        self._endpoint = ",".join(options.endpoints or self._find())
        if not self._endpoint:
            raise Unavailable(
                f"no daemon serves {base.uri}: start `memwal serve`, set the option endpoint if one runs, or use "
                "foreachBatch(memwal.MemWalSink(config)), which starts one"
            )

    def write(self, iterator: Iterator[pa.RecordBatch]) -> StagedRows:
        """Stage the rows of a partition, on an executor. Raises: Invalid with the place of a refused row."""
        context: Any = TaskContext.get()
        return self.staged(iterator, context.getLocalProperty(_QUERY))

    def staged(self, rows: Iterator[pa.RecordBatch], query: str) -> StagedRows:
        """Stage the rows of this task, for the token `query`. Raises: as `write`."""
        context: Any = TaskContext.get()
        partition = context.partitionId()
        with source_edge():
            task = StageTask(RouteTask(self._uri, self._options.storage, self._routing), self._store(), partition)
            return StagedRows(query, partition, self._routing, task.stage(rows))

    @translate_errors
    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Send the staged rows of all tasks, on the driver; return when they are durable.

        Raises: errors that the owners return; Unavailable if the table was resized or staged rows are missing.
        """
        told = _by_partition(messages)
        if batchId == 0:  # raises if the frame lacks columns of the table and `missing` does not decide their values
            nulls_of(*self._columns, known=self._known, missing=self._options.missing, form=OPTION)
        staged = [each for message in told for each in message.staged]
        if len(told) < len(messages):
            raise Unavailable("Spark has lost the message of a task; start the query, or the write, again")
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
        staged = [each for message in _by_partition(messages) for each in message.staged]
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
            # first micro-batch of a query checks the columns (`commit`); later ones keep stored values.
            known=self._known if options.missing == "null" else (),
            missing=options.missing,
            form=OPTION,
        )

    def _store(self) -> wal.ObjectStore:
        return _opened_store(self._uri, self._options.storage)


class MemWalWriter(DataSourceArrowWriter):
    """Writes one frame into a table: `df.write.format("memwal").mode("append").save(uri)`.

    It is written like one micro-batch of a query of its own: each region applies all its rows or none, however often
    Spark repeats a task. Spark does not repeat a write that failed; the caller does, and its rows are put again.
    Thread safety. One thread. Raises: `ingest.errors` kinds, which Spark wraps.
    """

    def __init__(self, options: WriteOptions, columns: Sequence[str]) -> None:
        """As `MemWalStreamWriter`."""
        self._writer = MemWalStreamWriter(options, columns)
        self._query = f"write-{wal.SystemIds().entry_id()}"

    def write(self, iterator: Iterator[pa.RecordBatch]) -> StagedRows:
        """Stage the rows of a partition, on an executor. Raises: Invalid with the place of a refused row."""
        return self._writer.staged(iterator, self._query)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Send the staged rows of all tasks, on the driver; return when they are durable. Raises: as of a stream."""
        self._writer.commit(messages, 0)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Delete the staged rows of these tasks."""
        self._writer.abort(messages, 0)


def _by_partition(messages: Sequence[WriterCommitMessage | None]) -> list[StagedRows]:
    """Return the messages of tasks by the number of their partition."""
    return sorted((each for each in messages if isinstance(each, StagedRows)), key=lambda each: each.partition)


@lru_cache(maxsize=2)
def _opened_store(uri: str, storage: tuple[tuple[str, str], ...]) -> wal.ObjectStore:
    """Return the table's storage. A Python worker caches it for its tasks."""
    store = wal.open_store(uri, resolved(storage))
    return with_retried_reads(store, wal.SystemClock(), wal.WalOptions())


# ---- staging --------------------------------------------------------------------------------------------------------


class StageTask:
    """Validates, routes and stages the rows of one Spark partition.

    Thread safety. One thread. Raises: as `RouteTask.routed`; wal errors.
    """

    def __init__(self, route: RouteTask, store: wal.ObjectStore, partition: int, held: int = _HELD) -> None:
        """`partition`: number of the Spark partition, used as the place of rows whose source has none."""
        self._route, self._store, self._partition, self._most = route, store, partition, held
        self._held: dict[int, list[pa.RecordBatch]] = defaultdict(list)
        self._staged: list[Staged] = []

    def stage(self, batches: Iterable[pa.RecordBatch]) -> tuple[Staged, ...]:
        """Stage all rows. Return the objects; those of each region are in the order of its rows."""
        size = 0
        placed = (
            batch
            if place_column(batch.schema.names) in batch.schema.names
            else batch.append_column(BLOCK, pa.array(np.full(batch.num_rows, self._partition)))
            for batch in batches
        )
        for batch in self._route.routed(placed):
            ordered = batch.take(pc.array_sort_indices(batch[BUCKET]))  # a stable sort
            buckets = ordered[BUCKET].to_numpy()
            for start, end in runs(buckets) if batch.num_rows else ():
                self._held[int(buckets[start])].append(ordered.slice(start, end - start))
            size += batch.nbytes
            if size >= self._most:
                self._put_all()
                size = 0
        self._put_all()
        return tuple(self._staged)

    def _put_all(self) -> None:
        held, self._held = sorted(self._held.items()), defaultdict(list)
        with ThreadPoolExecutor(_AT_ONCE, "staging") as pool:
            self._staged += pool.map(lambda each: self._put(*each), held)

    def _put(self, bucket: int, batches: Sequence[pa.RecordBatch]) -> Staged:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batches[0].schema, options=_WRITTEN) as writer:
            for batch in batches:
                writer.write_batch(batch)
        data, key = sink.getvalue().to_pybytes(), staged_key(wal.SystemIds().entry_id())
        put_until_known(self._store, key, data, clock=wal.SystemClock(), options=wal.WalOptions())
        return Staged(key, bucket, sum(batch.num_rows for batch in batches), zlib.crc32(data))


def send_staged(send: SendTask, store: wal.ObjectStore, staged: Sequence[Staged]) -> list[pa.RecordBatch]:
    """Send staged rows, each region in one stream; return the receipts.

    `staged`: objects of all tasks, in the order of rows. Raises: Unavailable if an object is missing or differs; errors
    of `SendTask.sent`.
    """
    by_bucket: dict[int, list[Staged]] = defaultdict(list)
    for each in staged:
        by_bucket[each.bucket].append(each)
    regions = (
        RegionRows(bucket, sum(each.rows for each in of_region), _read(store, of_region))
        for bucket, of_region in sorted(by_bucket.items())
    )
    return list(send.sent(regions))


def delete_staged(store: wal.ObjectStore, staged: Iterable[Staged]) -> None:
    """Delete staged objects. Garbage collection deletes objects that cannot be deleted now."""

    def delete(each: Staged) -> None:
        with suppress(wal.WalError):
            store.delete(each.key)

    with ThreadPoolExecutor(_AT_ONCE, "staging") as pool:
        list(pool.map(delete, staged))


def _read(store: wal.ObjectStore, staged: Sequence[Staged]) -> Iterator[pa.RecordBatch]:
    for each in staged:
        data = store.get(each.key)
        if data is None or zlib.crc32(data) != each.crc:
            found = "is gone" if data is None else "is not what its task wrote"
            raise Unavailable(
                f"{each.key} {found}; nothing of its region was applied: start the query again, Spark replays the "
                "micro-batch"
            )
        yield from pa.ipc.open_stream(pa.py_buffer(data))
