"""A caller who may stop waiting for a call, as seen by the code that executes the call or waits for it.

Only some calls have a caller: those of an asynchronous table, whose tasks may be cancelled, and in a daemon the calls
that the table sent. The caller is a context variable of the executing thread. Threads started for the call inherit it
(`carried`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar, copy_context
from functools import partial
from typing import TypeVar

from memwal.ingest import tracing
from memwal.ingest.errors import LATE, MEMORY, Invalid, Unavailable

T = TypeVar("T")

LOOK_EVERY = 0.05
"""Seconds between two checks whether the caller has left, where no event wakes a wait."""


class Allowance:
    """The time that a daemon may work for one read, and the bytes of rows that it may gather for it.

    For a stream, the time of each batch counts separately, without the time until the caller takes the next one.
    Thread safety. Any thread; if two threads add bytes at once, only one addition may be counted.
    """

    def __init__(self, monotonic: Callable[[], float], seconds: float, size: int) -> None:
        """Set the limits. `monotonic`: the clock. `seconds`, `size` in bytes: 0 for no limit."""
        self._monotonic, self._seconds, self._size = monotonic, seconds, size
        self._worked, self._began, self._held = 0.0, float("inf"), 0

    @contextmanager
    def working(self) -> Iterator[None]:
        """Return a context whose time counts. Contexts are not nested."""
        self._began = self._monotonic()
        try:
            yield
        finally:
            self._worked, self._began = self._worked + self._monotonic() - self._began, float("inf")

    def anew(self) -> None:
        """Restart the count of time: the caller has received a batch of a stream, which may take long in total."""
        self._worked = 0.0

    def expect_time(self) -> None:
        """Check the time limit. Raises: Invalid if it is exceeded."""
        if self._seconds and self._worked + max(0.0, self._monotonic() - self._began) > self._seconds:
            raise Invalid(
                f"the read took more than daemon.query_timeout = {self._seconds:g} s; ask for less: a filter on an "
                "indexed column, fewer rows, or raise the setting",
                {"reason": LATE},
            )

    def hold(self, size: int) -> None:
        """Count bytes of rows. Raises: Invalid above the limit."""
        self.expect_room(size)
        self._held += size

    def expect_room(self, size: int) -> None:
        """Check that `size` more bytes of rows fit. Raises: Invalid if they exceed the limit."""
        if self._size and self._held + size > self._size:
            raise Invalid(
                f"the read needs more than daemon.query_memory = {self._size} bytes; ask for fewer rows or columns, a "
                "smaller k or refine_factor, use a scan without an order, which streams, or raise the setting",
                {"reason": MEMORY},
            )


class Caller:
    """Waits for one call until it has an answer, or until it leaves.

    Thread safety. Any thread.
    Invariants. Once `left`, always left; each end callback is called at most once.
    """

    def __init__(self, gone: Callable[[], bool] | None = None, allowance: Allowance | None = None) -> None:
        """Create a caller.

        `gone`: returns whether the caller has left without `leave`, by a lost connection. `allowance`: limits of its
        calls.
        """
        self._gone, self._left = gone, False
        self.allowance = allowance
        self._changing = threading.Lock()
        self._ends: dict[int, Callable[[], object]] = {}

    @property
    def left(self) -> bool:
        """Whether the caller has stopped waiting for the answer."""
        return self._left or (self._gone is not None and self._gone())

    def leave(self) -> None:
        """Stop waiting. Calls the callbacks given to `ending`, which do not block."""
        with self._changing:
            self._left, ends, self._ends = True, list(self._ends.values()), {}
        for end in ends:
            end()

    @contextmanager
    def ending(self, end: Callable[[], object]) -> Iterator[None]:
        """Within the context, let `leave` call `end`; call it at once if the caller has left before. `end` must not
        block."""
        with self._changing:
            left, self._ends[id(end)] = self._left, end
        try:
            if left:
                end()
            yield
        finally:
            with self._changing:
                self._ends.pop(id(end), None)

    def anew(self) -> None:
        """Restart the count of time of its calls."""
        if self.allowance is not None:
            self.allowance.anew()

    def run(self, call: Callable[[], T]) -> T:
        """Return the result of `call`, executed by this thread for this caller."""
        before = _PRESENT.set(self)
        try:
            with nullcontext() if self.allowance is None else self.allowance.working():
                expect_waiting()
                return call()
        finally:
            _PRESENT.reset(before)


_PRESENT: ContextVar[Caller | None] = ContextVar("memwal_caller", default=None)


def present() -> Caller | None:
    """Return the caller of this thread's work; None if it cannot leave."""
    return _PRESENT.get()


def left() -> bool:
    """Return whether the caller of this thread's work has left."""
    caller = _PRESENT.get()
    return caller is not None and caller.left


def ending(end: Callable[[], object]) -> AbstractContextManager[None]:
    """Return a context that calls `end` if the caller of this thread's work leaves; see `Caller.ending`."""
    caller = _PRESENT.get()
    return nullcontext() if caller is None else caller.ending(end)


def expect_waiting() -> None:
    """Check that the caller of this thread still waits.

    Raises: Unavailable if it has left, so that no further work begins; Invalid if the call has exceeded its time.
    """
    caller = _PRESENT.get()
    if caller is None:
        return
    if caller.left:
        raise given_up()
    if caller.allowance is not None:
        caller.allowance.expect_time()


def hold(size: int) -> None:
    """Count bytes of rows that this thread's call has gathered. Raises: Invalid above the limit."""
    if (allowance := _allowance()) is not None:
        allowance.hold(size)


def expect_room(size: int) -> None:
    """Check that this thread's call may gather `size` more bytes of rows. Raises: Invalid above the limit."""
    if (allowance := _allowance()) is not None:
        allowance.expect_room(size)


def _allowance() -> Allowance | None:
    caller = _PRESENT.get()
    return None if caller is None else caller.allowance


def given_up() -> Unavailable:
    """Return the error of a call whose caller has left. Only logs, and calls that `close` ended, show it."""
    return Unavailable("the call was given up before it had an answer: its task was cancelled, or the table closed")


def carried(call: Callable[[], T]) -> Callable[[], T]:
    """Return `call` for another thread, which then works for the caller of this thread and within its trace."""
    return call if _PRESENT.get() is None and not tracing.on else partial(copy_context().run, call)
