"""Limits for callers of a daemon: concurrent calls, bytes of requests and of puts, time and memory of reads.

Arrow Flight for Python cannot set gRPC's own limits: a message is in memory before a handler sees it. A daemon
rejects as early as it can; one that other machines can reach should have a memory limit (`configs/deploy`) as well.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pyarrow as pa

from memwal.ingest.caller import Allowance, Caller
from memwal.ingest.errors import BUSY, SIZE, Internal, Invalid, MemWalError, Unavailable, classify
from memwal.ingest.service.rpc.guard import Why
from memwal.ingest.settings.sections import DaemonSettings
from memwal.ingest.settings.values import format_size
from memwal.memtable.converted_size import ConvertedSize
from memwal.wal.errors import first_line
from memwal.wal.panics import as_exception

RETRY_AFTER = 0.1
"""Seconds after which a caller that was rejected for too many calls may retry."""
_BY_REASON: dict[str, Why] = {"role": "role", "size": "size", "late": "time", "memory": "memory"}


class Calls:
    """Limits the number of concurrent calls.

    Thread safety. Any thread.
    """

    def __init__(self, most: int) -> None:
        self._most, self._lock = most, threading.Lock()
        self.under_way = 0
        """The number of calls in progress."""

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Return the context of a call. Raises: Unavailable (busy) at the limit."""
        with self._lock:
            if self.under_way >= self._most:
                raise Unavailable(
                    f"this daemon answers daemon.calls_max = {self._most} calls already; ask again later",
                    {"reason": BUSY, "calls_max": self._most, "retry_after": RETRY_AFTER},
                )
            self.under_way += 1
        try:
            yield
        finally:
            with self._lock:
                self.under_way -= 1


@dataclass(frozen=True, slots=True)
class Limits:
    """Checks callers against the limits that [daemon] sets. For reads, 0 means no limit."""

    daemon: DaemonSettings

    def reader(self, gone: Callable[[], bool], monotonic: Callable[[], float]) -> Caller:
        """Return the caller of a read. `gone`: whether it has left."""
        return Caller(gone, Allowance(monotonic, self.daemon.query_timeout, self.daemon.query_memory))

    def take_message(self, size: int) -> None:
        """Check the bytes of a message. Raises: Invalid above the limit."""
        self._expect("a message", size, "message_max", "send smaller batches, or fewer keys")

    def take_keys(self, rows: pa.Table, table: pa.Schema) -> None:
        """Check the bytes of a request's rows, converted to the types of `table`. Raises: Invalid above the limit of
        a message."""
        size = ConvertedSize(rows.schema, table, whole=False)
        self.take_message(sum(size.of(batch) for batch in rows.to_batches()))

    def counted(self, table: pa.Schema) -> Callable[[pa.RecordBatch], None]:
        """Return a function that checks the batches of one put into a table with these columns.

        It raises Invalid for a batch with too many bytes, and for a put with too many: the bytes of its rows so far
        in the columns of the table, with nulls in columns that the batches lack. Nothing is applied then.
        """
        sizes, total = list[ConvertedSize](), 0

        def count(batch: pa.RecordBatch) -> None:
            nonlocal total
            if not sizes:
                sizes.append(ConvertedSize(batch.schema, table, whole=True))
            self.take_message(batch.nbytes)
            total += sizes[0].of(batch)
            todo = "nothing was applied: put fewer rows at a time, or smaller micro-batches"
            self._expect("a put", total, "put_max", todo)

        return count

    def _expect(self, what: str, size: int, setting: str, todo: str) -> None:
        if size > (most := getattr(self.daemon, setting)):
            text = f"{what} has {size} bytes, more than daemon.{setting} = {format_size(most)}"
            raise Invalid(f"{text}; {todo}, or raise the setting", {"reason": SIZE, "size": size, "most": most})


def why_refused(error: MemWalError) -> Why | None:
    """Return the reason of a rejection for the counters; None for any other error."""
    reason = str(error.details.get("reason", ""))
    if reason == BUSY and "calls_max" in error.details:
        return "busy"
    return _BY_REASON.get(reason, "invalid") if isinstance(error, Invalid) else None


_MALFORMED = (LookupError, TypeError, ValueError, AttributeError, OverflowError)


def classified(error: BaseException) -> MemWalError:
    """Return the error of a call by its kind.

    A request that lacks a field, or has one of another type, fails in the service; the table's methods raise no such
    errors.
    """
    found = classify(as_exception(error))
    if isinstance(found, Internal) and isinstance(error, _MALFORMED):
        return Invalid(f"not a request of memwal: {type(error).__name__}: {first_line(error)}")
    return found
