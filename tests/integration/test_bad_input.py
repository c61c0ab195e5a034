"""Rows that could break an index, put into a table: rejected in one line with column and row, or accepted and found.

`unit/test_memtable_bad_input` tests the memtable alone, in both index modes; `test_text_queries` has the texts.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import memwal

WIDTH = 4
SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        ("price", pa.int64()),
        ("body", pa.string()),
        ("vector", pa.list_(pa.float32(), WIDTH)),
    ]
)
GOOD = [{"id": n, "price": n, "body": f"word{n} harbor", "vector": [float(n), 1.0, 0.0, 0.0]} for n in range(100, 120)]
NAN, INF = float("nan"), float("inf")
ROWS = pa.table({"id": [1], "body": ["a"]})


@pytest.fixture
def table(tmp_path: Path) -> Iterator[Any]:
    indexes = {"vector": {"type": "ivf_pq", "metric": "cosine"}, "body": "fts", "price": "btree"}
    settings = {"commit": {"interval": "0s"}, "memtable": {"vector_train_rows": 256}}
    with memwal.open(
        tmp_path / "t.lance", schema=SCHEMA, key="id", regions=1, indexes=indexes, settings=settings
    ) as opened:
        opened.put(GOOD)
        yield opened


def not_utf8(rows: int) -> pa.Array:
    """Return text that Arrow accepts without validation: its last value is the byte FF."""
    offsets = pa.py_buffer(np.arange(rows + 1, dtype=np.int32).tobytes())
    return pa.Array.from_buffers(pa.string(), rows, [None, offsets, pa.py_buffer(b"a" * (rows - 1) + b"\xff")])


def vectors(bad: list[float], kind: pa.DataType | None = None) -> pa.Table:
    good = [1.0] * WIDTH
    return pa.table({"id": [1, 2, 3], "vector": pa.array([good, good, bad], kind or pa.list_(pa.float64()))})


REFUSED: dict[str, tuple[pa.Table | list[dict[str, Any]], str]] = {
    "NaN": (vectors([NAN, 0.0, 0.0, 0.0]), "vector"),
    "infinite": (vectors([0.0, 0.0, 0.0, -INF]), "vector"),
    "beyond float32": (vectors([1e300, 0.0, 0.0, 0.0]), "vector"),
    "too long": (vectors([3e38, 3e38, 0.0, 0.0]), "vector"),
    "too narrow": (vectors([1.0, 0.0, 0.0]), "vector"),
    "too wide": (vectors([1.0] * 5), "vector"),
    "empty": (vectors([]), "vector"),
    "NaN, as a dict": ([{"id": 1}, {"id": 3}, {"id": 2, "vector": [NAN] * WIDTH}], "vector"),
    "not UTF-8": (pa.table({"id": [1, 2, 3], "body": not_utf8(3)}), "body"),
    "not UTF-8, chunked": (pa.concat_tables([ROWS, pa.table({"id": [2, 3], "body": not_utf8(2)})]), "body"),
    "null key": (pa.table({"id": pa.array([1, 2, None], pa.int64())}), "id"),
}
"""The third row is at fault."""


def test_rows_that_cannot_be_found_again_are_refused_with_column_and_row(table: Any) -> None:
    for case, (rows, column) in REFUSED.items():
        with pytest.raises(memwal.Invalid) as refused:
            table.put(rows, missing="null")
        said = str(refused.value)
        assert len(said.splitlines()) == 1, case
        assert f"'{column}'" in said, case
        assert "2" in said.replace("table wants", "").replace("float32", ""), case
    reads_as_before(table, {})
    table.put([{"id": 1, "price": 1, "body": "copper", "vector": [1.0] * WIDTH}])
    reads_as_before(table, {1: "copper"})


def reads_as_before(table: Any, more: dict[int, str | None]) -> None:
    """Check that every read finds all good rows, and finds `more` rows (id: body) by their keys."""
    known = {row["id"]: row["body"] for row in GOOD}
    found = table.scan(["id", "body"]).read_all().to_pylist()
    assert {row["id"]: row["body"] for row in found} == known | more
    assert table.get([101, *more], columns=["body"])["body"].to_pylist() == [known[101], *more.values()]
    assert set(known) <= set(table.match("body", "harbor", k=1_000)["id"].to_pylist())
    searched = table.search("vector", [1.0, 1.0, 0.0, 0.0], k=1_000)
    assert set(known) <= set(searched["id"].to_pylist())
    assert np.isfinite(searched["_distance"].to_numpy()).all()
    assert set(table.scan(["id"], filter="price >= 100").read_all()["id"].to_pylist()) == set(known)


@pytest.mark.parametrize("vector", [None, [0.0] * WIDTH, [-0.0] * WIDTH], ids=["null", "zero", "negative zero"])
def test_rows_that_are_near_nothing_and_null_elsewhere_are_found_by_key(vector: Any, table: Any) -> None:
    table.put([{"id": n, "vector": vector} for n in range(50)], missing="null")
    for step in (lambda: None, table.flush, table.commit):
        step()
        reads_as_before(table, dict.fromkeys(range(50)))
        assert table.get(7, columns=["vector"]).to_pylist() == [{"vector": vector}]
        assert table.search("vector", [1.0, 1.0, 0.0, 0.0], k=1_000).num_rows == 20
        assert table.count("price IS NULL AND body IS NULL") == 50
