"""A commit writes every published row once and the newest per key, whichever programs write beside it and crash."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest

from memwal import flush
from memwal.flush import BaseTable, CommitConflict, CommitReport, CountMismatch
from memwal.flush.commits import committer, rounds
from memwal.flush.commits.changes import read_changes
from memwal.flush.commits.merge_passes import Written, delete_pass, upsert_pass
from memwal.flush.commits.plan import agree, uncommitted
from memwal.memtable import IndexSpec
from memwal.wal import Corrupt, bucket_region
from tests.commit_world import World
from tests.messages import raises
from tests.support.clock import FakeClock
from tests.support.interpose import killed_at
from tests.support.together import together


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(str(tmp_path / "table"))


def test_newest_row_of_each_key_wins_over_generations(world: World) -> None:
    world.put(range(20), 1)
    world.put(range(5, 10), 2)
    world.delete(range(8, 15))
    world.put([9, 30], 4)
    version = world.version()
    report = world.commit()
    assert world.found() == world.oracle
    assert world.committed() == dict(enumerate(world.generations()))
    assert (report.rows_inserted, report.rows_updated, report.rows_deleted) == (len(world.oracle), 0, 0)
    assert report.version == world.version() == version + 2  # a deletes pass, though for new keys only


def test_upserts_alone_are_one_version(world: World) -> None:
    world.put(range(20), 1)
    before = world.version()
    assert world.commit().version == before + 1


def test_deletes_alone_are_one_version_that_carries_the_progress(world: World) -> None:
    world.put(range(20), 1)
    world.commit()
    world.delete(range(20))
    before = world.version()
    report = world.commit()
    assert (report.version, report.rows_deleted, world.found()) == (before + 1, 20, {})
    assert world.committed() == {0: 2, 1: 2}


def test_tombstones_of_keys_nobody_has_are_committed_too(world: World) -> None:
    world.delete(range(10))
    assert world.commit().rows_deleted == 0
    assert world.committed() == {0: 1, 1: 1}


def test_the_base_schema_is_kept(world: World) -> None:
    world.put(range(4), 1)
    world.commit()
    assert BaseTable.open(world.uri).schema.equals(world.base.schema, check_metadata=True)
    assert not lance.dataset(world.uri).schema.field("n").nullable


def test_a_crash_between_the_passes_is_repeated_to_the_same_table(world: World) -> None:
    world.put(range(20), 1)
    world.commit()
    world.put(range(15, 25), 2)
    world.delete(range(5))
    with killed_at(rounds, "upsert_pass"):
        world.commit()
    assert world.committed() == {0: 1, 1: 1}
    assert set(world.found()) == set(range(5, 20))
    world.put([3, 40], 3)  # published between the crash and the next commit
    world.commit()
    assert world.found() == world.oracle
    assert world.listed() == [0, 0]


def test_two_committers_at_once_commit_everything_once(world: World) -> None:
    reports: list[CommitReport] = []
    for n in range(4):
        world.put(range(n * 10, n * 10 + 30), n)
        world.delete(range(n * 10, n * 10 + 3))
        reports += together(world.commit, world.commit)
        assert world.found() == world.oracle
    assert len(reports) == 8
    assert sum(report.ssts for report in reports) == sum(world.generations())


def test_committers_do_not_keep_each_other_from_committing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another committer's deletes pass lands first in every round. This committer's deletes pass is then empty, and
    must not write a version: the two would keep each other from committing."""
    world.put(range(20), 1)
    world.commit()
    world.put(range(30, 40), 2)
    world.delete(range(5))
    keys = pa.table({"id": pa.array(range(5))}).cast(pa.schema([world.base.schema.field("id")]))
    other = rounds.delete_pass

    def overtaken(dataset: Any, *arguments: Any) -> Written:
        other(lance.dataset(world.uri), keys)
        return other(dataset, *arguments)

    monkeypatch.setattr(rounds, "delete_pass", overtaken)
    report = world.commit(retries=1)
    assert world.found() == world.oracle
    assert (report.rows_inserted, report.ssts) == (10, sum(world.generations()) - 2)


def test_a_committer_that_slept_through_a_newer_commit_changes_nothing(world: World) -> None:
    """It made its plan before a newer generation was published, and wakes after that generation is committed."""
    world.put(range(20), 1)
    world.commit()
    world.put([1, 2, 30], 2)
    world.delete([3, 4])
    asleep = BaseTable.open(world.uri)
    todo = uncommitted(world.latest(), asleep.committed)
    plans = [agree(world.store, each, clock=FakeClock()) for each in todo]
    changes = read_changes(world.store, plans, asleep.schema, asleep.key)
    world.commit()
    world.put([3, 4], 5)
    world.delete([1, 30])
    world.commit()
    with raises(OSError):
        delete_pass(asleep.dataset, changes.deletes)
    awake = BaseTable.open(world.uri, version=asleep.version)
    with raises(OSError):
        upsert_pass(awake.dataset, changes.upserts, ["id"], {plan.region: plan.last for plan in plans})
    assert world.found() == world.oracle


def test_a_range_planned_by_another_committer_is_taken_as_it_is(world: World) -> None:
    world.put([1, 2, 3, 4], 1)
    for plan in uncommitted(world.latest(), {}):
        agree(world.store, plan, clock=FakeClock())
    world.delete([1, 2, 3, 4])
    before = world.version()
    report = world.commit()
    assert (report.rows_inserted, report.rows_deleted, world.found()) == (4, 4, {})
    assert report.version == before + 2


