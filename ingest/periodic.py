"""A piece of work that a thread of its own does at intervals."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from ingest.errors import classify
from ingest.worker import Worker

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
