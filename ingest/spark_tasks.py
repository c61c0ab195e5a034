"""What the Spark sink does on executors: two functions over streams of Arrow batches. Nothing here imports Spark.

`RouteTask` validates rows and names the region of each; `SendTask` streams the rows of each region, which Spark has
brought together and in order by then, to the region's owner, and bad rows to the table of dead letters. Spark shuffles
between the two, so no row is sent before every row of the micro-batch has passed validation.

Both are pickled with plain strings and numbers only; what they need beside is opened in the worker.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from pathlib import PurePosixPath
from uuid import UUID

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import SecretStr

from flush import BaseTable
from ingest.access import Access
from ingest.admission import given_required
from ingest.bad_rows import BadRow, problems_of, unfit_of
from ingest.client import IN_FLIGHT_MAX, RemoteTable
from ingest.errors import Invalid
from ingest.file_rows import explained
from ingest.letters import (
    FAIL,
    LETTER,
    NOWHERE,
    Letterbox,
    Mode,
    Place,
    Refusals,
    Rules,
    letter_column,
    place_of,
    rows_at,
)
from ingest.owners import FromNotes
from ingest.pipelined import Pipelined
from ingest.receipts import Applied, StreamReceipt
from ingest.references import resolve
from ingest.region_stream import RegionStream
from ingest.routings import expect_routing
from ingest.rows import split_deletes
from ingest.source import BESIDE, BLOCK, DELETE, FILE, LANDED, OURS, TOPIC
from ingest.task_errors import task_edge
from ingest.tokens import Token
from ingest.whole_input import BUCKET, ROW, RegionRows, by_region, runs, with_counts
from memtable import TOMBSTONE, InvalidRows, MemTable, emptied, row_schema, with_tombstone
from wal import Clock, SystemClock

ADDED = (ROW, BUCKET)
"""Columns that `RouteTask` adds."""
_NOT_THE_USERS = {*OURS, *ADDED, LETTER}

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
        pa.field("skipped", pa.int64(), nullable=False),
        pa.field("newest", pa.int64()),
        pa.field("letters", pa.int64()),
        pa.field("said", pa.string()),
    ]
)
"""All that comes back to the driver: one row per region and micro-batch. Times in unix seconds; `landed_*` null where
the source has no files.

