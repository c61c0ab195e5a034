"""Loads past the log are applied exactly once per token, whatever crashes and whichever programs write beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import lance
import pyarrow as pa
import pytest

from memwal import flush
from memwal.flush import BaseTable, CommitConflict
from memwal.flush.base.state import read_state, versions
from memwal.flush.commits import committer, foreign_writes, load_notes, rounds
from memwal.flush.commits import load as loading
from memwal.flush.commits.append_pass import AppendedRows
from memwal.flush.commits.load import LoadReport, finish_load, loaded_in
from memwal.flush.commits.load_notes import begin_load, ended_id, has_landed, is_load, load_id
from memwal.flush.errors import DoubledKey, LoadEnded
from memwal.flush.history.actions import read_history
from memwal.flush.verification.runner import verify_table
from memwal.memtable import IndexSpec
from memwal.wal import LocalStore, SystemClock, SystemIds, bucket_region
from memwal.wal.layout import UNSHARDED_REGION
from tests.append_world import AppendWorld
from tests.clean import assert_clean
from tests.commit_world import World
from tests.load_world import begun, keyed, load_appended, load_keyed, rows_of, settled
from tests.messages import raises
from tests.support.clock import FakeClock
from tests.support.interpose import Once, killed_at, run_once
from tests.support.together import together


@pytest.fixture(params=["int64", "int16"])
def world(tmp_path: Path, request: pytest.FixtureRequest) -> World:
    """Return a table with a key. Lance detects two merges that insert one key for the first key type only."""
    return World(str(tmp_path / "table"), key_type=getattr(pa, request.param)())


@pytest.fixture
def appends(tmp_path: Path) -> AppendWorld:
    return AppendWorld(str(tmp_path / "appended"))


# ---- ids -----------------------------------------------------------------------------------------------------------


def test_ids_tell_loads_from_regions() -> None:
    assert is_load(load_id("books"))
    assert load_id("books") == load_id("books") != load_id("Books")
    assert load_id("books").version == 8
    assert load_id("").bytes[:4] == b"load"
    regions = [bucket_region(0), UNSHARDED_REGION, SystemIds().uuid(), UUID(int=0)]
    assert not any(map(is_load, regions))


# ---- what a load does ----------------------------------------------------------------------------------------------


def test_rows_are_inserted_and_replaced_and_a_token_lands_once(world: World) -> None:
    world.put(range(20), 1)
    world.commit()
    report = load_keyed(world, range(10, 30), 2)
    assert (report.rows_inserted, report.rows_replaced, report.already) == (10, 10, False)
    assert report.loaded_in == world.version()
    assert report.files_written == 1
    assert report.bytes_written
    settled(world)
    again = load_keyed(world, range(40, 50), 3)
    assert again.already
    assert (again.rows_inserted, again.loaded_in) == (0, report.loaded_in)
    settled(world)
    load_keyed(world, range(5), 4, token="another")
    settled(world)


def test_without_a_key_rows_are_appended_once(appends: AppendWorld) -> None:
    appends.put([1, 2])
    appends.commit()
    report = load_appended(appends, [1, 1, 7])
    assert (report.rows_inserted, report.rows_replaced, report.already) == (3, 0, False)
    assert load_appended(appends, [8]).already
    settled(appends)
    base = BaseTable.open(appends.uri)
    assert base.marked[load_id("t")] == base.committed[load_id("t")] == 1
    assert has_landed(base.committed, load_id("t"))


def test_a_repeat_finishes_what_has_landed_and_writes_nothing_else(world: World) -> None:
    """A restore may undo a load before a repeat finishes it; the token is then free again."""
    before = world.version()
    assert not finish_load(world.uri, {}, world.store, "t", clock=FakeClock())
    load_keyed(world, range(5), 1)
    assert finish_load(world.uri, {}, world.store, "t", clock=FakeClock())
    settled(world)
    lance.dataset(world.uri, version=before).restore()
    assert not finish_load(world.uri, {}, world.store, "t", clock=FakeClock())
    assert load_keyed(world, range(5), 2).rows_inserted == 5
    settled(world)


def test_into_an_empty_table_and_after_a_later_version_was_read(world: World) -> None:
    assert load_keyed(world, range(300), 1).rows_inserted == 300
    world.put(range(290, 310), 2)
    world.commit()
    settled(world)
    assert loaded_in(world.store, BaseTable.open(world.uri), "t") == 3
    assert loaded_in(world.store, BaseTable.open(world.uri), "other") == 0


def test_a_row_in_an_sst_hides_the_loaded_row_and_replaces_it(world: World) -> None:
    world.put([1], 1)  # published, not committed: as put while the load runs
    load_keyed(world, [1, 2], 2)
    world.oracle[1] = 1
    world.commit()
    settled(world)


def test_history_and_the_note_name_the_load(world: World, appends: AppendWorld) -> None:
    for each, report in ((world, load_keyed(world, [1, 2], 2)), (appends, load_appended(appends, [3]))):
        (change,) = (c for c in read_history(each.store).changes if c.state.version == report.loaded_in)
        assert [action.kind for action in change.actions or ()] == ["insert", "load"]
        assert load_notes.noted_token(each.store, report.id) == "t"
    assert load_notes.noted_token(world.store, load_id("other")) is None


def test_a_delete_before_a_load_is_no_half_of_it(world: World) -> None:
    load_keyed(world, range(4), 1)
    lance.dataset(world.uri).delete("id = 3")
    load_keyed(world, [1], 2, token="second")
    deleted = [c for c in read_history(world.store).changes if c.actions and c.actions[0].kind == "delete"]
    assert [change.part_of for change in deleted] == [None]


def test_indexes_are_extended(tmp_path: Path) -> None:
    indexes = [IndexSpec("vector", "ivf_pq"), IndexSpec("note", "fts"), IndexSpec("n", "btree")]
    world = World(str(tmp_path / "table"), indexes=indexes)
    world.put(range(400), 1)
    world.commit()
    load_keyed(world, range(300, 900), 2)
    dataset = lance.dataset(world.uri)
    fragments = {fragment.fragment_id for fragment in dataset.get_fragments()}
    built = {index.name: index for index in dataset.describe_indices() if not index.name.startswith("__")}
    assert len(built) == 3
    for index in built.values():
        assert {f for segment in index.segments for f in segment.fragment_ids} >= fragments, index.name
    settled(world)
    assert dataset.to_table(filter="n = 2").num_rows == 600
    assert dataset.to_table(full_text_query="899").column("id").to_pylist() == [899]
    row = dataset.to_table(filter="id = 777").to_pylist()[0]
    near = dataset.to_table(nearest={"column": "vector", "q": row["vector"], "k": 5, "refine_factor": 50})
    assert 777 in near.column("id").to_pylist()


def test_restoring_the_base_takes_the_token_back(world: World) -> None:
    world.put([1], 1)
    before = world.commit().version
    load_keyed(world, [1, 2], 2)
    dataset = lance.dataset(world.uri, version=before)
    dataset.restore()
    world.oracle = {1: 1}
    settled(world)
    assert not load_keyed(world, [1, 2], 3).already
    settled(world)


# ---- crashes -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> World:
    world = World(str(tmp_path_factory.mktemp("prepared") / "table"), 1, [IndexSpec("n", "btree")], key_type=pa.int16())
    world.put(range(20), 1)
    world.commit()
    return world


def loaded_after_a_crash(world: World) -> LoadReport:
    assert_clean(world.store, world.uri)
    report = load_keyed(world, range(10, 30), 2)
    world.oracle |= dict.fromkeys(range(10, 30), 2)
    settled(world)
    assert load_keyed(world, [1], 9).already
    return report


def test_killed_at_any_call_of_the_store(prepared: World, tmp_path: Path) -> None:
    for world in prepared.killed_at_each_call(tmp_path, lambda world: load_keyed(world, range(10, 30), 2)):
        loaded_after_a_crash(world)


LANCES = (
    (loading, "note_token", False),
    (loading, "upsert_pass", False),
    (loading, "upsert_pass", True),
    (committer, "catch_up", False),
    (committer, "catch_up", True),
    (loading, "sync_table", True),
)


@pytest.mark.parametrize(("owner", "name", "after"), LANCES, ids=[f"{name} {after}" for _, name, after in LANCES])
def test_killed_at_any_call_of_lance(prepared: World, tmp_path: Path, owner: Any, name: str, after: bool) -> None:
    world = prepared.copied(tmp_path)
    world.put([2], 3)
    with killed_at(owner, name, after=after):
        load_keyed(world, range(10, 30), 2)
    world.commit()
    report = loaded_after_a_crash(world)
    assert report.already == ((name, after) not in {("note_token", False), ("upsert_pass", False)})


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("name", ["write", "append", "mark"])
def test_killed_without_a_key(appends: AppendWorld, name: str, after: bool) -> None:
    appends.put([1, 2])
    appends.commit()
    owner: Any = committer if name == "mark" else AppendedRows
    with killed_at(owner, name, after=after):
        load_appended(appends, [5, 5, 6])
    appends.oracle.update([5, 5, 6])
    report = load_appended(appends, [5, 5, 6])
    assert report.already == (name == "mark" or (name, after) == ("append", True))
    appends.oracle.subtract([] if report.already else [5, 5, 6])
    settled(appends)


def test_an_answer_that_is_lost_is_no_second_load(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    upsert = loading.upsert_pass

    def landed_without_an_answer(*given: Any, **more: Any) -> Any:
        monkeypatch.setattr(loading, "upsert_pass", upsert)
        upsert(*given, **more)
        lance.dataset(world.uri).delete("id = 999")  # another version, so that this looks like a conflict
        raise OSError("connection reset")

    monkeypatch.setattr(loading, "upsert_pass", landed_without_an_answer)
    assert load_keyed(world, [1, 2], 2).already
    world.oracle = {1: 2, 2: 2}
    settled(world)


def test_rows_that_cannot_be_read_load_nothing(world: World, appends: AppendWorld) -> None:
    class Unreadable(Exception):
        pass

    for each, rows in ((world, keyed(world, range(20), 1)), (appends, rows_of(appends.table(range(20))))):

        def broken(rows: Any = rows) -> Iterator[pa.RecordBatch]:
            yield next(rows.batches())
            raise Unreadable("file 2")

        version = lance.dataset(each.uri).version
        given = loading.RowsToLoad(rows.schema, rows.number, rows.keys, broken)
        with raises(Unreadable):
            loading.load(each.uri, {}, each.store, given, "t", begun(each), clock=FakeClock())
        assert lance.dataset(each.uri).version == version
        settled(each)


# ---- others at the same time ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [("t", "t"), ("t", "u")], ids=["one token", "two tokens"])
@pytest.mark.parametrize("has_key", [True, False], ids=["keyed", "appended"])
def test_loads_in_two_threads(world: World, appends: AppendWorld, tokens: tuple[str, str], has_key: bool) -> None:
    def one(number: int) -> LoadReport:
        rows = keyed(world, range(number, number + 50), 2) if has_key else rows_of(appends.table(range(50)))
        table: World | AppendWorld = world if has_key else appends
        token = tokens[number]
        attempt = begun(table, token)
        return loading.load(table.uri, {}, table.store, rows, token, attempt, clock=SystemClock(), retries=100)

    reports = together(lambda: one(0), lambda: one(1))
    both = tokens[0] != tokens[1]
    assert sorted(report.already for report in reports) == ([False, False] if both else [False, True])
    if has_key:
        landed = [number for number, report in enumerate(reports) if not report.already]
        world.oracle = {id: 2 for number in landed for id in range(number, number + 50)}
        settled(world)
    else:
        appends.oracle.update([*range(50)] * (1 + both))
        settled(appends)


def test_a_commit_of_the_same_keys_comes_in_between(world: World, once: Once) -> None:
    """The load and a commit insert the keys 3 and 4, and neither has seen the other: no key is doubled."""

    def commit() -> None:
        world.put(range(1, 5), 1)
        world.commit()

    once(loading, "upsert_pass", commit)
    report = load_keyed(world, range(3, 9), 2)
    assert report.rows_repaired == (2 if world.key_type == pa.int16() else 0)
    settled(world)


def test_a_load_of_the_same_keys_comes_in_between_a_commit(world: World, once: Once) -> None:
    world.put(range(1, 5), 1)
    once(rounds, "upsert_pass", lambda: load_keyed(world, range(3, 9), 2))
    world.commit()
    world.oracle |= {3: 1, 4: 1}  # not committed when the load landed
    settled(world)


@pytest.mark.parametrize("mended_by", ["a commit", "an attempt"])
def test_several_commits_come_in_between_and_the_load_crashes(
    world: World, monkeypatch: pytest.MonkeyPatch, mended_by: str
) -> None:
    """The load lands above three versions that it has not seen, and crashes before it checks them."""

    def commits() -> None:
        for id in (3, 50, 60):
            world.put([id], 1)
            world.commit()

    with monkeypatch.context() as killing:
        run_once(killing, loading, "upsert_pass", commits)
        with killed_at(loading, "upsert_pass", after=True):  # for int64 in the second attempt: Lance refuses the first
            load_keyed(world, range(3, 9), 2)
    world.oracle |= dict.fromkeys(range(3, 9), 2)
    if mended_by == "a commit":
        world.put([70], 5)
        repaired = world.commit().rows_repaired
        assert repaired == (1 if world.key_type == pa.int16() else 0)
    else:
        assert finish_load(world.uri, {}, world.store, "t", clock=FakeClock())
    settled(world)
    assert load_keyed(world, range(3, 9), 2).already


@pytest.mark.parametrize("name", ["append", "delete", "compact"])
def test_another_program_comes_in_between(world: World, once: Once, name: str) -> None:
    for begin in range(3):
        world.put(range(begin * 10, begin * 10 + 10), 1)
        world.commit()
    acts: dict[str, Callable[[], Any]] = {
        "append": lambda: world.stranger_row(500, 5),
        "delete": lambda: lance.dataset(world.uri).delete("id = 5"),
        "compact": lance.dataset(world.uri).optimize.compact_files,
    }
    once(loading, "upsert_pass", acts[name])
    world.oracle |= {500: 5} if name == "append" else {}
    load_keyed(world, range(4, 40), 2)
    settled(world)


def test_a_key_that_stands_twice_is_refused_before_anything_is_written(world: World) -> None:
    load_keyed(world, [1], 1)
    for _ in range(2):
        world.stranger_row(7, 1)
    version = world.version()
    with raises(DoubledKey):
        load_keyed(world, [3], 2, token="u")
    assert world.version() == version


def test_changed_columns_end_a_load(world: World) -> None:
    rows = keyed(world, [1], 1)
    lance.dataset(world.uri).add_columns(pa.field("more", pa.int64()))
    with raises(CommitConflict):
        loading.load(world.uri, {}, world.store, rows, "t", begun(world), clock=FakeClock())


def test_conflicts_without_an_end_are_reported(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    upsert = loading.upsert_pass

    def overtaken(*given: Any, **more: Any) -> Any:
        world.stranger_row(world.version() + 1000, 5)
        return upsert(*given, **more)

    monkeypatch.setattr(loading, "upsert_pass", overtaken)
    with raises(CommitConflict):
        load_keyed(world, [1], 1, retries=2)


# ---- resizing, and what verify finds -------------------------------------------------------------------------------


@pytest.mark.parametrize("wal_format", ["lance", "arrow"])
def test_a_resize_keeps_the_token(tmp_path: Path, wal_format: Any, once: Once) -> None:
    from tests.commit_world import SCHEMA

    uri = str(tmp_path / "table")
    base = BaseTable.create(uri, SCHEMA, ["id"], 2, [], wal_format=wal_format)
    store = LocalStore(uri)
    table = pa.Table.from_pylist([{"id": id, "n": 1} for id in range(9)], base.schema)

    def one(token: str) -> LoadReport:
        attempt = begin_load(store, BaseTable.open(uri), load_id(token), FakeClock(), SystemIds())
        return loading.load(uri, {}, store, rows_of(table, ["id"]), token, attempt, clock=FakeClock())

    one("before")
    once(lance.LanceDataset, "commit", lambda: one("while"))
    flush.resize(uri, {}, store, 3, clock=SystemClock(), ids=SystemIds())
    assert one("before").already
    assert one("while").already
    assert not one("after").already
    assert lance.dataset(uri).count_rows() == 9
    assert_clean(store, uri)


def test_verify_knows_loads(world: World) -> None:
    load_keyed(world, [1], 1)
    assert_clean(world.store, world.uri)
    base = BaseTable.open(world.uri)
    from memwal.flush.commits.append_pass import mark

    mark(base.dataset, {load_id("odd"): 2, ended_id(load_id("odd")): 3})
    (finding,) = verify_table(world.store, world.uri).findings
    assert "attempt 3 at a load was ended, above all that are committed" in str(finding)


def test_every_version_keeps_the_markers(world: World) -> None:
    load_keyed(world, [1], 1)
    world.put([1, 2, 3], 2)
    world.delete([2])
    world.commit()
    lance.dataset(world.uri).optimize.compact_files()
    newest = max(versions(world.store))
    assert load_id("t") in read_state(world.store, newest).committed


# ---- planted faults ------------------------------------------------------------------------------------------------


def test_without_the_marker_rows_would_double(appends: AppendWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault that the tests above must detect."""
    init = AppendedRows.__init__
    with monkeypatch.context() as planted, killed_at(AppendedRows, "append", after=True):
        planted.setattr(AppendedRows, "__init__", lambda self, base, _, source: init(self, base, {}, source))
        load_appended(appends, [1])
    load_appended(appends, [1])
    assert appends.found() != appends.oracle


