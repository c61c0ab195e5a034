"""Commits into a table without a key write each row exactly once, whatever other programs write and wherever a commit
stops."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest

from memwal.flush import BaseTable, CommitConflict, CountMismatch
from memwal.flush.commits import append_pass, committer
from memwal.flush.commits.append_pass import AppendedRows
from memwal.flush.garbage.orphans import collect_orphans
from memwal.flush.history.actions import read_history
from memwal.memtable import IndexSpec
from memwal.wal import Corrupt, bucket_region
from tests.append_world import AppendWorld
from tests.clean import assert_clean
from tests.failure_matrix import Killed
from tests.messages import raises
from tests.support.clock import FakeClock
from tests.support.interpose import Once, killed_at
from tests.support.together import together

LANCES = ("mark", "catch_up", "sync_table")


@pytest.fixture
def world(tmp_path: Path) -> AppendWorld:
    return AppendWorld(str(tmp_path / "table"))


def settled(world: AppendWorld) -> None:
    """Assert that the base holds every row once and that no commit, SST or error is left."""
    assert world.found() == world.oracle
    ours, lances = world.progress()
    assert ours == lances
    assert set(world.listed()) == {0}
    assert world.commit().versions == 0
    assert_clean(world.store, world.uri)


def test_identical_rows_are_all_kept(world: AppendWorld) -> None:
    world.put([1, 1, 2, 2, 2, *range(3, 40)])
    world.put([1, 2, 3])
    report = world.commit()
    assert (report.rows_inserted, report.rows_updated, report.rows_skipped) == (45, 0, 0)
    assert world.found()[2] == 4
    world.put([1])
    assert world.commit().rows_inserted == 1
    settled(world)


def test_a_range_is_taken_in_rounds_that_memory_bounds(world: AppendWorld) -> None:
    for n in range(4):
        world.put(range(n, n + 20))
    report = world.commit(memory_max=1)
    assert report.rows_inserted == 80
    settled(world)


def test_indexes_stay_and_are_caught_up(tmp_path: Path) -> None:
    specs = [IndexSpec("n", "btree"), IndexSpec("note", "fts"), IndexSpec("vector", "ivf_pq")]
    world = AppendWorld(str(tmp_path / "table"), indexes=specs)
    for begin in (0, 300, 600):
        world.put(range(begin, begin + 300))
        world.commit()
    dataset = lance.dataset(world.uri)
    fragments = {fragment.fragment_id for fragment in dataset.get_fragments()}
    built = {index.name: index for index in dataset.describe_indices() if not index.name.startswith("__")}
    assert len(built) == 3
    for index in built.values():
        assert {fragment for segment in index.segments for fragment in segment.fragment_ids} == fragments
    assert dataset.to_table(filter="n = 450").num_rows == 1
    assert dataset.to_table(full_text_query="450").num_rows == 1
    settled(world)


def test_field_ids_with_gaps_and_new_columns(tmp_path: Path) -> None:
    """Columns are dropped and added between two flushes; the values of each SST go into the right columns."""
    world = AppendWorld(str(tmp_path / "table"), buckets=1)
    world.put([1, 2])
    lance.dataset(world.uri).add_columns(pa.schema([("later", pa.int32())]))
    world.commit()
    base = BaseTable.open(world.uri)
    assert base.dataset.to_table().column("later").to_pylist() == [None, None]
    base.dataset.drop_columns(["note"])
    base = BaseTable.open(world.uri)
    assert base.row_field_ids is not None
    assert base.committed == {bucket_region(0): 1}
    assert lance.dataset(world.uri).to_table(columns=["n"]).column("n").to_pylist() == [1, 2]


def test_deleted_rows_of_others_stay_deleted(world: AppendWorld) -> None:
    world.put(range(20))
    world.commit()
    lance.dataset(world.uri).delete("n < 5")
    for n in range(5):
        del world.oracle[n]
    world.put([3, 3])
    world.commit()
    settled(world)


STRANGERS: dict[str, Callable[[AppendWorld], Any]] = {
    "append": lambda world: world.stranger([1, 1, 7]),
    "delete": lambda world: (lance.dataset(world.uri).delete("n = 0"), world.oracle.pop(0)),
    "compact": lambda world: lance.dataset(world.uri).optimize.compact_files(),
    "index": lambda world: lance.dataset(world.uri).create_scalar_index("n", "BTREE"),
    "extend": lambda world: lance.dataset(world.uri).optimize.optimize_indices(),
    "config": lambda world: lance.dataset(world.uri).update_config({"a": "b"}),
    "schema metadata": lambda world: lance.dataset(world.uri).update_schema_metadata({"a": "b"}),
    "column": lambda world: lance.dataset(world.uri).add_columns(pa.schema([("more", pa.int8())])),
    "commit": lambda world: world.commit(courtesy=0),
}


@pytest.mark.parametrize("name", STRANGERS)
@pytest.mark.parametrize("place", ["before the append", "before the marker"])
def test_others_come_in_between(world: AppendWorld, once: Once, name: str, place: str) -> None:
    for begin in range(3):
        world.stranger([1, *range(begin, begin + 10)])
    world.put([1, 1, 5])
    owner, where = (AppendedRows, "append") if place == "before the append" else (committer, "mark")
    once(owner, where, lambda: STRANGERS[name](world))
    world.commit()
    world.commit()
    settled(world)
    found = lance.dataset(world.uri)
    assert (found.config().get("a") == "b") == (name == "config")
    assert ((found.schema.metadata or {}).get(b"a") == b"b") == (name == "schema metadata")


def data_files(world: AppendWorld) -> int:
    return len(list(Path(world.uri).glob("data/*")))


def test_after_a_conflict_with_a_stranger_rows_are_not_written_again(world: AppendWorld, once: Once) -> None:
    world.put(range(30))
    once(AppendedRows, "append", lambda: world.stranger([5]))
    world.commit()
    assert data_files(world) == 2
    settled(world)


def test_they_are_where_the_columns_changed_meanwhile(world: AppendWorld, once: Once) -> None:
    world.put(range(30))
    once(AppendedRows, "append", lambda: lance.dataset(world.uri).drop_columns(["vector"]))
    world.commit()
    assert lance.dataset(world.uri).to_table().column_names == ["n", "note"]
    assert lance.dataset(world.uri).count_rows() == 30


def test_a_lost_race_leaves_orphans_that_are_collected(world: AppendWorld, once: Once) -> None:
    world.put(range(30))
    once(AppendedRows, "append", lambda: world.commit(courtesy=0))
    world.commit()
    assert data_files(world) == 2
    clock = FakeClock()
    clock.sleep(4e9)  # the files have times of the system's clock
    found = collect_orphans(world.store, lance.dataset(world.uri), clock, 86_400.0)
    assert [key for key in found.files if key.startswith("data/")]
    assert data_files(world) == 1
    settled(world)


def test_committers_at_once(world: AppendWorld) -> None:
    """Several threads commit the same SSTs: of any two commits Lance accepts one."""
    for n in range(6):
        world.put([1, n, *range(40)])

    def commits() -> None:
        with suppress(CommitConflict):
            world.commit(retries=40, courtesy=0, memory_max=1)

    together(*[commits] * 3)
    world.commit(retries=40)
    settled(world)


def test_without_the_swap_rows_would_double(world: AppendWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault that the tests above must detect: a plain append conflicts with no other append."""

    def plain(self: Any, base: Any) -> Any:
        operation = lance.LanceOperation.Append(self._fragments)
        lance.LanceDataset.commit(base.dataset, operation, read_version=base.version)
        raise Killed

    world.put([1, 2])
    with monkeypatch.context() as planted:
        planted.setattr(AppendedRows, "append", plain)
        with pytest.raises(Killed):
            world.commit()
    world.commit()
    assert world.found() != world.oracle


