"""Rows routed and answers put together without storage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from flush import BaseTable
from flush.sharding import Routing
from ingest.merged_answers import best_of, in_asked_order

SCHEMA = pa.schema(
    [
        pa.field("a", pa.string(), nullable=False),
        pa.field("b", pa.int32(), nullable=False),
        pa.field("raw", pa.binary()),
    ]
)
ROWS = pa.table(
    {"a": [f"k{n}" for n in range(300)], "b": list(range(300)), "raw": [bytes([n % 256]) for n in range(300)]},
    schema=SCHEMA,
)


@pytest.mark.parametrize(
    ("key", "append_by"), [(("a",), None), (("b", "a"), None), ((), ()), ((), ("b",)), ((), ("raw", "a"))]
)
def test_a_row_goes_where_the_table_itself_would_send_it(tmp_path: Path, key: Any, append_by: Any) -> None:
    base = BaseTable.create(str(tmp_path / "t.lance"), SCHEMA, key, 5, (), append_by=append_by)
    travelled = Routing.parse(json.loads(json.dumps(base.routing._asdict())))
    assert travelled == base.routing
    found = travelled.hash(base.schema)(ROWS)
    assert np.array_equal(found, base.route(ROWS))
    assert set(found.tolist()) == set(range(5))


def test_a_column_that_is_renamed_or_dropped_is_found_by_its_id(tmp_path: Path) -> None:
    uri = str(tmp_path / "t.lance")
    before = BaseTable.create(uri, SCHEMA, (), 5, (), append_by=())
    before.dataset.alter_columns({"path": "a", "name": "c"})
    after = BaseTable.open(uri)
    renamed = ROWS.rename_columns(["c", "b", "raw"])
    assert np.array_equal(after.routing.hash(after.schema)(renamed), before.route(ROWS))


def test_rows_found_by_several_come_in_the_order_asked() -> None:
    asked = pa.table({"a": ["z", "x", "y", "x", "w"], "b": pa.array([1, 2, 3, 2, 4], pa.int32())})
    vectors = pa.array([[1.0, 2.0]] * 2, pa.list_(pa.float32(), 2))
    one = pa.table({"v": vectors, "b": pa.array([3, 1], pa.int32()), "a": ["y", "z"]})
    other = pa.table({"v": vectors.slice(1), "b": pa.array([2], pa.int32()), "a": ["x"]})
    assert in_asked_order([one, other], asked).column("a").to_pylist() == ["z", "x", "y"]
    assert in_asked_order([one, other.slice(1)], asked).column("a").to_pylist() == ["z", "y"]
    assert in_asked_order([one.slice(2), other.slice(1)], asked).num_rows == 0


def test_the_best_of_several_rankings() -> None:
    def ranked(*scores: float, first: int) -> pa.Table:
        return pa.table({"id": range(first, first + len(scores)), "s": pa.array(scores, pa.float32())})

    near = best_of([ranked(0.5, 2.0, first=0), ranked(0.5, 1.0, float("nan"), first=10)], "s", 4, ascending=True)
    assert near.column("id").to_pylist() == [0, 10, 11, 1]
    best = best_of([ranked(3.0, 1.0, first=0), ranked(2.0, first=10)], "s", 9, ascending=False)
    assert best.column("id").to_pylist() == [0, 10, 1]
