"""Deletion of expired rows of the base table: the rows, the reads that it needs, concurrent writers, and crashes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import lance
import numpy as np
import pyarrow as pa
import pytest

from memwal.flush import BaseTable, Ttl, set_ttl
from memwal.flush.base.ttl import Expiry
from memwal.flush.commits import expiry as expiry_module
from memwal.flush.commits import rounds
from memwal.flush.commits.expiry import GRACE, ExpiredRows
from memwal.flush.commits.foreign_writes import look_back
from memwal.flush.commits.maintenance import MaintenanceRules
from memwal.flush.history.actions import read_history
from memwal.ingest.engine.table.maintenance import BaseUpkeep
from memwal.ingest.settings.load import load
from memwal.wal import LocalStore
from tests.clean import assert_clean, assert_collected
from tests.messages import raises
from tests.opened import open_table
from tests.support.clock import FakeClock
from tests.support.interpose import Once, killed_at

HOUR = timedelta(hours=1)
SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        ("t", pa.timestamp("us", "UTC")),
        ("body", pa.string()),
        ("v", pa.list_(pa.float32(), 4)),
    ]
)
INDEXES = {"t": "btree", "body": "fts", "v": "ivf_pq"}
NO_OTHER_STEPS = MaintenanceRules(optimize_interval=0, compact_interval=0, versions_interval=0)


class Aged:
    """A table whose rows are put with an age in hours, committed at once, and expire after ten hours."""

    def __init__(self, path: Path, *, keyed: bool = True, indexes: dict[str, str] | None = None) -> None:
        self.uri, self.clock = str(path / "table.lance"), FakeClock()
        key: dict[str, Any] = {"key": ["id"]} if keyed else {"append_only": True}
        table = {"uri": self.uri, "ttl": "10h", "ttl_column": "t", "indexes": indexes or {}, **key}
        quiet = {"commit": {"interval": "0s"}, "gc": {"interval": "0s"}}
        loaded = load({"table": table, "regions": {"count": 1}, **quiet}, {}, {})
        self.store = LocalStore(self.uri)
        self.table = open_table(loaded, {}, SCHEMA, clock=self.clock)
        self.table.upkeep.maintain = lambda: None  # type: ignore[method-assign]  # only the tests delete rows
        self.expired = ExpiredRows()

    @property
    def now(self) -> datetime:
        return datetime.fromtimestamp(self.clock.now(), UTC)

    def put(self, ages: dict[int, float | None]) -> None:
        times = [None if age is None else self.now - age * HOUR for age in ages.values()]
        vectors = [np.random.default_rng(id).random(4).tolist() for id in ages]
        bodies = [f"word{id % 3}" for id in ages]
        self.table.put(pa.table({"id": list(ages), "t": times, "body": bodies, "v": vectors}, schema=SCHEMA))
        self.table.flush()
        self.table.commit()

    def collect(self, by: ExpiredRows | None = None) -> int:
        return (by or self.expired).collect(lance.dataset(self.uri), self.expiry(), {})

    def expiry(self) -> Expiry:
        found = BaseTable.open(self.uri).expiry(self.clock.now() - GRACE)
        assert found is not None
        return found

    def expect_clean(self, *, collected: bool = False) -> None:
        """Close the table; assert that nothing is wrong with it and, once all is committed, that nothing is left."""
        self.table.close()
        assert_clean(self.store, self.uri)
        if collected:
            assert_collected(self.store, self.uri)

    def ids(self) -> list[int]:
        return sorted(lance.dataset(self.uri).to_table(columns=["id"])["id"].to_pylist())

    def actions(self) -> list[str]:
        change = read_history(LocalStore(self.uri), 1).changes[0]
        return [f"{each.kind} {each.details.get('rows')}" for each in change.actions or ()]


@pytest.fixture
def aged(tmp_path: Path) -> Iterator[Aged]:
    made = Aged(tmp_path)
    yield made
    made.table.close()


@pytest.mark.parametrize("keyed", [True, False], ids=["key", "no key"])
def test_rows_go_a_grace_after_they_expired_and_no_others(tmp_path: Path, keyed: bool) -> None:
    aged = Aged(tmp_path, keyed=keyed)
    grace, second = GRACE / 3600, 1 / 3600
    aged.put({1: 0, 2: 10, 3: 10 + grace - 5 * second, 4: 10 + grace + second, 5: 11, 6: None, 7: -5})
    assert aged.collect() == 2
    assert aged.ids() == [1, 2, 3, 6, 7]
    assert aged.actions() == ["expire 2"]
    assert aged.collect() == 0
    aged.clock.advance(1e9)
    assert aged.collect() == 4
    assert aged.ids() == [6]
    aged.put({8: 1, 6: None})
    assert aged.ids() == ([6, 8] if keyed else [6, 6, 8])
    aged.expect_clean(collected=True)


@contextmanager
def reads() -> Iterator[list[int]]:
    """Yield a list that records the fragments whose times are read."""
    found, real = list[int](), expiry_module._oldest

    def counted(dataset: lance.LanceDataset, fragment: lance.LanceFragment, column: str) -> int | None:
        found.append(fragment.fragment_id)
        return real(dataset, fragment, column)

    with mock.patch.object(expiry_module, "_oldest", counted):
        yield found


def test_each_fragment_is_read_once_and_again_after_rows_of_it_were_deleted(aged: Aged) -> None:
    with reads() as read:
        aged.put({1: 1, 2: 2})
        aged.put({3: 9.5, 4: 5})
        assert aged.collect() == 0
        assert read == [0, 1]
        read.clear()
        assert aged.collect() == 0
        assert read == []
        aged.clock.advance(3600)
        assert aged.collect() == 1
        assert read == []
        aged.put({5: 0})
        assert aged.collect() == 0
        assert read == [1, 2]


def test_what_is_read_at_once_is_bounded_and_the_next_collection_goes_on(
    aged: Aged, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expiry_module, "_ROWS_AT_ONCE", 2)
    for id in range(5):
        aged.put({id: 20, 10 + id: 20})
    assert aged.expired.interval(Ttl("t", 36_000.0)) == 360.0
    assert aged.collect() == 2
    assert aged.expired.interval(Ttl("t", 36_000.0)) == 10.0
    assert [aged.collect() for _ in range(5)] == [2, 2, 2, 2, 0]
    assert aged.expired.interval(Ttl("t", 36_000.0)) == 360.0
    assert aged.ids() == []


def test_another_column_is_looked_at_anew(aged: Aged) -> None:
    aged.put({1: 1, 2: 20})
    assert aged.collect() == 1
    lance.dataset(aged.uri).add_columns({"u": "cast(null as timestamp)"})
    set_ttl(BaseTable.open(aged.uri), Ttl("u", 3600.0), aged.clock)
    aged.clock.advance(1e9)
    assert aged.collect() == 0
    assert aged.ids() == [1]


@pytest.mark.parametrize(("ttl", "seconds"), [(1, 10), (3600, 36), (86_400, 864), (30 * 86_400, 3600)])
def test_it_runs_every_hundredth_of_the_ttl_within_limits(ttl: float, seconds: float) -> None:
    assert ExpiredRows().interval(Ttl("t", ttl)) == seconds


def test_indexes_find_what_is_left(tmp_path: Path) -> None:
    aged = Aged(tmp_path, indexes=INDEXES)
    aged.put({id: id % 20 + 0.5 for id in range(300)})
    aged.put(dict.fromkeys(range(300, 320), 20))  # a whole fragment
    assert aged.collect() == 150 + 20
    left = {id for id in range(300) if id % 20 < 10}
    level: Any = {"level": "committed"}
    assert set(aged.ids()) == left == set(aged.table.scan(["id"], **level).read_all()["id"].to_pylist())
    words = aged.table.match("body", "word1", 500, **level)["id"].to_pylist()
    assert set(words) == {id for id in left if id % 3 == 1}
    assert set(aged.table.search("v", [0.5] * 4, 500, **level)["id"].to_pylist()) == left
    aged.put({1000: 0, 5: 1})
    assert aged.table.match("body", "word1", 500, **level).num_rows == len(words) + 1
    aged.expect_clean()


# ---- another writer --------------------------------------------------------------------------------------------------


def merged_by_another(aged: Aged, id: int) -> Callable[[], None]:
    """Open the table as another program; return its merge of row `id` for later."""
    handle, row = lance.dataset(aged.uri), lance.dataset(aged.uri).to_table(filter=f"id = {id}")
    merge = handle.merge_insert("id").when_matched_update_all().when_not_matched_insert_all().use_index(False)
    return lambda: merge.conflict_retries(0).execute(row) and None


def test_a_row_that_another_writer_changes_meanwhile_stays(aged: Aged, once: Once) -> None:
    aged.put({1: 20, 2: 5})

    def overtaken() -> None:
        dataset = lance.dataset(aged.uri)
        row = dataset.to_table(filter="id = 1").set_column(1, SCHEMA.field("t"), pa.array([aged.now], SCHEMA[1].type))
        dataset.merge_insert("id").when_matched_update_all().use_index(False).execute(row)

    once(lance.LanceDataset, "commit", overtaken)
    with raises(OSError):
        aged.collect()
    assert aged.ids() == [1, 2]
    assert aged.collect() == 0


@pytest.mark.parametrize("id", [1, 2], ids=["of the row", "of another row of the fragment"])
def test_a_merge_that_was_planned_before_brings_no_row_back_or_fails(aged: Aged, id: int) -> None:
    aged.put({1: 20, 2: 5})
    merge = merged_by_another(aged, id)
    assert aged.collect() == 1
    if id == 1:
        with raises(OSError):
            merge()
    else:
        merge()
    assert aged.ids() == [2]
    assert_clean(aged.store, aged.uri)


def test_a_commit_that_meets_a_collection_counts_and_ends_right(aged: Aged, once: Once) -> None:
    aged.put({1: 20, 2: 5, 3: 20})
    vectors = [[0.0] * 4] * 3
    rows = {"id": [1, 2, 4], "t": [aged.now] * 3, "body": ["new"] * 3, "v": vectors}
    aged.table.put(pa.table(rows, schema=SCHEMA))
    aged.table.delete([3])
    aged.table.flush()

    collected: list[int] = []
    once(rounds, "upsert_pass", lambda: collected.append(aged.collect()))
    report = aged.table.commit()
    assert aged.ids() == [1, 2, 4]
    assert collected == [1]
    assert report.regions
    assert_clean(aged.store, aged.uri)


def test_a_collection_counts_as_no_write_of_another_program(aged: Aged) -> None:
    aged.put({1: 20, 2: 5})
    aged.collect()
    assert not look_back(aged.store, BaseTable.open(aged.uri)).possible


# ---- crashes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (expiry_module, "_oldest"),
        (lance.LanceFragment, "delete"),
        (lance.LanceDataset, "commit"),
        (lance.LanceDataset, "checkout_latest"),
    ],
    ids=["read", "deletion vector", "version", "reopened"],
)
def test_killed_at_any_call_it_leaves_a_clean_table_crash(tmp_path: Path, owner: Any, name: str, after: bool) -> None:
    aged = Aged(tmp_path)
    aged.put({1: 20, 2: 5})
    aged.put({3: 20, 4: None})
    with killed_at(owner, name, after=after):
        aged.collect()
    done = name == "checkout_latest" or (name == "commit" and after)
    assert aged.ids() == ([2, 4] if done else [1, 2, 3, 4])
    assert sorted(aged.table.get([1, 2, 3, 4])["id"].to_pylist()) == [2, 4]
    aged.table.close()
    assert_clean(aged.store, aged.uri)
    assert aged.collect(ExpiredRows()) == (0 if done else 2)
    assert aged.ids() == [2, 4]
    assert_collected(aged.store, aged.uri)


# ---- by a process that commits ---------------------------------------------------------------------------------------


def test_upkeep_collects_at_its_interval_by_the_tables_present_ttl(
    aged: Aged, caplog: pytest.LogCaptureFixture
) -> None:
    clock, told = aged.clock, list[int]()
    upkeep = BaseUpkeep(aged.table.base, clock, NO_OTHER_STEPS, told.append)
    aged.put({1: 20, 2: 5, 3: 5})
    assert upkeep.expire() == ["expired rows deleted: 1"]
    aged.put({4: 20})
    assert upkeep.run() == []  # not due yet
    clock.advance(360.0)
    assert upkeep.run() == ["expired rows deleted: 1"]
    newest = set_ttl(BaseTable.open(aged.uri), Ttl("t", 3600.0), clock)
    clock.advance(36.0)
    assert upkeep.expire(newest) == ["expired rows deleted: 2"]  # the interval is that of the new ttl
    aged.put({5: 20})
    set_ttl(newest, None, clock)
    clock.advance(3600.0)
    assert upkeep.expire(newest) == []  # its state is old; on storage no row expires
    assert (told, aged.ids()) == ([1, 1, 2], [5])


def test_nothing_is_deleted_by_a_ttl_that_changes_while_rows_are_looked_at(aged: Aged) -> None:
    aged.put({1: 20, 2: 5})
    base = BaseTable.open(aged.uri)
    asked: list[bool] = []

    def still() -> bool:
        set_ttl(base, None, aged.clock)
        asked.append(base.latest().ttl == base.ttl)
        return asked[-1]

    assert aged.expired.collect(lance.dataset(aged.uri), aged.expiry(), {}, still) == 0
    assert (asked, aged.ids()) == ([False], [1, 2])


@pytest.mark.parametrize("ttl", [None, Ttl("t", 25 * 3600.0)], ids=["none", "longer"])
@pytest.mark.parametrize("indexed", [False, True])
def test_nothing_is_deleted_by_a_ttl_that_changes_just_before_the_deletion(
    tmp_path: Path, indexed: bool, ttl: Ttl | None, once: Once
) -> None:
    """The process that deletes may be suspended before the commit of the deletion. The change of the ttl must be a
    conflict then, although Lance sees none in a change of the ttl alone."""
    aged = Aged(tmp_path, indexes=INDEXES if indexed else None)
    aged.put({1: 20, 2: 5})
    base, expiry, changed = BaseTable.open(aged.uri), aged.expiry(), list[Ttl | None]()
    once(lance.LanceDataset, "commit", lambda: changed.append(set_ttl(base, ttl, aged.clock).ttl))
    with raises(OSError):
        aged.expired.collect(lance.dataset(aged.uri), expiry, {})
    assert changed == [ttl]
    assert aged.ids() == [1, 2]
    assert [each.name for each in lance.dataset(aged.uri).describe_indices()] == [
        each.name for each in base.dataset.describe_indices()
    ]
    aged.put({3: 1})
    assert aged.ids() == [1, 2, 3]
    assert_clean(aged.store, aged.uri)


def test_it_waits_while_a_load_asks_for_it_and_asks_only_when_it_is_due(aged: Aged) -> None:
    upkeep, asked = BaseUpkeep(aged.table.base, aged.clock, NO_OTHER_STEPS), list[bool]()

    def loading(answer: bool) -> Callable[[], bool]:
        return lambda: asked.append(answer) or answer

    aged.put({1: 20})
    assert upkeep.expire(unless=loading(True)) == []
    assert upkeep.expire(unless=loading(False)) == ["expired rows deleted: 1"]
    assert upkeep.expire(unless=loading(False)) == []
    assert asked == [True, False]


def test_a_failure_fails_no_commit_and_is_tried_again(aged: Aged, caplog: pytest.LogCaptureFixture) -> None:
    upkeep = BaseUpkeep(aged.table.base, aged.clock, NO_OTHER_STEPS)
    aged.put({1: 20})
    with mock.patch.object(lance.LanceDataset, "commit", side_effect=OSError("no answer")):
        assert upkeep.run() == []
    assert "deleting expired rows failed, will try again in 360 s" in caplog.text
    assert aged.ids() == [1]
    aged.clock.advance(360.0)
    assert upkeep.run() == ["expired rows deleted: 1"]


def test_a_table_without_a_ttl_costs_no_request(tmp_path: Path) -> None:
    base = BaseTable.create(str(tmp_path / "t"), SCHEMA, ["id"], 1, ())
    with mock.patch.object(lance, "dataset", side_effect=AssertionError("storage was asked")):
        assert BaseUpkeep(base, FakeClock(), NO_OTHER_STEPS).run() == []
    assert Expiry.at(Ttl("t", 1.0), SCHEMA.field("t").type, 0.0).least == -1_000_000
