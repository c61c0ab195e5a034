"""Run tasks, several at once: most of each task is waiting for storage."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

AT_ONCE = 8
"""Regions processed at once. A claim makes about ten requests, one after the other."""
_In = TypeVar("_In")
_Out = TypeVar("_Out")


def each(work: Callable[[_In], _Out], items: Iterable[_In], at_once: int) -> Iterator[_Out]:
    """Yield `work(item)` of every item in order, `at_once` items in parallel; with 1, or a single item, in this thread.

    Raises the error of the first item that fails, after all started items have ended.
    """
    several = () if at_once == 1 else list(items)
    if len(several) < 2:
        yield from map(work, several or items)
        return
    pool = ThreadPoolExecutor(at_once, "parallel")
    try:
        yield from pool.map(work, several)
    finally:
        pool.shutdown(cancel_futures=True)


class Budget:
    """Limits the bytes that parallel tasks hold together.

    Thread safety. Any thread.
    Invariants. More than `most` bytes are held only by a single task.
    """

    def __init__(self, most: int) -> None:
        """`most`: bytes."""
        self._most, self._held = most, 0
        self._changed = threading.Condition()

    @contextmanager
    def of(self, size: int) -> Iterator[None]:
        """Hold `size` bytes; wait until other tasks have released enough."""
        with self._changed:
            self._changed.wait_for(lambda: not self._held or self._held + size <= self._most)
            self._held += size
        try:
            yield
        finally:
            with self._changed:
                self._held -= size
                self._changed.notify_all()
