"""Maintenance of the base table bounds fragments, index segments and versions, and loses no row and no marker."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lance.mem_wal import CompactedSsTable

from memwal.flush import BaseTable
from memwal.flush.commits.index_catchup import catch_up
from memwal.flush.commits.maintenance import (
    CompactionLimits,
    MaintenanceRules,
    _Size,
    clean_up,
    compact,
    merge_segments,
    worth_merging,
)
from memwal.flush.commits.thinning import VersionRules
from memwal.ingest.engine.table import maintenance as base_upkeep
from memwal.ingest.engine.table.maintenance import BaseUpkeep
from memwal.memtable import IndexSpec
from memwal.wal import LocalStore, bucket_region
from tests.support.clock import FakeClock

WIDTH = 8
SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("price", pa.int64()),
        pa.field("body", pa.string()),
        pa.field("vector", pa.list_(pa.float32(), WIDTH)),
    ]
)
INDEXES = (IndexSpec("price", "btree"), IndexSpec("body", "fts"), IndexSpec("vector", "ivf_pq"))
NAMES = [spec.name for spec in INDEXES]
RULES = MaintenanceRules()


class Base:
    """A base table that grows as by commits: each adds a fragment, and a segment per index."""

    def __init__(self, uri: str, indexes: Sequence[IndexSpec] = INDEXES) -> None:
        self.uri = uri
        self.table = BaseTable.create(uri, SCHEMA, ["id"], 1, indexes)
        self.generation = self.rows = 0

    @property
    def dataset(self) -> lance.LanceDataset:
        return lance.dataset(self.uri)

    def commit(self, rows: int, *, catching_up: bool = True) -> None:
        self.generation += 1
        ids = range(self.rows, self.rows + rows)
        self.rows += rows
        dataset = self.dataset
        builder = dataset.merge_insert(["id"]).when_matched_update_all().when_not_matched_insert_all()
        marker = [CompactedSsTable(str(bucket_region(0)), self.generation)]
        builder.use_index(False).mark_sstables_as_compacted(marker).execute(self.made(ids))
        if catching_up:
            catch_up(self.dataset, self.table.indexes)

    def made(self, ids: Sequence[int]) -> pa.Table:
        values = {
            "id": list(ids),
            "price": [id * 7 % 1000 for id in ids],
            "body": [f"word{id % 50} other" for id in ids],
            "vector": [np.random.default_rng(id).random(WIDTH, dtype=np.float32) for id in ids],
        }
        return pa.table(values, schema=self.table.schema)

    def maintain(self) -> None:
        merge_segments(self.dataset, NAMES, RULES.segments_min)
        compact(self.dataset, RULES.compaction)

    def fragments(self) -> list[int]:
        """Return the number of live rows of each fragment."""
        return [each.count_rows() for each in self.dataset.get_fragments()]

    def segments(self) -> dict[str, int]:
        return {each.name: len(each.segments) for each in self.dataset.describe_indices() if each.name in NAMES}

    def versions(self) -> list[int]:
        return [each["version"] for each in self.dataset.version_refs()]

    def answers(self) -> list[Any]:
        """Return the answers of one query per index."""
        dataset, vector = self.dataset, np.random.default_rng(5).random(WIDTH, dtype=np.float32)
        nearest = {"column": "vector", "q": vector, "k": 5, "refine_factor": 50}
        asked: list[dict[str, Any]] = [
            {"filter": "price BETWEEN 100 AND 130"},
            {"full_text_query": {"query": "word7", "columns": ["body"]}, "limit": 10_000},
            {"nearest": nearest},
        ]
        return [sorted(dataset.scanner(columns=["id"], **each).to_table()["id"].to_pylist()) for each in asked]


@pytest.fixture
def base(tmp_path: Path) -> Base:
    return Base(str(tmp_path / "table"))


# ---- what belongs together -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "count"),
    [
        ([], 0),
        ([5], 1),
        ([1, 1], 2),
        ([1] * 8, 8),
        ([1] * 8 + [8], 9),  # the small ones double the size of the last one, so it is merged too
        ([1] * 8 + [9], 8),
        ([100, 3000, 3000, 3000], 4),  # a small fragment does not separate the others
        ([1, 2, 4, 8], 1),
        ([0, 0, 0], 3),
    ],
)
def test_as_many_belong_together_as_the_largest_is_no_larger_than_the_rest(sizes: list[int], count: int) -> None:
    assert worth_merging(sizes) == count


@pytest.mark.parametrize("seed", range(4))
def test_fragments_and_rewrites_grow_with_the_logarithm_of_the_commits(seed: int) -> None:
    """The arithmetic of `flush.commits.maintenance`, without Lance."""
    rng = np.random.default_rng(seed)
    sizes, written, rows, most = [], 0, 0, 0
    for _ in range(5000):
        sizes.append(int(rng.integers(1, 2000)) if seed else 1000)
        rows += sizes[-1]
        sizes.sort()
        if (count := worth_merging(sizes)) >= RULES.compaction.fragments_min:
            merged = sum(sizes[:count])
            sizes = [*sizes[count:], merged]
            written += merged
        most = max(most, len(sizes))
    assert most < 2 * RULES.compaction.fragments_min + np.log2(5000)
    assert written / rows < np.log2(5000 / RULES.compaction.fragments_min) + 1


# ---- on a table ------------------------------------------------------------------------------------------------------


def test_many_commits_leave_few_fragments_and_segments_and_every_answer_is_the_same(base: Base) -> None:
    base.commit(300)
    for _ in range(30):
        base.commit(20)
    crowded, answers, models = (base.fragments(), base.segments()), base.answers(), base.table.latest().vector_models()
    assert (len(crowded[0]), min(crowded[1].values())) == (31, 31)
    under_way = base.dataset
    base.maintain()
    assert (len(base.fragments()), base.segments()) == (1, dict.fromkeys(NAMES, 1))
    assert base.answers() == answers
    assert under_way.to_table().num_rows == 900  # a reader that began before the compaction
    found = base.table.latest()
    assert found.committed == {bucket_region(0): base.generation}
    assert {each.name: each.num_rows_indexed for each in base.dataset.describe_indices() if each.name in NAMES} == (
        dict.fromkeys(NAMES, 900)
    )
    kept = found.vector_models()["vector"]
    np.testing.assert_array_equal(kept.codebook, models["vector"].codebook)
    base.commit(20)
    assert len(base.fragments()) == 2
    assert base.table.latest().committed == {bucket_region(0): base.generation}


def test_a_vector_index_that_was_trained_on_few_rows_of_one_kind_is_trained_anew_while_it_is_small(base: Base) -> None:
    """All segments become one, trained with the table's parameters. An index with too many rows keeps its model."""
    base.commit(300)
    for _ in range(8):
        base.commit(100)
    vectors = [spec for spec in base.table.indexes if spec.kind == "ivf_pq"]
    models, answers = base.table.latest().vector_models(), base.answers()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("memwal.flush.commits.maintenance.TRAINED_ROWS_MAX", 1000)
        assert merge_segments(base.dataset, ["vector_idx"], 100, vectors) == []
        dataset = base.dataset
        assert merge_segments(dataset, ["vector_idx"], 8, vectors) == ["vector_idx"]
    kept = base.table.latest().vector_models()["vector"]
    np.testing.assert_array_equal(kept.codebook, models["vector"].codebook)
    for _ in range(8):
        base.commit(200)
    assert merge_segments(base.dataset, ["vector_idx"], 8, vectors) == ["vector_idx"]
    assert base.segments()["vector_idx"] == 1
    trained = base.table.latest().vector_models()["vector"]
    assert trained.codebook.shape == models["vector"].codebook.shape
    assert not np.array_equal(trained.codebook, models["vector"].codebook)
    assert base.answers()[:2] != answers[:2]
    assert base.table.latest().committed == {bucket_region(0): base.generation}
    base.commit(20)
    (found,) = [each for each in base.dataset.describe_indices() if each.name == "vector_idx"]
    assert (found.num_rows_indexed, len(found.segments)) == (base.rows, 2)


