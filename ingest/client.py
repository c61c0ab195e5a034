"""`ingest.connect`: the methods of `Table`, through a daemon.

A client keeps one Flight connection. Rows of any number of regions go in one call; a Spark task opens one stream per
region instead (`open_stream`), so that a micro-batch is applied whole.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import wraps
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight

from flush import CommitReport
from ingest.errors import Invalid, UnknownOutcome
from ingest.flight_wire import closing, from_flight, pack
from ingest.keys import normalise_keys
from ingest.reads import Reads
from ingest.receipts import Receipt, StreamReceipt
from ingest.rows import as_table
from ingest.tokens import Token, TokenLike
from wal import Clock, SystemClock

P = ParamSpec("P")
R = TypeVar("R")

STATUS_TIMEOUT, READ_TIMEOUT, WRITE_TIMEOUT, STEP_TIMEOUT = 10.0, 120.0, 120.0, 1800.0
"""Seconds after which a call to a daemon that is stopped or out of reach is given up. A write's is longer than any put
timeout and retry budget of the defaults; a step (flush, commit) may build an index."""

ANSWER_TIMEOUT = 5.0
"""Seconds that a daemon has to say that a put's own timeout has passed, which is a better answer than none."""

BATCH_ROWS = 16_384
"""Rows per Flight message: large enough to amortise the call, small enough to stay below gRPC's buffers."""


def connect(location: str, *, token: str | None = None, tls_ca: bytes | None = None) -> RemoteTable:
    """Connect to a daemon.

    `location`: grpc://host:port or grpc+tls://host:port. `token`: sent as a bearer token. `tls_ca`: PEM bytes.
    Raises: Invalid for a location that is none, Unavailable when nobody answers.
    """
    return RemoteTable(location, token=token, tls_ca=tls_ca)


