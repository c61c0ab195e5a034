"""A Flight connection to one daemon: calls, streams and errors. `client.router` chooses the daemon."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight

from memwal.ingest import protocol, tracing
from memwal.ingest.caller import given_up, left
from memwal.ingest.engine.api.reads import READS
from memwal.ingest.engine.api.tokens import Token
from memwal.ingest.errors import Invalid, UnknownOutcome
from memwal.ingest.protocol import refusal_of_daemon
from memwal.ingest.service.rpc.credentials import bearer
from memwal.ingest.service.rpc.exchange import OpenRead, Told, command_of, exchanged, message_of, rows_of, streamed
from memwal.ingest.service.rpc.tls import NO_TLS, ClientTls
from memwal.ingest.service.rpc.trace_headers import sent_headers
from memwal.ingest.service.rpc.wire import ALIGNED, StreamSum, from_flight
from memwal.wal.errors import first_line

P = ParamSpec("P")
R = TypeVar("R")

_OF_REGIONS = ("applied", "record")
"""Operations on some of the daemon's regions."""
BATCH_ROWS = 16_384
"""Rows per Flight message: enough to amortise the call, few enough to fit gRPC's buffers."""
BATCH_BYTES = 16 << 20
"""Maximum bytes of a message; larger batches are split into messages of at least one row. A daemon limits message
sizes."""