def test_one_whose_rows_are_deleted_by_now_is_merged_as_it_is(base: Base) -> None:
    base.commit(300)
    for _ in range(8):
        base.commit(100)
    lance.dataset(base.table.uri).delete("id % 10 > 0")
    vectors = [spec for spec in base.table.indexes if spec.kind == "ivf_pq"]
    assert merge_segments(base.dataset, ["vector_idx"], 8, vectors) == ["vector_idx"]
    assert base.segments()["vector_idx"] == 1


def test_nothing_to_do_makes_no_version(base: Base) -> None:
    base.commit(300)
    for _ in range(5):
        base.commit(10)
    before = base.versions()
    base.maintain()
    assert base.versions() == before


def test_deleted_rows_are_dropped_from_the_fragments_that_have_many(tmp_path: Path) -> None:
    base = Base(str(tmp_path / "table"), INDEXES[:1])
    for _ in range(3):
        base.commit(100)
    base.dataset.delete("id < 30 OR (id >= 100 AND id < 110)")
    assert compact(base.dataset, CompactionLimits()) == (1, 1)
    left = [(each.physical_rows, each.num_deletions) for each in base.dataset.get_fragments()]
    assert sorted(left) == [(70, 0), (100, 0), (100, 10)]
    alive = [id for id in range(300) if not (id < 30 or 100 <= id < 110)]
    found = base.dataset.to_table(columns=["id"], filter="price BETWEEN 100 AND 130")["id"].to_pylist()
    assert sorted(found) == [id for id in alive if 100 <= id * 7 % 1000 <= 130]


