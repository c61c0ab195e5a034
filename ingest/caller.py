"""A caller who may stop waiting for a call, as everything that works or waits for it sees it.

Only some calls have one: those of an asynchronous table, whose tasks may be cancelled, and in a daemon those that such
a table sent. It is a context variable of the thread that works; threads started for the call take it along (`carried`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from functools import partial
from typing import TypeVar

from memwal.ingest import tracing
from memwal.ingest.errors import Unavailable

T = TypeVar("T")

LOOK_EVERY = 0.05
"""Seconds between two looks whether the caller has left, where nothing wakes a wait."""


class Caller:
    """Waits for one call until it has an answer, or until it leaves.

    Thread safety. Any thread. Invariants. Once `left`, always left; each end is called at most once.
    """

    def __init__(self, gone: Callable[[], bool] | None = None) -> None:
        """`gone`: tells that the caller has left without calling `leave`: a lost connection."""
        self._gone, self._left = gone, False
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

    def run(self, call: Callable[[], T]) -> T:
        """Return what `call` does, made for this caller by this thread."""
        before = _PRESENT.set(self)
        try:
            expect_waiting()
            return call()
        finally:
            _PRESENT.reset(before)


_PRESENT: ContextVar[Caller | None] = ContextVar("memwal_caller", default=None)


def present() -> Caller | None:
    """Return for whom this thread works; None if that one waits in any case."""
    return _PRESENT.get()


def expect_waiting() -> None:
    """Raises: Unavailable if the caller of this thread's call has left: what has not begun is not done."""
    caller = _PRESENT.get()
    if caller is not None and caller.left:
        raise given_up()


def given_up() -> Unavailable:
    """Return the error of a call whose caller has left; only logs, and calls that `close` ended, show it."""
    return Unavailable("the call was given up before it had an answer: its task was cancelled, or the table closed")


def carried(call: Callable[[], T]) -> Callable[[], T]:
    """Return `call` for another thread, which then works for the caller of this one, and within its trace."""
    return call if _PRESENT.get() is None and not tracing.on else partial(copy_context().run, call)
