"""Replaced and deleted rows: a read never returns them, and never returns fewer results because of them.

The tests use the public methods: the older version is at one level, the newer one at a higher level, with memtables
indexed at the put and later. tests/unit/test_memtable_stale_reads.py has the same cases inside one memtable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import memwal

WIDTH = 8
SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        ("price", pa.int64()),
        ("body", pa.string()),
        ("vector", pa.list_(pa.float32(), WIDTH)),
    ]
)
INDEXES = {"vector": "ivf_pq", "body": "fts", "price": "btree"}
NEAR, FAR = [0.0] * WIDTH, [50.0] * WIDTH
LEVELS = {
    "base": lambda table: (table.flush(), table.commit()),
    "sst": lambda table: table.flush(),
    "memtable": lambda table: None,
}
OVER = [("base", "sst"), ("base", "memtable"), ("sst", "sst"), ("sst", "memtable"), ("memtable", "memtable")]


def rows(ids: Any, vectors: Any, *, price: int = 5, body: str = "plain words") -> pa.Table:
    """Return one row per id; a single vector applies to all rows."""
    ids = np.asarray(ids, dtype=np.int64)
    numbers = np.broadcast_to(np.asarray(vectors, dtype=np.float32), (len(ids), WIDTH))
    vector = pa.FixedSizeListArray.from_arrays(pa.array(numbers.ravel()), WIDTH)
    return pa.table(
        [pa.array(ids), pa.array([price] * len(ids), pa.int64()), pa.array([body] * len(ids), pa.string()), vector],
        schema=SCHEMA,
    )


def spread(count: int, at: float) -> np.ndarray:
    """Return vectors around a point `at` away from the origin in every dimension."""
    return np.random.default_rng(count).normal(at, 0.5, (count, WIDTH)).astype(np.float32)


def ids(found: pa.Table) -> list[int]:
    return found.column("id").to_pylist()


@pytest.fixture(params=["sync", "async"])
def table(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    settings = {"commit": {"interval": "0s"}, "memtable": {"index_mode": request.param, "vector_train_rows": 256}}
    with memwal.open(
        tmp_path / "t.lance", schema=SCHEMA, key="id", regions=2, indexes=INDEXES, settings=settings
    ) as opened:
        yield opened


@pytest.fixture(params=OVER, ids=lambda levels: f"{levels[1]} over {levels[0]}")
def settle(request: pytest.FixtureRequest, table: Any) -> Iterator[Callable[[], None]]:
    """Yield a function that the test calls after the older rows and again after the newer ones."""
    waiting = list(request.param)
    yield lambda: LEVELS[waiting.pop(0)](table)
    assert waiting == [], "the test puts at both levels"


def test_a_newer_row_outside_the_top_k_hides_its_older_self_inside(table: Any, settle: Callable[[], None]) -> None:
    table.put(rows(range(10, 400), spread(390, 5.0), body="harbor among other words"))
    table.put(rows(range(5), NEAR, body="harbor harbor harbor"))
    settle()
    newer = "harbor " + "lost among a great many further words " * 20
    table.put(rows(range(4), FAR, body=newer))
    settle()
    found = ids(table.search("vector", NEAR, k=10))
    assert found[0] == 4
    assert len(set(found)) == 10
    assert min(found[1:]) >= 10
    for k in (1, 10, 1_000):  # scores use one level's statistics, so the test ignores their order
        matched = table.match("body", "harbor", k=k)
        assert len(set(ids(matched))) == matched.num_rows == min(k, 395)
        assert all(row["body"] == newer for row in matched.to_pylist() if row["id"] < 4)


def test_a_filter_that_only_the_old_version_passes_finds_nothing(table: Any, settle: Callable[[], None]) -> None:
    table.put(rows(range(10, 400), spread(390, 5.0), price=9, body="harbor"))
    table.put(rows(range(3), NEAR, price=1, body="harbor harbor"))
    settle()
    table.put(rows([0, 1], NEAR, price=9, body="harbor harbor"))
    table.delete([2])
    settle()
    for filter in ("price = 1", "price < 5", "price <> 9", "price IN (1, 2)", "id < 5 AND price = 1"):
        assert table.scan(filter=filter).read_all().num_rows == 0
        assert table.count(filter) == 0
        assert table.search("vector", NEAR, k=5, filter=filter).num_rows == 0
        assert table.match("body", "harbor", k=5, filter=filter).num_rows == 0
    assert sorted(ids(table.scan(filter="id < 5").read_all())) == [0, 1]


def test_thousands_of_nearer_rows_that_were_replaced_or_deleted_cost_no_result(
    table: Any, settle: Callable[[], None]
) -> None:
    near = 4_000
    table.put(rows(range(near), spread(near, 0.0), body="harbor harbor"))
    table.put(rows(range(near, near + 40), spread(40, 20.0), price=7, body="one harbor among many other words"))
    settle()
    table.put(rows(range(near // 2), [500.0] * WIDTH, body="copper"))
    table.delete(list(range(near // 2, near)))
    settle()
    for k in (1, 10, 40):
        for filter in (None, "price = 7"):
            for found in (
                ids(table.search("vector", NEAR, k=k, filter=filter)),
                ids(table.match("body", "harbor", k=k, filter=filter)),
            ):
                assert len(set(found)) == len(found) == k
                assert min(found) >= near
    assert table.search("vector", NEAR, k=10_000, filter="price = 7").num_rows == 40
    assert table.match("body", "harbor", k=10_000).num_rows == 40


def test_a_key_inserted_again_after_a_delete_is_its_new_row_alone(table: Any, settle: Callable[[], None]) -> None:
    table.put(rows(range(10, 400), spread(390, 5.0)))
    table.put(rows([1], NEAR, price=1, body="harbor"))
    settle()
    table.delete([1])
    table.put(rows([1], FAR, price=2, body="meadow"))
    settle()
    assert table.get(1).to_pylist() == rows([1], FAR, price=2, body="meadow").to_pylist()
    assert table.count("price = 1") == 0
    assert ids(table.scan(filter="price = 2").read_all()) == [1]
    assert table.match("body", "harbor").num_rows == 0
    assert ids(table.match("body", "meadow")) == [1]
    assert ids(table.search("vector", FAR, k=1)) == [1]
    assert 1 not in ids(table.search("vector", NEAR, k=10))


def test_a_delete_is_visible_in_every_read_when_it_returns(table: Any, settle: Callable[[], None]) -> None:
    vectors = spread(300, 5.0)
    for n in range(0, 300, 100):
        table.put(rows(range(n, n + 100), vectors[n : n + 100], price=n, body=f"word{n} harbor"))
    settle()
    for n in (0, 150, 299):
        table.delete([n])
        assert table.get(n).num_rows == 0
        assert n not in ids(table.scan(filter="price >= 0").read_all())
        assert n not in ids(table.search("vector", vectors[n], k=300))
        assert n not in ids(table.match("body", "harbor", k=300))
    settle()
    assert table.count() == 297
    assert table.search("vector", NEAR, k=1_000).num_rows == 297
    assert table.match("body", "harbor", k=1_000).num_rows == 297
