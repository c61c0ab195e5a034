"""Known faults of readers of levels: each has a named test, for every kind of read that can have the fault.

`test_table_contract` tests that both arms of a hybrid search use one snapshot.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import memwal
from memwal.ingest.engine.read.reader import Reader

SCHEMA = pa.schema(
    [pa.field("id", pa.int64(), False), ("price", pa.int64()), ("v", pa.list_(pa.float32(), 16)), ("text", pa.string())]
)
INDEXES = {"v": {"type": "ivf_pq", "num_partitions": 2}, "text": "fts", "price": "btree"}
LEVELS = ("committed", "flushed", "durable", "latest")
ROWS = 600


def rows(ids: range, price: int = 0, *, near: bool = False, text: str = "harbor") -> pa.Table:
    """Return rows whose vectors depend on the id alone; `near`: the lower the id, the closer to the origin."""
    vectors = np.stack([np.random.default_rng(id).normal(size=16) for id in ids]).astype(np.float32)
    if near:
        vectors *= (np.array(ids, np.float32) + 1)[:, None] / np.linalg.norm(vectors, axis=1, keepdims=True)
    flat = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), 16)
    return pa.table([pa.array(ids), pa.array([price] * len(ids)), flat, pa.array([text] * len(ids))], schema=SCHEMA)


@pytest.fixture
def table(uri: str) -> Iterator[Any]:
    settings = {"commit": {"interval": "0s"}, "gc": {"interval": "0s"}}
    with memwal.open(uri, schema=SCHEMA, key="id", regions=2, indexes=INDEXES, settings=settings) as opened:
        yield opened


def commit(table: Any) -> None:
    table.flush()
    table.commit()


def test_distances_of_all_levels_are_on_one_scale(table: Any) -> None:
    """The fault: distances of quantised vectors are compared with exact ones, so the rows of one level come first."""
    for first, step in ((0, commit), (ROWS, lambda opened: opened.flush()), (2 * ROWS, lambda _: None)):
        same = rows(range(ROWS)).set_column(0, SCHEMA.field("id"), pa.array(range(first, first + ROWS)))
        table.put(same)
        step(table)
    for id in (3, 77, 599):
        query = rows(range(id, id + 1))["v"][0].as_py()
        found = table.search("v", [each + 0.1 for each in query], 9).to_pylist()
        by_vector: dict[int, list[float]] = {}
        for each in found:
            by_vector.setdefault(each["id"] % ROWS, []).append(each["_distance"])
        assert by_vector.pop(id) == pytest.approx([0.16] * 3, rel=1e-3)
        assert all(len(each) == 3 and each == pytest.approx([each[0]] * 3, rel=1e-5) for each in by_vector.values())


@pytest.mark.parametrize("replaced", ["deleted", "moved"])
def test_the_best_k_are_k_rows_though_newer_levels_hide_better_ones(table: Any, replaced: str) -> None:
    table.put(rows(range(ROWS), near=True))
    commit(table)
    hidden = range(200)
    if replaced == "deleted":
        table.delete(list(hidden))
    else:
        table.put([{"id": id, "price": 0, "v": [1e4] * 16, "text": "copper"} for id in hidden])
    for step in (lambda: None, table.flush):
        step()
        found = table.search("v", [0.0] * 16, 10)
        assert found["id"].to_pylist() == list(range(200, 210))
        assert table.match("text", "harbor", 390).num_rows == 390
        assert set(table.match("text", "harbor", ROWS)["id"].to_pylist()) == set(range(200, ROWS))
        both = table.hybrid([0.0] * 16, "harbor", 10, candidates=10)
        assert set(both["id"].to_pylist()) <= set(range(200, ROWS))
        assert both.num_rows == 10


def test_an_old_version_that_passes_a_filter_stays_hidden(table: Any) -> None:
    """The fault: a filter below the merge returns a version that was replaced by a newer one, which does not pass."""
    table.put(rows(range(ROWS), price=5))
    commit(table)
    table.put(rows(range(100), price=50))
    table.flush()
    table.put(rows(range(50), price=5, text="violet"))
    for _ in range(2):
        expected = {*range(50), *range(100, ROWS)}
        assert set(table.scan(["id"], "price < 10").read_all()["id"].to_pylist()) == expected
        assert table.count("price < 10") == len(expected)
        assert table.count("price >= 10") == 50
        assert set(table.search("v", [0.0] * 16, ROWS, "price < 10")["id"].to_pylist()) == expected
        assert set(table.match("text", "harbor", ROWS, "price < 10")["id"].to_pylist()) == set(range(100, ROWS))
        assert set(table.scan(["id"], "price < 10", order_by="id").read_all()["id"].to_pylist()) == expected
        commit(table)


def test_a_limit_counts_visible_rows_only(table: Any) -> None:
    """The fault: a limit below the levels that hide rows returns too few rows."""
    table.put(rows(range(ROWS)))
    commit(table)
    table.delete(list(range(250)))
    table.flush()
    table.delete(list(range(250, 500)))
    for limit in (1, 60, 100):
        assert table.scan(limit=limit).read_all().num_rows == limit
        assert table.scan(filter="price = 0", limit=limit).read_all().num_rows == limit
        assert table.scan(["id"], order_by="id", limit=limit).read_all()["id"].to_pylist() == list(
            range(500, 500 + limit)
        )
    assert table.scan(limit=1000).read_all().num_rows == 100


def test_an_sst_that_is_committed_while_a_read_begins_counts_once(
    table: Any, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault: the list of SSTs is older than the base table, so rows of both count twice, or deletes are undone."""
    base = Reader.base
    with memwal.open(uri, read_only=True) as stored:
        for reader in (stored, table):
            for level in LEVELS[1:]:
                table.put(rows(range(ROWS), price=1))
                table.flush()

                def committed_meanwhile(of: Reader) -> Any:
                    monkeypatch.undo()
                    table.commit()
                    table.upkeep.collect()
                    return base(of)

                for counts in (True, False):
                    table.put(rows(range(10), price=2))
                    table.delete([ROWS + 1])
                    table.flush()
                    monkeypatch.setattr(Reader, "base", committed_meanwhile)
                    found = (
                        reader.count(level=level) if counts else reader.scan(["id"], level=level).read_all().num_rows
                    )
                    assert found == ROWS, (type(reader), level)
