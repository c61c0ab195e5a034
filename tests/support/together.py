"""Work in several threads at once."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


def together(*works: Callable[[], object]) -> None:
    """Run each work in its own thread, and return when all have ended. Raises: the error of the first that failed."""
    with ThreadPoolExecutor(len(works)) as pool:
        running = [pool.submit(work) for work in works]
    for each in running:
        each.result()