Two kinds of rows more, of no region's ack: with `letters` not null, what became of the bad rows (`rows` of them, of
which so many letters were not there before; `said`: the most frequent reasons); with `said` alone, rows which the
region refused, as `letters.Refusals` writes them, and it has applied nothing."""


@dataclass(frozen=True, slots=True)
class RouteTask:
    """Validates batches against the table and adds the columns `ADDED`; good rows pass unchanged. Behind them come the
    count rows of each region (`ingest.whole_input`).

    Bad rows go on as dead letters, with the column `LETTER`, where `letters` is not "fail"; `refused` are those that
    their region refused in an earlier attempt, or are letters of it; with "fail" they are left out.
    Raises (as TaskError): Invalid naming the column, and the row and its
    file where there is one; where there are dead letters, only for columns that fit no row.
    """

    uri: str
    options: tuple[tuple[str, str], ...]
    routing: int = 1
    """Version of the routing that the driver sends by; a worker that knows another opens the table again."""
    letters: Mode = "fail"
    refused: Mapping[Place, BadRow] = field(default_factory=dict)

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with task_edge():
            yield from with_counts(self.routed(batches))

    def routed(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """As a call, without the edge of a task and without count rows. Raises: Invalid."""
        numbers = RowNumbers()
        for batch in batches:
            yield self._routed(batch, numbers.of(batch))

    def warm_up(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Open the table in this worker; passes batches of any kind through."""
        with task_edge():
            opened(self.uri, self.options, self.routing)
            yield from batches

    def _routed(self, batch: pa.RecordBatch, numbers: npt.NDArray[np.int64]) -> pa.RecordBatch:
        target = self._target(of_table(batch.schema.names))
        refused = rows_at(self.refused, batch, numbers)
        if self.letters == "fail":
            if refused:  # letters of an earlier run
                others = np.setdiff1d(np.arange(batch.num_rows), list(refused))
                batch, numbers = batch.take(pa.array(others)), numbers[others]
            bad = explained(problems_of(batch), batch, target.base.schema)
            return self._all_or_none(batch, numbers, bad, target)
        bad = explained(problems_of(batch), batch, target.base.schema) | refused
        rest = np.setdiff1d(np.arange(batch.num_rows), list(bad)) if bad else None
        asked = batch if rest is None else batch.take(pa.array(rest))
        unfit, conformed = unfit_of(asked, lambda rows: conformed_to(target, rows))
        bad |= {row if rest is None else int(rest[row]): why for row, why in unfit.items()}
        good = np.ones(batch.num_rows, dtype=bool)
        good[list(bad)] = False
        if conformed is None:
            conformed = conformed_to(target, batch.filter(pa.array(good)))
        buckets = np.full(batch.num_rows, NOWHERE, dtype=np.int32)
        buckets[good] = target.base.route(conformed)
        return self._sorted_out(batch, numbers, bad, buckets)

    def _target(self, columns: Sequence[str]) -> Target:
        target = opened(self.uri, self.options, self.routing)
        if not set(columns) <= set(target.schema.names):
            target = reopened(target, self.uri, self.options, self.routing)
        return target

    @staticmethod
    def _all_or_none(
        batch: pa.RecordBatch, numbers: npt.NDArray[np.int64], bad: Mapping[int, BadRow], target: Target
    ) -> pa.RecordBatch:
        for row, why in sorted(bad.items())[:1]:
            what = "; correct the file, or set dlq.mode" if FILE in batch.schema.names else ""
            raise Invalid(f"{why.reason}{_where(batch, numbers, row)}{what}", {"stage": why.stage})
        try:
            conformed = conformed_to(target, batch)
        except InvalidRows as error:
            raise Invalid(f"{error}{_where(batch, numbers, error.row)}", {"column": error.column}) from error
        return _with_places(batch, numbers, pa.array(target.base.route(conformed), pa.int32()))

    def _sorted_out(
        self,
        batch: pa.RecordBatch,
        numbers: npt.NDArray[np.int64],
        bad: Mapping[int, BadRow],
        buckets: npt.NDArray[np.int32],
    ) -> pa.RecordBatch:
        """All rows in their order: good ones with their region, bad ones emptied, with their letter."""
        letter = letter_column(batch, bad, of_table(batch.schema.names), raw=self.letters == "table")
        good = pa.array(buckets != NOWHERE)
        for name in of_table(batch.schema.names) if bad else ():
            at = batch.schema.get_field_index(name)
            kept = pc.if_else(good, batch[name], pa.scalar(None, batch[name].type))
            batch = batch.set_column(at, batch.schema.field(at).with_nullable(True), kept)
        return _with_places(batch, numbers, pa.array(buckets)).append_column(LETTER, letter)


def conformed_to(target: Target, batch: pa.RecordBatch) -> pa.Table:
    """The user's columns of a batch as the table has them. Raises: InvalidRows for what a region would refuse."""
    rows, deletes = rows_and_deletes(batch, target.base.key, target.base.rules.version)
    conformed = with_tombstone(rows, target.schema, target.required_of(rows.column_names), deletes)
    target.checker.check(conformed)
    return conformed


def _with_places(batch: pa.RecordBatch, numbers: npt.NDArray[np.int64], buckets: pa.Array) -> pa.RecordBatch:
    beside = [name for name in BESIDE if name in batch.schema.names]
    return batch.drop_columns(beside).append_column(ROW, pa.array(numbers)).append_column(BUCKET, buckets)


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


