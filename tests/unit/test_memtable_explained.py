"""The explanation of reads of a memtable: which indexes serve them, and how many rows are compared one by one."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from memwal.memtable import IndexSpec, MemTable, Snapshot, row_schema, with_tombstone
from memwal.memtable.filter.scalar_index import LOOKS
from memwal.memtable.vector.index import FETCH

ROWS, WIDTH = 10_000, 8
BASE = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("price", pa.int64()),
        pa.field("vector", pa.list_(pa.float32(), WIDTH)),
        pa.field("other", pa.list_(pa.float32(), WIDTH)),
    ]
)
QUERY = np.ones(WIDTH, np.float32)


def table(rows: int, train_rows: int) -> MemTable:
    vectors = pa.array(np.random.default_rng(3).standard_normal(rows * WIDTH), pa.float32())
    vectors = pa.FixedSizeListArray.from_arrays(vectors, WIDTH)
    schema = row_schema(BASE, ["id"])
    specs = [IndexSpec("price", "btree"), IndexSpec("vector", "ivf_pq", {"train_rows": train_rows})]
    memtable = MemTable(schema, ["id"], specs, generation=1)
    columns = [pa.array(np.arange(rows)), pa.array(np.arange(rows)), vectors, vectors]
    memtable.apply(with_tombstone(pa.table(columns, schema=BASE), schema))
    return memtable


@pytest.fixture(scope="module")
def trained() -> Snapshot:
    memtable = table(ROWS, train_rows=256)
    while memtable.index_step():
        pass
    snapshot = memtable.snapshot()
    for _ in range(LOOKS):  # a B-tree sorts its rows after this number of filters
        snapshot.where("price < 20 AND id > 10", snapshot.live())
    return snapshot


def test_a_vector_search_says_how_it_finds_its_rows(trained: Snapshot) -> None:
    live = trained.live()
    few = live & (np.arange(ROWS) < 100)
    compared, way = trained.way("vector", 10, live)
    assert way == "quantiser"
    assert FETCH <= compared < ROWS
    # Rows that wait for the quantiser are compared too, so no more than these and the candidates.
    assert len(trained.search("vector", QUERY, 10, live)[0]) == 10
    assert trained.way("vector", 10, few) == (100, "few")
    assert trained.way("vector", 10, live, "cosine") == (ROWS, "metric")
    assert trained.way("vector", 10, live, None, 0.5) == (ROWS, "low")
    assert trained.way("other", 10, live, "l2") == (ROWS, "no index")
    untrained = table(9_000, train_rows=ROWS).snapshot()
    assert untrained.way("vector", 10, untrained.live()) == (9_000, "untrained")
    small = table(300, train_rows=256).snapshot()
    assert small.way("vector", 10, small.live()) == (300, "few")


@pytest.mark.parametrize(
    ("filter", "evaluated", "columns"),
    [
        ("price < 20", 20, ["price"]),
        ("price < 20 AND id > 10", 20, ["price", "id"]),
        ("id IN (5, 6)", 2, ["id"]),
        ("price < 9000", ROWS, []),  # too many rows for an index to be worth it
        ("price % 2 = 0", ROWS, []),
    ],
)
def test_a_filter_says_which_rows_it_evaluates(
    filter: str, evaluated: int, columns: list[str], trained: Snapshot
) -> None:
    live = trained.live()
    passing = int(np.count_nonzero(trained.where(filter, live)))
    counted, used = trained.narrowed(filter, live)
    assert used == columns
    assert passing <= counted <= evaluated
    assert counted == ROWS or columns
