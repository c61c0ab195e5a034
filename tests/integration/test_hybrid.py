"""Hybrid search beyond the contract of a table: rows without a key, shares of several owners, prefixes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import memwal
from memwal.ingest.engine.api.reads import READS
from memwal.ingest.service.client.scatter import merged
from tests.messages import raises

ROWS = pa.schema([("body", pa.string()), ("vector", pa.list_(pa.float32(), 2))])


def test_rows_that_are_equal_are_each_found_once(uri: str) -> None:
    same = {"body": "harbor", "vector": [1.0, 0.0]}
    settings = {"commit": {"interval": "0s"}}
    with memwal.open(uri, schema=ROWS, key=(), indexes={"vector": "ivf_pq", "body": "fts"}, settings=settings) as table:
        for count, step in ((3, table.flush), (6, table.commit), (9, lambda: None)):
            table.put([same] * 3)
            step()
            found = table.hybrid([1.0, 0.0], "harbor", k=50)
            assert found["_distance"].to_pylist() == [0.0] * count
            assert found["_score"].null_count == 0


@pytest.fixture
def layered(open_small: Callable[..., Any], made: Any) -> Any:
    """Fill four regions with rows at every level, newer versions above older ones."""
    table = open_small(regions=4)
    table.put(made.table(range(80)))
    table.flush()
    table.commit()
    table.put(made.table(range(40, 60), 1))
    table.flush()
    table.put(made.table(range(50, 70), 2))
    return table


@pytest.mark.parametrize("text", ["harbor copper", "harb*", "+harbor -copper"])
def test_the_shares_of_owners_add_up_to_the_whole(text: str, layered: Any, made: Any) -> None:
    regions = list(layered.base.regions)
    vector = made.row(55, 2)["vector"]
    for level in ("committed", "flushed", "latest"):
        for n in (5, 200):
            request = {"vector": vector, "text": text, "n": n, "level": level}
            shares = [layered.only(part).candidates(**request) for part in (regions[:1], regions[1:])]
            together = merged(READS["candidates"], shares, {"n": n}, layered.key)
            whole = layered.candidates(**request)
            assert nearest(together) == nearest(whole), (level, n)
            if n == 200:  # scores use the statistics of a level, so compare all rows by id
                assert matched(together) == matched(whole), level


def nearest(candidates: pa.Table) -> dict[int, float]:
    near = candidates.filter(candidates["_distance"].is_valid())
    return dict(zip(near["id"].to_pylist(), np.round(near["_distance"].to_numpy(), 4).tolist(), strict=True))


def matched(candidates: pa.Table) -> set[int]:
    return set(candidates.filter(candidates["_score"].is_valid())["id"].to_pylist())


def test_all_texts_are_searched_and_two_vectors_ask_which(uri: str) -> None:
    vector = pa.list_(pa.float32(), 2)
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), *ROWS, ("title", pa.string()), ("other", vector)])
    indexes = {"vector": "ivf_pq", "body": "fts", "title": "fts"}
    with memwal.open(uri, schema=schema, key="id", indexes=indexes) as table:
        row = {"id": 1, "body": "harbor", "title": "lights", "vector": [1.0, 0.0], "other": [0.0, 1.0]}
        table.put([row, row | {"id": 2, "body": "lights", "title": "harbor"}])
        found = table.hybrid([1.0, 0.0], "lights", columns=["id"])
        assert [score > 0 for score in found["_score"].to_pylist()] == [True, True]
        assert sorted(table.match(None, "harbor")["id"].to_pylist()) == [1, 2]
        table.create_index("other", "ivf_pq")
        with raises(memwal.Invalid):
            table.hybrid([1.0, 0.0], "lights")
        with raises(memwal.Invalid):
            table.search([1.0, 0.0]).to_list()


def test_a_table_without_an_index_of_a_kind_says_so(uri: str) -> None:
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), *ROWS])
    with memwal.open(uri, schema=schema, key="id", indexes={"vector": "ivf_pq"}) as table, raises(memwal.Invalid):
        table.hybrid([1.0, 0.0], "lights")
