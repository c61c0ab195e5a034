"""A call to a daemon: one DoExchange, which another thread can end while the caller waits for the answer.

1. The command is the request; for a write, the rows and their closing message follow.
2. The daemon answers with rows, or with one message whose metadata is JSON. If requested, the explanation of a read
   follows as the metadata of one more message.
3. If the caller leaves, its `Caller` cancels the call. The waiting thread gets an error at once. The daemon checks
   for the cancellation before it starts the work and while it waits to start.

pyarrow cannot cancel the other kinds of call: DoGet and DoAction return to Python only when the answer begins, and
the result of DoPut has no `cancel`.

A scan is a stream of rows (`streamed`):

1. The client opens the call and waits for the first batch within the timeout of the read. Until then it may retry.
2. The daemon produces a batch when gRPC has room for it, about 4 MB ahead of the client.
3. A client that closes or drops its result cancels the call, and the daemon stops the read. A requested explanation
   follows the last row.
4. A stream is complete only if the daemon has ended it. If the daemon is lost, or sends nothing for the whole timeout
   while the client waits for a batch, the client gets Unavailable.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.flight as flight

from memwal.ingest import protocol
from memwal.ingest.caller import ending, given_up
from memwal.ingest.engine.api.results import RowStream
from memwal.ingest.errors import LOST, Unavailable
from memwal.ingest.service.rpc.wire import from_flight, pack
from memwal.ingest.threads import Worker, start

T = TypeVar("T")
Told = Callable[[Mapping[str, Any]], object]
"""Receives the explanation of a read."""


def command_of(op: str, request: Mapping[str, Any], rows: pa.Table | None = None) -> bytes:
    """Return an encoded request for the operation `op`, which states the protocol of this process."""
    name = "act" if op in protocol.ASK_WHO else "op"
    return pack({**request, name: op, "protocol": str(protocol.OURS)}, rows)


def exchanged(client: Any, command: bytes, options: flight.FlightCallOptions, take: Callable[[Any, Any], T]) -> T:
    """Open a call and return the result of `take(writer, reader)`. Raises: Flight's errors."""
    writer, reader = client.do_exchange(flight.FlightDescriptor.for_command(command), options)
    try:
        with ending(reader.cancel):
            return take(writer, reader)
    finally:
        with suppress(flight.FlightError, pa.ArrowException, OSError):  # otherwise pyarrow writes a warning to stderr
            writer.close()


def rows_of(reader: Any, told: Told | None = None) -> pa.Table:
    """Return the rows of an answer. `told`: receives the explanation, if requested. Raises: Flight's errors.

    `reader.read_all` is not used: when either side cancels the call, it also interrupts the main thread of the
    program, which then ends with KeyboardInterrupt (pyarrow 26).
    """
    batches = list[pa.RecordBatch]()
    for chunk in reader:
        if chunk.data is not None:
            batches.append(chunk.data)
        elif told is not None:
            told(json.loads(chunk.app_metadata.to_pybytes()))
    return pa.Table.from_batches(batches, reader.schema)


def message_of(reader: Any, told: Told | None = None) -> Any:
    """Return the message of an answer. `told`: receives the explanation, if requested. Raises: Flight's errors."""
    messages = [json.loads(chunk.app_metadata.to_pybytes()) for chunk in reader]
    if not messages:
        raise flight.FlightCancelledError("the call ended without an answer")
    if told is not None:
        told(messages[1])
    return messages[0]


class OpenRead:
    """An open stream of rows.

    Thread safety. One thread reads; `cancel` from any thread.
    """

    def __init__(self, client: Any, command: bytes, options: flight.FlightCallOptions) -> None:
        """Start the call. Raises: Flight's errors, as does every method."""
        self._writer, self._reader = client.do_exchange(flight.FlightDescriptor.for_command(command), options)

    @property
    def schema(self) -> pa.Schema:
        """Schema of the rows, once the daemon has answered."""
        return self._reader.schema

    def read_chunk(self) -> Any:
        """Return the next batch and its metadata. Raises also: StopIteration after the last."""
        return self._reader.read_chunk()

    def cancel(self) -> None:
        """End the call; a read that waits for the daemon raises an error."""
        self._reader.cancel()

    def __del__(self) -> None:
        if hasattr(self, "_writer"):
            self._reader.cancel()
            with suppress(flight.FlightError, pa.ArrowException, OSError):  # see `exchanged`
                self._writer.close()


