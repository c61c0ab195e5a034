"""Measure single operations, by one caller or by many concurrent callers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from bench.benchmark import Watch

Item = TypeVar("Item")


def timed_each(
    work: Callable[[Item], object], items: Iterable[Item], clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Return the seconds that `work` took for each item, one after another."""
    taken = []
    for item in items:
        began = clock()
        work(item)
        taken.append(clock() - began)
    return taken


def timed_callers(work: Callable[[Item], object], items: Sequence[Sequence[Item]], watch: Watch) -> list[float]:
    """Run one thread per sequence of items, all started at once; the watch runs until the last one ends.

    Raises: the first error of any caller, after all have ended.
    """
    taken: list[list[float]] = [[] for _ in items]
    errors: list[BaseException] = []
    gate = threading.Barrier(len(items) + 1)

    def call(n: int) -> None:
        gate.wait()
        try:
            taken[n] = timed_each(work, items[n])
        except BaseException as error:  # noqa: BLE001 - raised by the thread that waits
            errors.append(error)

    callers = [threading.Thread(target=call, args=(n,), name=f"caller-{n}") for n in range(len(items))]
    for caller in callers:
        caller.start()
    with watch.timed():  # started before the gate: behind it this thread may be scheduled late
        gate.wait()
        for caller in callers:
            caller.join()
    if errors:
        raise errors[0]
    return [seconds for each in taken for seconds in each]
