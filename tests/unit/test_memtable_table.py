"""Puts into a memtable: the newest row wins, snapshots do not change, bad batches have no effect, memory is counted."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from memwal.memtable import (
    IndexSpec,
    InvalidRows,
    MemTable,
    MemTableFailed,
    MemTableFrozen,
    row_schema,
    tombstones,
    with_tombstone,
)
from memwal.memtable.batch_store import BATCH_OVERHEAD, MERGE_AT, SMALL_ROWS
from memwal.memtable.text.index import TextIndex
from tests.messages import raises

BASE = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("name", pa.string()),
        pa.field("vector", pa.list_(pa.float32(), 2)),
    ]
)
ROWS = row_schema(BASE, ["id"])
INDEXES = [IndexSpec("vector", "ivf_pq", {"metric": "cosine"}), IndexSpec("name", "fts")]


def make(indexes: list[IndexSpec] | None = None) -> MemTable:
    return MemTable(ROWS, ["id"], INDEXES if indexes is None else indexes, 3)


def put(table: MemTable, **columns: Any) -> None:
    table.apply(with_tombstone(pa.table(columns), ROWS))


def live(table: MemTable) -> list[dict[str, Any]]:
    snapshot = table.snapshot()
    return snapshot.take(np.flatnonzero(snapshot.live()), ["id", "name"]).to_pylist()


def test_an_empty_memtable_answers_everything() -> None:
    snapshot = make().snapshot()
    none = snapshot.live()
    assert snapshot.n == 0
    assert snapshot.lookup(pa.table({"id": [1]})).tolist() == [-1]
    assert snapshot.where("id > 1", none).tolist() == []
    assert [len(part) for part in snapshot.search("vector", [1.0, 0.0], 5, none)] == [0, 0]
    assert [len(part) for part in snapshot.match("name", "word", 5, none)] == [0, 0]
    assert snapshot.take(np.array([], dtype=np.int64)).schema.names == BASE.names
    assert snapshot.keys(none).num_rows == 0


def test_the_last_row_of_a_key_wins_within_a_batch_and_over_batches() -> None:
    table = make()
    put(table, id=[1, 2, 1, 1], name=["a", "b", "c", "d"])
    put(table, id=[2, 3, 2], name=["e", "f", "g"])
    assert live(table) == [{"id": 1, "name": "d"}, {"id": 3, "name": "f"}, {"id": 2, "name": "g"}]
    assert (table.rows, table.batches) == (7, 2)


def test_a_snapshot_keeps_its_rows_when_they_are_replaced_or_deleted() -> None:
    table = make()
    put(table, id=[1, 2], name=["a", "b"])
    before = table.snapshot()
    put(table, id=[1], name=["new"])
    table.apply(tombstones(pa.table({"id": [2]}), ROWS))
    after = table.snapshot()
    keys = pa.table({"id": [1, 2, 9]})
    assert before.lookup(keys).tolist() == [0, 1, -1]
    assert before.live().tolist() == [True, True]
    assert after.lookup(keys).tolist() == [2, 3, -1]
    assert after.live().tolist() == [False, False, True, False]
    assert after.newest().tolist() == [False, False, True, True]
    assert after.tombstone().tolist() == [False, False, False, True]
    assert before.lookup(keys).tolist() == [0, 1, -1]


def test_masks_cannot_be_changed_by_a_caller() -> None:
    table = make()
    put(table, id=[1])
    with raises(ValueError):
        table.snapshot().live()[0] = False


@pytest.mark.parametrize(
    "vector",
    [
        [float("nan"), 0.0],
        [float("inf"), 0.0],
        [1e300, 0.0],
        [1e30, 0.0],
        [None, 1.0],
    ],
)
def test_a_bad_vector_is_refused_with_its_row_and_nothing_changes(vector: list[Any]) -> None:
    schema = row_schema(pa.schema([BASE.field("id"), ("vector", pa.list_(pa.float64(), 2))]), ["id"])
    table = MemTable(schema, ["id"], [IndexSpec("vector", "ivf_pq")], 1)
    table.apply(with_tombstone(pa.table({"id": [1], "vector": [[1.0, 0.0]]}), schema))
    usage = table.usage()
    bad = with_tombstone(pa.table({"id": [1, 5, 6], "vector": [[0.0, 1.0], None, vector]}), schema)
    for refusing in (table.check, table.apply):
        with raises(InvalidRows) as caught:
            refusing(bad)
        assert (caught.value.column, caught.value.row) == ("vector", 2)
    assert table.usage() == usage
    snapshot = table.snapshot()
    assert snapshot.n == 1
    assert snapshot.search("vector", [0.0, 1.0], 5, snapshot.live())[0].tolist() == [0]


def test_rows_of_another_schema_are_refused() -> None:
    with raises(InvalidRows):
        make().apply(pa.table({"id": [1], "name": ["x"], "vector": [None]}, schema=BASE))


def test_a_null_key_is_refused_even_where_the_schema_forbids_it() -> None:
    rows = with_tombstone(pa.table({"id": [1, 2]}), ROWS)
    smuggled = pa.Table.from_arrays([pa.array([1, None], pa.int64()), *rows.columns[1:]], schema=ROWS)
    with pytest.raises(InvalidRows) as caught:
        make().apply(smuggled)
    assert (caught.value.column, caught.value.row) == ("id", 1)


def test_a_frozen_memtable_refuses_rows_and_goes_on_answering() -> None:
    table = make()
    put(table, id=[1, 2], name=["alpha beta", "gamma"], vector=[[1.0, 0.0], [0.0, 1.0]])
    table.freeze()
    with raises(MemTableFrozen):
        put(table, id=[3])
    snapshot = table.snapshot()
    assert snapshot.match("name", "gamma", 5, snapshot.live())[0].tolist() == [1]
    assert snapshot.search("vector", [1.0, 0.1], 1, snapshot.live())[0].tolist() == [0]


def test_a_put_that_breaks_half_way_is_invisible_and_stops_the_memtable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = make()
    put(table, id=[1], name=["alpha"])

    def out_of_memory(self: TextIndex, texts: pa.ChunkedArray, first: int) -> None:
        raise MemoryError("no memory")

    monkeypatch.setattr(TextIndex, "add", out_of_memory)
    with pytest.raises(MemoryError):
        put(table, id=[1, 2], name=["beta", "gamma"])
    monkeypatch.undo()
    with raises(MemTableFailed):
        put(table, id=[3])
    assert live(table) == [{"id": 1, "name": "alpha"}]


def test_an_empty_batch_changes_nothing() -> None:
    table = make()
    put(table, id=pa.array([], pa.int64()))
    assert (table.rows, table.batches) == (0, 0)


def test_take_keeps_the_order_asked_for_and_leaves_the_tombstone_out() -> None:
    table = make()
    put(table, id=[1, 2, 3], name=["a", "b", "c"])
    snapshot = table.snapshot()
    assert snapshot.take(np.array([2, 0])).column_names == BASE.names
    assert snapshot.take(np.array([2, 0]), ["name", "_tombstone"]).to_pylist() == [
        {"name": "c", "_tombstone": False},
        {"name": "a", "_tombstone": False},
    ]
    with raises(InvalidRows):
        snapshot.take(np.array([0]), ["nmae"])
    with pytest.raises(IndexError):
        snapshot.take(np.array([-1]))


@pytest.mark.parametrize(
    "keys",
    [{"name": ["x"]}, {"id": ["x"]}, {"id": pa.array([None], pa.int64())}, {"id": [1], "name": ["x"]}],
)
def test_lookup_refuses_anything_but_the_key(keys: dict[str, Any]) -> None:
    with pytest.raises(InvalidRows):
        make().snapshot().lookup(pa.table(keys))


@pytest.mark.parametrize(
    ("kinds", "values"),
    [
        ([pa.int8()], [(1,), (-1,), (1,)]),
        ([pa.uint64()], [(2**64 - 1,), (0,), (2**64 - 1,)]),
        ([pa.bool_()], [(True,), (False,), (True,)]),
        ([pa.large_string()], [("a",), ("",), ("a",)]),
        ([pa.binary()], [(b"\x00",), (b"",), (b"\x00",)]),
        ([pa.int32(), pa.string()], [(1, "a"), (1, "b"), (1, "a")]),
        ([pa.int16(), pa.bool_(), pa.binary()], [(1, True, b"x"), (1, False, b"x"), (1, True, b"x")]),
    ],
)
def test_every_key_type_finds_its_newest_row(kinds: list[pa.DataType], values: list[tuple[Any, ...]]) -> None:
    names = [f"k{place}" for place in range(len(kinds))]
    base = pa.schema([pa.field(name, kind, nullable=False) for name, kind in zip(names, kinds, strict=True)])
    schema = row_schema(base, names)
    columns = [pa.array(column, kind) for column, kind in zip(zip(*values, strict=True), kinds, strict=True)]
    rows = pa.Table.from_arrays(columns, schema=base)
    table = MemTable(schema, names, [], 1)
    table.apply(with_tombstone(rows, schema))
    snapshot = table.snapshot()
    assert snapshot.lookup(rows).tolist() == [2, 1, 2]
    assert snapshot.lookup(rows.select(names[::-1])).tolist() == [2, 1, 2]
    assert snapshot.keys(snapshot.newest()).to_pylist() == rows.slice(1).to_pylist()


def test_many_tiny_puts_are_merged_and_keep_their_positions() -> None:
    table = make([])
    count = 3 * MERGE_AT
    for number in range(count):
        put(table, id=[number], name=[str(number)])
    snapshot = table.snapshot()
    assert len(snapshot._rows.batches) < MERGE_AT
    assert snapshot.take(np.arange(count), ["id"]).column("id").to_pylist() == list(range(count))


def test_rows_are_counted_alike_however_they_came_and_were_merged() -> None:
    table = make([])
    sizes = [*[1] * MERGE_AT, SMALL_ROWS, 7, *[1] * (MERGE_AT - 2), SMALL_ROWS - 1, SMALL_ROWS, *[2] * 5]
    for size, first in zip(sizes, np.cumsum([0, *sizes[:-1]]).tolist(), strict=True):
        put(table, id=np.arange(first, first + size), name=["x"] * size)
        batches = table.snapshot()._rows.batches
        assert table.usage()["rows"] == sum(batch.nbytes + len(ROWS) * BATCH_OVERHEAD for batch in batches)
        assert sum(batch.num_rows for batch in batches) == table.rows
    assert len(batches) < 12


def test_usage_counts_every_part_and_grows_with_it() -> None:
    table = MemTable(ROWS, ["id"], [*INDEXES[:1], IndexSpec("name", "fts")], 1)
    put(table, id=[1], name=["word"], vector=[[1.0, 0.0]])
    small = table.usage()
    count = 5_000
    vectors = np.random.default_rng(0).standard_normal((count, 2)).tolist()
    put(table, id=np.arange(count), name=["some words here"] * count, vector=vectors)
    large = table.usage()
    assert set(large) == {"rows", "key", "vector", "text", "scalar"}
    assert all(large[part] > small[part] for part in ("rows", "key", "vector", "text"))
    assert table.bytes == sum(large.values())
    assert large["vector"] >= count * 8


def test_a_small_slice_does_not_hold_the_large_table_it_came_from() -> None:
    large = with_tombstone(pa.table({"id": np.arange(100_000), "name": ["a long text"] * 100_000}), ROWS)
    table = make([])
    table.apply(large.slice(50, 10))
    held = table.snapshot()._rows.batches[0]
    assert held.get_total_buffer_size() < 100_000
    assert held.column("id").to_pylist() == list(range(50, 60))
