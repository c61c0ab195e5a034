"""The simulation of the log: some seeds, equal runs for one seed, and the planted faults that it finds.

Every failure names its seed. `make simulate` runs thousands of seeds.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import extent
from tests.simulation.many import results
from tests.simulation.planted import FOUND_BY, OF_LEASES, PLANTED, WITHOUT_A_KEY, found_by
from tests.simulation.world import AppendWorld, SeedFailed, simulate
from tests.simulation_fixtures import expect_found

ROOT = Path(__file__).resolve().parent.parent.parent
SEEDS = extent(6, 100)
SEEDS_WITHOUT_A_KEY = extent(4, 60)
SEEDS_OF_LEASES = extent(8, 80)


def test_no_seed_breaks_a_promise() -> None:
    failed = [result.said for result in results(1, SEEDS, workers=1, kind="log") if result.said]
    assert failed == []


@pytest.mark.timeout(900)
def test_no_seed_breaks_a_promise_without_a_key() -> None:
    failed = [result.said for result in results(1, SEEDS_WITHOUT_A_KEY, workers=1, kind="append") if result.said]
    assert failed == []
    outcome = simulate(7, kind=AppendWorld)
    assert outcome.acked > 10, "little of the log is run"
    assert simulate(7, kind=AppendWorld) == outcome


def test_no_owner_answers_a_read_with_rows_that_are_not_the_newest() -> None:
    failed = [result.said for result in results(1, SEEDS_OF_LEASES, workers=1, kind="leases") if result.said]
    assert failed == []


def command(*arguments: str, hash_seed: str = "0") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.simulation", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        timeout=500,
    )


def test_one_seed_is_one_run_in_every_process() -> None:
    (there,) = {command("--log", "--seed", "7", hash_seed=hash_seed).stdout for hash_seed in ("1", "2")}
    assert simulate(7).digest in there


def test_seeds_are_different_runs() -> None:
    assert simulate(1).digest != simulate(2).digest


def test_a_trace_names_time_actor_call_and_answer() -> None:
    shown: list[str] = []
    outcome = simulate(3, shown.append)
    assert len(shown) == outcome.steps
    puts = [line.split() for line in shown if "put r" in line and "/wal/" in line]
    assert {"created"} <= {word for line in puts for word in line}
    assert all(float(line[0]) >= 0 for line in puts)
    assert any(line[1].startswith("writer") for line in puts)


@pytest.mark.parametrize("fault", [*PLANTED, *WITHOUT_A_KEY, *OF_LEASES])
def test_a_planted_fault_is_found(fault: str) -> None:
    """The worth of a green run: a typical mistake of an implementation shows within a few seeds."""
    expect_found(fault, found_by, FOUND_BY)


def test_a_failure_names_the_seed_and_shows_the_last_steps() -> None:
    found = found_by("claims_without_a_sentinel")
    assert found is not None
    seed, reason = found
    with PLANTED["claims_without_a_sentinel"](), pytest.raises(SeedFailed) as caught:
        simulate(seed)
    said = str(caught.value)
    assert reason in said
    assert f"seed {seed}: " in said
    assert f"python -m tests.simulation --log --seed {seed} --trace" in said
    assert len(said.splitlines()) > 20


def test_many_seeds_at_the_command_line() -> None:
    ran = command("--start", "1", "--seeds", "2", "--workers", "1", "--coverage")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "2 of 2 seeds, 0 failed" in ran.stdout
    assert "| append |" in ran.stdout