def test_rows_that_lance_did_not_write_are_missed(world: AppendWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    world.put(range(30))
    version = lance.dataset(world.uri).version

    def takes_and_drops(rows: pa.RecordBatchReader, *_: Any, **__: Any) -> list[Any]:
        rows.read_all()
        return []

    with monkeypatch.context() as planted:
        planted.setattr(append_pass, "write_fragments", takes_and_drops)
        with raises(CountMismatch):
            world.commit()
    assert lance.dataset(world.uri).version == version
    world.commit()
    settled(world)


def test_rows_that_a_version_does_not_hold_are_missed(world: AppendWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    world.put(range(30))
    append = AppendedRows.append

    def loses_them(self: Any, base: Any) -> Any:
        self._fragments.clear()
        return append(self, base)

    monkeypatch.setattr(AppendedRows, "append", loses_them)
    with raises(CountMismatch):
        world.commit()


def test_rows_whose_writing_failed_are_written_again(world: AppendWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """Storage fails after the files are written, and another program's append makes the commit start again."""
    world.put(range(30))
    write = append_pass.write_fragments

    def fails_once(*arguments: Any, **more: Any) -> Any:
        monkeypatch.setattr(append_pass, "write_fragments", write)
        write(*arguments, **more)
        lance.write_dataset(world.table([99]), world.uri, mode="append")
        raise OSError("storage went away")

    monkeypatch.setattr(append_pass, "write_fragments", fails_once)
    world.oracle[99] += 1
    assert world.commit().rows_inserted == 30
    assert world.found() == world.oracle


@pytest.mark.usefixtures("only_process")
def test_a_damaged_sst_is_named_and_nothing_is_appended(world: AppendWorld) -> None:
    world.put(range(30))
    version = lance.dataset(world.uri).version
    for file in Path(world.uri).glob("_mem_wal/*/*_gen_1/data/*.lance"):
        file.unlink()
    with raises(Corrupt):
        world.commit()
    assert lance.dataset(world.uri).version == version


def test_the_log_names_commits_and_their_rows(world: AppendWorld) -> None:
    world.put(range(10))
    world.commit()
    kinds = [[action.kind for action in change.actions or ()] for change in read_history(world.store).changes]
    assert kinds[0] == ["mark", "mark"]
    assert kinds[1] == ["insert", "commit", "commit"]
    (inserted,) = [each for each in read_history(world.store).changes[1].actions or () if each.kind == "insert"]
    assert inserted.details == {"rows": 10}


# ---- crashes -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> AppendWorld:
    """Return a base with rows and two generations in each of two regions, one of them already committed."""
    world = AppendWorld(str(tmp_path_factory.mktemp("prepared") / "table"), indexes=[IndexSpec("n", "btree")])
    world.put(range(20))
    world.commit()
    world.put([1, 1, *range(15, 30)])
    world.put([1, *range(15, 30)])
    return world


def test_killed_at_any_call_of_the_store(prepared: AppendWorld, tmp_path: Path) -> None:
    for world in prepared.killed_at_each_call(tmp_path, AppendWorld.commit):
        world.commit()
        settled(world)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("name", ["write", "append", *LANCES])
def test_killed_at_any_call_of_lance(prepared: AppendWorld, tmp_path: Path, name: str, after: bool) -> None:
    world = prepared.copied(tmp_path)
    with killed_at(AppendedRows if name in ("write", "append") else committer, name, after=after):
        world.commit()
    appended = (name, after) not in [("write", False), ("write", True), ("append", False)]
    ours, lances = world.progress()
    assert ours == ({0: 3, 1: 3} if appended else {0: 1, 1: 1})
    assert lances == (ours if appended and (name, after) not in [("append", True), ("mark", False)] else {0: 1, 1: 1})
    assert world.commit().rows_inserted == (0 if appended else 33)
    settled(world)
