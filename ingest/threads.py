"""A piece of work that a thread of its own does at intervals.

A thread whose end can be waited for again after the wait was interrupted.

`threading.Thread.join` cannot: in CPython up to 3.12 an interrupt inside it makes the living thread count as ended, and
the next `join` returns at once. A program interrupted while it closes would then end in the middle of an append.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from memwal.ingest.errors import classify

_LOG = logging.getLogger("memwal.periodic")


class Periodic:
    """Does `work` every `interval` seconds from `start` to `stop`.

    Thread safety. Any thread. Work that fails is logged in one line and done again at the next interval.
    """

    def __init__(self, name: str, work: Callable[[], object], interval: float) -> None:
        """`name`: the thread's, and what messages call the work; `interval` 0 never does it."""
        self._name, self._work, self._interval = name, work, interval
        self._stopped = threading.Event()
        self._worker: Worker | None = None

    def start(self) -> None:
        """Begin; the first time is one interval from now."""
        if self._interval > 0:
            self._worker = Worker(self._name, self._run)

    def stop(self) -> None:
        """End the thread; work under way is finished first."""
        self._stopped.set()
        if self._worker is not None:
            self._worker.wait()

    def _run(self) -> None:
        while not self._stopped.wait(self._interval):
            try:
                self._work()
            except BaseException as error:  # noqa: BLE001 - ending here would end all of it in silence
                # A panic of pylance's Rust code is no Exception; nothing else that is none comes to this thread.
                _LOG.warning("%s failed, will try again in %g s: %s", self._name, self._interval, classify(error))


class Worker:
    """Runs `work` in a daemon thread of its own, from construction on.

    Thread safety. Any thread.
    """

    def __init__(self, name: str, work: Callable[[], None]) -> None:
        self._ended = threading.Event()
        self._work = work
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Return once the work has ended; may be interrupted, and called again."""
        self._ended.wait()
        self._thread.join()  # it has nothing left to do

    def _run(self) -> None:
        try:
            self._work()
        finally:
            self._ended.set()


def stop_event(lifeline: TextIO | None) -> threading.Event:
    """An event that SIGTERM, SIGINT and the end of `lifeline` set."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    if lifeline is not None:
        threading.Thread(target=_watch, args=(lifeline, stop), name="lifeline", daemon=True).start()
    return stop


def _watch(lifeline: TextIO, stop: threading.Event) -> None:
    while lifeline.readline():
        pass
    stop.set()


@contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """An event that SIGINT and SIGTERM set for as long as the context lasts; the handlers before come back after."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
