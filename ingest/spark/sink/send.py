"""The task that sends rows: each region's rows to its owner, bad rows to the table of dead letters.

Spark shuffles between `RouteTask` and `SendTask`, so the rows of a region arrive together and in order, and no row is
sent before every row of the micro-batch has passed validation. Both tasks are pickled with plain strings and numbers
only, and open everything else in the worker. This module does not import Spark.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain, cycle
from typing import Generic, Self, TypeVar
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from memwal.ingest import tracing
from memwal.ingest.caller import carried
from memwal.ingest.engine.api.missing import SETTING, CallersColumns, Missing, choices, missing_rule
from memwal.ingest.engine.api.tokens import Applied, Token
from memwal.ingest.engine.table.owner_notes import NotesFinder
from memwal.ingest.errors import MISFIT, NO_TABLE, Invalid, MemWalError, Unavailable
from memwal.ingest.service.client.connect import CREATED_WITHIN
from memwal.ingest.service.client.remote import IN_FLIGHT_MAX, RemoteTable
from memwal.ingest.service.client.retry import Attempts
from memwal.ingest.service.client.router import endpoints_of
from memwal.ingest.service.client.stream import RegionStream
from memwal.ingest.service.client.target import template_target
from memwal.ingest.service.rpc.connection import Connection
from memwal.ingest.service.rpc.credentials import Access
from memwal.ingest.spark.dlq.bad_rows import Refusals, Rules, write_letters
from memwal.ingest.spark.sink.receipts import RECEIPT, without_ack
from memwal.ingest.spark.source.columns import DELETE, LANDED, NO_REGION, TABLE, of_table, rows_and_deletes
from memwal.ingest.spark.source.whole_input import RegionRows, by_region
from memwal.ingest.spark.task import task_edge
from memwal.memtable import TOMBSTONE, row_schema, with_tombstone
from memwal.wal import Clock, SystemClock, SystemIds

_MICROS = 1e6
_OF_ANSWER = ("region", "rows", "applied", "position", "ack_seconds", "skipped", "newest")
"""Fields of a receipt that the owner returns."""


@dataclass(frozen=True, slots=True)
class SendTask:
    """Streams rows, sorted by `BUCKET` and then oldest first, to their owners; yields one `RECEIPT` row per region.

    A region's stream is closed only after as many rows were sent as its count rows say. If anything fails before, the
    region applies nothing. If the owner is lost, releases the region or is busy, the stream is sent again until
    `timeout`, also if the only daemon is restarted. While the rows of one region are sent, the acks of previous regions
    are awaited.

    Raises (as TaskError): errors that the owner returns; Unavailable and UnknownOutcome if no owner answers.
    """

    endpoint: str
    """Endpoints of daemons, separated by commas; these daemons name the others."""
    regions: tuple[UUID, ...]
    """The region of bucket n at index n."""
    producer: str
    sequence: int
    timeout: float
    in_flight_max: int = IN_FLIGHT_MAX
    access: Access = field(default_factory=Access)
    routing: int = 1
    """Version of the routing of `regions`."""
    letters: Rules = field(default_factory=Rules)
    find: NotesFinder | None = None
    """Finds daemons that are not configured."""
    table: str | None = None
    """Id of the table; None accepts any table that the daemons serve."""
    trace: tracing.Headers = ()
    """Names the span of the micro-batch."""
    known: tuple[str, ...] = ()
    """Columns of the table when the sender started. Columns that were added later keep their stored values."""
    missing: Missing | None = None
    """How known columns that the rows lack are handled; see `missing_rule`."""
    form: str = SETTING
    """How the user writes `missing`, for messages."""
    template: str = ""
    """If rows go to many tables, named in the column `TABLE`: see `template_target`. The owners know the regions."""

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with task_edge():
            yield from self.sent(by_region(batches))

    def sent(self, regions: Iterator[RegionRows]) -> Iterator[pa.RecordBatch]:
        """As a call, but raises errors unchanged: errors that the owner returns, Unavailable, UnknownOutcome."""
        first = next(regions, None)
        if first is not None and first.bucket == NO_REGION:
            rows, added, said = write_letters(self.letters, self.producer, self.sequence, first)
            yield without_ack(SystemClock().now(), rows=rows, letters=added, said=said)
            first = next(regions, None)
        if first is None:
            return
        if not self.template:
            self._connected().refresh(look=False)
        try:
            with OrderedPipeline[pa.RecordBatch](self.in_flight_max) as acks:
                yield from self._send(chain([first], regions), acks)
        except MemWalError:
            connected_by_name.cache_clear()  # a table may have been resized or replaced: the next attempt asks again
            raise

    def note(self, regions: Iterable[UUID]) -> None:
        """Make regions that received no rows of the micro-batch note it as applied. Raises: as a stream of rows."""
        table, token = self._connected(), Token(self.producer, self.sequence)
        for region in regions:
            columns = table.schema.names
            opened_stream(table, region, token, self.timeout, columns, 0, self.routing).finish()

    def applied(self) -> Applied:
        """Return which micro-batches of the query the regions have applied. Raises: Unavailable."""
        return self._connected().applied(self.producer, self.timeout)

    def _connected(self, name: str = "") -> RemoteTable:
        given = (self.endpoint, self.timeout, os.getpid(), self.access)
        return connected_by_name(*given, name, self.template) if name else connected(*given, self.find, self.table)

    def _send(self, regions: Iterator[RegionRows], acks: OrderedPipeline[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for rows in regions:
            streams: dict[tuple[str, int], _Sending] = {}
            try:
                for name, of_one in ((name, part) for batch in rows for name, part in self._by_table(batch)):
                    try:
                        table = self._connected(name)
                    except Invalid as error:
                        if self.letters.mode == "fail" or error.details.get("reason") != MISFIT:
                            raise
                        yield without_ack(SystemClock().now(), said=_all_refused(of_one, error))
                        continue
                    for bucket, part in self._by_bucket(table, rows.bucket, of_one):
                        if (name, bucket) not in streams:
                            streams[name, bucket] = self._opened(table, name, bucket, rows)
                        streams[name, bucket].write(part)
                while streams:
                    sending = streams.pop(next(iter(streams)))
                    yield from acks.begin(sending.finish, sending.stream.bytes)
            except BaseException:
                for sending in streams.values():
                    sending.stream.abort()
                raise
        yield from acks.rest()

    def _by_table(self, batch: pa.RecordBatch) -> Iterator[tuple[str, pa.RecordBatch]]:
        """Yield the rows of each table in order, with its name; "" for the only table."""
        names = pc.unique(batch[TABLE]).to_pylist() if self.template else [""]
        for name in names:
            yield name, batch.filter(pc.equal(batch[TABLE], name)) if len(names) > 1 else batch

    def _by_bucket(
        self, table: RemoteTable, bucket: int, batch: pa.RecordBatch
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yield the rows of each region of a table in order, with its bucket; all are in `bucket` of the only table."""
        if not self.template or len(table.splitter.regions) == 1:
            yield 0 if self.template else bucket, batch
            return
        rows, deletes = rows_and_deletes(batch, table.key, table.version)
        conformed = with_tombstone(rows, row_schema(table.schema, table.key), deletes=deletes)
        buckets = table.splitter.buckets(conformed)
        for each in np.unique(buckets).tolist():
            yield each, batch.filter(pa.array(buckets == each))

    def _opened(self, table: RemoteTable, name: str, bucket: int, rows: RegionRows) -> _Sending:
        columns = [*of_table(rows.columns), *([TOMBSTONE] if DELETE in rows.columns else [])]
        regions, routing = self.regions, self.routing
        if self.template:
            regions, routing = tuple(map(UUID, table.splitter.regions)), table.splitter.routing
        count = None if self.template else rows.count  # the rows of a hash may go to several regions
        with tracing.continued(self.trace):
            of = (rows.columns, table.schema, table.key, table.required, table.upsert)
            nulls = nulls_of(*of, known=self.known, missing=self.missing, form=self.form)
            token = Token(self.producer, self.sequence)
            stream = opened_stream(table, regions[bucket], token, self.timeout, columns, count, routing, nulls)
        refusals = Refusals() if self.letters.mode != "fail" else None
        return _Sending(table, stream, SystemClock(), refusals, name or None)


