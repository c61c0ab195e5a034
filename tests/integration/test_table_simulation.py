"""The simulation of flush, commit and collection: seeds, equal runs for one seed, and the planted
faults that it finds.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.conftest import extent
from tests.simulation.many import results
from tests.simulation.table_planted import FOUND_BY, OF_REST, PLANTED_IN_TABLE, found_in_table_by
from tests.simulation.table_world import TableWorld
from tests.simulation.world import SeedFailed, simulate
from tests.simulation_fixtures import expect_found

SEEDS = extent(3, 50)
"""`make simulate ARGS=--table` runs thousands of seeds."""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["table", "rest"])
def test_no_seed_breaks_a_promise(kind: str) -> None:
    failed = [result.said for result in results(1, SEEDS, workers=1, kind=kind) if result.said]
    assert failed == []


def test_one_seed_is_one_run(pool: ProcessPoolExecutor) -> None:
    there = pool.submit(simulate, 6, kind=TableWorld)
    assert simulate(6, kind=TableWorld).digest == there.result().digest


@pytest.mark.parametrize("fault", [*PLANTED_IN_TABLE, *OF_REST])
def test_a_planted_fault_is_found(fault: str) -> None:
    expect_found(fault, found_in_table_by, FOUND_BY)


def test_a_failure_says_how_to_see_it_again() -> None:
    found = found_in_table_by("prunes_one_generation_too_many")
    assert found is not None
    seed, reason = found
    with PLANTED_IN_TABLE["prunes_one_generation_too_many"](), pytest.raises(SeedFailed) as caught:
        simulate(seed, kind=TableWorld)
    said = str(caught.value)
    assert reason in said
    assert f"python -m tests.simulation --table --seed {seed} --trace" in said
