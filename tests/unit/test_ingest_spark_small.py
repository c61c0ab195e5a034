"""A small micro-batch in one task: the order of its rows; no row is sent before all are checked, and none if there are
too many."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from memwal.ingest.service.daemon.service import FlightService
from memwal.ingest.spark.dlq.bad_rows import Rules
from memwal.ingest.spark.sink.route import RouteTask
from memwal.ingest.spark.sink.send import SendTask
from memwal.ingest.spark.sink.small import PATHS_NEEDED, TOO_MANY, OneTask, in_order, unpacked
from memwal.ingest.spark.source.columns import BLOCK, BUCKET, FILE, LANDED, OFFSET, PART, PARTITION, PROBLEM, ROW, TOPIC
from memwal.ingest.spark.task import TaskError
from tests.messages import raises
from tests.routed import ended, placed


def packed(rows: pa.Table, hashed: int, landed: int = 1_000) -> pa.RecordBatch:
    """Like `placed`, with one number for the place; `landed` in milliseconds."""
    return rows.append_column(PART, pa.array([landed << 20 | hashed] * rows.num_rows)).combine_chunks().to_batches()[0]


@pytest.fixture
def served(open_small: Callable[..., Any], uri: str) -> Iterator[tuple[Any, Callable[..., OneTask]]]:
    """Yield an open table, and a function that creates the task that writes a micro-batch into it."""
    table = open_small()
    service = FlightService(table, "grpc://127.0.0.1:0")

    def task(batch_id: int = 0, **more: Any) -> OneTask:
        send = SendTask(f"grpc://127.0.0.1:{service.port}", table.base.regions, "query", batch_id, 30.0)
        return OneTask(RouteTask(uri, ()), send, **more)

    yield table, task
    service.shutdown()


def test_rows_of_several_files_and_regions_arrive_and_the_newest_of_a_key_wins(
    served: tuple[Any, Callable[..., OneTask]], made: Any
) -> None:
    table, task = served
    newer = placed(made.table(range(20), version=1), "a-later-name-sorts-first", landed=2_000)
    older = placed(made.table(range(40), version=0), "b", landed=1_000)
    receipts = pa.Table.from_batches(task()(ended([newer, older.slice(0, 25), older.slice(25)])))
    assert sorted(receipts["region"].to_pylist()) == sorted(region["id"] for region in table.status()["regions"])
    assert sum(receipts["rows"].to_pylist()) == 60
    assert {row["id"]: row["name"] for row in table.scan(["id", "name"]).read_all().to_pylist()} == {
        id: f"row {id} v{int(id < 20)}" for id in range(40)
    }


def test_a_bad_row_in_the_last_batch_keeps_all_others_from_being_sent(
    served: tuple[Any, Callable[..., OneTask]], made: Any
) -> None:
    table, task = served
    nullable = pa.schema([field.with_nullable(True) for field in made.schema])
    bad = pa.Table.from_pylist([{**made.row(7), "id": None}], nullable)
    good = made.table(range(20)).cast(nullable)
    with raises(TaskError):
        list(task()(ended([placed(good, "a.parquet"), placed(bad, "a.parquet")])))
    assert not table.scan(["id"]).read_all().num_rows


def test_of_more_bytes_than_it_may_keep_nothing_is_sent_and_the_receipt_says_so(
    served: tuple[Any, Callable[..., OneTask]], made: Any
) -> None:
    table, task = served
    batches = [placed(made.table(range(start, start + 20)), "a") for start in (0, 20, 40)]
    left = ended(batches)
    (receipt,) = task(most=batches[0].nbytes + 1)(left)
    assert receipt["said"].to_pylist() == [TOO_MANY]
    assert receipt["rows"].to_pylist() == [0]
    assert next(left, None) is None, "Spark's worker goes on with the next task only where all was read"
    assert not table.scan(["id"]).read_all().num_rows
    assert sum(answer["rows"][0].as_py() for answer in task()(ended(batches))) == 60


def test_batches_with_bad_rows_and_without_go_together(uri: str, made: Any, served: tuple[Any, Any]) -> None:
    table, task = served
    send = replace(task().send, letters=Rules("skip"))
    both = OneTask(RouteTask(uri, (), letters="skip"), send)
    bad = placed(made.table(range(20, 40)), "a").append_column(PROBLEM, pa.array(["map: odd", *[None] * 19]))
    good = placed(made.table(range(20)), "a").append_column(PROBLEM, pa.nulls(20, pa.string()))
    answers = pa.Table.from_batches(both(ended([good, bad]))).to_pylist()
    assert [answer["rows"] for answer in answers if answer["letters"] is not None] == [1]
    assert sorted(table.scan(["id"]).read_all()["id"].to_pylist()) == [*range(20), *range(21, 40)]


def test_rows_without_the_paths_of_their_files_arrive_in_the_same_order(
    served: tuple[Any, Callable[..., OneTask]], made: Any
) -> None:
    table, task = served
    files = [packed(made.table(range(20), version=n), 9 - n, landed=n - 1) for n in (3, 0, 1)]
    receipts = pa.Table.from_batches(task(without_paths=True)(ended(files)))
    assert sum(receipts["rows"].to_pylist()) == 60
    assert {row["name"] for row in table.scan(["name"]).read_all().to_pylist()} == {f"row {id} v3" for id in range(20)}
    assert {receipt["landed_first"] for receipt in receipts.to_pylist()} == {-0.001}
    assert {receipt["landed_last"] for receipt in receipts.to_pylist()} == {0.002}


def test_a_packed_place_is_the_moment_of_the_file_and_tells_parts_apart() -> None:
    moments = [-8_700_000_000_000, -1, 0, 1_790_000_000_123, 8_700_000_000_000]
    parts = [moment << 20 | hashed for moment in moments for hashed in (0, (1 << 20) - 1)]
    rows = unpacked(pa.record_batch({"id": range(len(parts)), PART: pa.array(parts, pa.int64())}))
    assert rows.schema.names == ["id", FILE, LANDED, BLOCK]
    assert rows[LANDED].cast(pa.int64()).to_pylist() == [moment * 1000 for moment in moments for _ in range(2)]
    assert len(set(rows[FILE].to_pylist())) == len(parts)


def test_paths_are_asked_for_before_anything_is_sent_where_they_would_be_told_or_order_rows(
    uri: str, served: tuple[Any, Callable[..., OneTask]], made: Any
) -> None:
    table, task = served
    nullable = pa.schema([field.with_nullable(True) for field in made.schema])
    bad = packed(pa.Table.from_pylist([{**made.row(7), "id": None}], nullable), 1)
    good = packed(made.table(range(20)).cast(nullable), 2, landed=5)
    lenient = OneTask(
        RouteTask(uri, (), letters="skip"), replace(task().send, letters=Rules("skip")), without_paths=True
    )
    of_one_moment = [packed(made.table(range(20), version=n), n) for n in range(2)]
    for asked, batches in ((task(without_paths=True), [bad, good]), (lenient, [bad, good]), (lenient, of_one_moment)):
        left = ended(batches)
        (receipt,) = asked(left)
        assert receipt["said"].to_pylist() == [PATHS_NEEDED]
        assert next(left, None) is None, "Spark's worker goes on with the next task only where all was read"
    assert not table.scan(["id"]).read_all().num_rows


def test_no_rows_open_no_connection(uri: str, made: Any, open_small: Callable[..., Any]) -> None:
    open_small().close()
    nobody = OneTask(RouteTask(uri, ()), SendTask("grpc://127.0.0.1:1", (), "query", 0, 30.0))
    assert list(nobody(ended([]))) == []
    assert list(nobody(ended([placed(made.table([1]), "a").slice(0, 0)]))) == []


def ordered(order_by: tuple[str, ...] = (), **columns: Any) -> list[int]:
    """Return the row numbers in the order of `in_order`."""
    batch = pa.RecordBatch.from_pydict({name: pa.array(values) for name, values in columns.items()})
    batch = batch.append_column(ROW, pa.array(range(batch.num_rows), pa.int64()))
    return in_order(batch, order_by)[ROW].to_pylist()  # type: ignore[no-any-return]


def test_the_region_comes_first_and_then_the_columns_that_order_and_then_the_place() -> None:
    buckets = pa.array([1, 0, 1, 0, -1], pa.int32())
    assert ordered(**{BUCKET: buckets, LANDED: [1, 5, 1, 4, 9], FILE: ["b", "a", "a", "a", "a"]}) == [4, 3, 1, 2, 0]
    kafka = {TOPIC: ["t"] * 5, PARTITION: [1, 0, 0, 0, 0], OFFSET: [3, 9, 3, 7, 0], LANDED: [0, 1, 2, 3, 4]}
    assert ordered(**{BUCKET: buckets, **kafka}) == [4, 3, 1, 2, 0]
    assert ordered(("at",), **{BUCKET: buckets, "at": [1, 2, 0, 3, 0], **kafka}) == [4, 1, 3, 2, 0]


def test_nulls_come_first_and_nan_last_and_equal_rows_stay_as_they_came() -> None:
    same = pa.array([0] * 6, pa.int32())
    assert ordered(("at",), **{BUCKET: same, "at": [float("nan"), 2.0, None, 0.0, -0.0, 1.0]}) == [2, 3, 4, 5, 1, 0]
    assert ordered(("at",), **{BUCKET: same, "at": ["b", None, "a", "", None, "é"]}) == [1, 4, 3, 2, 0, 5]
