"""`task_edge` excludes imported objects from garbage collection in Spark's Python workers, and does nothing in other
processes."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from memwal.ingest.spark import task as task_memory
from memwal.ingest.spark.task import task_edge


@pytest.fixture
def thawed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give the garbage collector the state of a new process, before and after the test."""
    monkeypatch.setattr(task_memory, "_frozen_with", 0)
    gc.unfreeze()
    yield
    gc.unfreeze()


def test_what_is_there_at_the_end_of_a_workers_task_is_not_looked_at_again(
    thawed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyspark.worker", ModuleType("pyspark.worker"))
    with task_edge():
        pass
    frozen = gc.get_freeze_count()
    assert frozen > 10_000
    later = [[number] for number in range(100_000)]  # many, as frozen objects of earlier tests may be freed
    with task_edge():  # this task has imported no module
        pass
    assert gc.get_freeze_count() <= frozen
    monkeypatch.setitem(sys.modules, "more", ModuleType("more"))
    with task_edge():
        pass
    assert gc.get_freeze_count() >= frozen + len(later) // 2


def test_the_collector_of_another_process_is_left_alone(thawed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "pyspark.worker", raising=False)
    with task_edge():
        pass
    assert gc.get_freeze_count() == 0
