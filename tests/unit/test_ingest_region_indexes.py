"""Indexing of a region's rows: the thread that does it and when, the rows that wait, and that no read notices a failed
step."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from memwal import wal
from memwal.ingest.engine.region.core import RegionCore
from memwal.ingest.engine.region.groups import WriteGroup
from memwal.ingest.engine.region.write_queue import Write
from memwal.memtable import IndexSpec, MemTable
from tests.region_contexts import LIMITS, region_context
from tests.support.memory_store import MemoryStore

BASE = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("text", pa.string())])
REGION = wal.bucket_region(0)
BLOCK = 4


class Steps:
    """A counting stand-in for `MemTable.index_step`; each step indexes BLOCK more rows."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []
        """Per step: the generation, and the number of rows of the memtable at that time."""
        self.fails: dict[int, Exception] = {}
        self._done: dict[int, int] = {}

    def step(self, table: MemTable) -> bool:
        self.calls.append((table.generation, table.rows))
        if table.generation in self.fails:
            raise self.fails[table.generation]
        done = self._done[table.generation] = min(table.rows, self._done.get(table.generation, 0) + BLOCK)
        return done < table.rows


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    found = Steps()
    monkeypatch.setattr(MemTable, "index_step", lambda table: found.step(table))  # noqa: PLW0108 - binds the memtable
    return found


@pytest.fixture
def opened(tmp_path: Path) -> Callable[..., RegionCore]:
    """Return a function that claims the same region each time, in a given index mode."""
    store = wal.LocalStore(tmp_path / "t.lance")

    def open_core(mode: Any = "async", **more: Any) -> RegionCore:
        fixed = {"indexes": (IndexSpec("text", "fts"),), "limits": replace(LIMITS, rows_max=1000), "index_mode": mode}
        return RegionCore.open(region_context(store, BASE, **fixed, **more), REGION)

    return open_core


def put(core: RegionCore, *ids: int, durable: bool = True) -> Write:
    write = Write(pa.table({"id": ids, "text": [f"copper {id}" for id in ids]}, schema=BASE), durable)
    core.serve([write])
    return write


def found(core: RegionCore) -> set[int]:
    """Return the ids of all rows that a match finds."""
    ids: set[int] = set()
    for level in core.view().memtables:
        rows, _ = level.match("text", "copper", 100, level.live())
        ids |= set(level.take(rows, ["id"])["id"].to_pylist())
    return ids


def waiting(core: RegionCore) -> int:
    return int(core.status()["unindexed_rows"])


def test_async_leaves_the_rows_to_the_indexing_party(opened: Callable[..., RegionCore], steps: Steps) -> None:
    core = opened("async")
    put(core, *range(10))
    put(core, 10, durable=False)
    assert (waiting(core), steps.calls) == (11, [])
    assert found(core) == set(range(11)), "what waits is found"
    assert [core.index_step() for _ in range(4)] == [True, True, True, False]
    assert (waiting(core), steps.calls) == (0, [(1, 11)] * 3)
    put(core, 11)
    assert waiting(core) == 1
    assert found(core) == set(range(12))


def test_sync_indexes_before_it_acknowledges(
    opened: Callable[..., RegionCore], steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = opened("sync")
    write = Write(pa.table({"id": range(6), "text": ["copper"] * 6}, schema=BASE))
    monkeypatch.setattr(WriteGroup, "acknowledge", lambda *_: steps.calls.append((0, waiting(core))))
    core.serve([write])
    assert steps.calls == [(1, 6), (1, 6), (0, 0)]
    assert found(core) == set(range(6))


def test_the_newest_memtable_goes_first_and_a_frozen_one_is_finished(
    opened: Callable[..., RegionCore], steps: Steps
) -> None:
    core = opened("async")
    put(core, 1)
    while core.index_step():
        pass
    steps.calls.clear()
    core.freeze()
    put(core, 2)
    core.freeze()
    put(core, 3)
    while core.index_step():
        pass
    # Generation 1 has no new row, but it is frozen now: its step releases memory that only a writer needs.
    assert steps.calls == [(3, 1), (2, 1), (1, 1)]
    core.publish_next()
    assert (waiting(core), found(core)) == (0, {2, 3})


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("error", [RuntimeError("tantivy said no"), MemoryError()], ids=["library", "memory"])
def test_a_step_that_fails_is_told_once_and_costs_no_row(
    mode: str, error: Exception, opened: Callable[..., RegionCore], steps: Steps, caplog: pytest.LogCaptureFixture
) -> None:
    core = opened(mode)
    steps.fails[1] = error
    with caplog.at_level(logging.WARNING, "memwal.region"):
        for id in range(3):
            assert put(core, id).done.result().applied
            while core.index_step():
                pass
    assert [type(error).__name__ in record.message for record in caplog.records] == [True]
    assert "generation 1 is not indexed any further" in caplog.text
    assert (core.failure, waiting(core), found(core)) == (None, 3, {0, 1, 2})
    core.freeze()
    put(core, 3)
    while core.index_step():
        pass
    assert waiting(core) == 3, "the next generation is indexed again"
    assert core.publish_next()
    assert (waiting(core), found(core)) == (0, {3})


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_replay_is_indexed_as_a_whole(mode: str, opened: Callable[..., RegionCore], steps: Steps) -> None:
    first = opened("async")
    for id in range(9):
        put(first, id)
    core = opened(mode)
    assert steps.calls == ([(1, 9)] * 3 if mode == "sync" else []), "not entry by entry"
    assert waiting(core) == (0 if mode == "sync" else 9)
    assert found(core) == set(range(9))


def test_a_region_that_ended_indexes_nothing(opened: Callable[..., RegionCore], steps: Steps) -> None:
    core = opened("async")
    put(core, 1)
    core.end(wal.Fenced(REGION, 1, 2))
    assert not core.index_step()
    assert steps.calls == []


def test_bytes_counted_late_are_not_those_of_the_next_memtable(
    opened: Callable[..., RegionCore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memtable freezes while its bytes are counted; the next, empty memtable must not count as full."""
    core = opened("async")
    put(core, *range(500))
    table, counted = core.levels.active, MemTable.bytes.fget  # type: ignore[attr-defined]
    freezing = []

    def bytes_of(each: MemTable) -> int:
        found = int(counted(each))
        if each is table and not freezing:
            freezing.append(True)
            core.freeze()
        return found

    monkeypatch.setattr(MemTable, "bytes", property(bytes_of))
    core.levels.measure()
    assert core.levels.active.generation == 2
    assert core.levels.active_bytes == core.levels.active.bytes < table.bytes


def test_a_table_without_such_indexes_counts_nothing_as_waiting() -> None:
    for indexes, expected in (((), False), ((IndexSpec("id", "btree"),), False), ((IndexSpec("text", "fts"),), True)):
        assert region_context(MemoryStore(), BASE, indexes=indexes).has_indexes is expected
