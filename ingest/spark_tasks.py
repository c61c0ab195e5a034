"""What the Spark sink does on executors: two functions over streams of Arrow batches. Nothing here imports Spark.

`RouteTask` validates rows and names the region of each; `SendTask` streams the rows of each region, which Spark has
brought together and in order by then, to the region's owner. Spark shuffles between the two, so no row is sent before
every row of the micro-batch has passed validation.

Both are pickled with plain strings and numbers only; what they need beside is opened in the worker.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from pathlib import PurePosixPath
from uuid import UUID

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import SecretStr

from flush import BaseTable
from ingest.access import Access
from ingest.client import IN_FLIGHT_MAX, RemoteTable
from ingest.errors import Invalid
from ingest.pipelined import Pipelined
from ingest.receipts import StreamReceipt
from ingest.references import resolve
from ingest.region_stream import RegionStream
from ingest.source import BLOCK, FILE, LANDED, PLACE
from ingest.task_errors import task_edge
from ingest.tokens import Token
from memtable import InvalidRows, MemTable, required_columns, row_schema, with_tombstone
from wal import Clock, SystemClock

ROW, BUCKET = "_memwal_row", "_memwal_bucket"
ADDED = (ROW, BUCKET)
"""Columns that `RouteTask` adds: int64 number of the row within its part of the source, int32 region of the row."""

_MICROS = 1e6

RECEIPT = pa.schema(
    [
        pa.field("region", pa.string(), nullable=False),
        pa.field("rows", pa.int64(), nullable=False),
        pa.field("applied", pa.bool_(), nullable=False),
        pa.field("position", pa.int64(), nullable=False),
        pa.field("ack_seconds", pa.float64(), nullable=False),
        pa.field("landed_first", pa.float64()),
        pa.field("landed_last", pa.float64()),
        pa.field("acked_at", pa.float64(), nullable=False),
    ]
)
"""All that comes back to the driver: one row per region and micro-batch. Times in unix seconds; `landed_*` null where
the source has no files."""


@dataclass(frozen=True, slots=True)
class RouteTask:
    """Validates batches against the table and adds the columns `ADDED`; the rows themselves pass unchanged.

    Raises (as TaskError): Invalid naming the column, and the row and its file where there is one.
    """

    uri: str
    options: tuple[tuple[str, str], ...]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with task_edge():
            numbers = RowNumbers()
            for batch in batches:
                yield self._routed(batch, numbers.of(batch))

    def warm_up(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Open the table in this worker; passes batches of any kind through."""
        with task_edge():
            opened(self.uri, self.options)
            yield from batches

    def _routed(self, batch: pa.RecordBatch, numbers: npt.NDArray[np.int64]) -> pa.RecordBatch:
        rows = pa.Table.from_batches([batch]).select(of_table(batch))
        target = opened(self.uri, self.options)
        if not set(rows.column_names) <= set(target.schema.names):
            target = reopened(target, self.uri, self.options)
        try:
            conformed = with_tombstone(rows, target.schema, target.required_of(rows.column_names))
            target.checker.check(conformed)
        except InvalidRows as error:
            raise Invalid(f"{error}{_where(batch, numbers, error.row)}", {"column": error.column}) from error
        buckets = pa.array(target.base.route(conformed), pa.int32())
        return batch.append_column(ROW, pa.array(numbers)).append_column(BUCKET, buckets)


class RowNumbers:
    """Numbers the rows of a task by their place in the part of a file they come from (in the task, without files).

    A replay may cut the source into other tasks, but a file part is always read in its own order, so these numbers
    do not depend on the cut.
    """

    def __init__(self) -> None:
        self._part: tuple[object, object] | None = None
        self._next = 0

    def of(self, batch: pa.RecordBatch) -> npt.NDArray[np.int64]:
        """Numbers of the rows of the next batch: int64[rows]."""
        numbers = np.empty(batch.num_rows, dtype=np.int64)
        for start, end in self._parts(batch):
            part = (
                (batch[FILE][start].as_py(), batch[BLOCK][start].as_py())
                if FILE in batch.schema.names
                else (None, None)
            )
            first = self._next if part == self._part else 0
            numbers[start:end] = np.arange(first, first + end - start)
            self._part, self._next = part, first + end - start
        return numbers

    @staticmethod
    def _parts(batch: pa.RecordBatch) -> Sequence[tuple[int, int]]:
        if not batch.num_rows:
            return ()
        if FILE not in batch.schema.names:
            return ((0, batch.num_rows),)
        files = batch[FILE].dictionary_encode().indices.to_numpy()
        return runs(files, batch[BLOCK].to_numpy())


