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
from memwal.memtable.vector import index as vector_index
from tests.index_modes import memtable_in

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
Made = Callable[[], "Rows"]


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

    def scanned(self, filter: str | None = None) -> list[int]:
        return self._ids(lambda _, mask: np.flatnonzero(mask), filter)

    def got(self, ids: list[int]) -> list[int]:
        """Return those of `ids` that have a live row."""
        snapshot = self.table.snapshot()
        positions = snapshot.lookup(pa.table({"id": np.asarray(ids, dtype=np.int64)}))
        live = snapshot.live()
        return [id for id, position in zip(ids, positions.tolist(), strict=True) if position >= 0 and live[position]]

    def _ids(self, found: Callable[[Snapshot, np.ndarray], np.ndarray], filter: str | None) -> list[int]:
        snapshot = self.table.snapshot()
        mask = snapshot.live() if filter is None else snapshot.where(filter, snapshot.live())
        return snapshot.take(found(snapshot, mask), ["id"]).column("id").to_pylist()


@pytest.fixture(autouse=True)
def quantised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vector_index, "EXACT_ROWS", 0)


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


# ---- a newer row outside the top k ---------------------------------------------------------------------------------


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


def test_a_newer_row_without_a_vector_hides_its_older_self(rows: Rows) -> None:
    rows.put(np.arange(100), spread(100))
    rows.put([7], NEAR)
    rows.index()
    rows.table.apply(with_tombstone(pa.table({"id": [7]}), ROWS))
    assert 7 not in rows.searched(100)
    assert rows.got([7]) == [7]


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


def test_a_newer_text_that_does_not_match_hides_its_older_self(rows: Rows) -> None:
    rows.put([1, 2], FAR, body="harbor")
    rows.index()
    rows.put([1], FAR, body="copper")
    assert rows.matched(10, "harbor") == [2]
    assert rows.matched(10, "copper") == [1]


# ---- a predicate that only the old version passes ------------------------------------------------------------------


@pytest.mark.parametrize("filter", ["price = 1", "price < 2", "price IN (0, 1)", "price BETWEEN 1 AND 1", "price <> 9"])
def test_a_filter_that_only_the_old_version_passes_finds_nothing(rows: Rows, filter: str) -> None:
    rows.put(np.arange(10, 300), spread(290), price=9, body="harbor")
    rows.put([1, 2], NEAR, price=1, body="harbor harbor")
    rows.index()
    assert set(rows.scanned(filter)) == {1, 2}
    rows.put([1], NEAR, price=9, body="harbor harbor")
    rows.delete([2])
    assert rows.scanned(filter) == []
    assert rows.searched(5, filter=filter) == []
    assert rows.matched(5, "harbor", filter) == []


def test_a_filter_on_null_that_only_the_old_version_passes_finds_nothing(rows: Rows) -> None:
    rows.table.apply(with_tombstone(pa.table({"id": [1, 2]}), ROWS))
    rows.index()
    rows.put([1], NEAR, price=1)
    assert rows.scanned("price IS NULL") == [2]
    rows.delete([2])
    assert rows.scanned("price IS NULL") == []
    assert rows.scanned("body IS NULL OR true") == [1]


def test_a_filter_on_the_key_finds_the_newest_version_alone(rows: Rows) -> None:
    for price in (1, 2, 3):
        rows.put(np.arange(100), FAR, price=price)
        rows.index()
    assert sorted(rows.scanned("id >= 40 AND id < 50")) == list(range(40, 50))
    assert rows.scanned("id >= 40 AND id < 50 AND price < 3") == []
    assert rows.scanned("id IN (3, 5) AND price = 2") == []


# ---- k results whenever k live rows pass ---------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 10, 50])
def test_thousands_of_nearer_rows_that_were_replaced_cost_no_result(rows: Rows, k: int) -> None:
    near = 6_000
    rows.put(np.arange(near), spread(near, at=0.0))
    rows.put(np.arange(near, near + 50), spread(50, at=20.0))
    rows.index()
    rows.put(np.arange(near), FAR * 10)
    found = rows.searched(k)
    assert len(found) == k
    assert set(found) <= set(range(near, near + 50))


@pytest.mark.parametrize("k", [1, 10, 50])
def test_thousands_of_nearer_rows_that_were_deleted_cost_no_result(rows: Rows, k: int) -> None:
    near = 6_000
    rows.put(np.arange(near), spread(near, at=0.0), body="harbor harbor")
    rows.put(np.arange(near, near + 50), spread(50, at=20.0), body="the harbor is one of very many words here")
    rows.index()
    rows.delete(np.arange(near))
    for found in (rows.searched(k), rows.matched(k, "harbor")):
        assert len(set(found)) == len(found) == k
        assert min(found) >= near


@pytest.mark.parametrize("k", [1, 10, 50])
def test_thousands_of_nearer_rows_that_do_not_pass_cost_no_result(rows: Rows, k: int) -> None:
    near = 6_000
    rows.put(np.arange(near), spread(near, at=0.0), price=1, body="harbor harbor")
    rows.put(np.arange(near, near + 50), spread(50, at=20.0), price=2, body="the harbor is one of very many words")
    rows.index()
    for found in (rows.searched(k, filter="price = 2"), rows.matched(k, "harbor", "price = 2")):
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


