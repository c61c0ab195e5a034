"""The rows of a scan as a daemon sends them.

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
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight

from memwal.ingest.caller import given_up, present
from memwal.ingest.engine.api.results import RowStream
from memwal.ingest.errors import LOST, MemWalError, Unavailable
from memwal.ingest.service.rpc.exchange import Told
from memwal.ingest.service.rpc.wire import from_flight
from memwal.ingest.threads import Worker


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
            failed, caller = list[BaseException](), present()

            def work() -> None:
                try:
                    self._open(call)
                except BaseException as error:  # noqa: BLE001 - raised in the waiting thread
                    failed.append(error)
                self._opened.set()

            Worker("scan", work)
            with nullcontext() if caller is None else caller.ending(self.cancel):
                opened = self._opened.wait(self._timeout)
            if self._cancelled:
                raise given_up()
            if not opened:
                self.cancel()
                raise self._silent()
            if failed:
                raise failed.pop()
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
            raise self._silent() if self._stalled else self._cut_short(error) from None
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

    def _cut_short(self, error: Exception) -> MemWalError:
        translated = from_flight(error, self._endpoint)
        if translated.details.get("reason") != LOST:
            return translated
        return Unavailable(f"the daemon at {self._endpoint} was lost while its rows were read; read again", _LOST)

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
