"""A Flight connection to one daemon: calls, streams and errors. `client.router` chooses the daemon."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight

from memwal.ingest import protocol, tracing
from memwal.ingest.caller import given_up, present
from memwal.ingest.engine.api.reads import READS
from memwal.ingest.engine.api.tokens import Token
from memwal.ingest.errors import Invalid, UnknownOutcome
from memwal.ingest.protocol import refusal_of_daemon
from memwal.ingest.service.rpc.credentials import bearer
from memwal.ingest.service.rpc.exchange import Answers, OpenRead, exchanged, message_of, read_all, rows_of
from memwal.ingest.service.rpc.row_stream import Told, streamed
from memwal.ingest.service.rpc.tls import NO_TLS, ClientTls
from memwal.ingest.service.rpc.trace_headers import sent_headers
from memwal.ingest.service.rpc.wire import ALIGNED, EXPLANATION, StreamSum, explained, from_flight, pack
from memwal.wal.errors import first_line

P = ParamSpec("P")
R = TypeVar("R")

ASK_WHO = ("schema", "regions")
"""Actions that identify the daemon's table, so their requests do not name one."""
_OF_REGIONS = ("applied", "record")
"""Actions on some of the daemon's regions."""
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
            caller = present()
            if caller is not None and caller.left:
                raise given_up() from None
            raise self.tls.translated(error, self.endpoint) from None

    return translated


class Connection:
    """Calls one daemon; `daemon.service` describes the calls. `timeout` is in seconds; None: no limit.

    Thread safety. Every method from any thread.
    Errors. Only `ingest.errors` kinds. For a lost connection: Unavailable with the details {"reason": "lost"}, or
    UnknownOutcome if rows may have been applied.
    """

    def __init__(self, endpoint: str, *, token: str | None = None, tls: ClientTls = NO_TLS) -> None:
        """Prepare the connection; the first call connects.

        Raises: Invalid for a malformed address, and if the token would cross a network unencrypted.
        """
        self.endpoint = endpoint
        self.table: str | None = None
        """Id of the table that calls name, except the actions `ASK_WHO`. A daemon that serves another table rejects
        the call. None: calls name no table."""
        self._states = True
        """Whether calls state the protocol version. False for a daemon whose answers state no version, which is older
        than the versions."""
        self.tls, self._headers = tls, bearer(endpoint, token)
        try:
            self._client = flight.FlightClient(endpoint, generic_options=_CHANNEL, **tls.flight_options())
        except (pa.ArrowException, ValueError, TypeError) as error:
            raise Invalid(f"{endpoint!r} is not the address of a daemon ({error}); write grpc://host:port") from None

    @_translate_flight_errors
    def act(self, name: str, request: Mapping[str, Any] | None = None, timeout: float | None = None) -> Any:
        """Run an action and return its answer. Raises also: Invalid if the daemon speaks another protocol."""
        said = {"protocol": str(protocol.OURS)} if name in ASK_WHO else self._said()
        asked, caller = {**(request or {}), **said}, present()
        if caller is not None:
            command = pack({"act": name, **asked})
            return self._met(name, exchanged(self._client, command, self._options(timeout), caller, message_of))
        action = flight.Action(name, pack(asked))
        results = list(self._client.do_action(action, self._options(timeout)))
        return self._met(name, results[0].body.to_pybytes())

    @_translate_flight_errors
    def read(
        self,
        read: str,
        request: Mapping[str, Any],
        rows: pa.Table | None = None,
        timeout: float | None = None,
        told: Told | None = None,
    ) -> Any:
        """Run one of `READS`, or an action on some regions, and return its answer.

        `rows`: the rows that the read sends (`sends` in `READS`). `timeout`: for a read that streams, the limit for
        the first batch and for each further one. `told`: receives the daemon's explanation; of a stream, after its
        last row.
        """
        name = read if told is None else explained(read)
        if read in _OF_REGIONS or READS[read].counts:
            counted = self.act(name, request, timeout)
            return counted if told is None else _told_apart(counted, told)
        request = {"op": name, **request}
        if READS[read].streams:
            command, options = pack({**self._said(), **request}, rows), self._options(None)
            if present() is not None:
                return streamed(self.endpoint, lambda: OpenRead(self._client, command, options), timeout, told)
            ticket = flight.Ticket(command)
            return streamed(self.endpoint, lambda: self._client.do_get(ticket, options), timeout, told)
        answer = self._rows(request, rows, timeout)
        return answer if told is None else _told_of(answer, told)

    @_translate_flight_errors
    def changes(self, request: Mapping[str, Any], timeout: float | None = None) -> pa.Table:
        """Return the next changes of the table, in the form of `api.changes.packed`."""
        return self._rows({"op": "changes", **request}, None, timeout)

    @_translate_flight_errors
    def write(self, rows: pa.Table, request: Mapping[str, Any], timeout: float | None = None) -> dict[str, Any]:
        """Send rows or keys of any of this daemon's regions and return its answer. `request` includes "op"."""
        caller = present()
        if caller is None:
            return _written(rows, self._open_put(request, rows.schema, timeout))

        def write(writer: Any, reader: Any) -> dict[str, Any]:
            writer.begin(rows.schema)
            return _written(rows, OpenPut(self.endpoint, writer, Answers(reader), self.tls))

        command = pack({**request, **self._said()})
        return exchanged(self._client, command, self._options(timeout), caller, write)

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
        request: dict[str, Any] = {"op": "put", "region": region, "routing": routing}
        request |= {"producer": token.producer, "sequence": token.sequence, "rows": rows, **(kept or {})}
        return self._open_put(request, schema, timeout)

    def close(self) -> None:
        """Close the connection; the daemon keeps running."""
        self._client.close()

    def _met(self, name: str, answer: bytes) -> Any:
        """Return the answer to an action; remember whether it states a protocol version."""
        told = json.loads(answer)
        if name in ASK_WHO:
            self._states = "protocol" in told
            if (refusal := refusal_of_daemon(told, self.endpoint)) is not None:
                raise refusal
        return told

    def _said(self) -> dict[str, str]:
        """Return the fields that every call carries: the table and the protocol version."""
        stated = {"protocol": str(protocol.OURS)} if self._states else {}
        return stated if self.table is None else {**stated, "table": self.table}

    def _rows(self, request: Mapping[str, Any], rows: pa.Table | None, timeout: float | None) -> pa.Table:
        command, caller = pack({**request, **self._said()}, rows), present()
        if caller is not None:
            return exchanged(self._client, command, self._options(timeout), caller, rows_of)
        return read_all(self._client.do_get(flight.Ticket(command), self._options(timeout)))

    def _options(self, timeout: float | None) -> flight.FlightCallOptions:
        sent = [*self._headers, *sent_headers()] if tracing.on else self._headers
        return flight.FlightCallOptions(timeout=timeout, headers=sent, read_options=ALIGNED)

    def _open_put(self, request: Mapping[str, Any], schema: pa.Schema, timeout: float | None) -> OpenPut:
        descriptor = flight.FlightDescriptor.for_command(pack({**request, **self._said()}))
        writer, answers = self._client.do_put(descriptor, schema, self._options(timeout))
        return OpenPut(self.endpoint, writer, answers, self.tls)


