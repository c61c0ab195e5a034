"""Work of a read that is done in another thread while the read's own goes on: the base beside the levels above it.

Lance, faiss and tantivy let go of Python's lock, so both run at once where there are cores for it. A read never waits
for a thread: what none has begun when its result is wanted is done by the caller.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

from memwal.ingest.caller import carried
from memwal.ingest.threads import CallThreads

T = TypeVar("T")

_THREADS = CallThreads("beside", os.cpu_count() or 1)


def beside(work: Callable[[], T]) -> Callable[[], T]:
    """Have a thread begin `work`, for the caller of this one; return what waits for its result, or raises its error."""
    job = _THREADS.submit(carried(work))

    def result() -> T:
        return work() if job.cancel() else job.result()

    return result