_CHANNEL = [
    # Without this option, channels to one address share their state. After a daemon has failed, a client then waits
    # up to two minutes before it tries the restarted daemon.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]


def _translate_flight_errors(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Decorate a method of a connection so that Flight's errors become `ingest.errors` kinds."""

    @wraps(method)
    def translated(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(self, *args, **kwargs)
        except (flight.FlightError, pa.ArrowException, OSError) as error:
            if left():
                raise given_up() from None
            raise self.tls.translated(error, self.endpoint) from None

    return translated


class Connection:
    """Calls one daemon; `daemon.service` describes the calls. `timeout` is in seconds; None: no limit.

    Thread safety. Every method from any thread.
    Errors. Only `ingest.errors` kinds. For a lost connection: Unavailable with the details {"reason": "lost"}, or
    UnknownOutcome if rows may have been applied.
    """

    def __init__(
        self, endpoint: str, *, token: str | None = None, tls: ClientTls = NO_TLS, name: str | None = None
    ) -> None:
        """Prepare the connection; the first call connects. `name`: of the table, if the daemon serves a fleet.

        Raises: Invalid for a malformed address, and if the token would cross a network unencrypted.
        """
        self.endpoint, self._name = endpoint, name
        self.table: str | None = None
        """Id of the table that calls name, except the operations `ASK_WHO`. A daemon that serves another table rejects
        the call. None: calls name no table."""
        self.tls, self._headers = tls, bearer(endpoint, token)
        try:
            self._client = flight.FlightClient(endpoint, generic_options=_CHANNEL, **tls.flight_options())
        except (pa.ArrowException, ValueError, TypeError) as error:
            raise Invalid(f"{endpoint!r} is not the address of a daemon ({error}); write grpc://host:port") from None

    @_translate_flight_errors
    def act(self, name: str, request: Mapping[str, Any] | None = None, timeout: float | None = None) -> Any:
        """Return the answer to an operation that is one message. Raises also: Invalid if the daemon speaks another
        protocol."""
        answer = self._asked(name, request or {}, None, timeout, message_of)
        if name in protocol.ASK_WHO and (refusal := refusal_of_daemon(answer, self.endpoint)) is not None:
            raise refusal
        return answer

    @_translate_flight_errors
    def read(
        self,
        read: str,
        request: Mapping[str, Any],
        rows: pa.Table | None = None,
        timeout: float | None = None,
        told: Told | None = None,
    ) -> Any:
        """Return the answer to one of `READS`, or to an operation on some regions.

        `rows`: the rows that the read sends (`sends` in `READS`). `timeout`: for a read that streams, the limit for
        the first batch and for each further one. `told`: receives the daemon's explanation; of a stream, after its
        last row.
        """
        if told is not None:
            request = {**request, "explain": True}
        if read in _OF_REGIONS or READS[read].counts:
            return self._asked(read, request, rows, timeout, partial(message_of, told=told))
        if not READS[read].streams:
            return self._asked(read, request, rows, timeout, partial(rows_of, told=told))
        command, options = self._command(read, request, rows), self._options(None)
        return streamed(self.endpoint, lambda: OpenRead(self._client, command, options), timeout, told)

    @_translate_flight_errors
    def changes(self, request: Mapping[str, Any], timeout: float | None = None) -> pa.Table:
        """Return the next changes of the table, in the form of `api.changes.packed`."""
        return self._asked("changes", request, None, timeout, rows_of)

    @_translate_flight_errors
    def write(self, rows: pa.Table, request: Mapping[str, Any], timeout: float | None = None) -> dict[str, Any]:
        """Send rows or keys of any of this daemon's regions and return its answer. `request` includes "op"."""

        def write(writer: Any, reader: Any) -> dict[str, Any]:
            put = OpenPut(self.endpoint, writer, reader, rows.schema, self.tls)
            put.write(rows)
            return put.finish()

        return exchanged(self._client, self._command(request["op"], request), self._options(timeout), write)

    @_translate_flight_errors
    def open_put(
        self,
        region: str,
        token: Token,
        schema: pa.Schema,
        timeout: float | None = None,
        routing: int = 1,
        rows: int | None = None,
        kept: Mapping[str, Any] | None = None,
    ) -> OpenPut:
        """Open the stream of one region and micro-batch. Nothing is applied before `OpenPut.finish`.

        `routing`: version of the routing that computed `region`. `rows`: number of rows that follow; None: unknown.
        `kept`: see `kept_columns`.
        """
        request: dict[str, Any] = {"region": region, "routing": routing, **(kept or {})}
        request |= {"producer": token.producer, "sequence": token.sequence, "rows": rows}
        descriptor = flight.FlightDescriptor.for_command(self._command("put", request))
        writer, reader = self._client.do_exchange(descriptor, self._options(timeout))
        return OpenPut(self.endpoint, writer, reader, schema, self.tls)

    def close(self) -> None:
        """Close the connection; the daemon keeps running."""
        self._client.close()

    def _asked(
        self,
        op: str,
        request: Mapping[str, Any],
        rows: pa.Table | None,
        timeout: float | None,
        answer: Callable[[Any], R],
    ) -> R:
        """Make a call that sends no stream of rows, and return the result of `answer`, which reads the answer."""

        def take(writer: Any, reader: Any) -> R:
            writer.done_writing()
            return answer(reader)

        return exchanged(self._client, self._command(op, request, rows), self._options(timeout), take)

    def _command(self, op: str, request: Mapping[str, Any], rows: pa.Table | None = None) -> bytes:
        """Return an encoded request, which names the table."""
        named: dict[str, Any] = {} if self.table is None or op in protocol.ASK_WHO else {"table": self.table}
        if self._name is not None:
            named["table_name"] = self._name
            if op in protocol.ASK_WHO:  # an older daemon would describe its only table instead
                named["needs"] = ["table_name"]
        return command_of(op, {**request, **named}, rows)

    def _options(self, timeout: float | None) -> flight.FlightCallOptions:
        sent = [*self._headers, *sent_headers()] if tracing.on else self._headers
        return flight.FlightCallOptions(timeout=timeout, headers=sent, read_options=ALIGNED)


class OpenPut:
    """An open stream of rows to a daemon. `finish` applies the rows; without it, none is applied.

    Thread safety. One thread.
    """

    def __init__(self, endpoint: str, writer: Any, reader: Any, schema: pa.Schema, tls: ClientTls) -> None:
        """Begin to send rows with `schema` over an open call. Raises: Flight's errors."""
        self.endpoint, self.tls = endpoint, tls
        self._writer, self._reader = writer, reader
        self._sum = StreamSum()
        writer.begin(schema)

    @_translate_flight_errors
    def write(self, rows: pa.Table | pa.RecordBatch) -> None:
        """Send rows with the stream's columns, in messages of at most BATCH_ROWS rows and about BATCH_BYTES.

        Raises: the daemon's error, or Unavailable; in both cases nothing is applied.
        """
        for batch in rows.to_batches(BATCH_ROWS) if isinstance(rows, pa.Table) else [rows]:
            most = max(1, batch.num_rows * BATCH_BYTES // max(1, batch.nbytes))
            for at in range(0, batch.num_rows, most):
                message = batch if most >= batch.num_rows else batch.slice(at, most)
                self._writer.write_batch(message)
                self._sum.add(message)

    def finish(self) -> dict[str, Any]:
        """Send the closing message and wait for the answer.

        If the connection is lost after the closing message, the outcome is unknown. A retry with the same token
        applies the rows once.
        """
        try:
            self._writer.write_metadata(self._sum.closing())
            self._writer.done_writing()
            answer: dict[str, Any] = message_of(self._reader)
            self._writer.close()
        except (flight.FlightError, pa.ArrowException, OSError) as error:
            translated = from_flight(error, self.endpoint)
            refused = isinstance(translated, Invalid) or bool(getattr(error, "extra_info", b""))
            raise translated if refused else _no_answer(self.endpoint) from None
        return answer

    def abort(self) -> None:
        """Drop the stream; nothing is applied."""
        try:
            self._writer.close()
        except (flight.FlightError, pa.ArrowException, OSError):
            return  # the daemon reports an unclosed stream, or the connection is lost: nothing was applied


def kept_columns(keeps: bool, nulls: Sequence[str]) -> dict[str, Any]:
    """Return the fields of a put for table columns that its rows lack: those in `nulls` become null, the others keep
    their values.

    `keeps`: whether there are others. A daemon that does not know the field would set them to null, so `needs` makes
    it reject the call.
    """
    return {"nulls": list(nulls), **({"needs": ["nulls"]} if keeps else {})}


def _no_answer(endpoint: str) -> UnknownOutcome:
    return UnknownOutcome(
        f"the daemon at {endpoint} was lost before it answered; the rows may be applied: retry with the same token"
    )


def as_vector(vector: Any) -> pa.Table:
    """Return the vector of a search as a table to send. Raises: Invalid."""
    try:
        return pa.table({"vector": pa.array(np.asarray(vector, dtype=np.float32))})
    except (ValueError, TypeError, pa.ArrowException) as error:
        raise Invalid(f"search: the vector is not a list of numbers: {first_line(error):.200}") from None