def test_without_the_look_back_a_key_would_stand_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, once: Once
) -> None:
    world = World(str(tmp_path / "table"), key_type=pa.int16())

    def commit() -> None:
        world.put([3], 1)
        world.commit()

    once(loading, "upsert_pass", commit)
    monkeypatch.setattr(foreign_writes, "lance_detects_duplicates", lambda *_: True)
    load_keyed(world, [3], 2)
    with raises(AssertionError):
        world.found()


# ---- the request to wait -------------------------------------------------------------------------------------------


def test_a_request_to_wait_ends_by_itself(world: World) -> None:
    clock, base = FakeClock(), BaseTable.open(world.uri)
    assert not load_notes.is_asked_to_wait(world.store, clock, base)
    attempt = begun(world, clock=clock)
    assert load_notes.is_asked_to_wait(world.store, clock, base)
    clock.sleep(load_notes.LASTS + 1)
    assert not load_notes.is_asked_to_wait(world.store, clock, base)
    attempt.renew(world.store, clock)
    assert load_notes.is_asked_to_wait(world.store, clock, base)
    clock.sleep(-3600.0)  # seen from a machine whose clock is an hour behind
    assert not load_notes.is_asked_to_wait(world.store, clock, base)
    world.store.put(attempt.key, b"nonsense")
    assert not load_notes.is_asked_to_wait(world.store, clock, base)
    world.store.put("_mem_wal/loading/nonsense.json", b"{}")
    attempt.withdraw(world.store)
    assert not load_notes.is_asked_to_wait(world.store, clock, base)