def runs(*columns: npt.NDArray[np.integer]) -> list[tuple[int, int]]:
    """Maximal ranges [start, end) of rows that are equal in every one of `columns` (equal lengths, at least 1)."""
    changed = np.zeros(len(columns[0]) - 1, dtype=bool)
    for column in columns:
        changed |= column[1:] != column[:-1]
    cuts = [0, *(np.flatnonzero(changed) + 1).tolist(), len(columns[0])]
    return list(pairwise(cuts))


@dataclass(frozen=True, slots=True)
class SendTask:
    """Streams rows, sorted by `BUCKET` and then oldest first, to their owners; yields one `RECEIPT` row per region.

    A region's stream is finished only after its last row was sent; whatever goes wrong before, the region applies
    nothing of it. One whose owner is lost, or lets the region go, or is busy, is sent again until `timeout`. The ack of
    one region is waited for while the next one's rows are sent.
    Raises (as TaskError): what the owner answers, Unavailable and UnknownOutcome when none does.
    """

    endpoint: str
    """Of the daemons, with commas between them; they name others."""
    regions: tuple[UUID, ...]
    """That of bucket n at n."""
    producer: str
    sequence: int
    timeout: float
    in_flight_max: int = IN_FLIGHT_MAX
    access: Access = field(default_factory=Access)

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with task_edge():
            first = next((batch for batch in batches if batch.num_rows), None)
            if first is None:
                return
            table = connected(self.endpoint, self.timeout, os.getpid(), self.access)
            table.refresh(look=False)
            with Pipelined[pa.RecordBatch](self.in_flight_max) as acks:
                yield from self._send(table, _chain(first, batches), acks)

    def _send(
        self, table: RemoteTable, batches: Iterator[pa.RecordBatch], acks: Pipelined[pa.RecordBatch]
    ) -> Iterator[pa.RecordBatch]:
        sending: _Sending | None = None
        try:
            for batch in batches:
                for start, end in runs(batch[BUCKET].to_numpy()) if batch.num_rows else ():
                    bucket = batch[BUCKET][start].as_py()
                    if sending is not None and sending.bucket != bucket:
                        done, sending = sending, None
                        yield from acks.begin(done.finish, done.bytes)
                    if sending is None:
                        token = Token(self.producer, self.sequence)
                        region, columns = self.regions[bucket], of_table(batch)
                        stream = opened_stream(table, region, token, self.timeout, columns)
                        sending = _Sending(table, bucket, stream, SystemClock())
                    sending.write(batch.slice(start, end - start))
            if sending is not None:
                done, sending = sending, None
                yield from acks.begin(done.finish, done.bytes)
            yield from acks.rest()
        finally:
            if sending is not None:
                sending.abort()


