"""Work of a read that is done in another thread while the read's own goes on: the base beside the levels above it.

Lance, faiss and tantivy let go of Python's lock, so both run at once where there are cores for it. A read never waits
for a thread: what none has begun when its result is wanted is done by the caller.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Generic, TypeVar

from memwal.ingest.caller import carried
from memwal.ingest.threads import CallThreads

T = TypeVar("T")


def _pool() -> CallThreads:
    return CallThreads("beside", os.cpu_count() or 1)


_threads = _pool()


def _forked() -> None:
    """A forked process has none of the threads."""
    global _threads  # noqa: PLW0603
    _threads = _pool()


os.register_at_fork(after_in_child=_forked)


class Beside(Generic[T]):
    """One piece of work, begun by a thread as soon as one is free, for the caller of the thread that asks.

    Thread safety. One thread. Invariants. Once `result` or `end` has returned, nothing of the work runs any more: if
    the program ended in the middle of a search, Lance would abort the process.
    """

    def __init__(self, work: Callable[[], T], *, alone: bool = False) -> None:
        """`alone`: nothing else is to be done meanwhile, so it is left to `result`."""
        self._work = work
        self._job: Future[T] | None = None
        if not alone:
            with suppress(RuntimeError):  # no thread can be started
                self._job = _threads.submit(carried(work))

    def result(self) -> T:
        """Return what the work returns, or raise its error. Once."""
        job = self._job
        try:
            if job is None or _threads.take_back(job):
                return self._work()
            return job.result()
        finally:
            del job  # an error holds this frame, and would hold by it what the work holds

    def end(self) -> None:
        """Take the work back; if it has begun, wait until it has ended. What it returns or raises is dropped."""
        if self._job is not None and not _threads.take_back(self._job):
            wait([self._job])
        self._job = None
