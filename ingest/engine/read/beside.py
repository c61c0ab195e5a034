"""Run part of a read in another thread: the base table is searched beside the levels above it.

Lance, faiss and tantivy release Python's lock, so both run at once if there are cores. A read never waits for a thread:
if no thread has started the work when its result is needed, the caller does the work.
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


_threads: CallThreads


def _start() -> None:
    """Create the threads, also after a fork: a forked process has none of its parent's."""
    global _threads  # noqa: PLW0603
    _threads = CallThreads("beside", os.cpu_count() or 1)


_start()
os.register_at_fork(after_in_child=_start)


class Beside(Generic[T]):
    """One piece of work that a thread starts as soon as one is free.

    Thread safety. One thread. Invariants. After `result` or `end` has returned, no part of the work runs any more: if
    the program ended in the middle of a search, Lance would abort the process.
    """

    def __init__(self, work: Callable[[], T], *, alone: bool = False) -> None:
        """`alone`: the caller has no other work in the meantime, so `result` does this work."""
        self._work = work
        self._job: Future[T] | None = None
        if not alone:
            with suppress(RuntimeError):  # no thread can be started
                self._job = _threads.submit(carried(work))

    def result(self) -> T:
        """Return the result of the work, or raise its error. Call it once."""
        job = self._job
        try:
            if job is None or _threads.take_back(job):
                return self._work()
            return job.result()
        finally:
            del job  # an error refers to this frame and would keep alive what the work refers to

    def end(self) -> None:
        """Cancel the work; if it has started, wait until it has ended. Its result or error is dropped."""
        if self._job is not None and not _threads.take_back(self._job):
            wait([self._job])
        self._job = None
