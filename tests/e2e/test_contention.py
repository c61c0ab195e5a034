"""Clients in several processes contend for few keys while daemons are killed, stopped and ended. Porcupine checks the
histories."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import extent, wait_until
from tests.contention import OF_FLEETS, STEPS, Contention, FleetContention
from tests.histories.judge import judge


@pytest.fixture
def contention(tmp_path: Path) -> Iterator[Callable[..., Contention]]:
    """Return a function that creates a contention; its processes end with the test."""
    made: list[Contention] = []

    def make(seed: int, *, fleet: bool = False, **options: Any) -> Contention:
        made.append((FleetContention if fleet else Contention)(tmp_path, seed, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_what_clients_see_is_linearizable_whoever_was_killed_or_stopped(contention: Callable[..., Contention]) -> None:
    run = contention(1, clients=2)
    run.run(0.0, STEPS)
    judged = run.judged()
    print(judged)
    assert set(run.done) == set(STEPS)
    assert judged.operations > 300
    regions = [part for part in judged.parts if ", key" not in part.partition]
    assert all(part.reads[level] for part in regions for level in ("latest", "durable", "stored"))


def test_what_clients_of_a_fleet_see_is_linearizable_whichever_daemon_was_killed(
    contention: Callable[..., Contention],
) -> None:
    run = contention(3, fleet=True, clients=2, tables=extent(8, 50))
    run.run(0.0, [*OF_FLEETS, *["kill"] * extent(2, 20)])
    judged = run.judged()
    print(judged)
    assert judged.operations > 300
    assert sum(part.reads["latest"] for part in judged.parts if ", key" not in part.partition)


def test_a_deposed_daemon_that_answers_from_memory_is_found(
    contention: Callable[..., Contention], tmp_path: Path
) -> None:
    """Without commits the deposed daemon does not detect its loss: it answers the probers until it ends."""
    run = contention(2, serve=("tests.histories.stale_daemon", "serve"), commit="0s", clients=1)
    run.begin()
    run.take("stop")
    wrong = wait_until(lambda: judge(run.histories, pictures=tmp_path).wrong, every=1.0)
    assert {part.verdict for part in wrong} == {"Illegal"}
    assert "at latest" in wrong[0].why
