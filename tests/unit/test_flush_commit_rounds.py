"""Rounds of a commit: their size, the report, and the work that two committers do twice."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest

from memwal import flush
from memwal.flush import CommitReport, CountMismatch
from memwal.flush.commits import changes, rounds
from memwal.wal import SystemClock
from tests.commit_world import World
from tests.messages import raises
from tests.support.clock import FakeClock
from tests.support.interpose import killed_at


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(str(tmp_path / "table"))


def counting(monkeypatch: pytest.MonkeyPatch, name: str) -> list[int]:
    """Return a list that records the number of rows of each call of the function `name`."""
    call, seen = getattr(rounds, name), list[int]()

    def counted(dataset: Any, rows: pa.Table, *more: Any) -> Any:
        seen.append(rows.num_rows)
        return call(dataset, rows, *more)

    monkeypatch.setattr(rounds, name, counted)
    return seen


def data_files(uri: str) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in (Path(uri) / "data").glob("*.lance")}


def test_the_report_says_what_became_of_every_row(world: World) -> None:
    world.put(range(20), 1)
    world.commit()
    files, version = data_files(world.uri), world.version()
    world.put(range(10, 25), 2)  # 10 existing keys, 5 new ones
    world.put([24], 3)  # replaces one of the new rows
    world.delete([0, 1, 23, 99])  # two existing keys, one new key, one unknown key
    report = world.commit()
    new = [size for name, size in data_files(world.uri).items() if name not in files]
    assert (report.rows_inserted, report.rows_updated, report.rows_deleted) == (4, 10, 2)
    assert report.rows_skipped == 4  # rows 24 and 23 of the first put, the tombstones of 23 and 99
    assert (report.files_written, report.bytes_written) == (len(new), sum(new))
    assert (report.versions, report.version) == (2, version + 2)
    assert report.rows_repaired == 0


def test_nothing_is_written_for_nothing(world: World) -> None:
    report = world.commit()
    assert (report.versions, report.files_written, report.bytes_written, report.rows_skipped) == (0, 0, 0, 0)


def test_memory_bounds_what_one_round_takes(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in range(6):
        world.put(range(n * 5, n * 5 + 30), n)
    world.delete([12, 13])
    size = max(sst.in_memory_bytes or 0 for manifest in world.latest() for sst in manifest.ssts)
    upserts = counting(monkeypatch, "upsert_pass")
    report = world.commit(memory_max=4 * size)
    assert world.found() == world.oracle
    assert len(upserts) >= 3
    assert max(upserts) <= 4 * 30
    assert report.ssts == sum(world.generations())
    assert world.committed() == dict(enumerate(world.generations()))


def test_a_commit_ends_while_others_go_on_to_publish(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """With many regions, one of them publishes an SST in each round. The commit must end nevertheless: catching up
    indexes and pruning manifests follow only at its end."""
    read, published = rounds.read_changes, list[int]()

    def published_meanwhile(*args: Any) -> Any:
        taken = read(*args)
        assert len(published) < 10, "the commit goes on and on"
        published.append(len(published))
        world.put(range(10), 100 + len(published))
        return taken

    monkeypatch.setattr(rounds, "read_changes", published_meanwhile)
    world.put(range(20), 1)
    first = world.commit()
    assert (len(published), first.ssts) == (1, 2)
    assert all(len(manifest.ssts) == 1 for manifest in world.latest())  # those of the commit were pruned
    monkeypatch.undo()
    assert world.commit().ssts == 2
    assert world.found() == world.oracle


def test_one_sst_is_taken_however_large(world: World) -> None:
    world.put(range(30), 1)
    world.put(range(10, 40), 2)
    assert world.commit(memory_max=1).ssts == 4
    assert world.found() == world.oracle


def test_ssts_are_read_side_by_side_and_the_newest_row_still_wins(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers = set()
    read = changes.read_sst

    def noted(*args: Any) -> pa.Table:
        readers.add(threading.current_thread().name)
        return read(*args)

    monkeypatch.setattr(changes, "read_sst", noted)
    for n in range(8):
        world.put(range(n, n + 20), n)
    world.commit()
    assert world.found() == world.oracle
    assert all(name.startswith("parallel") for name in readers)


def test_rows_that_lance_did_not_add_are_reported(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.put(range(20), 1)
    count, missing = lance.LanceDataset.count_rows, itertools.count()  # one less after the pass than before it
    monkeypatch.setattr(lance.LanceDataset, "count_rows", lambda *args: count(*args) - next(missing))
    with raises(CountMismatch):
        world.commit()


def test_the_committer_that_planned_first_is_given_way(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second committer finds the plan of the first one, waits, and finds the commit done: it merges nothing."""
    world.put(range(100), 1)
    world.delete([5])
    passes = [counting(monkeypatch, "delete_pass"), counting(monkeypatch, "upsert_pass")]
    planned, reports = threading.Event(), list[CommitReport]()
    read = rounds.read_changes

    def slow(*args: Any) -> Any:
        planned.set()
        found = read(*args)
        SystemClock().sleep(0.3)
        return found

    monkeypatch.setattr(rounds, "read_changes", slow)

    def one() -> None:
        reports.append(flush.commit(world.uri, {}, world.store, clock=SystemClock(), courtesy=60.0))

    racers = [threading.Thread(target=one) for _ in range(2)]
    racers[0].start()
    assert planned.wait(60)
    racers[1].start()
    for racer in racers:
        racer.join()
    assert sorted(report.ssts for report in reports) == [0, sum(world.generations())]
    assert [len(each) for each in passes] == [1, 1]
    assert world.found() == world.oracle


def test_a_plan_of_one_that_crashed_is_waited_for_once_and_no_longer(world: World) -> None:
    world.put(range(20), 1)
    with killed_at(rounds, "read_changes"):
        world.commit(committer="first")
    clock = FakeClock()
    assert flush.commit(world.uri, {}, world.store, clock=clock, courtesy=2.0).ssts == 2
    assert 2.0 <= sum(clock.slept) < 3.0


def test_nobody_waits_for_a_plan_of_its_own(world: World) -> None:
    world.put(range(20), 1)
    with killed_at(rounds, "read_changes"):
        world.commit(committer="me")
    clock = FakeClock()
    assert flush.commit(world.uri, {}, world.store, clock=clock, committer="me").ssts == 2
    assert clock.slept == []


def test_rows_keep_their_stable_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table that was created with stable row ids keeps them through upserts and compactions."""
    create: Callable[..., Any] = lance.write_dataset
    with monkeypatch.context() as making:
        making.setattr(lance, "write_dataset", lambda *a, **k: create(*a, **k, enable_stable_row_ids=True))
        world = World(str(tmp_path / "table"), buckets=1)
    world.put(range(20), 1)
    world.commit()
    before = ids_of(world.uri)
    world.put(range(15, 25), 2)
    world.delete(range(5))
    world.commit()
    lance.dataset(world.uri).optimize.compact_files()
    assert lance.dataset(world.uri).has_stable_row_ids
    after = ids_of(world.uri)
    assert world.found() == world.oracle
    assert {id: row for id, row in after.items() if id in before} == {id: before[id] for id in range(5, 20)}
    assert not set(before.values()) & {after[id] for id in range(20, 25)}


def ids_of(uri: str) -> dict[int, int]:
    rows = lance.dataset(uri).to_table(columns=["id"], with_row_id=True).to_pylist()
    return {row["id"]: row["_rowid"] for row in rows}
