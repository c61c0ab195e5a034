"""The queue between the callers of a region and its one thread.

Callers submit `Write`s and wait; the region's thread takes everything that has gathered since it last looked. This is
adaptive group commit: an idle thread takes one write and appends it at once, a busy one finds many waiting and appends
them as one entry. No caller waits for a timer.

Callers that were answered together submit their next writes together, but one after another: each needs the interpreter
for a moment. If the thread took the first few of them, it would append two entries instead of one. So it yields to the
others as long as more arrive and fewer are queued than the last time.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from memwal.flush.base.shape import Shape
from memwal.ingest.api.deletes import Where
from memwal.ingest.api.rows import Deletes
from memwal.ingest.api.tokens import RegionCounts, Token
from memwal.ingest.read.levels import RegionView
from memwal.ingest.region.context import RegionContext
from memwal.wal import Clock

T = TypeVar("T")


class Pending(Generic[T]):
    """An answer, a value or an error, that one thread gives once and others wait for.

    Why not `concurrent.futures.Future`: it makes a condition, a lock and two lists for each, and waiting costs as much
    again; this is one lock used as a latch. With thousands of callers it counts.
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
        """Return whether it was answered."""
        return self._answered

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the error, None if the answer is a value. Raises: TimeoutError without answer in `timeout` seconds."""
        if not self._answered:
            if not self._latch.acquire(
                timeout=-1 if timeout is None else max(0.0, min(timeout, threading.TIMEOUT_MAX))
            ):
                raise TimeoutError(f"no answer within {timeout} s")
            self._latch.release()  # for the next waiter
        return self._error

    def result(self, timeout: float | None = None) -> T:
        """Return the value. Raises: the error given in its place; TimeoutError without answer in `timeout` seconds."""
        error = self.exception(timeout)
        if error is not None:
            raise error
        return self._value  # type: ignore[return-value]  # answered, and not with an error


@dataclass(frozen=True, slots=True)
class Ack:
    """A region's answer to a write of `rows` rows. `applied`: this call applied them (False: its token was applied
    before). `position`: the WAL position that made them durable (0: not durable yet). `skipped`: rows left out, because
    upsert = "insert" keeps the stored row of their key, or the stored row has a higher version. `newest`: if the token
    was applied before, the highest sequence of its producer that was applied. `repeated`: rows that this call did not
    apply, because the token was applied before."""

    rows: int
    applied: bool
    position: int
    skipped: int = 0
    newest: int | None = None
    repeated: int = 0

    @property
    def counts(self) -> RegionCounts:
        """The numbers of rows applied, repeated and skipped."""
        return RegionCounts(self.rows - self.repeated - self.skipped, self.repeated, self.skipped)


@dataclass(slots=True, eq=False)
class Write:
    """Rows on their way into one region.

    `rows`: in the columns of the row schema without `_tombstone`; of a put that keeps stored values fewer, the key's at
    least. They may share memory with the waiting caller: the region copies them before its ack.
    `deletes`: which rows delete their key: all, none, or a bool for each, in order. Such rows have no other values.
    `shape`: the shape of the rows; None if the columns of the table never change.
    `since`: monotonic seconds at which its caller submitted it.
    `repeated`: rows cut off, because the region has applied them under this token before.
    `where`: a condition, only if `deletes` is True. Of the keys those are deleted whose newest row passes when the
    region's thread comes to the write. Such a write does not record its token: it is one piece of a larger delete, at
    whose end a write of no rows does.
    `trace`: where the caller's span is, None if it has none or it is not recorded.
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
        """Cut the write down to `rows` (bool, one for each row); the others were applied before."""
        self.repeated += int(np.count_nonzero(~rows))
        self.rows = self.rows.filter(pa.array(rows))
        if not isinstance(self.deletes, bool):
            self.deletes = self.deletes[rows]

    def again(self) -> Write:
        """Return the same write, not submitted and not answered yet."""
        return replace(self, done=Pending(), copied=False, _fate=threading.Lock())

    @property
    def withdrawn(self) -> bool:
        """Whether its caller has withdrawn it. Requires: it is in a queue."""
        return self._fate.locked()

    def take(self) -> bool:
        """Return True on the first call only: of the region, to write the rows, or of the caller, to withdraw them."""
        return self._fate.acquire(blocking=False)