def _through_flight(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Turn Flight's errors into ours."""

    @wraps(method)
    def translated(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(self, *args, **kwargs)
        except (flight.FlightError, pa.ArrowException, OSError) as error:
            raise from_flight(error, self.endpoint) from None

    return translated


class RemoteTable(Reads):
    """A table served by a daemon.

    Thread safety. Every method from any thread. Errors. Only `ingest.errors` kinds.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        token: str | None = None,
        tls_ca: bytes | None = None,
        clock: Clock | None = None,
        patience: float | None = None,
    ) -> None:
        """See `connect`. `patience`: seconds to wait for the first answer, None for as long as it takes."""
        self.endpoint = endpoint
        self.clock = clock or SystemClock()
        self._headers = [] if token is None else [(b"authorization", f"Bearer {token}".encode())]
        try:
            self._client = flight.FlightClient(endpoint, tls_root_certs=tls_ca)
        except (pa.ArrowException, ValueError, TypeError) as error:
            raise Invalid(f"{endpoint!r} is no daemon's address ({error}); write grpc://host:port") from None
        self.identity: dict[str, Any] = self._describe({}, patience)["identity"]

    # ---- write ---------------------------------------------------------------------------------------------------

    @_through_flight
    def put(self, rows: Any, *, durable: bool = True, token: TokenLike = None, timeout: float | None = None) -> Receipt:
        """As `Table.put`. Raises also: UnknownOutcome when the connection was lost before the answer."""
        given = as_table(rows, self.schema, alike=self.upsert == "merge")
        if not set(given.column_names) <= set(self.schema.names):
            self.refresh()
            if isinstance(rows, Sequence):
                given = as_table(rows, self.schema, alike=self.upsert == "merge")
        return self._write(given, False, durable, token, timeout)

    @_through_flight
    def delete(
        self, keys: Any, *, durable: bool = True, token: TokenLike = None, timeout: float | None = None
    ) -> Receipt:
        """As `Table.delete`."""
        return self._write(normalise_keys(keys, self.schema, self.key), True, durable, token, timeout)

    @_through_flight
    def open_stream(
        self, region: UUID, token: Token, *, timeout: float | None = None, columns: Sequence[str] | None = None
    ) -> RegionStream:
        """Start the stream of one region and micro-batch; nothing is applied before `finish`.

        `columns`: those that the rows have, in the order of the schema; only a table whose upserts merge takes fewer
        than all, which are meant without it.
        `timeout`: seconds from now to the ack, after which the stream is given up; None waits for ever.
        """
        request = {"op": "put", "region": str(region), "producer": token.producer, "sequence": token.sequence}
        schema = self.schema if columns is None else pa.schema([self.schema.field(name) for name in columns])
        return RegionStream(self, str(region), schema, self._open_put(request, schema, timeout))

    # ---- steps and state -----------------------------------------------------------------------------------------

    @_through_flight
    def flush(self) -> None:
        """As `Table.flush`."""
        self._act("flush", patience=STEP_TIMEOUT)

    @_through_flight
    def commit(self) -> CommitReport:
        """As `Table.commit`; the rows never come here."""
        return CommitReport(**self._act("commit", patience=STEP_TIMEOUT))

    @_through_flight
    def status(self) -> dict[str, Any]:
        """As `Table.status`."""
        status: dict[str, Any] = self._act("status", patience=STATUS_TIMEOUT)
        return status

    @_through_flight
    def refresh(self) -> None:
        """Have the daemon look whether somebody changed the table's columns, and take them over into `schema`."""
        self._describe({"look": True}, READ_TIMEOUT)

    def close(self) -> None:
        """Close the connection; the daemon goes on."""
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    # ---- inside --------------------------------------------------------------------------------------------------

    def _describe(self, request: dict[str, Any], patience: float | None) -> dict[str, Any]:
        described: dict[str, Any] = self._act("schema", request, patience=patience)
        self.schema = pa.ipc.read_schema(pa.py_buffer(bytes.fromhex(described["schema"])))
        self.key = tuple(described["key"])
        self.upsert: str = described["upsert"]
        return described

    def _options(self, timeout: float | None) -> flight.FlightCallOptions:
        return flight.FlightCallOptions(timeout=timeout, headers=self._headers)

    def _open_put(self, request: dict[str, Any], schema: pa.Schema, timeout: float | None = None) -> tuple[Any, Any]:
        descriptor = flight.FlightDescriptor.for_command(pack(request))
        writer, answers = self._client.do_put(descriptor, schema, self._options(timeout))
        return writer, answers

    def _write(self, rows: pa.Table, delete: bool, durable: bool, token: TokenLike, timeout: float | None) -> Receipt:
        parsed = Token.parse(token)
        request = {
            "op": "write",
            "delete": delete,
            "durable": durable,
            "token": None if parsed is None else f"{parsed.producer}:{parsed.sequence}",
            "timeout": timeout,
        }
        patience = WRITE_TIMEOUT if timeout is None else timeout + ANSWER_TIMEOUT
        writer, answers = self._open_put(request, rows.schema, patience)
        try:
            writer.write_table(rows, max_chunksize=BATCH_ROWS)
        except (flight.FlightError, pa.ArrowException) as error:
            raise from_flight(error, self.endpoint) from None
        return Receipt(**_finish(writer, answers, rows.num_rows, self.endpoint))

    @_through_flight
    def _answer(self, read: str, level: str, /, **request: Any) -> Any:
        request["level"] = level
        if read == "count":
            return self._act("count", request)
        rows = None
        if read == "get":
            rows = normalise_keys(request.pop("keys"), self.schema, self.key)
        elif read == "search":
            rows = pa.table({"vector": _numbers(request.pop("vector"))})
        ticket = flight.Ticket(pack({"op": read, **request}, rows))
        return self._client.do_get(ticket, self._options(READ_TIMEOUT)).read_all()

    @_through_flight
    def _act(self, name: str, request: dict[str, Any] | None = None, patience: float | None = READ_TIMEOUT) -> Any:
        action = flight.Action(name, pack(request or {}))
        results = list(self._client.do_action(action, self._options(patience)))
        return json.loads(results[0].body.to_pybytes())


class RegionStream:
    """One region's rows of one micro-batch on their way; applied whole by `finish`, not at all otherwise.

    Thread safety. One thread.
    """

    def __init__(self, table: RemoteTable, region: str, schema: pa.Schema, put: tuple[Any, Any]) -> None:
        """Use `RemoteTable.open_stream`."""
        self._table, self._region, self.schema = table, region, schema
        self._writer, self._answers = put
        self.rows = 0

    def write(self, batch: pa.RecordBatch) -> None:
        """Send rows of the stream's columns, in the order of the schema and with types that cast without loss."""
        try:
            self._writer.write_batch(batch if batch.schema == self.schema else batch.cast(self.schema))
        except (flight.FlightError, pa.ArrowException) as error:
            raise from_flight(error, self._table.endpoint) from None
        self.rows += batch.num_rows

    def finish(self) -> StreamReceipt:
        """Close the stream and wait for the region's answer. Raises: the region's error, UnknownOutcome."""
        clock = self._table.clock
        started = clock.monotonic()
        answer = _finish(self._writer, self._answers, self.rows, self._table.endpoint)
        return StreamReceipt(
            self._region, answer["rows"], answer["applied"], answer["position"], clock.monotonic() - started
        )

    def abort(self) -> None:
        """Drop the stream; the region applies nothing of it."""
        try:
            self._writer.close()
        except (flight.FlightError, pa.ArrowException, OSError):
            return  # the region's complaint about an unclosed stream, or a lost connection: both mean "not applied"


def _finish(writer: Any, answers: Any, rows: int, endpoint: str) -> dict[str, Any]:
    """Send the closing message, wait for the answer.

    A connection lost after the closing message leaves the outcome unknown: the same token settles it.
    """
    try:
        writer.write_metadata(closing(rows))
        writer.done_writing()
        answer = answers.read()
        writer.close()
    except (flight.FlightError, pa.ArrowException, OSError) as error:
        found = from_flight(error, endpoint)
        refused = isinstance(found, Invalid) or bool(getattr(error, "extra_info", b""))
        raise found if refused else _unanswered(endpoint) from None
    if answer is None:
        raise _unanswered(endpoint)
    acked: dict[str, Any] = json.loads(answer.to_pybytes())
    return acked


def _unanswered(endpoint: str) -> UnknownOutcome:
    return UnknownOutcome(
        f"the daemon at {endpoint} was lost before it answered: the rows may be applied; retry with the same token"
    )


def _numbers(vector: Any) -> pa.Array:
    try:
        return pa.array(np.asarray(vector, dtype=np.float32))
    except (ValueError, TypeError, pa.ArrowException) as error:
        raise Invalid(f"search: the vector is no list of numbers: {str(error).splitlines()[0]}") from None
