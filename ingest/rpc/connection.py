"""One Flight connection to one daemon: calls, streams, errors. Which one to ask is `ingest.client.router`'s affair."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight

from memwal.ingest.api.tokens import Token
from memwal.ingest.errors import Invalid, UnknownOutcome
from memwal.ingest.rpc.credentials import bearer
from memwal.ingest.rpc.wire import StreamSum, from_flight, pack
from memwal.wal.errors import first_line

P = ParamSpec("P")
R = TypeVar("R")

ASK_WHO = ("schema", "regions")
"""Actions whose answers say which table the daemon serves."""
BATCH_ROWS = 16_384
"""Rows per Flight message: large enough to amortise the call, small enough to stay below gRPC's buffers."""

_CHANNEL = [
    # Channels to one address share their state otherwise, and a daemon that was restarted at its address would be left
    # alone for up to two minutes by every client that had met it dead.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]


def _through_flight(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Turn Flight's errors into ours."""

    @wraps(method)
    def translated(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(self, *args, **kwargs)
        except (flight.FlightError, pa.ArrowException, OSError) as error:
            raise from_flight(error, self.endpoint) from None

    return translated


class Connection:
    """The calls of one daemon, as `ingest.daemon.service` describes them; every `timeout` is in seconds, None: for
    ever.

    Thread safety. Every method from any thread. Errors. Only `ingest.errors` kinds; of a lost connection Unavailable
    with the details {"reason": "lost"}, or UnknownOutcome where rows may have been applied.
    """

    def __init__(self, endpoint: str, *, token: str | None = None, tls_ca: bytes | None = None) -> None:
        """Nothing is connected before the first call.

        Raises: Invalid for an address that is none, and where the token would cross a network in clear.
        """
        self.endpoint = endpoint
        self.table: str | None = None
        """Id of the one that is meant by all calls but those that ask which is there; None: whichever is there."""
        self._headers = bearer(endpoint, token)
        try:
            self._client = flight.FlightClient(endpoint, tls_root_certs=tls_ca, generic_options=_CHANNEL)
        except (pa.ArrowException, ValueError, TypeError) as error:
            raise Invalid(f"{endpoint!r} is no daemon's address ({error}); write grpc://host:port") from None

    @_through_flight
    def act(self, name: str, request: Mapping[str, Any] | None = None, timeout: float | None = None) -> Any:
        """The answer to an action."""
        meant = {} if name in ASK_WHO else self._meant()
        action = flight.Action(name, pack({**(request or {}), **meant}))
        results = list(self._client.do_action(action, self._options(timeout)))
        return json.loads(results[0].body.to_pybytes())

    @_through_flight
    def read(
        self, read: str, request: Mapping[str, Any], rows: pa.Table | None = None, timeout: float | None = None
    ) -> Any:
        """The answer to a read; `rows`: the keys of a get, the vector of a search."""
        if read in ("count", "applied"):
            return self.act(read, request, timeout)
        ticket = flight.Ticket(pack({"op": read, **self._meant(), **request}, rows))
        return self._client.do_get(ticket, self._options(timeout)).read_all()

    @_through_flight
    def write(self, rows: pa.Table, request: Mapping[str, Any], timeout: float | None = None) -> dict[str, Any]:
        """Send rows or keys of any number of regions of this daemon; what it answers."""
        put = self._open_put({"op": "write", **request}, rows.schema, timeout)
        put.write(rows)
        return put.finish()

    @_through_flight
    def open_put(
        self,
        region: str,
        token: Token,
        schema: pa.Schema,
        timeout: float | None = None,
        routing: int = 1,
        rows: int | None = None,
    ) -> OpenPut:
        """Start the stream of one region and micro-batch; nothing is applied before it is finished.

        `routing`: version of the routing by which `region` was found. `rows`: how many will come, None if unknown.
        """
        request: dict[str, Any] = {"op": "put", "region": region, "routing": routing}
        request |= {"producer": token.producer, "sequence": token.sequence, "rows": rows}
        return self._open_put(request, schema, timeout)

    def close(self) -> None:
        """Close the connection; the daemon goes on."""
        self._client.close()

    def _meant(self) -> dict[str, str]:
        return {} if self.table is None else {"table": self.table}

    def _options(self, timeout: float | None) -> flight.FlightCallOptions:
        return flight.FlightCallOptions(timeout=timeout, headers=self._headers)

    def _open_put(self, request: Mapping[str, Any], schema: pa.Schema, timeout: float | None) -> OpenPut:
        descriptor = flight.FlightDescriptor.for_command(pack({**request, **self._meant()}))
        return OpenPut(self.endpoint, *self._client.do_put(descriptor, schema, self._options(timeout)))


class OpenPut:
    """Rows on their way to a daemon; applied by `finish`, not at all otherwise.

    Thread safety. One thread.
    """

    def __init__(self, endpoint: str, writer: Any, answers: Any) -> None:
        self.endpoint = endpoint
        self._writer, self._answers = writer, answers
        self._sum = StreamSum()

    @_through_flight
    def write(self, rows: pa.Table | pa.RecordBatch) -> None:
        """Send rows with the columns of the stream. Raises: what the daemon said, or that it was lost: not applied."""
        for batch in rows.to_batches(BATCH_ROWS) if isinstance(rows, pa.Table) else [rows]:
            if batch.num_rows:
                self._writer.write_batch(batch)
                self._sum.add(batch)

    def finish(self) -> dict[str, Any]:
        """Send the closing message, wait for the answer.

        A connection lost after the closing message leaves the outcome unknown: the same token settles it.
        """
        try:
            self._writer.write_metadata(self._sum.closing())
            self._writer.done_writing()
            answer = self._answers.read()
            self._writer.close()
        except (flight.FlightError, pa.ArrowException, OSError) as error:
            found = from_flight(error, self.endpoint)
            refused = isinstance(found, Invalid) or bool(getattr(error, "extra_info", b""))
            raise found if refused else _unanswered(self.endpoint) from None
        if answer is None:
            raise _unanswered(self.endpoint)
        acked: dict[str, Any] = json.loads(answer.to_pybytes())
        return acked

    def abort(self) -> None:
        """Drop the stream; nothing of it is applied."""
        try:
            self._writer.close()
        except (flight.FlightError, pa.ArrowException, OSError):
            return  # the region's complaint about an unclosed stream, or a lost connection: both mean "not applied"


def _unanswered(endpoint: str) -> UnknownOutcome:
    return UnknownOutcome(
        f"the daemon at {endpoint} was lost before it answered: the rows may be applied; retry with the same token"
    )


def as_vector(vector: Any) -> pa.Table:
    """The vector of a search as it travels. Raises: Invalid."""
    try:
        return pa.table({"vector": pa.array(np.asarray(vector, dtype=np.float32))})
    except (ValueError, TypeError, pa.ArrowException) as error:
        raise Invalid(f"search: the vector is no list of numbers: {first_line(error)}") from None
