"""A thread whose end can be waited for again after the wait was interrupted.

`threading.Thread.join` cannot: in CPython up to 3.12 an interrupt inside it makes the living thread count as ended, and
the next `join` returns at once. A program interrupted while it closes would then end in the middle of an append.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


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
