"""Many seeds in several processes."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

from tests.simulation.daemon_world import DaemonWorld
from tests.simulation.lease_world import LeaseWorld
from tests.simulation.table_world import TableWorld
from tests.simulation.world import AppendWorld, SeedFailed, World, simulate

_CHUNK = 4
KINDS: dict[str, type[World]] = {
    "log": World,
    "append": AppendWorld,
    "leases": LeaseWorld,
    "table": TableWorld,
    "daemons": DaemonWorld,
}
"""The log with a table's reads and commits; the same without a key; owners that are read while they are deposed; flush,
commit and collection of a table; daemons, producers and resizes."""


def outcomes(start: int, seeds: int, workers: int, *, kind: str = "log") -> Iterator[str]:
    """For each seed, in order, why it failed: one line, "" where it did not. `kind`: of world, see `KINDS`."""
    # Not forked: pylance's threads would not be in the child.
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        yield from pool.map(partial(_said, kind), range(start, start + seeds), chunksize=_CHUNK)


def _said(kind: str, seed: int) -> str:
    try:
        simulate(seed, kind=KINDS[kind])
    except SeedFailed as error:
        return error.reason
    return ""
