"""The simulation of daemons, producers and resizes: one seed one run, and what it would find if it were there."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.simulation.daemon_planted import PLANTED_IN_DAEMONS, found_in_daemons_by
from tests.simulation.daemon_world import DaemonWorld
from tests.simulation.many import outcomes
from tests.simulation.world import simulate

SEEDS = 4
"""Thousands: `make simulate ARGS=--daemons`."""


@pytest.mark.timeout(900)
def test_no_seed_breaks_a_promise() -> None:
    failed = [said for said in outcomes(1, SEEDS, workers=2, kind="daemons") if said]
    assert failed == []


def test_one_seed_is_one_run() -> None:
    assert simulate(3, kind=DaemonWorld) == simulate(3, kind=DaemonWorld)


@pytest.mark.timeout(900)
def test_planted_faults_are_found(pool: ProcessPoolExecutor) -> None:
    hunts = {name: pool.submit(found_in_daemons_by, name) for name in PLANTED_IN_DAEMONS}
    missed = [name for name, hunt in hunts.items() if hunt.result() is None]
    assert missed == []