class _Sending:
    """The open stream of one region."""

    def __init__(
        self, table: RemoteTable, stream: RegionStream, clock: Clock, refusals: Refusals | None, name: str | None
    ) -> None:
        """`refusals`: records every sent row, if rows that the region refuses may be left out. `name`: of the table, if
        there are many."""
        self._refusals, self._name = refusals, name
        self.stream, self._clock, self._key, self._version = stream, clock, table.key, table.version
        self._rows_schema = row_schema(table.schema, table.key)
        self._landed: list[pa.Scalar] = []

    def write(self, batch: pa.RecordBatch) -> None:
        rows, deletes = rows_and_deletes(batch, self._key, self._version)
        conformed = with_tombstone(rows, self._rows_schema, deletes=deletes)
        sent = self.stream.schema
        for part in conformed.select(sent.names).cast(sent).combine_chunks().to_batches():
            self.stream.write(part)
        if self._refusals is not None:
            self._refusals.sent(batch)
        if LANDED in batch.schema.names:
            self._landed.append(pc.min_max(batch[LANDED].cast(pa.int64())))

    def finish(self) -> pa.RecordBatch:
        """Close the stream and wait until its rows are durable and visible."""
        try:
            answer = self.stream.finish()
        except BaseException as error:
            self.stream.abort()
            refused = self._refusals.packed(error) if self._refusals and isinstance(error, Invalid) else None
            if refused is None:
                raise
            return without_ack(self._clock.now(), said=refused)
        landed = [bounds.as_py() for bounds in self._landed]
        receipt = {
            **{name: getattr(answer, name) for name in _OF_ANSWER},
            "landed_first": min((each["min"] / _MICROS for each in landed), default=None),
            "landed_last": max((each["max"] / _MICROS for each in landed), default=None),
            "acked_at": self._clock.now(),
            "table": self._name,
        }
        return pa.RecordBatch.from_pylist([receipt], schema=RECEIPT)