@dataclass(frozen=True, slots=True)
class SendTask:
    """Streams rows, sorted by `BUCKET` and then oldest first, to their owners; yields one `RECEIPT` row per region.

    A region's stream is finished only after as many rows were sent as its count rows say; whatever goes wrong before,
    the region applies nothing of it. One whose owner is lost, or lets the region go, or is busy, is sent again until
    `timeout`; so where the only daemon is started again. The ack of one region is waited for while the next one's rows
    are sent.
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
    routing: int = 1
    """Version of the routing of `regions`."""
    letters: Rules = FAIL
    find: FromNotes | None = None
    """Where daemons are that nobody has configured."""
    table: str | None = None
    """Id of the table, None for whichever is served there."""

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with task_edge():
            yield from self.sent(by_region(batches))

    def sent(self, regions: Iterator[RegionRows]) -> Iterator[pa.RecordBatch]:
        """As a call, without the edge of a task. Raises: what the owner answers, Unavailable, UnknownOutcome."""
        first = next(regions, None)
        if first is not None and first.bucket == NOWHERE:
            written = Letterbox(self.letters, ROW, self.producer, self.sequence).take(first)
            told = {"rows": written.rows, "letters": written.added, "said": written.reasons}
            yield without_ack(SystemClock().now(), **told)
            first = next(regions, None)
        if first is None:
            return
        table = self._connected()
        table.refresh(look=False)
        with Pipelined[pa.RecordBatch](self.in_flight_max) as acks:
            yield from self._send(table, chain([first], regions), acks)

    def note(self, regions: Iterable[UUID]) -> None:
        """Have regions that got no rows of the micro-batch remember it as applied. Raises: as a stream of rows."""
        table, token = self._connected(), Token(self.producer, self.sequence)
        for region in regions:
            columns = table.schema.names
            opened_stream(table, region, token, self.timeout, columns, 0, self.routing).finish()

    def applied(self) -> Applied:
        """Which micro-batches of the query the regions have applied. Raises: Unavailable."""
        return self._connected().applied(self.producer, self.timeout)

    def _connected(self) -> RemoteTable:
        return connected(self.endpoint, self.timeout, os.getpid(), self.access, self.find, self.table)

    def _send(
        self, table: RemoteTable, regions: Iterator[RegionRows], acks: Pipelined[pa.RecordBatch]
    ) -> Iterator[pa.RecordBatch]:
        for rows in regions:
            sending = self._sending(table, rows)
            try:
                for batch in rows:
                    sending.write(batch)
            except BaseException:
                sending.abort()
                raise
            yield from acks.begin(sending.finish, sending.bytes)
        yield from acks.rest()

    def _sending(self, table: RemoteTable, rows: RegionRows) -> _Sending:
        token, region = Token(self.producer, self.sequence), self.regions[rows.bucket]
        columns = [*of_table(rows.columns), *([TOMBSTONE] if DELETE in rows.columns else [])]
        stream = opened_stream(table, region, token, self.timeout, columns, rows.count, self.routing)
        return _Sending(table, stream, SystemClock(), Refusals(ROW) if self.letters.mode != "fail" else None)


class _Sending:
    """The open stream of one region."""

    def __init__(self, table: RemoteTable, stream: RegionStream, clock: Clock, refusals: Refusals | None) -> None:
        """`refusals`: told of every row, where rows that the region refuses may be left out."""
        self._refusals = refusals
        self._stream, self._clock, self._key, self._version = stream, clock, table.key, table.version
        self._rows_schema = row_schema(table.schema, table.key)
        self._landed: list[pa.Scalar] = []

    def write(self, batch: pa.RecordBatch) -> None:
        rows, deletes = rows_and_deletes(batch, self._key, self._version)
        conformed = with_tombstone(rows, self._rows_schema, deletes=deletes)
        sent = self._stream.schema
        for part in conformed.select(sent.names).cast(sent).combine_chunks().to_batches():
            self._stream.write(part)
        if self._refusals is not None:
            self._refusals.sent(batch)
        if LANDED in batch.schema.names:
            self._landed.append(pc.min_max(batch[LANDED].cast(pa.int64())))

    def finish(self) -> pa.RecordBatch:
        """Close the stream and wait until its rows are durable and visible."""
        try:
            answer = self._stream.finish()
        except BaseException as error:
            self._stream.abort()
            refused = self._refusals.packed(error) if self._refusals and isinstance(error, Invalid) else None
            if refused is None:
                raise
            return without_ack(self._clock.now(), said=refused)
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
            "skipped": answer.skipped,
            "newest": answer.newest,
        }
        return pa.RecordBatch.from_pylist([receipt], schema=RECEIPT)


@lru_cache(maxsize=8)
def connected(
    endpoint: str,
    patience: float,
    _process: int,
    access: Access,
    find: FromNotes | None = None,
    table: str | None = None,
) -> RemoteTable:
    """A client of the owners, made once per Python worker: a micro-batch finds its connections and who owns what.

    `patience`: seconds to wait until a daemon answers. `_process`: the worker's, since a fork must make its own.
    """
    return RemoteTable(endpoint, wait=patience, restarts=patience, find=find, id=table, **access.options())


def opened_stream(
    table: RemoteTable, region: UUID, token: Token, timeout: float, columns: Sequence[str], rows: int, routing: int = 1
) -> RegionStream:
    """A stream for so many rows with `columns`: it carries all of the table's, unless upserts merge; then those, in its
    order; and `_tombstone` where that is among them.

    Raises: as `RemoteTable.open_stream`.
    """
    if not set(columns) - {TOMBSTONE} <= set(table.schema.names):
        table.refresh()  # added since the daemon last looked, and known to `RouteTask`
    carried = [name for name in table.schema.names if name in columns or table.upsert != "merge"]
    return table.open_stream(
        region, token, timeout=timeout, columns=carried, deletes=TOMBSTONE in columns, routing=routing, rows=rows
    )


def of_table(columns: Sequence[str]) -> list[str]:
    """Those of `columns` that are the user's, in order."""
    return [name for name in columns if name not in _NOT_THE_USERS]


