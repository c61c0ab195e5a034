"""Many seeds in several processes."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

from tests.simulation.table_world import TableWorld
from tests.simulation.world import SeedFailed, World, simulate

_CHUNK = 4
KINDS: dict[bool, type[World]] = {False: World, True: TableWorld}
"""By whether it is the table's second half that is simulated."""


def outcomes(start: int, seeds: int, workers: int, *, table: bool = False) -> Iterator[str]:
    """For each seed, in order, why it failed: one line, "" where it did not. `table`: worlds of `table_world`."""
    # Not forked: pylance's threads would not be in the child.
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        yield from pool.map(partial(_said, table), range(start, start + seeds), chunksize=_CHUNK)


def _said(table: bool, seed: int) -> str:
    try:
        simulate(seed, kind=KINDS[table])
    except SeedFailed as error:
        return error.reason
    return ""
