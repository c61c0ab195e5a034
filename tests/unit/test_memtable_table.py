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
    row_schema,
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


def test_masks_cannot_be_changed_by_a_caller() -> None:
    table = make()
    put(table, id=[1])
    with raises(ValueError):
        table.snapshot().live()[0] = False


def test_rows_of_another_schema_are_refused() -> None:
    with raises(InvalidRows):
        make().apply(pa.table({"id": [1], "name": ["x"], "vector": [None]}, schema=BASE))


def test_a_null_key_is_refused_even_where_the_schema_forbids_it() -> None:
    rows = with_tombstone(pa.table({"id": [1, 2]}), ROWS)
    smuggled = pa.Table.from_arrays([pa.array([1, None], pa.int64()), *rows.columns[1:]], schema=ROWS)
    with pytest.raises(InvalidRows) as caught:
        make().apply(smuggled)
    assert (caught.value.column, caught.value.row) == ("id", 1)


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


def test_rows_are_counted_alike_however_they_came_and_were_merged() -> None:
    table = make([])
    sizes = [*[1] * MERGE_AT, SMALL_ROWS, 7, *[1] * (MERGE_AT - 2), SMALL_ROWS - 1, SMALL_ROWS, *[2] * 5]
    for size, first in zip(sizes, np.cumsum([0, *sizes[:-1]]).tolist(), strict=True):
        put(table, id=np.arange(first, first + size), name=["x"] * size)
        snapshot = table.snapshot()
        batches = list(snapshot.batches(snapshot.live()))
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
    table, before = make([]), pa.total_allocated_bytes()
    large = with_tombstone(pa.table({"id": np.arange(100_000), "name": ["a long text"] * 100_000}), ROWS)
    table.apply(large.slice(50, 10))
    del large
    assert pa.total_allocated_bytes() - before < 100_000
    assert [row["id"] for row in live(table)] == list(range(50, 60))
