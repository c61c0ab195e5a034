"""Many seeds in several processes."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

from tests.simulation.world import SeedFailed, simulate

_CHUNK = 4


def outcomes(start: int, seeds: int, workers: int, *, append: bool = False) -> Iterator[str]:
    """For each seed, in order, why it failed: one line, "" where it did not. `append`: on tables without a key."""
    # Not forked: pylance's threads would not be in the child.
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        yield from pool.map(partial(_said, append=append), range(start, start + seeds), chunksize=_CHUNK)


def _said(seed: int, *, append: bool) -> str:
    try:
        simulate(seed, append=append)
    except SeedFailed as error:
        return error.reason
    return ""