def test_patience_ends_and_nothing_is_lost(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.put(range(20), 1)
    with monkeypatch.context() as busy:
        ids = iter(range(1000, 2000))

        def overtaken(*args: Any) -> Any:
            changes = read_changes(*args)
            world.stranger_row(next(ids), 0)
            return changes

        busy.setattr(rounds, "read_changes", overtaken)
        with raises(CommitConflict):
            world.commit(retries=2)
    lance.dataset(world.uri).delete("true")
    world.commit()
    assert world.found() == world.oracle


def test_a_gap_in_the_generations_is_corruption(world: World) -> None:
    world.put(range(20), 1)
    world.put(range(20), 2)
    flush.prune(world.store, bucket_region(0), 1)
    with raises(Corrupt):
        world.commit()
    assert world.listed() == [1, 0]
    assert set(world.found().values()) == {2}


def test_a_missing_sst_stops_the_commit_of_its_region_alone(world: World) -> None:
    world.put(range(20), 1)
    (directory, *_) = Path(world.uri).glob("_mem_wal/*/*_gen_1")
    shutil.rmtree(directory)
    with raises(Corrupt):
        world.commit()
    assert sorted(world.listed()) == [0, 1]
    assert 0 < len(world.found()) < 20


def test_a_key_the_base_holds_twice_stops_the_commit_of_its_region_before_it_writes(world: World) -> None:
    world.stranger_row(1, 0)
    world.stranger_row(1, 0)
    world.put(range(5), 1)
    with raises(CountMismatch):
        world.commit()
    assert sorted(world.listed()) == [0, 1]
    assert lance.dataset(world.uri).count_rows("id = 1 AND n = 0") == 2
    lance.dataset(world.uri).delete("_rowaddr = 0")
    world.commit()
    assert world.found() == world.oracle


def test_a_vector_index_is_built_once_there_are_rows_enough_and_then_extended(tmp_path: Path) -> None:
    world = World(str(tmp_path / "table"), indexes=[IndexSpec("vector", "ivf_pq"), IndexSpec("n", "btree")])

    def indexed() -> dict[str, int]:
        return {each.name: each.num_rows_indexed for each in lance.dataset(world.uri).describe_indices()}

    world.put(range(200), 1)
    world.commit()
    assert (indexed().get("vector_idx"), indexed()["n_idx"]) == (None, 200)
    world.put(range(200, 300), 2)
    world.commit()
    assert (indexed()["vector_idx"], indexed()["n_idx"]) == (300, 300)
    world.put(range(300, 350), 3)
    report = world.commit()
    assert (indexed()["vector_idx"], indexed()["n_idx"]) == (350, 350)
    assert report.version == world.version()
    assert world.commit().version == report.version


def test_indexes_catch_up_with_what_a_crashed_commit_left(tmp_path: Path) -> None:
    world = World(str(tmp_path / "table"), indexes=[IndexSpec("n", "btree")])
    world.put(range(20), 1)
    with killed_at(committer, "catch_up"):
        world.commit()
    assert world.commit().ssts == 0
    (index,) = [each for each in lance.dataset(world.uri).describe_indices() if each.name == "n_idx"]
    assert index.num_rows_indexed == 20


def test_a_commit_prints_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    world = World(str(tmp_path / "table"), indexes=[IndexSpec("vector", "ivf_pq"), IndexSpec("note", "fts")])
    world.put(range(300), 1)
    world.commit()
    world.put(range(310), 2)
    world.delete([1])
    world.commit()
    assert capfd.readouterr() == ("", "")


TEXTS, BYTES = ["", "a", "b\0", "é", "b", "c"], [b"", b"a", b"\0", b"\xff", b"b", b"c"]


@pytest.mark.parametrize(
    "keys",
    [
        pa.array(range(-3, 3), pa.int8()),
        pa.array(range(6), pa.uint64()),
        pa.array([True, False]),
        *(pa.array(TEXTS, kind) for kind in (pa.string(), pa.large_string())),
        *(pa.array(BYTES, kind) for kind in (pa.binary(), pa.large_binary())),
    ],
    ids=lambda keys: str(keys.type),
)
def test_one_range_is_accepted_once_whatever_the_key_type(tmp_path: Path, keys: pa.Array) -> None:
    """The commit relies on this: of two upserts of one range on the same version, Lance refuses the second one."""
    schema = pa.schema([pa.field("k", keys.type, nullable=False), pa.field("n", pa.int64())])
    uri = str(tmp_path / "table")
    base = BaseTable.create(uri, schema, ["k"], 2, [])
    rows = pa.table({"k": keys, "n": range(len(keys))}).cast(base.schema)
    region = bucket_region(0)
    first, second = (BaseTable.open(uri).dataset for _ in range(2))
    assert upsert_pass(first, rows, ["k"], {region: 1}).inserted == len(keys)
    with raises(OSError):
        upsert_pass(second, rows, ["k"], {region: 1})
    assert delete_pass(BaseTable.open(uri).dataset, rows.select(["k"]).slice(1), {region: 2}).deleted == len(keys) - 1
    assert lance.dataset(uri).to_table().column("k").to_pylist() == [keys[0].as_py()]