def test_more_is_asked_for_than_there_is(rows: Rows) -> None:
    rows.put(np.arange(500), spread(500), body="harbor")
    rows.index()
    rows.put(np.arange(480), FAR, body="copper")
    rows.delete(np.arange(400))
    assert sorted(rows.searched(10_000)) == list(range(400, 500))
    assert sorted(rows.matched(10_000, "harbor")) == list(range(480, 500))
    assert sorted(rows.searched(10_000, filter="id >= 490")) == list(range(490, 500))


def test_one_key_replaced_thousands_of_times_is_found_once(rows: Rows) -> None:
    for _ in range(4):
        rows.put(np.repeat([1, 2, 3], 1_000), spread(3_000, at=0.0), body="harbor")
        rows.index()
    assert sorted(rows.searched(10)) == [1, 2, 3]
    assert sorted(rows.matched(10, "harbor")) == [1, 2, 3]
    assert sorted(rows.scanned("price = 5")) == [1, 2, 3]


# ---- a key inserted again after a delete ---------------------------------------------------------------------------


@pytest.mark.parametrize("in_one_batch", [False, True])
def test_a_key_inserted_again_after_a_delete_is_its_new_row_alone(rows: Rows, in_one_batch: bool) -> None:
    rows.put(np.arange(10, 200), spread(190), body="copper")
    rows.put([1], NEAR, price=1, body="harbor")
    rows.index()
    if in_one_batch:
        deleting = tombstones(pa.table({"id": np.array([1])}), ROWS)
        again = {"id": [1], "price": [2], "body": ["meadow"], "vector": [FAR.tolist()]}
        rows.table.apply(pa.concat_tables([deleting, with_tombstone(pa.table(again), ROWS)]))
    else:
        rows.delete([1])
        rows.put([1], FAR, price=2, body="meadow")
    assert rows.got([1]) == [1]
    assert rows.scanned("id = 1 AND price = 2") == [1]
    assert rows.scanned("price = 1") == []
    assert rows.matched(5, "harbor") == []
    assert rows.matched(5, "meadow") == [1]
    assert rows.searched(1, FAR) == [1]
    assert 1 not in rows.searched(10, NEAR)
    assert sorted(rows.searched(1_000)) == [1, *range(10, 200)]


def test_a_row_put_and_deleted_in_one_batch_is_not_there(rows: Rows) -> None:
    put = with_tombstone(pa.table({"id": [1], "body": ["harbor"], "vector": [NEAR.tolist()], "price": [1]}), ROWS)
    rows.table.apply(pa.concat_tables([put, tombstones(pa.table({"id": np.array([1])}), ROWS)]))
    assert (rows.got([1]), rows.scanned(), rows.searched(5), rows.matched(5, "harbor")) == ([], [], [], [])


# ---- a delete is visible everywhere at once ------------------------------------------------------------------------


def test_a_delete_is_visible_in_every_index_when_apply_returns(rows: Rows) -> None:
    rows.put(np.arange(300), spread(300), price=np.arange(300), body=[f"word{n} harbor" for n in range(300)])
    rows.index()
    vectors = spread(300)
    for id in range(0, 300, 23):
        before = rows.table.snapshot()
        rows.delete([id])
        assert rows.got([id]) == []
        assert rows.scanned(f"id = {id}") == []
        assert rows.scanned(f"price = {id}") == []
        assert id not in rows.scanned("price >= 0")
        assert id not in rows.searched(300, vectors[id])
        assert rows.matched(5, f"word{id}") == []
        assert id not in rows.matched(300, "harbor")
        assert before.search("vector", vectors[id], 1, before.live())[0].tolist() == [id]
        assert before.match("body", f"word{id}", 1, before.live())[0].tolist() == [id]


def test_deletes_of_keys_that_were_never_there_are_found_by_nothing(rows: Rows) -> None:
    rows.put([1], NEAR, body="harbor")
    rows.delete([2, 3])
    assert rows.scanned() == [1]
    assert rows.scanned("price IS NULL") == []
    assert rows.searched(10) == [1]
    assert rows.matched(10, "harbor") == [1]
    snapshot = rows.table.snapshot()
    assert snapshot.lookup(pa.table({"id": [2]})).tolist() == [1]  # the tombstone, which hides older levels
    assert snapshot.newest().tolist() == [True, True, True]


# ---- snapshots -----------------------------------------------------------------------------------------------------


def test_a_snapshot_taken_before_shows_the_old_version_in_every_index(rows: Rows) -> None:
    rows.put(np.arange(10, 2_000), spread(1_990), body="copper")
    rows.put([1], NEAR, price=1, body="harbor")
    before = rows.table.snapshot()
    rows.put([1], FAR, price=2, body="meadow")
    rows.index()
    rows.delete([1])
    live = before.live()
    row = before.lookup(pa.table({"id": [1]}))
    assert before.search("vector", NEAR, 1, live)[0].tolist() == row.tolist()
    assert before.match("body", "harbor", 1, live)[0].tolist() == row.tolist()
    assert before.match("body", "meadow", 1, live)[0].tolist() == []
    assert np.flatnonzero(before.where("price = 1", live)).tolist() == row.tolist()
    assert not before.where("price = 2", live).any()
