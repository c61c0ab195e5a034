"""Queue requests between the callers of a region and its one thread.

Callers submit `Write`s and wait. The region's thread takes all writes that have gathered since its last call. This is
adaptive group commit: an idle thread takes one write and appends it at once; a busy thread finds many waiting writes
and appends them as one entry. No caller waits for a timer.

Callers that were answered together submit their next writes in close succession, because each needs the interpreter
lock for a moment. A thread that took only the first of them would append two entries instead of one. It therefore
yields as long as more writes arrive and fewer are queued than the last time. Callers can also fall into two halves, of
which one is served while the other prepares its writes, and then write two entries instead of one. Every `PROBE`th
time the thread therefore yields for up to twice as many writes, which joins the halves.

Where storage charges for each request, `PacedQueue` limits how often a region writes entries. With
`wal.entry_interval`, durable writes wait in the queue until the interval since the last ones were taken has
passed, and then share one entry. The first write after a pause is taken at once. Waiting writes are taken early when
they fill an entry, when an item that does not wait arrives after them (a non-durable write, a piece of a delete by
filter, a freeze, a durable read), or when the queue is closed. A write whose caller waits for less than the interval is
withdrawn by its caller.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from memwal.flush.base.shape import Shape
from memwal.ingest.engine.api.filter_writes import Where
from memwal.ingest.engine.api.rows import Deletes, size_bound
from memwal.ingest.engine.api.tokens import Ack, Token
from memwal.ingest.engine.region.context import RegionContext
from memwal.wal import Clock

T = TypeVar("T")

PROBE = 16
"""Number of takes after which one waits for up to twice as many writes as the last one took."""


class Pending(Generic[T]):
    """An answer (a value or an error) that one thread sets once and others wait for.

    `concurrent.futures.Future` creates a condition, a lock and two lists per instance, and waiting costs as much again;
    this class uses one lock as a latch. The difference is measurable with thousands of callers.
    Thread safety. `set_result` or `set_exception` once, by the answering thread; the rest from any thread.
    """

    __slots__ = ("_answered", "_error", "_latch", "_value")

    def __init__(self) -> None:
        self._latch = threading.Lock()
        self._latch.acquire()
        self._answered = False
        self._value: T | None = None
        self._error: BaseException | None = None

    def set_result(self, value: T) -> None:
        """Answer with a value, and wake the waiters."""
        self._value = value
        self._answered = True
        self._latch.release()

    def set_exception(self, error: BaseException) -> None:
        """Answer with an error, and wake the waiters."""
        self._error = error
        self._answered = True
        self._latch.release()

    def done(self) -> bool:
        """Return whether the answer is set."""
        return self._answered

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the error, None for a value. Raises: TimeoutError after `timeout` seconds without an answer."""
        if not self._answered:
            if not self._latch.acquire(
                timeout=-1 if timeout is None else max(0.0, min(timeout, threading.TIMEOUT_MAX))
            ):
                raise TimeoutError(f"no answer within {timeout} s")
            self._latch.release()  # for the next waiter
        return self._error

    def result(self, timeout: float | None = None) -> T:
        """Return the value. Raises: the error set instead; TimeoutError without an answer in `timeout` seconds."""
        error = self.exception(timeout)
        if error is not None:
            raise error
        return self._value  # type: ignore[return-value]  # the answer is set and is not an error


@dataclass(slots=True, eq=False)
class Write:
    """Rows on their way into one region.

    `rows`: in the columns of the row schema without `_tombstone`; a put that keeps stored values has fewer, but at
    least the key. They may share memory with the waiting caller: the region copies them before its ack.
    `deletes`: which rows delete their key: all, none, or a bool for each, in order. Such rows have no other values.
    `shape`: the shape of the rows; None if the columns of the table never change.
    `since`: monotonic seconds at which its caller submitted it.
    `repeated`: rows removed because the region has applied them under this token before.
    `where`: a condition, only if `deletes` is True. The write deletes those of its keys whose newest row passes when
    the region's thread reaches the write. The write does not record its token: it is one piece of a larger delete,
    which ends with a write without rows that records it.
    `trace`: the caller's span, None without a recorded span.
    `copied`: whether the region has its own copy and no longer reads the caller's memory.
    """

    rows: pa.Table
    durable: bool = True
    token: Token | None = None
    deletes: Deletes = False
    done: Pending[Ack] = field(default_factory=Pending)
    copied: bool = False
    since: float = 0.0
    shape: Shape | None = None
    repeated: int = 0
    where: Where | None = None
    trace: object | None = None
    _fate: threading.Lock = field(default_factory=threading.Lock)

    @property
    def deleted(self) -> int:
        """The number of rows that delete their key."""
        if isinstance(self.deletes, bool):
            return self.rows.num_rows if self.deletes else 0
        return int(np.count_nonzero(self.deletes))

    def keep(self, rows: npt.NDArray[np.bool_]) -> None:
        """Reduce the write to `rows` (bool, one for each row); the others were applied before."""
        self.repeated += int(np.count_nonzero(~rows))
        self.rows = self.rows.filter(pa.array(rows))
        if not isinstance(self.deletes, bool):
            self.deletes = self.deletes[rows]

    def again(self) -> Write:
        """Return the same write, neither submitted nor answered."""
        return replace(self, done=Pending(), copied=False, _fate=threading.Lock())

    @property
    def withdrawn(self) -> bool:
        """Whether its caller has withdrawn it. Requires: the write is in a queue."""
        return self._fate.locked()

    def take(self) -> bool:
        """Return True on the first call only. The region calls it to write the rows, the caller to withdraw them."""
        return self._fate.acquire(blocking=False)


