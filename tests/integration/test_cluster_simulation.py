"""The simulation of everything at once: a hundred seeds, what struck where, one seed one run, and planted faults."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.simulation.cluster_planted import PLANTED_IN_CLUSTERS, found_in_clusters_by
from tests.simulation.cluster_world import ClusterWorld
from tests.simulation.coverage import MUST_BE_KILLED, Cells, kills, table
from tests.simulation.many import results
from tests.simulation.world import simulate

SEEDS = 100
"""Thousands: `make simulate`."""


@pytest.mark.timeout(1200)
def test_no_seed_breaks_a_promise_and_processes_are_killed_in_every_part() -> None:
    cells, failed = Cells(), list[str]()
    for result in results(1, SEEDS, workers=2, kind="cluster"):
        cells.update(result.cells)
        failed += [result.said] if result.said else []
    assert failed == []
    spared = [part for part in MUST_BE_KILLED if not kills(cells, part)]
    assert spared == [], table(cells)


@pytest.mark.timeout(600)
def test_one_seed_is_one_run(pool: ProcessPoolExecutor) -> None:
    there = pool.submit(simulate, 4, kind=ClusterWorld)
    assert simulate(4, kind=ClusterWorld) == simulate(4, kind=ClusterWorld) == there.result()


@pytest.mark.timeout(1200)
def test_planted_faults_are_found(pool: ProcessPoolExecutor) -> None:
    hunts = {name: pool.submit(found_in_clusters_by, name) for name in PLANTED_IN_CLUSTERS}
    missed = [name for name, hunt in hunts.items() if hunt.result() is None]
    assert missed == []
