"""A replaced or deleted row is in no answer, and takes no other row's place in an answer.

Each case runs with rows that are indexed at the put, with rows that wait for the index, and with half of each. The
quantiser is used for any number of rows, so that the tests cover its handling of old rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from memwal.memtable import IndexSpec, Snapshot, row_schema, tombstones, with_tombstone
from tests.index_modes import memtable_in

pytestmark = pytest.mark.usefixtures("quantised")
WIDTH = 8
BASE = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        ("price", pa.int64()),
        ("body", pa.string()),
        ("vector", pa.list_(pa.float32(), WIDTH)),
    ]
)
ROWS = row_schema(BASE, ["id"])
INDEXES = [
    IndexSpec("vector", "ivf_pq", {"train_rows": 64}),
    IndexSpec("body", "fts"),
    IndexSpec("price", "btree"),
]
NEAR = np.zeros(WIDTH, dtype=np.float32)
FAR = np.full(WIDTH, 50, dtype=np.float32)


class Rows:
    """A memtable whose rows are indexed by its mode: at the put, never, or the first half of them."""

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.table = memtable_in(mode, ROWS, ["id"], INDEXES, 1)

    def put(self, ids: Any, vectors: Any, *, price: Any = 5, body: Any = "plain words") -> None:
        """Put one row per id; a single vector, price or body is used for every row."""
        ids = np.asarray(ids, dtype=np.int64)
        count = len(ids)
        numbers = np.broadcast_to(np.asarray(vectors, dtype=np.float32), (count, WIDTH))
        columns = {
            "id": pa.array(ids),
            "price": pa.array(np.broadcast_to(price, count)),
            "body": pa.array([body] * count if isinstance(body, str) else list(body)),
            "vector": pa.FixedSizeListArray.from_arrays(pa.array(numbers.ravel()), WIDTH),
        }
        self.table.apply(with_tombstone(pa.table(columns), ROWS))

    def delete(self, ids: Any) -> None:
        self.table.apply(tombstones(pa.table({"id": np.asarray(ids, dtype=np.int64)}), ROWS))

    def index(self) -> None:
        """Index rows in mode "half"; the tests call this between the older and the newer rows."""
        while self.mode == "half" and self.table.index_step():
            pass

    def searched(self, k: int, vector: Any = NEAR, filter: str | None = None) -> list[int]:
        return self._ids(lambda snapshot, mask: snapshot.search("vector", vector, k, mask)[0], filter)

    def matched(self, k: int, text: str, filter: str | None = None) -> list[int]:
        return self._ids(lambda snapshot, mask: snapshot.match("body", text, k, mask)[0], filter)

    def _ids(self, found: Callable[[Snapshot, np.ndarray], np.ndarray], filter: str | None) -> list[int]:
        snapshot = self.table.snapshot()
        mask = snapshot.live() if filter is None else snapshot.where(filter, snapshot.live())
        return snapshot.take(found(snapshot, mask), ["id"]).column("id").to_pylist()


@pytest.fixture(params=["sync", "async", "half"])
def rows(request: pytest.FixtureRequest) -> Iterator[Rows]:
    return Rows(request.param)


def spread(count: int, seed: int = 1, at: float = 5.0) -> np.ndarray:
    """Return vectors around a point whose distance from the origin is `at` in every dimension."""
    return np.random.default_rng(seed).normal(at, 0.5, (count, WIDTH)).astype(np.float32)


@pytest.mark.parametrize(("mode", "older", "newer"), [("sync", 0, 0), ("async", 1, 1), ("half", 0, 1)])
def test_the_modes_leave_waiting_what_they_say(mode: str, older: int, newer: int) -> None:
    """Otherwise all modes would test the same case."""
    rows = Rows(mode)
    rows.put(np.arange(3_000), spread(3_000), body="harbor")
    rows.index()
    assert rows.table.index_step() == bool(older)
    rows.put(np.arange(3_000), spread(3_000), body="harbor")
    assert rows.table.index_step() == bool(newer)


@pytest.mark.parametrize("count", [20, 3_000])
def test_a_newer_row_far_away_hides_its_older_self_near_by(rows: Rows, count: int) -> None:
    rows.put(np.arange(count), spread(count))
    rows.put([7, 8], NEAR)
    rows.index()
    assert set(rows.searched(2)) == {7, 8}
    rows.put([7], FAR)
    assert rows.searched(1) == [8]
    found = rows.searched(10)
    assert len(found) == 10
    assert 7 not in found


def test_a_newer_text_that_matches_less_hides_its_older_self(rows: Rows) -> None:
    """The older row is the best match; the newer one is the worst of all and so not among the top k."""
    rows.put(np.arange(500), FAR, body="harbor and many other words beside that one")
    rows.put([7], FAR, body="harbor harbor harbor")
    rows.index()
    assert rows.matched(1, "harbor") == [7]
    rows.put([7], FAR, body="harbor " + "lost among a great many further words of all kinds " * 20)
    found = rows.matched(10, "harbor")
    assert len(found) == 10
    assert 7 not in found
    assert sorted(rows.matched(1_000, "harbor")) == list(range(500))


@pytest.mark.parametrize("k", [1, 50])
@pytest.mark.parametrize("why", ["replaced", "deleted", "filtered"])
def test_thousands_of_nearer_rows_that_do_not_count_cost_no_result(rows: Rows, why: str, k: int) -> None:
    near = 6_000
    rows.put(np.arange(near), spread(near, at=0.0), price=1, body="harbor harbor")
    rows.put(np.arange(near, near + 50), spread(50, at=20.0), price=2, body="the harbor is one of very many words here")
    rows.index()
    if why == "replaced":
        rows.put(np.arange(near), FAR * 10, body="copper")
    elif why == "deleted":
        rows.delete(np.arange(near))
    filter = "price = 2" if why == "filtered" else None
    for found in (rows.searched(k, filter=filter), rows.matched(k, "harbor", filter)):
        assert len(set(found)) == len(found) == k
        assert min(found) >= near


def test_rows_that_the_quantiser_leaves_out_are_found_all_the_same(rows: Rows) -> None:
    """A quantiser that is trained on two vectors cannot distinguish the others, and returns too few rows."""
    spec = IndexSpec("vector", "ivf_pq", {"train_rows": 2})
    rows.table = memtable_in(rows.mode, ROWS, ["id"], [spec], 1)
    generator = np.random.default_rng(3)
    vectors = generator.integers(-3, 4, (200, WIDTH)).astype(np.float32)
    for first in range(0, 200, 8):
        rows.put(np.arange(first, first + 8), vectors[first : first + 8])
        rows.index()
        query = generator.integers(-3, 4, WIDTH).astype(np.float32)
        distances = ((vectors[: first + 8] - query) ** 2).sum(axis=1)
        found = ((vectors[rows.searched(3, query)] - query) ** 2).sum(axis=1)
        assert found.tolist() == sorted(distances.tolist())[:3]


# ---- snapshots -----------------------------------------------------------------------------------------------------
