"""One piece of work per region, several at once: most of each is waiting for storage."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

AT_ONCE = 8
"""Regions. A claim makes about ten requests, one after the other."""
_In = TypeVar("_In")
_Out = TypeVar("_Out")


def each(work: Callable[[_In], _Out], items: Iterable[_In], at_once: int) -> Iterator[_Out]:
    """`work` of every item, in their order; with `at_once` 1 in this thread. Raises what the first that fails raises,
    once those that were begun have ended.
    """
    if at_once == 1:
        yield from map(work, items)
        return
    pool = ThreadPoolExecutor(at_once, "regions")
    try:
        yield from pool.map(work, items)
    finally:
        pool.shutdown(cancel_futures=True)
