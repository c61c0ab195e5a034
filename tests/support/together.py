"""Work in several threads at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def together(*works: Callable[[], Any]) -> list[Any]:
    """Run each work in its own thread, all from one moment on; return their results when all have ended.

    Raises: the error of the first that failed.
    """
    start = threading.Barrier(len(works))

    def run(work: Callable[[], Any]) -> Any:
        start.wait(60)
        return work()

    with ThreadPoolExecutor(len(works)) as pool:
        running = [pool.submit(run, work) for work in works]
    return [each.result() for each in running]
