"""Other programs write into the base table during a commit: no row is doubled, and no row is lost."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from memwal.flush import BaseTable, CountMismatch
from memwal.flush.commits import foreign_writes
from memwal.flush.commits.foreign_writes import lance_detects_duplicates, look_back
from memwal.flush.commits.merge_passes import upsert_pass
from memwal.flush.commits.report import CommitTotals
from memwal.wal import bucket_region
from tests.commit_world import World, crash
from tests.messages import raises
from tests.support.interpose import Once, killed_at

BLIND = [pa.int8(), pa.uint16()]
"""Key types whose concurrent inserts of one key Lance accepts without a conflict, as it does for bool and for all other
types of 8 and 16 bits."""


def grown(path: Path, key_type: pa.DataType | None = None) -> World:
    """Return a table with 20 committed rows."""
    world = World(str(path / "table"), key_type=key_type)
    world.put(range(20), 1)
    world.commit()
    return world


@pytest.fixture
def world(tmp_path: Path) -> World:
    return grown(tmp_path)


@pytest.fixture(params=BLIND, ids=str)
def blind(request: pytest.FixtureRequest, tmp_path: Path) -> World:
    return grown(tmp_path, request.param)


def index(uri: str) -> None:
    lance.dataset(uri).create_scalar_index("n", "BTREE", name="strangers_idx")


STRANGERS: dict[str, Callable[[World], Any]] = {
    "append": lambda world: world.stranger_row(100, 5),
    "append of our key": lambda world: world.stranger_row(25, 5),
    "merge": lambda world: world.stranger_merge(100, 5),
    "merge of our new key": lambda world: world.stranger_merge(25, 5),
    "merge of our old key": lambda world: world.stranger_merge(7, 5),
    "update": lambda world: lance.dataset(world.uri).update({"n": "5"}, where="id in (7, 9)"),
    "delete": lambda world: lance.dataset(world.uri).delete("id in (1, 7, 9)"),
    "delete of all": lambda world: lance.dataset(world.uri).delete("true"),
    "compaction": lambda world: lance.dataset(world.uri).optimize.compact_files(),
    "index": lambda world: index(world.uri),
    "settings": lambda world: lance.dataset(world.uri).update_config({"a": "b"}),
    "new column": lambda world: lance.dataset(world.uri).add_columns(pa.field("more", pa.int64())),
}


@pytest.mark.parametrize("stranger", STRANGERS)
def test_a_commit_meets_every_kind_of_stranger(world: World, once: Once, stranger: str) -> None:
    """The result is the same as if the other program had written just before the commit: the commit's rows win, and
    the other program's rows for other keys remain."""
    world.put(range(20, 30), 0)  # another fragment, for the compaction
    world.delete(range(20, 30))
    world.commit()
    world.put(range(5, 30), 2)
    world.delete([15, 16])
    once(foreign_writes, "look_back", lambda: STRANGERS[stranger](world), after=True)
    world.commit()
    if stranger in ("append", "merge"):
        world.oracle[100] = 5
    if stranger == "delete":
        world.oracle.pop(1)
    if stranger == "delete of all":
        world.oracle = {id: n for id, n in world.oracle.items() if n == 2}
    assert world.found() == world.oracle
    assert world.listed() == [0, 0]
    assert world.commit().versions == 0


@pytest.mark.parametrize(
    "keys",
    [
        *(pa.array([3], kind) for kind in (pa.int32(), pa.int64(), pa.uint32(), pa.uint64(), *BLIND)),
        *(pa.array(["a"], kind) for kind in (pa.string(), pa.large_string())),
        *(pa.array([b"a"], kind) for kind in (pa.binary(), pa.large_binary())),
        pa.array([True]),
    ],
    ids=lambda keys: str(keys.type),
)
def test_the_types_that_lance_tells_apart(tmp_path: Path, keys: pa.Array) -> None:
    """Check each type on Lance, alone and with a second key column: another release of pylance may differ."""
    for names in (["k"], ["other", "k"]):
        rows = pa.table({"other": pa.array(["same"]), "k": keys, "n": [1]})
        schema = pa.schema([pa.field(each.name, each.type, nullable=each.name == "n") for each in rows.schema])
        uri = str(tmp_path / names[0])
        base = BaseTable.create(uri, schema, names, 1, [])
        rows = rows.cast(base.schema)
        other = lance.dataset(uri).merge_insert(names).when_matched_update_all().when_not_matched_insert_all()
        other.use_index(False).execute(rows)
        if lance_detects_duplicates(base.schema, names):
            with raises(OSError):
                upsert_pass(base.dataset, rows, names, {bucket_region(0): 1})
        else:
            upsert_pass(base.dataset, rows, names, {bucket_region(0): 1})
            assert lance.dataset(uri).count_rows() == 2


def test_a_key_that_two_merges_insert_at_once_stands_once(blind: World, once: Once) -> None:
    blind.put(range(15, 30), 2)
    once(foreign_writes, "look_back", lambda: blind.stranger_merge(25, 5), after=True)
    report = blind.commit()
    assert blind.found() == blind.oracle
    assert (report.rows_repaired, report.rows_inserted, report.rows_updated) == (1, 10, 5)
    assert report.versions == 2
    assert blind.commit().versions == 0


def test_a_bool_key_too(tmp_path: Path, once: Once) -> None:
    world = World(str(tmp_path / "table"), key_type=pa.bool_())
    world.put([True], 2)
    once(foreign_writes, "look_back", lambda: world.stranger_merge(True, 5), after=True)
    assert world.commit().rows_repaired == 1
    assert world.found() == world.oracle