class _Sending:
    """The open stream of one region."""

    def __init__(self, table: RemoteTable, bucket: int, stream: RegionStream, clock: Clock) -> None:
        self.bucket = bucket
        self._stream, self._clock = stream, clock
        self._rows_schema = row_schema(table.schema, table.key)
        self._landed: list[pa.Scalar] = []

    def write(self, batch: pa.RecordBatch) -> None:
        conformed = with_tombstone(pa.Table.from_batches([batch.select(of_table(batch))]), self._rows_schema)
        sent = self._stream.schema
        for part in conformed.select(sent.names).cast(sent).combine_chunks().to_batches():
            self._stream.write(part)
        if LANDED in batch.schema.names:
            self._landed.append(pc.min_max(batch[LANDED].cast(pa.int64())))

    def finish(self) -> pa.RecordBatch:
        """Close the stream and wait until its rows are durable and visible."""
        try:
            answer = self._stream.finish()
        except BaseException:
            self._stream.abort()
            raise
        return self._receipt(answer, self._clock.now())

    @property
    def bytes(self) -> int:
        return self._stream.bytes

    def abort(self) -> None:
        self._stream.abort()

    def _receipt(self, answer: StreamReceipt, acked_at: float) -> pa.RecordBatch:
        landed = [bounds.as_py() for bounds in self._landed]
        receipt = {
            "region": answer.region,
            "rows": answer.rows,
            "applied": answer.applied,
            "position": answer.position,
            "ack_seconds": answer.ack_seconds,
            "landed_first": min((each["min"] / _MICROS for each in landed), default=None),
            "landed_last": max((each["max"] / _MICROS for each in landed), default=None),
            "acked_at": acked_at,
        }
        return pa.RecordBatch.from_pylist([receipt], schema=RECEIPT)


@lru_cache(maxsize=8)
def connected(endpoint: str, patience: float, _process: int, access: Access) -> RemoteTable:
    """A client of the owners, made once per Python worker: a micro-batch finds its connections and who owns what.

    `patience`: seconds to wait until a daemon answers. `_process`: the worker's, since a fork must make its own.
    """
    return RemoteTable(endpoint, wait=patience, **access.options())


def opened_stream(
    table: RemoteTable, region: UUID, token: Token, timeout: float, columns: Sequence[str]
) -> RegionStream:
    """A stream for rows with `columns`: it carries all of the table's, unless upserts merge; then those, in its order.

    Raises: as `RemoteTable.open_stream`.
    """
    if not set(columns) <= set(table.schema.names):
        table.refresh()  # added since the daemon last looked, and known to `RouteTask`
    carried = [name for name in table.schema.names if name in columns or table.upsert != "merge"]
    return table.open_stream(region, token, timeout=timeout, columns=carried)


def of_table(batch: pa.RecordBatch) -> list[str]:
    """Names of the columns that are the user's, in order."""
    return [name for name in batch.schema.names if name not in PLACE and name not in ADDED]


def _chain(first: pa.RecordBatch, rest: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield first
    yield from rest


def _where(batch: pa.RecordBatch, numbers: npt.NDArray[np.int64], row: int | None) -> str:
    """Where a refused row lies, for the end of its message: its number in the file, not in the batch."""
    if row is None or FILE not in batch.schema.names:
        return ""
    name = PurePosixPath(str(batch[FILE][row].as_py())).name
    return f" (row {int(numbers[row])} of {name}, counted from 0)"


@dataclass(frozen=True, slots=True)
class Target:
    """What a worker knows of the table it routes to. `checker` holds no rows: it knows what a memtable refuses."""

    base: BaseTable
    schema: pa.Schema
    required: tuple[str, ...]
    checker: MemTable

    def required_of(self, columns: Sequence[str]) -> tuple[str, ...]:
        """The columns that must have a value in rows with `columns`."""
        if self.base.rules.upsert != "merge":
            return self.required
        return tuple(name for name in self.required if name in columns)


@lru_cache(maxsize=8)
def opened(uri: str, options: tuple[tuple[str, str], ...]) -> Target:
    """The target table, opened once per Python worker: key and regions of a table never change, and rows are checked
    again by the columns of their owner (see `reopened`).
    """
    secrets = {name: SecretStr(value) for name, value in options}
    base = BaseTable.open(uri, resolve(secrets, os.environ))
    schema = row_schema(base.schema, base.key)
    checker = MemTable(schema, base.key, base.indexes, generation=0)
    return Target(base, schema, required_columns(base.schema, base.key), checker)


def reopened(target: Target, uri: str, options: tuple[tuple[str, str], ...]) -> Target:
    """For rows with a column that `target` does not know: the table as it is now, to which it may have been added."""
    if target.base.latest().shape == target.base.shape:
        return target
    opened.cache_clear()
    return opened(uri, options)