def test_one_compaction_reads_no_more_than_its_bytes(tmp_path: Path) -> None:
    base = Base(str(tmp_path / "table"), ())
    for _ in range(20):
        base.commit(50)
    rows = base.dataset.to_table().sort_by("id")
    size = max(sum(file.file_size_bytes for file in each.metadata.files) for each in base.dataset.get_fragments())
    limits = CompactionLimits(bytes_max=9 * size)
    runs = []
    while (done := compact(base.dataset, limits)) != (0, 0):
        runs.append(done)
    assert all(8 <= removed <= 10 and added == 1 for removed, added in runs)
    assert len(runs) == 2
    assert base.dataset.to_table().sort_by("id") == rows


@given(
    st.lists(st.tuples(st.integers(1, 1000), st.floats(0, 1), st.integers(0, 5000)), max_size=30),
    st.integers(2, 8),
    st.sampled_from((1, 500, 5000, 1 << 30)),
)
def test_what_is_chosen_is_bounded_and_worth_it(
    drawn: list[tuple[int, float, int]], fragments_min: int, bytes_max: int
) -> None:
    limits = CompactionLimits(fragments_min=fragments_min, rows_max=400, bytes_max=bytes_max)
    fragments = {number: _Size(rows, round(rows * live), size) for number, (rows, live, size) in enumerate(drawn)}
    groups = [[number for number in fragments if number % 2 == rest] for rest in (0, 1)]
    chosen = limits.chosen(fragments, groups)
    assert len(chosen) <= 1 or sum(fragments[number].bytes for number in chosen) <= bytes_max
    deleted = {n for n, size in fragments.items() if size.physical - size.live > 0.25 * size.physical}
    assert bool(chosen) or not deleted
    for group in groups:
        merged = [number for number in chosen - deleted if number in group]
        assert all(fragments[number].live < 400 and fragments[number].bytes < bytes_max for number in merged)


def test_stable_row_ids_are_kept(tmp_path: Path) -> None:
    uri = str(tmp_path / "table")
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("n", pa.int64())])
    for first in range(0, 50, 5):
        rows = pa.table({"id": range(first, first + 5), "n": range(5)}, schema=schema)
        lance.write_dataset(rows, uri, mode="append", enable_stable_row_ids=True)
    BaseTable.adopt(uri, ["id"], 1, [IndexSpec("n", "btree")])
    before = lance.dataset(uri).to_table(with_row_id=True).sort_by("id")
    assert compact(lance.dataset(uri), CompactionLimits()) == (10, 1)
    assert lance.dataset(uri).to_table(with_row_id=True).sort_by("id") == before


# ---- old versions ----------------------------------------------------------------------------------------------------