def _all_refused(batch: pa.RecordBatch, error: Invalid) -> str | None:
    """Return the rows of a batch as rows that their table refuses."""
    refusals = Refusals()
    refusals.sent(batch)
    return refusals.packed(Invalid(error.message, {"rows": list(range(batch.num_rows))}))


def nulls_of(
    columns: Sequence[str],
    schema: pa.Schema,
    key: Sequence[str],
    required: Sequence[str],
    upsert: str,
    *,
    known: Sequence[str],
    missing: Missing | None,
    form: str,
) -> list[str]:
    """Return the columns of a table that become null, since rows with `columns` lack them; see `SendTask`.

    Raises: Invalid if rows must have one of them, or if `missing` does not decide its value.
    """
    rule = missing_rule(missing, key, upsert)
    # A delete needs no values.
    of = (of_table(columns), schema, key, () if DELETE in columns else required, rule)
    return CallersColumns(known).nulls(*of, remedy=choices(form))


@lru_cache(maxsize=8)
def connected(
    endpoint: str,
    patience: float,
    _process: int,
    access: Access,
    find: NotesFinder | None = None,
    table: str | None = None,
) -> RemoteTable:
    """Return a client of the owners with open connections and known owners, created once per Python worker.

    `patience`: seconds to wait until a daemon answers. `_process`: id of the worker, since a fork needs its own client.
    """
    return RemoteTable(endpoint, wait=patience, restarts=patience, find=find, id=table, **access.options())


@lru_cache(maxsize=256)
def connected_by_name(
    endpoint: str, patience: float, _process: int, access: Access, name: str, template: str
) -> RemoteTable:
    """Return a client of a table of a fleet, created unless it exists. Arguments as of `connected` and `SendTask`.

    Raises: Invalid, for a table that differs from the template with the reason MISFIT; Unavailable.
    """
    attempts = Attempts(SystemClock(), SystemIds(), patience, repeatable=True, restarts=patience)
    given, creators = {"name": name, **access.options()}, cycle(endpoints_of(endpoint))
    while True:
        try:
            table = RemoteTable(endpoint, wait=attempts.left, restarts=patience, **given)
            break
        except Invalid as error:
            if error.details.get("reason") != NO_TABLE:
                raise
        try:
            with closing(Connection(next(creators), **given)) as daemon:
                daemon.act("create", None, CREATED_WITHIN)
        except Unavailable as error:
            attempts.after(error, alone=False)
    base, kinds = template_target(template).base, {field.name: field.type for field in table.schema}
    if table.key != base.key or any(kinds.get(field.name) != field.type for field in base.schema):
        text = f"table {name!r} has another key or other columns than its template, [table]; correct one of them"
        raise Invalid(text, {"reason": MISFIT})
    return table


def opened_stream(
    table: RemoteTable,
    region: UUID,
    token: Token,
    timeout: float,
    columns: Sequence[str],
    rows: int | None,
    routing: int = 1,
    nulls: Sequence[str] = (),
) -> RegionStream:
    """Open a stream for `rows` rows (None: unknown) with `columns`, in the table's order.

    `_tombstone` is added if `columns` has it. Columns that the rows lack keep their stored values, except `nulls`.

    Raises: as `RemoteTable.open_stream`.
    """
    if not set(columns) - {TOMBSTONE} <= set(table.schema.names):
        table.refresh()  # `RouteTask` may know columns that were added after this client's last request
    names = [name for name in table.schema.names if name in columns]
    deletes = TOMBSTONE in columns
    return table.open_stream(
        region, token, timeout=timeout, columns=names, deletes=deletes, routing=routing, rows=rows, nulls=nulls
    )


T = TypeVar("T")

_AT_ONCE = 8


class OrderedPipeline(Generic[T]):
    """Runs steps in threads and returns their results in the order that the steps were begun in.

    Thread safety. One thread.
    Invariants. More than `most` bytes are in progress only if a single step has more. The context exits when all steps
    have ended.
    """

    def __init__(self, most: int) -> None:
        """`most`: bytes."""
        self._most, self._size = most, 0
        self._under_way: deque[tuple[Future[T], int]] = deque()
        self._pool = ThreadPoolExecutor(_AT_ONCE, "pipelined")

    def begin(self, step: Callable[[], T], size: int) -> Iterator[T]:
        """Begin a step of `size` bytes. Yield the results of steps that had to end first. Raises: errors of a step."""
        while self._under_way and (self._size + size > self._most or len(self._under_way) == _AT_ONCE):
            yield self._oldest()
        self._under_way.append((self._pool.submit(carried(step)), size))
        self._size += size

    def rest(self) -> Iterator[T]:
        """Yield the results of all other steps. Raises: as `begin`."""
        while self._under_way:
            yield self._oldest()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True)

    def _oldest(self) -> T:
        step, size = self._under_way.popleft()
        self._size -= size
        return step.result()