# ---- attempts, and their end ---------------------------------------------------------------------------------------


def newest(world: World | AppendWorld) -> BaseTable:
    return BaseTable.open(world.uri)


def abandoned(world: World | AppendWorld, clock: FakeClock) -> load_notes.LoadAttempt:
    """Begin an attempt, and let the time pass after which another process may end it."""
    attempt = begun(world, clock=clock)
    clock.sleep(load_notes.LASTS + 1)
    return attempt


def end_abandoned(world: World | AppendWorld, clock: FakeClock) -> list[load_notes.LoadAttempt]:
    return load_notes.end_abandoned(world.store, lambda: newest(world), clock)


def test_an_attempt_that_nobody_renews_is_ended_and_lands_no_more(world: World, appends: AppendWorld) -> None:
    loads: list[tuple[Any, Any]] = [(world, load_keyed), (appends, load_appended)]
    for table, load_into in loads:
        clock = FakeClock()
        attempt = begun(table, clock=clock)
        assert end_abandoned(table, clock) == [attempt], "it is renewed"
        clock.sleep(load_notes.LASTS + 1)
        assert end_abandoned(table, clock) == []
        assert not has_landed(newest(table).committed, load_id("t"))
        assert not table.store.list("_mem_wal/loading/")
        with raises(LoadEnded):
            load_into(table, [1], 1, attempt=attempt) if table is world else load_into(table, [1], attempt=attempt)
        settled(table)
        report = load_into(table, [1], 1) if table is world else load_into(table, [1])
        assert report.rows_inserted == 1
        assert loaded_in(table.store, newest(table), "t") == report.loaded_in
        settled(table)


