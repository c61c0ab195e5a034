"""Hands the items of an iterator from a thread that produces them to a thread that takes them."""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Generic, TypeVar

from memwal.ingest.errors import Invalid
from memwal.ingest.threads import Worker

T = TypeVar("T")

CLOSED = "the result was closed; make the read again"


class Interrupted(BaseException):
    """Ends the thread of a closed handover. No other thread sees it."""


class Handover(Generic[T]):
    """Items that a thread of its own produces, at most `ahead` before they are taken.

    Thread safety. One thread takes; `close` from any thread, which makes a `take` that waits raise Invalid.
    Errors. `take` raises what the iterator raised, after the items before it.
    """

    def __init__(self, name: str, items: Iterator[T], ahead: int, cancel: Callable[[], object] = lambda: None) -> None:
        """`cancel`: makes a `next` of `items` that waits return soon."""
        self._items, self._ahead, self._cancel = items, ahead, cancel
        self._ready: deque[T] = deque()
        self._changed = threading.Condition()
        self._closed = self._ended = False
        self._failure: BaseException | None = None
        self._thread: int | None = None
        Worker(name, self._run)

    def take(self, within: float | None = None) -> T | None:
        """Return the next item; None if none comes `within` these seconds. Raises: StopIteration after the last."""
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._ended or self._closed, within)
            if self._closed:
                raise Invalid(CLOSED)
            if self._ready:
                item = self._ready.popleft()
                self._changed.notify_all()
                return item
            if self._failure is not None:
                raise self._failure
            if self._ended:
                raise StopIteration
            return None

    def close(self, *, interrupt: bool = False) -> None:
        """Let the items go; the thread ends as soon as it can. Returns at once.

        `interrupt`: end a computation of DataFusion. It looks for exceptions of its thread once a second, and there is
        no other way to cancel it from outside.
        """
        with self._changed:
            closed, self._closed = self._closed, True
            self._ready.clear()
            self._changed.notify_all()
            if interrupt and not closed and self._thread is not None:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), ctypes.py_object(Interrupted))
        self._cancel()

    # ---- in its thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        with suppress(Interrupted):  # one that was sent while the thread ended
            self._produce()

    def _produce(self) -> None:
        try:
            self._give_all()
        except Interrupted:
            pass
        except BaseException as error:  # noqa: BLE001 - raised in the thread that takes
            self._failure = error
        try:
            close = getattr(self._items, "close", None)  # of a generator
            if close is not None:
                close()
        finally:
            del self._items
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _give_all(self) -> None:
        try:
            self._thread = threading.get_ident()
            for item in self._items:
                if not self._given(item):
                    return
                del item
        finally:
            with self._changed:
                self._thread = None

    def _given(self, item: T) -> bool:
        """Keep an item and wait for room for the next one. Returns whether another one is wanted."""
        with self._changed:
            self._ready.append(item)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._closed or len(self._ready) < self._ahead)
            return not self._closed
