"""The merge of the answers of several daemons."""

from __future__ import annotations

import pyarrow as pa

from memwal.ingest.engine.api.reads import READS, Reads, best_of
from memwal.ingest.engine.api.results import RowStream
from memwal.ingest.errors import Unavailable
from memwal.ingest.service.client.scatter import in_asked_order, merged, merged_status
from tests.messages import raises


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

    parts = [ranked(0.5, 2.0, first=0), ranked(0.5, 1.0, float("nan"), first=10)]
    near = best_of(parts, {"k": 4}, ["id"], score="s", ascending=True)
    assert near.column("id").to_pylist() == [0, 10, 11, 1]
    parts = [ranked(3.0, 1.0, first=0), ranked(2.0, first=10)]
    best = best_of(parts, {"k": 9}, ["id"], score="s", ascending=False)
    assert best.column("id").to_pylist() == [0, 10, 1]


def test_of_both_arms_the_best_of_all_owners_are_left() -> None:
    def arms(first: int, distances: list[float | None], scores: list[float | None]) -> pa.Table:
        columns = [pa.array(distances, pa.float32()), pa.array(scores, pa.float32())]
        return pa.table([pa.array(range(first, first + len(scores))), *columns], names=["id", "_distance", "_score"])

    parts = [arms(0, [1.0, 4.0, None], [None, 2.0, 1.0]), arms(10, [2.0, 3.0], [0.5, 3.0])]
    assert merged(READS["candidates"], parts, {"n": 2}, ["id"]).to_pylist() == [
        {"id": 0, "_distance": 1.0, "_score": None},
        {"id": 10, "_distance": 2.0, "_score": None},
        {"id": 11, "_distance": None, "_score": 3.0},
        {"id": 1, "_distance": None, "_score": 2.0},
    ]


def test_every_read_says_how_it_travels() -> None:
    methods = {name for name, member in vars(Reads).items() if not name.startswith("_") and callable(member)}
    assert set(READS) == methods - {"hybrid", "sql", "changes", "changes_position"}  # they are not sent as reads


def streamed(values: list[int], name: str = "a") -> RowStream:
    rows = pa.table({name: values})
    return RowStream(rows.schema, iter(rows.to_batches()))


def test_a_limit_counts_over_all_answers() -> None:
    for limit, expected in ((3, [1, 2, 3]), (2, [1, 2]), (0, []), (None, [1, 2, 3, 4])):
        merged_rows = merged(READS["scan"], [streamed([1, 2]), streamed([3, 4])], {"limit": limit}, ["a"])
        assert merged_rows.read_all().column("a").to_pylist() == expected


def test_answers_with_different_columns_are_asked_for_again() -> None:
    with raises(Unavailable) as told:
        merged(READS["scan"], [streamed([1]), streamed([1], "b")], {"limit": None}, ["a"])
    assert told.value.details == {"reason": "busy"}


def test_of_two_that_name_a_region_the_higher_epoch_is_believed() -> None:
    old, other = {"id": "r0", "epoch": 3, "bucket": 0}, {"id": "r1", "epoch": 1, "bucket": 1}
    new = {"id": "r0", "epoch": 4, "bucket": 0}
    found = merged_status([{"base_version": 7, "regions": [other, old]}, {"base_version": 9, "regions": [new]}])
    assert found == {"base_version": 9, "regions": [new, other]}


def test_what_any_of_them_cannot_commit_is_told_once() -> None:
    failure = {"region": "b", "error": "an SST is gone"}
    found = merged_status(
        [
            {"base_version": 3, "regions": [], "commit_failures": [failure]},
            {"base_version": 4, "regions": [], "commit_failures": []},
            {"base_version": 2, "regions": [], "commit_failures": [failure]},
        ]
    )
    assert found["commit_failures"] == [failure]