def rows_and_deletes(
    batch: pa.RecordBatch, key: Sequence[str], version: str
) -> tuple[pa.Table, npt.NDArray[np.bool_] | None]:
    """The user's columns of a batch, and which of its rows delete their key; None where it has no deletes.

    Rows that delete have values of their key and version only. Raises: Invalid as `ingest.rows.split_deletes`.
    """
    rows = pa.Table.from_batches([batch.select(of_table(batch.schema.names))])
    if DELETE not in batch.schema.names:
        return rows, None
    _, deletes = split_deletes(pa.table({TOMBSTONE: batch[DELETE]}), key)
    return (rows, None) if isinstance(deletes, bool) else (emptied(rows, (*key, version), deletes), deletes)


def without_ack(now: float, **values: object) -> pa.RecordBatch:
    """A receipt that tells of other things than a region's ack."""
    counts = dict.fromkeys(("rows", "position", "skipped"), 0)
    nothing = {"region": "", "applied": False, "ack_seconds": 0.0, "acked_at": now, **counts}
    return pa.RecordBatch.from_pylist([nothing | values], schema=RECEIPT)


def _where(batch: pa.RecordBatch, numbers: npt.NDArray[np.int64], row: int | None) -> str:
    """Where a refused row lies, for the end of its message: its number in the file, not in the batch."""
    if row is None:
        return ""
    if TOPIC in batch.schema.names and batch[TOPIC][row].is_valid:
        topic, partition, offset = place_of(batch, row, 0)
        return f" (offset {offset} of partition {partition} of topic {topic})"
    if FILE not in batch.schema.names:
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
        return given_required(self.required, columns, self.base.rules)


@lru_cache(maxsize=8)
def opened(uri: str, options: tuple[tuple[str, str], ...], routing: int = 1) -> Target:
    """The target table, opened once per Python worker and version of its routing: its key never changes, and rows are
    checked again by the columns of their owner (see `reopened`). Raises: Unavailable where another routing holds.
    """
    secrets = {name: SecretStr(value) for name, value in options}
    base = BaseTable.open(uri, resolve(secrets, os.environ))
    expect_routing(uri, routing, base.routing_version)
    schema = row_schema(base.schema, base.key)
    checker = MemTable(schema, base.key, base.indexes, generation=0)
    return Target(base, schema, base.required, checker)


def reopened(target: Target, uri: str, options: tuple[tuple[str, str], ...], routing: int = 1) -> Target:
    """For rows with a column that `target` does not know: the table as it is now, to which it may have been added."""
    if target.base.latest().shape == target.base.shape:
        return target
    opened.cache_clear()
    return opened(uri, options, routing)
