"""`flush.history`: the actions of each version of a table, found without reading rows, and the changes between two
versions."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest

import memwal.flush.history.actions
from memwal.flush.base.state import Fragment, TableState, Transaction, read_state, versions
from memwal.flush.history.actions import Change, History, change, read_history
from memwal.flush.history.diff import diff_versions
from memwal.wal import Corrupt, bucket_region, open_store
from tests.messages import raises

ONE, TWO = str(bucket_region(0)), str(bucket_region(1))
ROWS = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("n", pa.int64())])


def kinds(found: Change) -> list[str]:
    assert found.actions is not None
    return [each.kind for each in found.actions]


def story(history: History) -> dict[int, list[tuple[str, Any]]]:
    """Return the actions of each version, with their rows, generations or index."""

    def short(kind: str, details: Any) -> tuple[str, Any]:
        if kind == "commit":
            return kind, (details["region"], details["first"], details["last"])
        return kind, next((details[name] for name in ("version", "rows", "index", "column") if name in details), None)

    return {
        each.state.version: [short(action.kind, action.details) for action in each.actions or ()]
        for each in history.changes
    }


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return str(tmp_path / "table")


def plain(uri: str, ids: range = range(10)) -> lance.LanceDataset:
    """Return a table that memwal has never opened."""
    rows = pa.table({"id": list(ids), "n": list(ids)}, schema=ROWS)
    return lance.write_dataset(rows, uri)


def newest(uri: str) -> Change:
    return read_history(open_store(uri), 1).changes[0]


def test_a_commit_is_told_by_rows_and_generations(open_small: Callable[..., Any], made: Any, uri: str) -> None:
    with open_small() as table:
        table.put(made.table(range(20), 1))
        table.flush()
        table.commit()
        first = lance.dataset(uri).version
        table.put(made.table(range(15, 30), 2))
        table.flush()
        table.delete([1, 2, 3])
        table.put(made.table([4], 3))
        table.flush()
        table.commit()
    history = read_history(open_store(uri))
    told = story(history)
    assert told[1] == [("create", 0)]
    assert [("index built", "body_idx")] in told.values()
    (inserted,) = (each for each in told.values() if ("insert", 20) in each)
    assert inserted == [("insert", 20), ("commit", (ONE, 1, 1)), ("commit", (TWO, 1, 1))]
    ((version, deleted),) = ((v, each) for v, each in told.items() if v > first and ("delete", 3) in each)
    assert deleted == [("delete", 3)]
    generations = {region: last for _, (region, _, last) in told[version + 1][2:]}
    assert told[version + 1][:2] == [("insert", 10), ("update", 6)]
    assert set(generations) == {ONE, TWO}
    assert max(generations.values()) == 3
    assert [each.part_of for each in history.changes if each.state.version == version] == [version + 1]
    assert {each.part_of for each in history.changes if each.state.version != version} == {None}


def test_deletes_alone_carry_the_progress(open_small: Callable[..., Any], made: Any, uri: str) -> None:
    with open_small(regions=1) as table:
        table.put(made.table(range(20), 1))
        table.flush()
        table.commit()
        table.delete([1, 2])
        table.flush()
        table.commit()
    told = story(read_history(open_store(uri)))
    assert [("delete", 2), ("commit", (ONE, 2, 2))] in told.values()


@pytest.mark.parametrize(
    ("do", "expected"),
    [
        (lambda ds: ds.insert(pa.table({"id": [50, 51], "n": [1, 2]}, schema=ROWS)), [("append", 2)]),
        (lambda ds: ds.delete("id < 4"), [("delete", 4)]),
        (lambda ds: ds.delete("id >= 0"), [("delete", 10)]),
        (lambda ds: ds.update({"n": "0"}, where="id < 3"), [("update", 3)]),
        (lambda ds: ds.add_columns(pa.schema([pa.field("extra", pa.string())])), [("column added", "extra")]),
        (lambda ds: ds.add_columns({"twice": "n * 2"}), [("column added", "twice")]),
        (lambda ds: ds.drop_columns(["n"]), [("column dropped", "n")]),
        (lambda ds: ds.alter_columns({"path": "n", "name": "m"}), [("column changed", "m")]),
        (lambda ds: ds.create_scalar_index("n", "BTREE", name="by_n"), [("index built", "by_n")]),
        (lambda ds: ds.update_config({"a": "b"}), [("settings", None)]),
        (lambda ds: ds.update_schema_metadata({"a": "b"}), [("settings", None)]),
        (
            lambda ds: lance.write_dataset(pa.table({"id": [1], "n": [2]}, schema=ROWS), ds.uri, mode="overwrite"),
            [("overwrite", 1)],
        ),
    ],
)
def test_what_others_do_is_told_too(uri: str, do: Callable[[lance.LanceDataset], Any], expected: list[Any]) -> None:
    do(plain(uri))
    assert story(History((newest(uri),), 0)) == {2: expected}


def test_a_merge_with_updates_and_inserts(uri: str) -> None:
    dataset = plain(uri)
    merge = dataset.merge_insert("id").when_matched_update_all().when_not_matched_insert_all()
    merge.execute(pa.table({"id": [8, 9, 10], "n": [0, 0, 0]}, schema=ROWS))
    assert story(History((newest(uri),), 0)) == {2: [("insert", 1), ("update", 2)]}


def test_compaction_index_upkeep_and_restore(uri: str) -> None:
    dataset = plain(uri)
    dataset.create_scalar_index("n", "BTREE", name="by_n")
    for number in range(3):
        lance.write_dataset(pa.table({"id": [20 + number], "n": [1]}, schema=ROWS), uri, mode="append")
    dataset = lance.dataset(uri)
    dataset.delete("id = 0")
    dataset.optimize.compact_files()
    dataset = lance.dataset(uri)
    dataset.optimize.optimize_indices()
    found = read_history(open_store(uri)).changes
    compaction = next(each for each in found if "compact" in kinds(each))
    assert kinds(compaction) == ["compact"]
    assert compaction.actions is not None
    details = compaction.actions[0].details
    assert (details["fragments_before"], details["fragments_after"], details["deleted_rows_dropped"]) == (3, 1, 0)
    assert details["rows"] == 3
    lance.dataset(uri, version=1).restore()
    assert story(History((newest(uri),), 0))[lance.dataset(uri).version][0] == ("restore", 1)


def test_states_say_rows_fragments_and_bytes(uri: str) -> None:
    dataset = plain(uri)
    dataset.delete("id < 3")
    state = read_state(open_store(uri), 2)
    (file,) = Path(uri).glob("data/*")
    assert (state.rows, len(state.fragments), state.bytes) == (7, 1, file.stat().st_size)
    (fragment,) = state.fragments.values()
    assert set(fragment.files) == {f"data/{file.name}"}
    assert (Path(uri) / str(fragment.deletion_file)).exists()
    assert abs(state.seconds - dataset.versions()[1]["timestamp"].timestamp()) < 1


def test_a_limit_shows_the_newest_and_counts_the_rest(uri: str) -> None:
    dataset = plain(uri)
    for number in range(4):
        dataset.update_config({"a": str(number)})
    history = read_history(open_store(uri), 2)
    assert [each.state.version for each in history.changes] == [5, 4]
    assert [kinds(each) for each in history.changes] == [["settings"], ["settings"]]
    assert history.older == 3


def test_the_oldest_version_kept_after_a_clean_up_cannot_be_compared(uri: str) -> None:
    dataset = plain(uri)
    for number in range(4):
        dataset.update_config({"a": str(number)})
    dataset.cleanup_old_versions(timedelta(0), retain_versions=2)
    history = read_history(open_store(uri))
    assert [each.state.version for each in history.changes] == [5, 4]
    assert [each.actions is None for each in history.changes] == [False, True]


def test_a_version_that_is_cleaned_up_while_it_is_read_is_named(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset, store = plain(uri), open_store(uri)
    for number in range(4):
        dataset.update_config({"a": str(number)})

    def read(store: Any, version: int) -> TableState:
        if version == 2:
            next(Path(uri).glob(f"_versions/*{2**64 - 3}.manifest")).unlink()
        return read_state(store, version)

    monkeypatch.setattr(memwal.flush.history.actions, "read_state", read)
    history = read_history(store)
    assert history.gone == (2,)
    assert [each.state.version for each in history.changes] == [5, 4, 3, 1]
    assert history.changes[2].actions is None


def test_a_damaged_version_is_no_clean_up(uri: str) -> None:
    plain(uri)
    next(Path(uri).glob("_versions/*.manifest")).write_bytes(b"LANC")
    with raises(Corrupt):
        read_history(open_store(uri))


def test_without_its_transaction_a_version_is_told_by_its_fragments(uri: str) -> None:
    plain(uri).insert(pa.table({"id": [50, 51], "n": [1, 2]}, schema=ROWS))
    shutil.rmtree(Path(uri) / "_transactions")
    found = newest(uri)
    assert found.state.transaction is None
    assert story(History((found,), 0)) == {2: [("insert", 2)]}


def test_a_delete_is_half_a_commit_only_where_the_next_version_was_planned_on_it() -> None:
    def state(version: int, rows: int, committed: int, read: int, operation: str = "update") -> TableState:
        fragments = {
            version: Fragment(version, rows, 0, {}, None),
            0: Fragment(0, 9, version if version < 3 else 2, {}, None),
        }
        done = {bucket_region(0): committed}
        transaction = Transaction(operation, read)
        return TableState(version, 0.0, {}, fragments if rows else {0: fragments[0]}, {}, {}, done, transaction)

    one, two, three = state(1, 0, 1, 0), state(2, 0, 1, 1), state(3, 5, 2, 2)
    assert change(one, two, three).part_of == 3
    assert change(one, two, state(3, 5, 2, 1)).part_of is None
    assert change(one, two, state(3, 5, 1, 2)).part_of is None
    assert change(one, two, None).part_of is None


def test_a_deletes_pass_that_found_nothing_left_is_half_a_commit_too() -> None:
    def state(version: int, committed: int) -> TableState:
        done = {bucket_region(0): committed}
        return TableState(version, 0.0, {}, {}, {}, {}, done, Transaction("update", version - 1))

    found = change(state(1, 1), state(2, 1), state(3, 2))
    assert (kinds(found), found.part_of) == (["other"], 3)


def test_versions_of_both_naming_schemes_are_listed(uri: str) -> None:
    rows = pa.table({"id": [1], "n": [1]}, schema=ROWS)
    dataset = lance.write_dataset(rows, uri, enable_v2_manifest_paths=False)
    dataset.delete("id = 1")
    assert versions(open_store(uri)) == [1, 2]
    assert story(History((newest(uri),), 0)) == {2: [("delete", 1)]}


# ---- the difference of two versions --------------------------------------------------------------------------------


def ids(table: pa.Table) -> list[int]:
    return sorted(table["id"].to_pylist())


def test_what_lies_between_two_versions_by_key(open_small: Callable[..., Any], made: Any, uri: str) -> None:
    with open_small() as table:
        table.put(made.table(range(30), 1))
        table.flush()
        table.commit()
        before = lance.dataset(uri).version
        table.put(made.table(range(25, 35), 2))
        table.put(made.table([0], 1))  # the same row again
        table.delete([3, 4])
        table.flush()
        table.commit()
    lance.dataset(uri).optimize.compact_files()
    after, store = lance.dataset(uri).version, open_store(uri)
    found = diff_versions(store, before, after, ["id"])
    assert ids(found.added) == [30, 31, 32, 33, 34]
    assert ids(found.removed) == [3, 4]
    assert ids(found.changed) == [25, 26, 27, 28, 29]
    assert found.same == 23
    assert set(found.columns) <= {"name", "price", "body", "vector"}
    assert found.columns["vector"] == 5
    back = diff_versions(store, after, before, ["id"])
    assert (ids(back.added), ids(back.removed), ids(back.changed), back.same) == (
        [3, 4],
        [30, 31, 32, 33, 34],
        [25, 26, 27, 28, 29],
        23,
    )
    same = diff_versions(store, after, after, ["id"])
    assert (same.added.num_rows, same.removed.num_rows, same.changed.num_rows, same.same) == (0, 0, 0, 33)


def test_fragments_that_both_versions_have_are_not_read(uri: str, tmp_path: Path) -> None:
    dataset = plain(uri)
    dataset.insert(pa.table({"id": [50], "n": [1]}, schema=ROWS))
    first = next(iter(read_state(open_store(uri), 1).fragments.values()))
    (key,) = first.files
    (Path(uri) / key).unlink()
    found = diff_versions(open_store(uri), 1, 2, ["id"])
    assert (ids(found.added), found.same) == ([50], 10)


def test_columns_that_one_version_alone_has_are_named(uri: str) -> None:
    dataset = plain(uri)
    dataset.add_columns({"twice": "n * 2"})
    dataset.drop_columns(["n"])
    found = diff_versions(open_store(uri), 1, 3, ["id"])
    assert (found.columns_added, found.columns_dropped, found.same) == (("twice",), ("n",), 10)


def test_a_key_twice_is_no_key(uri: str) -> None:
    plain(uri).insert(pa.table({"id": [1, 1], "n": [1, 2]}, schema=ROWS))
    with raises(Corrupt):
        diff_versions(open_store(uri), 1, 2, ["id"])
