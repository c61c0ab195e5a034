"""A call to a daemon: one DoExchange, which another thread can end while the caller waits for the answer.

1. The command is the request; for a write, the rows and their closing message follow.
2. The daemon answers with rows, or with one message whose metadata is JSON. If requested, the explanation of a read
   follows as the metadata of one more message.
3. If the caller leaves, its `Caller` cancels the call. The waiting thread gets an error at once. The daemon checks
   for the cancellation before it starts the work and while it waits to start.

pyarrow cannot cancel the other kinds of call: DoGet and DoAction return to Python only when the answer begins, and
the result of DoPut has no `cancel`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.flight as flight

from memwal.ingest import protocol
from memwal.ingest.caller import present
from memwal.ingest.service.rpc.wire import pack

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
    caller = present()
    try:
        with nullcontext() if caller is None else caller.ending(reader.cancel):
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