@dataclass(slots=True)
class Request(Generic[T]):
    """A call that the region's thread makes after everything queued before it, such as a freeze. `done`: its result."""

    call: Callable[[], T]
    done: Pending[T] = field(default_factory=Pending)


Item = Write | Request[Any]
"""Work for a region's thread."""


class WriteQueue:
    """A first-in, first-out queue with many callers and one taker.

    Thread safety. `submit`, `break_off`, `close` and `oldest` from any thread, the rest from the region's thread only.
    Invariants. (1) A write is taken once or failed once. (2) After `break_off(error)` every later submit raises it.
    (3) After a submit or a close, `wake` is called, so that the taker comes. `seen` withdraws the calls for items that
    are taken: the taker would come at once, and find the first of the next items alone.
    """

    def __init__(self, clock: Clock, wake: Callable[[], None], seen: Callable[[], None] = lambda: None) -> None:
        self._clock, self._wake, self._seen = clock, wake, seen
        self._lock = threading.Lock()
        self._writes: deque[Item] = deque()
        self._broken: BaseException | None = None
        self._closed = False
        self._takes = self._taken_last = 0
        self._served: list[Item] = []

    def submit(self, item: Item) -> None:
        """Queue an item. Raises: the error that broke the region."""
        with self._lock:
            self._append(item)
        self._wake()

    def take(self) -> list[Item] | None:
        """Return all queued items that are due; None once closed and empty."""
        self._takes += 1
        seen, expected = 0, self._taken_last * (2 if self._takes % PROBE == 0 else 1)
        while seen < len(self._writes) < expected:  # more items arrive: yield to their threads
            seen = len(self._writes)
            self._clock.sleep(0.0)
        with self._lock:
            taken = list(self._writes)
            self._writes.clear()
            self._taken_last, self._served = len(taken), taken
            closed = self._closed
            if not closed:
                self._seen()
        if closed and taken:
            self._wake()  # the wake-up for the close may have been this one; the next call returns None
        return None if closed and not taken else taken

    def served(self) -> None:
        """Record that the taken items are answered."""
        self._served = []

    def due(self) -> float | None:
        """Return the seconds until the items that `take` has left may be taken; None without such items."""
        return None

    def oldest(self) -> float | None:
        """Return the submission time (monotonic s) of the oldest write that waits or is being served, or None."""
        with self._lock:
            return min((item.since for item in (*self._served, *self._writes) if isinstance(item, Write)), default=None)

    def _append(self, item: Item) -> None:
        if self._broken is not None:
            raise self._broken
        self._writes.append(item)

    def break_off(self, error: BaseException) -> None:
        """Fail every queued write with `error`, and every later one."""
        with self._lock:
            self._broken = self._broken or error
            orphans = list(self._writes)
            self._writes.clear()
            self._served = []
        for write in orphans:
            write.done.set_exception(error)

    def close(self, error: BaseException) -> None:
        """Reject later submits with `error`; queued items are still taken."""
        with self._lock:
            self._closed, self._broken = True, self._broken or error
        self._wake()


class PacedQueue(WriteQueue):
    """Release durable writes once per `interval` seconds. Thread safety and invariants. As `WriteQueue`."""

    def __init__(
        self,
        clock: Clock,
        wake: Callable[[], None],
        interval: float,
        size_max: int,
        seen: Callable[[], None] = lambda: None,
    ) -> None:
        """`size_max`: bytes of queued rows that end the interval early."""
        super().__init__(clock, wake, seen)
        self._interval, self._size_max = interval, size_max
        self._not_before = clock.monotonic()
        self._bytes = 0
        self._hurry = False
        """Whether the queue has an item that does not wait."""

    def _append(self, item: Item) -> None:
        super()._append(item)
        self._bytes += size_bound(item.rows) if isinstance(item, Write) else 0
        self._hurry = self._hurry or not _waits(item) or self._bytes >= self._size_max

    def take(self) -> list[Item] | None:
        """As `WriteQueue.take`; durable writes are due after the interval."""
        if self.due():
            return []
        with self._lock:
            self._bytes, self._hurry = 0, False
            if any(_waits(item) and not item.withdrawn for item in self._writes if isinstance(item, Write)):
                self._not_before = self._clock.monotonic() + self._interval
        return super().take()

    def due(self) -> float | None:
        """As `WriteQueue.due`; 0 if they may be taken now."""
        with self._lock:
            if not self._writes:
                return None
            at_once = self._hurry or self._closed
            return 0.0 if at_once else max(0.0, self._not_before - self._clock.monotonic())


def _waits(item: Item) -> bool:
    """Return whether an item waits for the interval; the consecutive pieces of a delete by filter do not."""
    return isinstance(item, Write) and item.durable and item.where is None


def queue_of(context: RegionContext, wake: Callable[[], None], seen: Callable[[], None]) -> WriteQueue:
    """Return the queue of a region. `wake`, `seen`: see `WriteQueue`."""
    limits = context.limits
    if not limits.entry_interval:
        return WriteQueue(context.clock, wake, seen)
    return PacedQueue(context.clock, wake, limits.entry_interval, limits.entry_size_max, seen)
