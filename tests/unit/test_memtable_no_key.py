"""A memtable without a key keeps every row, even identical ones; every read except by key returns each row once."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from memwal.memtable import IndexSpec, InvalidRows, MemTable, row_schema, with_tombstone
from tests.messages import raises

BASE = pa.schema([("n", pa.int64()), ("body", pa.string()), ("v", pa.list_(pa.float32(), 4))])
ROWS = row_schema(BASE, ())
SPECS = [IndexSpec("n", "btree"), IndexSpec("body", "fts"), IndexSpec("v", "ivf_pq")]


def rows(numbers: list[int | None]) -> pa.Table:
    vectors = [None if n is None else [float(n)] * 4 for n in numbers]
    columns = {"n": numbers, "body": [f"word{n}" for n in numbers], "v": pa.array(vectors, BASE.field("v").type)}
    return with_tombstone(pa.table(columns), ROWS)


def filled(*puts: list[int | None]) -> MemTable:
    table = MemTable(ROWS, (), SPECS, 1)
    for each in puts:
        table.apply(rows(each))
    return table


def test_every_row_stays_identical_ones_and_nulls_too() -> None:
    table = filled([1, 1, None], [1, None])
    snapshot = table.snapshot()
    assert snapshot.live().all()
    assert snapshot.take(np.flatnonzero(snapshot.live())).column("n").to_pylist() == [1, 1, None, 1, None]
    assert sum(batch.num_rows for batch in snapshot.batches(snapshot.newest())) == 5
    while table.index_step():
        pass


def test_filters_searches_and_matches_see_each_row_once() -> None:
    snapshot = filled([1, 2, 2], [2, 3]).snapshot()
    assert int(snapshot.where("n = 2", snapshot.live()).sum()) == 3
    assert int(snapshot.where("true", snapshot.live()).sum()) == 5
    at, distances = snapshot.search("v", [2.0] * 4, 3, snapshot.live())
    assert sorted(at.tolist()) == [1, 2, 3]
    assert distances.tolist() == [0, 0, 0]
    assert sorted(snapshot.match("body", "word2", 10, snapshot.live())[0].tolist()) == [1, 2, 3]


def test_an_older_snapshot_keeps_its_prefix() -> None:
    table = filled([1])
    before = table.snapshot()
    table.apply(rows([1, 1]))
    assert (int(before.live().sum()), int(table.snapshot().live().sum())) == (1, 3)


def test_nothing_is_found_by_key() -> None:
    snapshot = filled([1]).snapshot()
    with raises(InvalidRows):
        snapshot.lookup(pa.table({"n": [1]}))


def test_no_bytes_are_counted_for_keys() -> None:
    assert filled([1] * 1000).usage()["key"] <= 4096