def test_old_versions_go_but_the_newest_the_tagged_and_those_before_the_set_up(tmp_path: Path) -> None:
    uri = str(tmp_path / "table")
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False)])
    for n in range(3):
        lance.write_dataset(pa.table({"id": [n]}, schema=schema), uri, mode="append")
    BaseTable.adopt(uri, ["id"], 1, [])
    set_up = lance.dataset(uri).version
    for n in range(3, 12):
        lance.write_dataset(pa.table({"id": [n]}, schema=lance.dataset(uri).schema), uri, mode="append")
    dataset = lance.dataset(uri)
    dataset.tags.create("release", set_up + 2)
    store = LocalStore(uri)
    for rules in (VersionRules(age_min=3600), VersionRules(age_min=0.001, hourly=0, daily=0, newest=50)):
        assert clean_up(store, dataset, rules, time.time()) == 0
    time.sleep(0.01)
    assert clean_up(store, dataset, VersionRules(age_min=0.001, hourly=0, daily=0, newest=2), time.time()) > 0
    left = [each["version"] for each in lance.dataset(uri).version_refs()]
    newest = lance.dataset(uri).version
    assert [version for version in left if version >= set_up] == [set_up + 2, newest - 2, newest - 1, newest]
    assert left[:3] == [1, 2, 3]
    assert lance.dataset(uri, version=3).count_rows() == 3
    assert lance.dataset(uri, version=set_up + 2).count_rows() == 5
    assert lance.dataset(uri).count_rows() == 12


# ---- on its schedule -------------------------------------------------------------------------------------------------


@pytest.fixture
def crowded(tmp_path: Path) -> Base:
    base = Base(str(tmp_path / "table"), INDEXES[:1])
    for _ in range(10):
        base.commit(10)
    return base


def test_each_step_is_done_at_its_interval_and_not_at_0(crowded: Base) -> None:
    clock = FakeClock()
    rules = MaintenanceRules(optimize_interval=100, compact_interval=10, versions_interval=0)
    upkeep = BaseUpkeep(crowded.table, clock, rules)
    assert upkeep.run() == ["index segments merged: price_idx", "fragments compacted: 10 into 1"]
    for _ in range(10):
        crowded.commit(10)
    clock.advance(50)
    assert upkeep.run() == []  # each fragment has a segment of its own, and merging is not due
    clock.advance(50)
    assert upkeep.run() == ["index segments merged: price_idx", "fragments compacted: 11 into 1"]
    assert len(crowded.versions()) > 20
    off = MaintenanceRules(
        optimize_interval=0, compact_interval=0, versions_interval=1, versions=VersionRules(age_min=0)
    )
    assert BaseUpkeep(crowded.table, clock, off).run() == []


@pytest.mark.parametrize("stranger", ["delete", "compaction"])
def test_a_strangers_commit_costs_the_step_which_is_done_later(
    crowded: Base, monkeypatch: pytest.MonkeyPatch, stranger: str
) -> None:
    merge_segments(crowded.dataset, NAMES, 8)
    clock, marker = FakeClock(), crowded.table.latest().committed
    upkeep = BaseUpkeep(crowded.table, clock, MaintenanceRules(optimize_interval=0, versions_interval=0))

    def overtaken(dataset: lance.LanceDataset, *rules: Any) -> tuple[int, int]:
        other = crowded.dataset
        if stranger == "delete":
            other.delete("id = 5")
        else:
            other.optimize.compact_files()
        return compact(dataset, *rules)

    with monkeypatch.context() as busy:
        busy.setattr(base_upkeep, "compact", overtaken)
        assert upkeep.run() == []
    assert len(crowded.fragments()) == (10 if stranger == "delete" else 1)
    clock.advance(10)
    upkeep.run()
    assert sum(crowded.fragments()) == (99 if stranger == "delete" else 100)
    assert len(crowded.fragments()) == 1
    assert crowded.table.latest().committed == marker


def test_a_step_that_fails_fails_nobody(crowded: Base, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    def broken(*_: Any) -> tuple[int, int]:
        raise RuntimeError("no answer")

    monkeypatch.setattr(base_upkeep, "compact", broken)
    assert BaseUpkeep(crowded.table, FakeClock(), RULES).run() == ["index segments merged: price_idx"]
    assert "compact failed, will try again in 10 s: RuntimeError: no answer" in caplog.text
