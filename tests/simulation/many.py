"""Run many seeds in several processes."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.histories import simulated
from tests.simulation.cluster_world import ClusterWorld
from tests.simulation.coverage import Cells
from tests.simulation.lease_world import LeaseWorld
from tests.simulation.table_world import RestingWorld, TableWorld
from tests.simulation.world import AppendWorld, SeedFailed, World, simulate

_CHUNK = 4
KINDS: dict[str, type[World]] = {
    "cluster": ClusterWorld,
    "log": World,
    "append": AppendWorld,
    "leases": LeaseWorld,
    "rest": RestingWorld,
    "table": TableWorld,
}
"""The kinds of worlds: everything at once; the log with a table's reads and commits; the same without a key; owners
that are read while they are deposed; flush, commit and collection of a table."""


@dataclass(frozen=True)
class Result:
    """The result of one seed. `said`: the reason of a failure in one line; "" if it succeeded."""

    said: str
    cells: Cells
    """The coverage of a successful run."""


def results(start: int, seeds: int, workers: int, *, kind: str, judged: bool = False) -> Iterator[Result]:
    """Yield the results of seeds, in order. `kind`: of world, see `KINDS`. `workers`: processes; 1 is this process.

    `judged`: Porcupine judges each history too, for kinds that record one; see `tests.histories.simulated`.
    """
    run, numbers = partial(_judged if judged else _result, kind), range(start, start + seeds)
    if workers == 1:
        yield from map(run, numbers)
        return
    # Spawned: a forked child would not have pylance's threads.
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        yield from pool.map(run, numbers, chunksize=_CHUNK)


def _result(kind: str, seed: int) -> Result:
    try:
        return Result("", simulate(seed, kind=KINDS[kind]).cells)
    except SeedFailed as error:
        return Result(error.reason, Cells())


def _judged(kind: str, seed: int) -> Result:
    with TemporaryDirectory(prefix="memwal-histories-") as directory:
        _, failed = simulated.judged([seed], kind, Path(directory))
    return Result("; ".join(failed), Cells())
