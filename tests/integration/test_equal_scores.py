"""Rows with equal scores: their order depends on the rows, and not on their level or owner."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import memwal
from memwal.ingest.engine.api.reads import READS
from memwal.ingest.engine.read import merged as view
from memwal.ingest.engine.read import top_k
from memwal.ingest.service.client.scatter import merged, with_key

SCHEMA = pa.schema(
    [
        pa.field("name", pa.string(), nullable=False),
        pa.field("body", pa.string()),
        pa.field("vector", pa.list_(pa.float32(), 4)),
        pa.field("n", pa.int32()),
    ]
)
INDEXES = {"body": "fts", "vector": {"type": "ivf_pq", "num_sub_vectors": 2}}
NEAR = [0.0, 0.0, 0.0, 0.0]
QUIET = {"commit": {"interval": "0s"}}
ROWS = 120
K = 10


def rows(numbers: Iterator[int] | range) -> list[dict[str, Any]]:
    """Return rows with equal texts and equal distances, not in the order of their keys."""
    return [
        {"name": f"k{number * 7919 % 1000:03}", "body": "harbor master", "vector": [1.0, 0.0, 0.0, 0.0], "n": number}
        for number in numbers
    ]


def ordered(table: Any, column: str = "name", **more: Any) -> dict[str, list[Any]]:
    """Return the first rows of each ranked read; all rows tie."""
    answers = {
        "match": table.match("body", "harbor", K, columns=[column], **more),
        "both words": table.match("body", "harbor master", K, columns=[column], **more),
        "search": table.search("vector", NEAR, K, columns=[column], **more),
        "hybrid": table.hybrid(NEAR, "harbor", K, columns=[column], **more),
    }
    return {read: found.column(column).to_pylist() for read, found in answers.items()}


@pytest.fixture(params=[1, 3], ids=["one region", "three regions"])
def table(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    with memwal.open(
        tmp_path / "t.lance", schema=SCHEMA, key="name", regions=request.param, indexes=INDEXES, settings=QUIET
    ) as opened:
        yield opened


def test_equal_scores_stand_by_key_whatever_level_holds_them(table: Any) -> None:
    smallest = sorted(row["name"] for row in rows(range(ROWS)))[:K]
    names = {row["n"]: row["name"] for row in rows(range(ROWS))}

    def check(reads: set[str]) -> None:
        by_name, by_number = ordered(table), ordered(table, "n")  # the second read does not return the key column
        for read in reads:
            assert by_name[read] == smallest, read
            assert [names[n] for n in by_number[read]] == smallest, read

    every, one_region = set(ordered(table)), len(table.status()["regions"]) == 1
    # BM25 uses the statistics of one level, so texts of several regions tie only in the base.
    above = every if one_region else {"search"}
    table.put(rows(range(ROWS)))
    check(above)
    table.flush()
    check(above)
    table.commit()
    check(every)


def test_equal_scores_of_several_levels_stand_by_key(table: Any) -> None:
    for part, step in enumerate((table.commit, table.flush, lambda: None)):
        table.put(rows(range(40 * part, 40 * (part + 1))))
        if part < 2:
            table.flush()
        step()
    smallest = sorted(row["name"] for row in rows(range(ROWS)))[:K]
    assert ordered(table)["search"] == smallest
    before = ordered(table)
    assert ordered(table) == before


def test_owners_of_some_regions_give_the_order_of_the_whole(table: Any) -> None:
    table.put(rows(range(ROWS)))
    for step in (lambda: None, table.flush, table.commit):
        step()
        for read, request in {
            "match": {"column": "body", "text": "harbor", "k": K},
            "search": {"column": "vector", "vector": NEAR, "k": K},
            "candidates": {"vector": NEAR, "text": "harbor", "n": K},
        }.items():
            request["columns"] = ["n"]
            kind = READS[read]
            asked = with_key(kind, request, table.key)
            parts = [getattr(table.only([region]), read)(**asked) for region in table.base.regions[::-1]]
            whole = getattr(table, read)(**request)
            found = merged(kind, parts, request, table.key)
            assert found.column_names == whole.column_names
            assert found.column("n").to_pylist() == whole.column("n").to_pylist(), read


@pytest.mark.parametrize("column", ["name", "n", "vector"])
def test_without_a_key_equal_scores_stand_alike_at_every_level(tmp_path: Path, column: str) -> None:
    with memwal.open(tmp_path / "t.lance", schema=SCHEMA, key=(), regions=1, indexes=INDEXES, settings=QUIET) as table:
        made = rows(range(ROWS))
        table.put(made[:70])
        table.put(made[70:])
        first = ordered(table, column)
        table.flush()
        assert ordered(table, column) == first
        table.commit()
        assert ordered(table, column) == first
    with memwal.open(tmp_path / "t.lance", read_only=True) as again:
        assert ordered(again, column, level="committed") == first


def test_more_ties_than_are_compared_cost_no_row(table: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (top_k, view):
        monkeypatch.setattr(module, "TIES", (2, 3))
    table.put(rows(range(ROWS)))
    steps: list[Callable[[], Any]] = [lambda: None, table.flush, table.commit]
    for step in steps:
        step()
        for read, found in ordered(table).items():
            assert len(set(found)) == K, read


def test_equal_vectors_have_equal_distances_at_all_levels(tmp_path: Path) -> None:
    """Distances of quantised vectors must not be compared with exact ones: the rows of one level would come first."""
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), ("v", pa.list_(pa.float32(), 16))])
    indexes: Any = {"v": {"type": "ivf_pq", "num_partitions": 2}}
    vectors = np.random.default_rng(1).normal(size=(600, 16)).astype(np.float32)
    with memwal.open(
        tmp_path / "t.lance", schema=schema, key="id", regions=2, indexes=indexes, settings=QUIET
    ) as table:
        for level, steps in enumerate(((table.flush, table.commit), (table.flush,), ())):
            table.put([{"id": 600 * level + n, "v": vector.tolist()} for n, vector in enumerate(vectors)])
            for step in steps:
                step()
        for number in (3, 77, 599):
            distances: dict[int, list[float]] = {}
            for row in table.search("v", vectors[number] + 0.1, 9).to_pylist():
                distances.setdefault(row["id"] % 600, []).append(row["_distance"])
            assert distances[number] == pytest.approx([0.16] * 3, rel=1e-3)
            assert all(each == pytest.approx([each[0]] * 3, rel=1e-5) for each in distances.values())
