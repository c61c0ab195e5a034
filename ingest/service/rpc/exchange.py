"""A cancellable call: one DoExchange that another thread can end while the caller waits for the answer.

1. The command is the request of a DoGet, a DoPut, or a DoAction with the action's name as its "act".
2. For a write, the rows and their closing message follow.
3. The daemon answers with the rows of a read, or with one message whose metadata is JSON.
4. If the caller leaves, its `Caller` cancels the call. The waiting thread gets an error at once. The daemon checks
   for the cancellation before it starts the work and while it waits to start.

pyarrow cannot cancel the other kinds of call: DoGet and DoAction return to Python only when the answer begins, and
the result of DoPut has no `cancel`. Callers that never cancel use those: a DoExchange takes about 0.1 ms more.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.flight as flight

from memwal.ingest.caller import Caller

T = TypeVar("T")


def exchanged(
    client: Any, command: bytes, options: flight.FlightCallOptions, caller: Caller, take: Callable[[Any, Any], T]
) -> T:
    """Open a call and return the result of `take(writer, reader)`. Raises: Flight's errors."""
    writer, reader = client.do_exchange(flight.FlightDescriptor.for_command(command), options)
    try:
        with caller.ending(reader.cancel):
            return take(writer, reader)
    finally:
        with suppress(flight.FlightError, pa.ArrowException, OSError):  # otherwise pyarrow writes a warning to stderr
            writer.close()


def rows_of(writer: Any, reader: Any) -> pa.Table:
    """Return the rows of the daemon's answer."""
    writer.done_writing()
    return read_all(reader)


def message_of(writer: Any, reader: Any) -> bytes:
    """Return the message of the daemon's answer, as JSON."""
    writer.done_writing()
    message: bytes = reader.read_chunk().app_metadata.to_pybytes()
    return message


def read_all(reader: Any) -> pa.Table:
    """Return the rows of a stream. Raises: Flight's errors.

    `reader.read_all` is not used: when either side cancels the call, it also interrupts the main thread of the
    program, which then ends with KeyboardInterrupt (pyarrow 26).
    """
    batches = list[pa.RecordBatch]()
    while (batch := next_batch(reader)) is not None:
        batches.append(batch)
    return pa.Table.from_batches(batches, reader.schema)


def next_batch(reader: Any) -> pa.RecordBatch | None:
    """Return the next batch of a stream; None after the last. Raises: Flight's errors."""
    try:
        batch: pa.RecordBatch = reader.read_chunk().data
    except StopIteration:
        return None
    return batch


class OpenRead:
    """An open stream of rows. Unlike a DoGet, it can be cancelled before the daemon answers.

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


class Answers:
    """Reads the daemon's answer to a write through the interface of a DoPut's answer."""

    def __init__(self, reader: Any) -> None:
        self._reader = reader

    def read(self) -> pa.Buffer | None:
        """Return the metadata of the next message; None after the last."""
        try:
            return self._reader.read_chunk().app_metadata
        except StopIteration:
            return None