@pytest.mark.parametrize("first", ["the end", "the load"])
def test_of_a_load_and_its_end_one_happens(world: World, once: Once, first: str) -> None:
    """Both the load and the end have read the base before the other one writes."""
    clock = FakeClock()
    attempt = abandoned(world, clock)
    if first == "the end":
        once(loading, "upsert_pass", lambda: end_abandoned(world, clock))
        with pytest.raises(LoadEnded):
            load_keyed(world, range(3), 1, attempt=attempt)
    else:
        once(load_notes, "mark", lambda: load_keyed(world, range(3), 1, attempt=attempt))
        end_abandoned(world, clock)
    assert has_landed(newest(world).committed, load_id("t")) == (first == "the load")
    settled(world)


def test_an_end_ends_all_generations_up_to_that_of_a_note(world: World) -> None:
    """A restore undoes the end of an attempt, but the notes of later attempts stay."""
    clock, before = FakeClock(), world.version()
    abandoned(world, clock)
    end_abandoned(world, clock)
    second = begun(world, clock=clock)
    assert second.generation == 2
    lance.dataset(world.uri, version=before).restore()
    with pytest.raises(LoadEnded):
        load_keyed(world, [1], 1, attempt=second)
    first = abandoned(world, clock)
    assert end_abandoned(world, clock) == []
    for each in (first, second):
        with pytest.raises(LoadEnded):
            load_keyed(world, [1], 1, attempt=each)
    assert newest(world).committed[ended_id(load_id("t"))] == 2
    settled(world)


def test_the_note_of_a_load_that_has_landed_says_nothing(world: World) -> None:
    clock = FakeClock()
    attempt, other = begun(world, clock=clock), begun(world, clock=clock)
    load_keyed(world, [1], 1, attempt=attempt)
    late = begun(world, clock=clock)
    assert load_notes.under_way(world.store, lambda: newest(world)) == []
    version = world.version()
    assert end_abandoned(world, clock) == []
    assert (world.version(), world.store.list("_mem_wal/loading/")) == (version, [])
    for each in (other, late):
        assert load_keyed(world, [1], 2, attempt=each).already
    settled(world)


def test_history_names_what_was_ended(world: World) -> None:
    clock = FakeClock()
    attempt = abandoned(world, clock)
    end_abandoned(world, clock)
    change = next(c for c in read_history(world.store).changes if c.state.version == world.version())
    assert [(action.kind, action.details) for action in change.actions or ()] == [
        ("load ended", {"load": str(attempt.id)})
    ]
