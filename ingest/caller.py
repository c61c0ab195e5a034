"""A caller who may stop waiting for a call, as everything that works or waits for it sees it.

Only some calls have one: those of an asynchronous table, whose tasks may be cancelled, and in a daemon those that such
a table sent. It is a context variable of the thread that works; threads started for the call take it along (`carried`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar, copy_context
from functools import partial
from typing import TypeVar

from memwal.ingest import tracing
from memwal.ingest.errors import LATE, MEMORY, Invalid, Unavailable

T = TypeVar("T")

LOOK_EVERY = 0.05
"""Seconds between two looks whether the caller has left, where nothing wakes a wait."""


class Allowance:
    """The time that a daemon may work for one read, and the bytes of rows that it may gather for it.

    Of a stream, the time of each batch counts by itself, and not the time until the caller takes the next one.
    Thread safety. Any thread; what two threads hold
    at once may count once.
    """

    def __init__(self, monotonic: Callable[[], float], seconds: float, size: int) -> None:
        """`monotonic`: the clock. `seconds`, `size` in bytes: 0 for no limit."""
        self._monotonic, self._seconds, self._size = monotonic, seconds, size
        self._worked, self._began, self._held = 0.0, float("inf"), 0

    @contextmanager
    def working(self) -> Iterator[None]:
        """A context whose time counts. It is not nested."""
        self._began = self._monotonic()
        try:
            yield
        finally:
            self._worked, self._began = self._worked + self._monotonic() - self._began, float("inf")

    def anew(self) -> None:
        """Begin to count the time anew: the caller has got a batch of a stream, which may go on for long."""
        self._worked = 0.0

    def expect_time(self) -> None:
        """Raises: Invalid if the time is over."""
        if self._seconds and self._worked + max(0.0, self._monotonic() - self._began) > self._seconds:
            raise Invalid(
                f"the read took more than daemon.query_timeout = {self._seconds:g} s; ask for less: a filter on an "
                "indexed column, fewer rows, or raise the setting",
                {"reason": LATE},
            )

    def hold(self, size: int) -> None:
        """Count bytes of rows. Raises: Invalid if they are too many."""
        self.expect_room(size)
        self._held += size

    def expect_room(self, size: int) -> None:
        """Raises: Invalid if `size` more bytes of rows exceed the limit."""
        if self._size and self._held + size > self._size:
            raise Invalid(
                f"the read needs more than daemon.query_memory = {self._size} bytes; ask for fewer rows or columns, a "
                "smaller k or refine_factor, use a scan without an order, which streams, or raise the setting",
                {"reason": MEMORY},
            )


class Caller:
    """Waits for one call until it has an answer, or until it leaves.

    Thread safety. Any thread. Invariants. Once `left`, always left; each end is called at most once.
    """

    def __init__(self, gone: Callable[[], bool] | None = None, allowance: Allowance | None = None) -> None:
        """`gone`: tells that the caller has left without calling `leave`: a lost connection. `allowance`: what the
        calls that it runs may take.
        """
        self._gone, self._left = gone, False
        self.allowance = allowance
        self._changing = threading.Lock()
        self._ends: dict[int, Callable[[], object]] = {}

    @property
    def left(self) -> bool:
        """Whether nobody waits for the answer any more."""
        return self._left or (self._gone is not None and self._gone())

    def leave(self) -> None:
        """Stop waiting. Calls what `ending` was given; none of it blocks."""
        with self._changing:
            self._left, ends, self._ends = True, list(self._ends.values()), {}
        for end in ends:
            end()

    @contextmanager
    def ending(self, end: Callable[[], object]) -> Iterator[None]:
        """Within the context, have `leave` call `end`, at once if the caller has left before. `end` must not block."""
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
        """Begin to count the time of what it runs anew."""
        if self.allowance is not None:
            self.allowance.anew()

    def run(self, call: Callable[[], T]) -> T:
        """Return what `call` does, made for this caller by this thread."""
        before = _PRESENT.set(self)
        try:
            with nullcontext() if self.allowance is None else self.allowance.working():
                expect_waiting()
                return call()
        finally:
            _PRESENT.reset(before)


_PRESENT: ContextVar[Caller | None] = ContextVar("memwal_caller", default=None)


def present() -> Caller | None:
    """Return for whom this thread works; None if that one waits in any case."""
    return _PRESENT.get()


def expect_waiting() -> None:
    """Raises: Unavailable if the caller of this thread's call has left: what has not begun is not done. Invalid if the
    call has taken too long.
    """
    caller = _PRESENT.get()
    if caller is not None and caller.left:
        raise given_up()
    if caller is not None and caller.allowance is not None:
        caller.allowance.expect_time()


def hold(size: int) -> None:
    """Count bytes of rows that this thread's call has gathered. Raises: Invalid if they are more than it may."""
    caller = _PRESENT.get()
    if caller is not None and caller.allowance is not None:
        caller.allowance.hold(size)


def expect_room(size: int) -> None:
    """Raises: Invalid if this thread's call may not gather `size` more bytes of rows."""
    caller = _PRESENT.get()
    if caller is not None and caller.allowance is not None:
        caller.allowance.expect_room(size)


def given_up() -> Unavailable:
    """Return the error of a call whose caller has left; only logs, and calls that `close` ended, show it."""
    return Unavailable("the call was given up before it had an answer: its task was cancelled, or the table closed")


def carried(call: Callable[[], T]) -> Callable[[], T]:
    """Return `call` for another thread, which then works for the caller of this one, and within its trace."""
    return call if _PRESENT.get() is None and not tracing.on else partial(copy_context().run, call)