@dataclass(slots=True)
class Freeze:
    """A request to freeze the memtable after everything that was queued before it.

    `done`: the generation that is active then; everything queued before is in an older one.
    """

    done: Pending[int] = field(default_factory=Pending)


@dataclass(slots=True)
class DurableView:
    """A request to append lingering rows and to capture the levels at that moment."""

    done: Pending[RegionView] = field(default_factory=Pending)


@dataclass(slots=True)
class Reshape:
    """A request to take rows of another shape from the next queued item on.

    `done`: the newest generation that waits to be flushed in an older shape, 0 if none does.
    """

    context: RegionContext
    done: Pending[int] = field(default_factory=Pending)


Item = Write | Freeze | DurableView | Reshape
"""A request to a region's thread."""


class WriteQueue:
    """A first-in, first-out queue with many callers and one taker.

    Thread safety. `submit`, `break_off` and `close` from any thread, `take` from the region's thread only.
    Invariants. (1) A write is taken once or failed once. (2) After `break_off(error)` every later submit raises it.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        # Why not a Condition: it makes a lock for every wait, and a put waits here; this is one lock used as a latch.
        self._wake = threading.Lock()
        self._wake.acquire()
        self._taker_waits = False
        self._writes: deque[Item] = deque()
        self._broken: BaseException | None = None
        self._closed = self._nudged = False
        self._taken_last = 0
        self._served: list[Item] = []

    def submit(self, item: Item) -> None:
        """Queue an item. Raises: the error that broke the region."""
        with self._lock:
            self._append(item)
        self._wake_taker()

    def nudge(self) -> None:
        """Have `take` return without waiting, this time or the next."""
        with self._lock:
            self._nudged = True
        self._wake_taker()

    def take(self, timeout: float | None) -> list[Item] | None:
        """Return all queued items, waiting up to `timeout` seconds for the first; None once closed and empty.

        Items of the call before count as served. After a `nudge` it does not wait.
        """
        self._served = []
        self._wait(timeout)
        self._let_gather()
        with self._lock:
            taken = list(self._writes)
            self._writes.clear()
            self._taken_last, self._served, self._nudged = len(taken), taken, False
            return None if self._closed and not taken else taken

    def oldest(self) -> float | None:
        """Return when the oldest write that waits or is being served was submitted, in monotonic seconds; None
        without such a write. From any thread."""
        with self._lock:
            return min((item.since for item in (*self._served, *self._writes) if isinstance(item, Write)), default=None)

    def _append(self, item: Item) -> None:
        if self._broken is not None:
            raise self._broken
        self._writes.append(item)

    def _wait(self, timeout: float | None, beyond: int = 0) -> None:
        """Return when more than `beyond` items are queued, on a close or a nudge, at the latest after `timeout` s."""
        with self._lock:
            if len(self._writes) > beyond or self._closed or self._nudged:
                return
            self._taker_waits = True
        if self._wake.acquire(timeout=-1 if timeout is None else timeout):
            return
        with self._lock:
            woken = not self._taker_waits
            self._taker_waits = False
        if woken:  # just after the timeout
            self._wake.acquire()

    def _wake_taker(self) -> None:
        with self._lock:
            waits, self._taker_waits = self._taker_waits, False
        if waits:
            self._wake.release()

    def _let_gather(self) -> None:
        """Let other threads run while more items arrive, until there are as many as the last time."""
        seen = 0
        while seen < len(self._writes) < self._taken_last:
            seen = len(self._writes)
            self._clock.sleep(0.0)

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
        """Refuse later submits with `error`; queued items are still taken."""
        with self._lock:
            self._closed, self._broken = True, self._broken or error
        self._wake_taker()
