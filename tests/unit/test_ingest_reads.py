"""Reads over levels: refused requests, the best rows of several levels, SSTs as memtables, and reads from storage."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memwal import flush, wal
from memwal.flush import BaseTable
from memwal.ingest.engine.api.arguments import at_least_one, checked_limit
from memwal.ingest.engine.api.reads import check_level
from memwal.ingest.engine.read.request import (
    checked_columns,
    checked_vector,
    expect_indexed,
    unknown_column,
)
from memwal.ingest.engine.read.sst_cache import Columns, SstCache, SstId, load_sst
from memwal.ingest.engine.read.stored import StoredLevels
from memwal.ingest.engine.read.top_k import Candidates, HiddenShare, Visible, best_visible, merge
from memwal.ingest.errors import Invalid, Unavailable, classify
from memwal.memtable import IndexSpec, InvalidRows, MemTable, Snapshot, row_schema, with_tombstone
from memwal.memtable.filter.translation import checked
from memwal.wal import LocalStore, ManifestStore, Overtaken, bucket_region
from memwal.wal.layout import entry_key, wal_prefix
from tests.messages import raises
from tests.support.clock import SeededIds
from tests.support.together import together

SCHEMA = pa.schema(
    {
        "package": pa.string(),
        "description": pa.string(),
        "embedding": pa.list_(pa.float32(), 3),
        "odd name": pa.int64(),
    }
)
SPECS = (IndexSpec("embedding", "ivf_pq"), IndexSpec("description", "fts"))
KNOWN: Any = SimpleNamespace(schema=SCHEMA, indexes=SPECS, gone={})
WIDE = SCHEMA.field("embedding").type


@pytest.mark.parametrize(
    "ask",
    [
        lambda: checked_columns(["pakage"], SCHEMA),
        lambda: checked_columns([], SCHEMA),
        lambda: at_least_one(0),
        lambda: at_least_one(True),
        lambda: at_least_one(2.5),
        lambda: checked_limit(-1),
        lambda: checked_vector([1, 2], "embedding", WIDE),
        lambda: checked_vector([[1, 2, 3]], "embedding", WIDE),
        lambda: checked_vector(5, "embedding", WIDE),
        lambda: checked_vector([1, float("nan"), 3], "embedding", WIDE),
        lambda: checked_vector(["a", "b", "c"], "embedding", WIDE),
        lambda: expect_indexed("embeding", "ivf_pq", "search", KNOWN),
        lambda: expect_indexed("package", "fts", "match", KNOWN),
        lambda: check_level("lastest"),
    ],
)
def test_a_wrong_request_is_refused_in_one_line_that_names_the_field(ask: Callable[[], Any]) -> None:
    with raises(Invalid):
        ask()


def test_all_columns_are_meant_when_none_are_named_and_repeats_count_once() -> None:
    assert checked_columns(None, SCHEMA) == SCHEMA.names
    assert checked_columns(["package", "description", "package"], SCHEMA) == ["package", "description"]


@pytest.mark.parametrize("vector", [[1, 2, 3], np.arange(1, 4), pa.array([1.0, 2.0, 3.0]), (1.0, 2.0, 3.0)])
def test_a_vector_may_be_any_list_of_numbers(vector: Any) -> None:
    assert checked_vector(vector, "embedding", WIDE).tolist() == [1.0, 2.0, 3.0]


def test_a_vector_may_be_a_value_of_the_column() -> None:
    value = pa.array([[1.0, 2.0, 3.0]], WIDE)[0]

    assert checked_vector(value, "embedding", WIDE).tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("filter", "says"),
    [
        ("packge = 'x'", "column 'packge' does not exist; did you mean 'package'?"),
        ("upper(descripton) LIKE '%a%'", "did you mean 'description'?"),
        ("`odd nam` > 1", "did you mean 'odd name'?"),
        ('PACKAGE = "packge" AND `odd name` IS NOT NULL', None),
        ("cast(package as bigint) > 1 AND starts_with(package, 'a') AND package > date '2020-01-01'", None),
    ],
)
def test_a_filter_is_blamed_on_the_first_word_that_names_no_column(filter: str, says: str | None) -> None:
    found = unknown_column(checked(filter, SCHEMA.names), SCHEMA.names)

    assert (found or "").endswith(says or "")
    assert (found is None) == (says is None)


ROWS = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("level", pa.int64())])


def level(number: int, scores: dict[int, float]) -> Callable[[int], tuple[Candidates, pa.Table]]:
    """Return a level that returns its nearest ids, smallest score first, and their keys."""
    ranked = sorted(scores.items(), key=lambda item: item[1])

    def fetch(n: int) -> tuple[Candidates, pa.Table]:
        ids = np.array([id for id, _ in ranked[:n]], np.int64)
        rows = pa.table({"id": ids, "level": np.full(len(ids), number)})
        found = np.array([score for _, score in ranked[:n]], np.float32)
        return Candidates(
            ids, found, lambda at: rows.take(pa.array(at)), lambda at: rows.select(["id"]).take(pa.array(at))
        ), rows.select(["id"])

    return fetch


def hiding(newer: set[int]) -> Callable[[pa.Table], np.ndarray]:
    return lambda keys: np.isin(keys.column("id").to_numpy(), list(newer))


@given(
    st.dictionaries(st.integers(0, 30), st.floats(0, 1, width=32), max_size=20),
    st.dictionaries(st.integers(0, 30), st.floats(0, 1, width=32), max_size=20),
    st.integers(1, 12),
)
def test_the_best_of_two_levels_is_the_best_of_the_newest_versions(
    new: dict[int, float], old: dict[int, float], k: int
) -> None:
    newest = {**old, **new}
    levels = [
        best_visible(level(1, new), hiding(set()), k, 0, HiddenShare()),
        best_visible(level(0, old), hiding(set(new)), k, len(new), HiddenShare()),
    ]

    found = merge(levels, k, ascending=True, name="_distance", schema=ROWS, keyed=True)

    assert found.column("_distance").to_pylist() == pytest.approx(sorted(newest.values())[:k])
    assert len(set(found.column("id").to_pylist())) == min(k, len(newest))
    for row in found.to_pylist():
        assert row["_distance"] == pytest.approx(newest[row["id"]])
        assert row["level"] == (1 if row["id"] in new else 0)


def test_a_level_whose_best_rows_are_all_hidden_is_asked_for_more() -> None:
    scores = {id: id / 1000 for id in range(1000)}

    visible = best_visible(level(0, scores), hiding(set(range(990))), 5, 990, HiddenShare())

    assert visible.scores.tolist() == pytest.approx([0.99, 0.991, 0.992, 0.993, 0.994])


def test_a_base_that_nothing_lies_above_is_asked_once_and_no_key_is_looked_up() -> None:
    asked: list[int] = []

    def looked_up(_: pa.Table) -> np.ndarray:
        raise AssertionError("keys were looked up")

    def counting(n: int) -> tuple[Candidates, pa.Table]:
        asked.append(n)
        return level(0, {id: float(id) for id in range(100)})(n)

    visible = best_visible(counting, looked_up, 10, 0, HiddenShare())

    assert asked == [10]
    assert visible.scores.tolist() == list(range(10))


def test_descending_scores_put_the_highest_first_and_nan_last() -> None:
    found = merge(
        [
            Visible(level(1, {1: 0.5, 2: 0.9})(2)[0], np.array([0, 1])),
            Visible(level(0, {3: 0.7, 4: float("nan")})(2)[0], np.array([0, 1])),
        ],
        4,
        ascending=False,
        name="_score",
        schema=ROWS,
        keyed=True,
    )

    assert found.column("id").to_pylist() == [2, 3, 1, 4]


def test_no_levels_give_no_rows_but_all_columns() -> None:
    assert merge([], 3, ascending=True, name="_distance", schema=ROWS, keyed=True).schema.names == [
        "id",
        "level",
        "_distance",
    ]


def test_the_base_is_asked_for_more_rows_by_the_share_that_was_hidden() -> None:
    share = HiddenShare()
    assert share.wanted(10) == 20
    for _ in range(100):
        share.saw(100, 0)
    assert share.wanted(50) == 51
    for _ in range(100):
        share.saw(100, 20)
    assert 63 < share.wanted(50) < 75
    for _ in range(100):
        share.saw(100, 100)
    assert share.wanted(50) == 100
    share.saw(0, 0)
    assert share.wanted(50) == 100


def test_reads_whose_best_rows_are_hidden_are_asked_again_and_taught_by_it() -> None:
    asked: list[int] = []
    rows = level(0, {id: float(id) for id in range(1000)})

    def counting(n: int) -> tuple[Candidates, pa.Table]:
        asked.append(n)
        return rows(n)

    share = HiddenShare()
    for _ in range(100):
        share.saw(100, 0)
    visible = best_visible(counting, hiding(set(range(15))), 10, 500, share)
    assert visible.scores.tolist() == list(range(15, 25))
    assert asked == [11, 44]
    assert share.wanted(10) > 11


BASE = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("text", pa.string())])


NONE: Columns = frozenset()


def loader(rows: int, loads: list[int]) -> Callable[[Columns], MemTable]:
    def load(columns: Columns) -> MemTable:
        loads.append(rows)
        schema = row_schema(BASE, ["id"])
        table = MemTable(schema, ["id"], (), 1)
        table.apply(with_tombstone(pa.table({"id": list(range(rows)), "text": ["x" * 100] * rows}), schema))
        table.freeze()
        return table

    return load


def test_a_flushed_memtable_is_kept_in_place_of_its_sst() -> None:
    cache, loads = SstCache(), list[int]()
    memtable = loader(3, loads)(NONE)

    cache.keep("a", frozenset({"text"}), memtable)
    assert cache.get("a", frozenset({"text"}), loader(5, loads)).n == 3
    assert cache.get("a", NONE, loader(5, loads)).n == 3
    assert loads == [3]

    read = cache.get("b", NONE, loader(4, loads))
    cache.keep("b", NONE, memtable)
    assert cache.get("b", NONE, loader(4, loads)) is read  # one snapshot of an SST for all reads
    assert cache.bytes > 600


def test_the_least_recently_used_goes_first_and_the_newest_always_stays() -> None:
    loads: list[int] = []
    size = loader(1000, [])(NONE).bytes
    cache = SstCache(limit=int(size * 2.5))
    for path in ("a", "b", "a", "c"):
        cache.get(path, NONE, loader(1000, loads))

    cache.get("a", NONE, loader(1000, loads))
    assert len(loads) == 3
    cache.get("b", NONE, loader(1000, loads))
    assert len(loads) == 4
    assert cache.bytes <= size * 2.5

    tiny = SstCache(limit=1)
    tiny.get("a", NONE, loader(1000, loads))
    assert len(tiny) == 1


def test_a_failed_load_is_told_to_everyone_who_waits_and_then_forgotten() -> None:
    cache, loads = SstCache(), list[int]()

    def broken(columns: Columns) -> MemTable:
        raise OSError("storage is away")

    with raises(OSError):
        cache.get("a", NONE, broken)
    assert cache.get("a", NONE, loader(2, loads)).n == 2


def test_an_sst_is_loaded_anew_for_an_index_it_lacks_and_never_for_fewer() -> None:
    cache, indexed = SstCache(), list[set[str]]()

    def load(columns: Columns) -> MemTable:
        indexed.append(set(columns))
        return loader(3, [])(columns)

    for columns in ({"text"}, set[str](), {"text"}, {"vector"}, {"text"}, {"text", "vector"}):
        cache.get("a", frozenset(columns), load)

    assert indexed == [{"text"}, {"text", "vector"}]
    assert len(cache) == 1


def test_an_index_that_cannot_be_built_does_no_lasting_harm() -> None:
    cache, loads = SstCache(), list[int]()
    cache.get("a", NONE, loader(2, loads))

    def broken(columns: Columns) -> MemTable:
        raise OSError("storage is away")

    with raises(OSError):
        cache.get("a", frozenset({"text"}), broken)
    assert cache.get("a", NONE, loader(2, loads)).n == 2
    assert cache.get("a", frozenset({"text"}), loader(2, loads)).n == 2


def test_many_threads_that_ask_for_one_sst_load_it_once() -> None:
    cache, loads, found = SstCache(), list[int](), list[Snapshot]()
    barrier = threading.Barrier(8)

    def ask() -> None:
        barrier.wait()
        found.append(cache.get("a", NONE, loader(500, loads)))

    together(*[ask] * 8)

    assert len(loads) == 1
    assert len({id(snapshot) for snapshot in found}) == 1


def test_what_is_dead_is_dropped_and_what_lives_stays() -> None:
    cache, loads = SstCache(), list[int]()
    region = UUID(int=1)
    ssts = [SstId(1, region, f"0000000{n}_gen_{n}", n) for n in (1, 2, 3)]
    held = [cache.get(sst, NONE, loader(3, loads)) for sst in ssts]

    cache.drop(lambda sst: sst.region == region and sst.generation <= 2)

    assert len(cache) == 1
    assert cache.get(ssts[2], NONE, loader(3, loads)) is held[2]
    assert held[0].n == 3  # a running read may still use it
    assert len(loads) == 3


INDEXED = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("size", pa.int64()),
        pa.field("text", pa.string()),
        pa.field("vec", pa.list_(pa.float32(), 4)),
    ]
)
INDEXES = (IndexSpec("vec", "ivf_pq"), IndexSpec("text", "fts"), IndexSpec("size", "btree"))


@pytest.fixture
def sst(tmp_path: Path) -> tuple[flush.BaseTable, wal.ObjectStore, wal.SsTable]:
    """Return an SST with ten rows, each with a vector, a text and a size."""
    base = flush.BaseTable.create(str(tmp_path / "table"), INDEXED, ["id"], 1, INDEXES)
    store, rows = wal.open_store(base.uri), row_schema(base.schema, base.key)
    columns = {"id": range(10), "size": range(10), "text": ["font"] * 10, "vec": [[float(n)] * 4 for n in range(10)]}
    table = MemTable(rows, base.key, INDEXES, 1)
    table.apply(with_tombstone(pa.table(columns, schema=base.schema), rows))
    written = flush.write_sst(
        store,
        wal.bucket_region(0),
        table.snapshot(),
        flush.SstFormat.of(base),
        generation=1,
        ids=SeededIds(0),
    )
    return base, store, written


@pytest.mark.parametrize(
    "columns", [set(), {"text"}, {"vec"}, {"text", "vec"}], ids=lambda each: " ".join(sorted(each))
)
def test_exactly_the_indexes_asked_for_are_there(
    sst: tuple[flush.BaseTable, wal.ObjectStore, wal.SsTable], columns: set[str]
) -> None:
    base, store, written = sst
    found = load_sst(base, store, wal.bucket_region(0), written, columns).snapshot()

    assert found.generation == 1
    assert found.take(found.lookup(pa.table({"id": [7]}))).column("size").to_pylist() == [7]
    assert np.flatnonzero(found.where("size > 6", found.live())).tolist() == [7, 8, 9]
    reads = {
        "text": lambda: found.match("text", "fonts", 3, found.live()),
        "vec": lambda: found.search("vec", [9.0] * 4, 3, found.live()),
    }
    for column, read in reads.items():
        if column in columns:
            assert len(read()[0]) == 3
        else:
            with raises(InvalidRows):
                read()


REGION = bucket_region(0)


class Collecting(LocalStore):
    """Runs `before_tail` just before a tail is listed."""

    def __init__(self, root: str | Path, before_tail: Callable[[], None]) -> None:
        super().__init__(root)
        self.before_tail = before_tail

    def list_some(self, prefix: str, most: int) -> list[str]:
        if prefix == wal_prefix(REGION):
            self.before_tail()
        return super().list_some(prefix, most)


class Scene:
    """A table of one region. Before each of the next `times` reads of its tail, its rows are flushed and their entries
    are collected."""

    def __init__(self, table: Any, made: Any, uri: str, times: int) -> None:
        self.table, self.made, self.times, self.rows = table, made, times, 0
        self.store = Collecting(uri, self.collect)
        self.base = BaseTable.find(uri, {})
        self.put()

    def put(self) -> None:
        for _ in range(3):
            self.table.put(self.made.table([self.rows]))
            self.rows += 1

    def collect(self) -> None:
        if not self.times:
            return
        self.times -= 1
        before = ManifestStore(self.store, REGION).latest()
        self.table.flush()
        after = ManifestStore(self.store, REGION).latest()
        assert before is not None
        assert after is not None
        for position in range(before.replay_after + 1, after.replay_after):
            self.store.delete(entry_key(REGION, position, "lance"))
        self.put()


@pytest.mark.parametrize("times", [1, 4])
def test_a_reader_that_was_overtaken_captures_the_region_again(
    open_small: Callable[..., Any], made: Any, uri: str, times: int
) -> None:
    scene = Scene(open_small(regions=1), made, uri, times)
    assert scene.base is not None
    (view,) = StoredLevels(scene.store).views(scene.base, "durable")
    assert len(view.ssts) == times
    assert sum(snapshot.n for snapshot in view.memtables) == 3
    assert scene.rows == 3 * (times + 1)


def test_one_that_is_overtaken_every_time_is_told_to_try_again(
    open_small: Callable[..., Any], made: Any, uri: str
) -> None:
    scene = Scene(open_small(regions=1), made, uri, 100)
    assert scene.base is not None
    with pytest.raises(Overtaken) as caught:
        StoredLevels(scene.store).views(scene.base, "durable")
    assert isinstance(classify(caught.value), Unavailable)
    assert scene.times == 95
