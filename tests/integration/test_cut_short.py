"""Micro-batches that Spark cuts short between two batches lose no rows; longer runs: `python -m tests.cut_short`.

When Spark ends a task, the input of its Python worker ends between two messages, as it does after the last row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cut_short import BATCHES, ONE_TASK, ROUTE, SEND, TASKS, WAYS, Case, Scene, cut_spark

CUTS = {
    Case(ONE_TASK): {25: "kill worker", 49: "cancel"},
    Case(ONE_TASK, append=True, letters=True): {7: "cancel", 49: "stop"},
    Case(ONE_TASK, append=True, daemons=2): {1: "kill worker"},
    Case(ONE_TASK, append=True, without_paths=True): {25: "stop"},
    Case(SEND, append=True): {1: "stop", 49: "kill worker"},
    Case(SEND, letters=True, daemons=2): {7: "kill worker", 49: "cancel"},
    Case(ROUTE, append=True, letters=True): {7: "stop"},
}
"""For each case, the ways of its cuts in their order, by the number of its 50 batches that have arrived."""


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Start one Spark with small batches for the module."""
    session = cut_spark(tmp_path_factory.mktemp("unused"))
    yield session
    session.stop()


@pytest.fixture
def scene(spark: Any, tmp_path: Path, start: Callable[..., Any]) -> Iterator[Callable[[Case], Scene]]:
    """Make scenes; their child daemons end with the test."""
    made: list[Scene] = []

    def make(case: Case) -> Scene:
        made.append(Scene(spark, tmp_path, case, start))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize("case", CUTS, ids=str)
def test_every_row_arrives_once_wherever_its_micro_batch_was_cut(scene: Callable[[Case], Scene], case: Case) -> None:
    table = scene(case)
    for boundary, way in CUTS[case].items():
        tasks = table.cut(boundary, WAYS[way])
        assert {each.name for each in tasks} == TASKS[case.where], "another task was cut"
        assert {each.came for each in tasks} <= {boundary}
        # After the last batch the same sink continues, as in a query that restarts by itself; else a new sink does.
        table.resume(anew=boundary < BATCHES - 1)
        table.check()