def test_a_crash_before_the_second_look_is_made_good_by_the_next_commit(blind: World, once: Once) -> None:
    blind.put(range(15, 30), 2)
    once(foreign_writes, "look_back", lambda: blind.stranger_merge(25, 5), after=True)
    with killed_at(CommitTotals, "committed"):
        blind.commit()
    assert sorted(lance.dataset(blind.uri).to_table(filter="id = 25").column("n").to_pylist()) == [2, 5]
    blind.put([1], 3)
    assert blind.commit().rows_repaired == 1
    assert blind.found() == blind.oracle


def test_a_strangers_merge_that_saw_nothing_of_our_commit_stands(blind: World) -> None:
    """The merge was planned before the commit and landed after it. The later version wins: the other program's row."""
    late = lance.dataset(blind.uri)
    blind.put(range(25, 30), 2)
    blind.commit()
    row = pa.table({"note": [None], "id": [27], "n": [5], "vector": [None]}, schema=blind.base.schema)
    merge = late.merge_insert("id").when_matched_update_all().when_not_matched_insert_all().use_index(False)
    merge.conflict_retries(0).execute(row)
    assert lance.dataset(blind.uri).count_rows("id = 27") == 2
    blind.put([1], 3)
    assert blind.commit().rows_repaired == 1
    assert blind.found() == {**blind.oracle, 27: 5}


def test_a_doubled_key_that_is_nobodys_race_is_not_repaired(blind: World) -> None:
    blind.stranger_row(7, 70)
    blind.put([1], 3)
    with raises(CountMismatch):
        blind.commit()
    assert lance.dataset(blind.uri).count_rows("id = 7") == 2
    lance.dataset(blind.uri).delete("n = 70")
    blind.commit()
    assert blind.found() == blind.oracle


def test_a_strangers_doubled_key_is_found_though_the_commit_does_not_touch_it(world: World) -> None:
    world.stranger_row(7, 70)
    world.put([1], 3)
    with raises(CountMismatch):
        world.commit()


def test_where_nobody_else_wrote_no_row_of_the_base_is_read(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign_writes, "rows_with_keys", crash)
    world.put(range(5, 30), 2)
    world.delete([3])
    world.commit()
    lance.dataset(world.uri).optimize.compact_files()
    lance.dataset(world.uri).delete("id = 4")
    index(world.uri)
    world.put([3], 3)
    world.commit()
    world.oracle.pop(4)
    assert world.found() == world.oracle


def test_a_history_that_was_cleaned_up_counts_as_somebody(world: World) -> None:
    world.stranger_row(7, 70)
    lance.dataset(world.uri).create_scalar_index("n", "BTREE", name="strangers_idx")
    lance.dataset(world.uri).cleanup_old_versions(timedelta(0))
    assert not look_back(world.store, BaseTable.open(world.uri)).complete
    world.put(range(5, 9), 3)
    with raises(CountMismatch):
        world.commit()
    lance.dataset(world.uri).delete("n = 70")
    world.commit()
    assert world.found() == world.oracle


def test_a_long_history_is_read_so_far_and_no_further(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign_writes, "_LOOK_BACK", 3)
    for number in range(4):
        lance.dataset(world.uri).update_config({"number": str(number)})
    assert not look_back(world.store, BaseTable.open(world.uri)).complete
    world.put(range(5, 25), 2)
    report = world.commit()
    assert (report.rows_inserted, report.rows_updated) == (5, 15)
    assert look_back(world.store, BaseTable.open(world.uri)).complete


def test_keys_are_looked_for_batch_by_batch(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign_writes, "_ROWS_AT_ONCE", 1)
    world.stranger_row(50, 5)
    world.stranger_row(51, 5)
    base = BaseTable.open(world.uri)
    wanted = pa.table({"id": pa.array([3, 3, 50, 99])}).cast(pa.schema([base.schema.field("id")]))
    assert sorted(foreign_writes.rows_with_keys(base, wanted).column("id").to_pylist()) == [3, 50]
    assert foreign_writes.rows_with_keys(base, wanted.slice(0, 0)).num_rows == 0
    assert sorted(foreign_writes.added_keys(base, look_back(world.store, base)).column("id").to_pylist()) == [50, 51]
    monkeypatch.setattr(foreign_writes, "_ADDED_ROWS_MAX", 1)
    assert foreign_writes.added_keys(base, look_back(world.store, base)).num_rows == 0


def test_a_commit_that_does_not_meet_the_rows_it_read_is_reported(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.stranger_row(50, 5)
    found = foreign_writes.rows_with_keys
    monkeypatch.setattr(foreign_writes, "rows_with_keys", lambda *args: found(*args).filter(pc.field("id") != 5))
    world.put(range(5, 9), 2)
    with raises(CountMismatch):
        world.commit()


@pytest.mark.parametrize("rows", [1, 2], ids=["fragments of the version read", "versions of strangers"])
def test_what_was_to_be_read_is_compacted_and_cleaned_up_meanwhile(world: World, rows: int, once: Once) -> None:
    """The missing versions do not count as damage: the commit starts again at the newest version."""
    for id in range(100, 100 + rows):
        world.stranger_row(id, 5)
        world.oracle[id] = 5

    def tidy() -> None:
        dataset = lance.dataset(world.uri)
        dataset.optimize.compact_files()
        dataset.cleanup_old_versions(older_than=timedelta(0))

    world.put([1, 30], 6)
    once(foreign_writes, "look_back", tidy, after=True)
    world.commit()
    assert world.found() == world.oracle