class OpenPut:
    """An open stream of rows to a daemon. `finish` applies the rows; without it, none is applied.

    Thread safety. One thread.
    """

    def __init__(self, endpoint: str, writer: Any, answers: Any, tls: ClientTls = NO_TLS) -> None:
        self.endpoint, self.tls = endpoint, tls
        self._writer, self._answers = writer, answers
        self._sum = StreamSum()

    @_translate_flight_errors
    def write(self, rows: pa.Table | pa.RecordBatch) -> None:
        """Send rows with the stream's columns. Raises: the daemon's error, or Unavailable; in both cases nothing is
        applied."""
        for batch in _messages(rows):
            self._writer.write_batch(batch)
            self._sum.add(batch)

    def finish(self) -> dict[str, Any]:
        """Send the closing message and wait for the answer.

        If the connection is lost after the closing message, the outcome is unknown. A retry with the same token
        applies the rows once.
        """
        try:
            self._writer.write_metadata(self._sum.closing())
            self._writer.done_writing()
            answer = self._answers.read()
            self._writer.close()
        except (flight.FlightError, pa.ArrowException, OSError) as error:
            translated = from_flight(error, self.endpoint)
            refused = isinstance(translated, Invalid) or bool(getattr(error, "extra_info", b""))
            raise translated if refused else _no_answer(self.endpoint) from None
        if answer is None:
            raise _no_answer(self.endpoint)
        acked: dict[str, Any] = json.loads(answer.to_pybytes())
        return acked

    def abort(self) -> None:
        """Drop the stream; nothing is applied."""
        try:
            self._writer.close()
        except (flight.FlightError, pa.ArrowException, OSError):
            return  # the daemon reports an unclosed stream, or the connection is lost: nothing was applied


def _messages(rows: pa.Table | pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Yield rows as messages of at most BATCH_ROWS rows and about BATCH_BYTES."""
    for batch in rows.to_batches(BATCH_ROWS) if isinstance(rows, pa.Table) else [rows]:
        most = max(1, batch.num_rows * BATCH_BYTES // max(1, batch.nbytes))
        for at in range(0, batch.num_rows, most):
            yield batch if most >= batch.num_rows else batch.slice(at, most)


def _written(rows: pa.Table, put: OpenPut) -> dict[str, Any]:
    put.write(rows)
    return put.finish()


def _told_apart(counted: Mapping[str, Any], told: Told) -> Any:
    told(counted["explanation"])
    return counted["count"]


def _told_of(answer: pa.Table, told: Told) -> pa.Table:
    metadata = dict(answer.schema.metadata or {})
    told(json.loads(metadata.pop(EXPLANATION)))
    return answer.replace_schema_metadata(metadata or None)


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