def streamed(endpoint: str, call: Callable[[], Any], timeout: float | None, told: Told | None = None) -> RowStream:
    """Return the rows of `call`, which opens a Flight stream without a deadline.

    A deadline would include the time between two reads of the caller. `timeout`: seconds for the first batch and
    for each further one. `told`: receives the explanation that follows the last row.
    Raises: Flight's errors; Unavailable (reason "lost") after the timeout.
    """
    incoming = _Incoming(endpoint, timeout, told)
    return RowStream(incoming.opened(call), incoming.batches(), incoming.cancel)


class _Incoming:
    """One Flight stream.

    Thread safety. One thread reads; `cancel` from any thread.
    """

    def __init__(self, endpoint: str, timeout: float | None, told: Told | None) -> None:
        self._endpoint, self._timeout, self._told = endpoint, timeout, told
        self._reader: Any = None
        self._opened = threading.Event()
        self._first: pa.RecordBatch | None = None
        self._ended, self._stalled, self._cancelled = threading.Event(), False, False
        self._awaited, self._waits = 0, False

    def opened(self, call: Callable[[], Any]) -> pa.Schema:
        """Start the call, read the first batch, and return the schema."""
        if self._timeout is None:
            self._open(call)
        else:
            job = start("scan", partial(self._open, call))
            job.add_done_callback(lambda _: self._opened.set())
            with ending(self.cancel):
                opened = self._opened.wait(self._timeout)
            if self._cancelled:
                raise given_up()
            if not opened:
                self.cancel()
                raise self._silent()
            try:
                job.result()
            finally:
                del job  # its error refers to this frame
        return self._reader.schema

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows; end the call when the iterator ends."""
        try:
            batch, self._first = self._first, None
            if batch is None:
                return
            yield batch
            if self._timeout is not None:
                Worker("scan-watch", self._watch)
            while (batch := self._next()) is not None:
                yield batch
        finally:
            self.cancel()

    def cancel(self) -> None:
        """End the call; a read that waits for the daemon raises an error."""
        self._cancelled = True
        self._opened.set()
        self._ended.set()
        if self._reader is not None:
            self._reader.cancel()

    # ---- inside --------------------------------------------------------------------------------------------------

    def _open(self, call: Callable[[], Any]) -> None:
        self._reader = call()
        self._first = self._read()
        if self._cancelled:  # the caller has left
            self._reader.cancel()

    def _next(self) -> pa.RecordBatch | None:
        self._awaited, self._waits = self._awaited + 1, True
        try:
            return self._read()
        except (flight.FlightError, pa.ArrowException, OSError) as error:
            if self._stalled:
                raise self._silent() from None
            translated = from_flight(error, self._endpoint)
            if translated.details.get("reason") != LOST:
                raise translated from None
            text = f"the daemon at {self._endpoint} was lost while its rows were read; read again"
            raise Unavailable(text, _LOST) from None
        finally:
            self._waits = False

    def _read(self) -> pa.RecordBatch | None:
        """Return the next batch; None after the last."""
        try:
            chunk = self._reader.read_chunk()
        except StopIteration:
            return None
        if self._told is not None and chunk.data is None:
            self._told(json.loads(chunk.app_metadata.to_pybytes()))
        batch: pa.RecordBatch | None = chunk.data
        return batch

    def _silent(self) -> Unavailable:
        text = f"the daemon at {self._endpoint} has sent no rows for {self._timeout:.1f} s; read again"
        return Unavailable(text, _LOST)

    def _watch(self) -> None:
        """Cancel the call if the daemon sends no batch for the whole timeout."""
        seen = 0
        while not self._ended.wait(self._timeout):
            if self._waits and seen == self._awaited:
                self._stalled = True
                self.cancel()
            seen = self._awaited


_LOST = {"reason": LOST}
