"""The answers of several daemons: merged rows and status, and the explanation of a read."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from memwal.ingest.engine.api.explanation import ExplainedLevel, ExplainedPart, ExplainedSearch, Explanation, Watch
from memwal.ingest.engine.api.reads import READS, Reads, best_of
from memwal.ingest.engine.api.results import RowStream, gathered
from memwal.ingest.errors import Unavailable
from memwal.ingest.service.client.scatter import in_asked_order, merged, merged_status
from tests.messages import raises
from tests.support.clock import FakeClock


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


def part(ms: float, returned: int) -> ExplainedPart:
    search = ExplainedSearch("rows", "every row", returned=returned, found=returned, ms=ms / 2)
    return ExplainedPart("t.lance", 7, ("a" * 32,), (ExplainedLevel("base", 10, searches=(search,)),), ms=ms)


def sent(ms: float, returned: int) -> dict[str, Any]:
    return Explanation("scan", "latest", returned, ms, (part(ms, returned),)).as_dict()


def test_the_callers_time_between_batches_is_not_the_reads() -> None:
    told, clock = list[Explanation](), FakeClock()
    watch = Watch("scan", "latest", told.append, clock)
    clock.advance(1.0)
    watch.add(lambda ms: part(ms, 4))
    rows = watch.ended(gathered(pa.table({"a": pa.chunked_array([[1, 2], [3, 4]])})))
    for _ in rows:
        clock.advance(60.0)
    assert [(each.rows, each.ms, each.parts[0].ms, each.network_ms) for each in told] == [(4, 1_000.0, 1_000.0, 0.0)]


def test_parts_of_daemons_are_those_of_the_last_attempt() -> None:
    told, clock = list[Explanation](), FakeClock()
    watch = Watch("search", "latest", told.append, clock)
    watch.again()
    late = watch.heard("grpc://a")
    watch.again()
    first, second, _ = watch.heard("grpc://a"), watch.heard("grpc://b"), watch.heard("grpc://silent")
    late(sent(9_000.0, 9))
    second(sent(300.0, 3))
    first(sent(100.0, 2))
    clock.advance(0.5)
    watch.ended(pa.table({"a": [1, 2, 3]}))
    (one,) = told
    assert [(each.endpoint, each.ms) for each in one.parts] == [("grpc://a", 100.0), ("grpc://b", 300.0)]
    assert (one.attempts, one.rows, one.found, one.network_ms) == (2, 3, 5, 200.0)
    assert str(one).splitlines()[0] == (
        "search at latest: 3 rows in 500.0 ms; 2 more were found and left out (offset, fusion or merging); "
        "2 attempts; 200.0 ms of it beyond the slowest daemon's own"
    )
