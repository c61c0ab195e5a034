"""Tasks of a micro-batch: rows in order, none sent before all are checked, none applied of input that is cut short."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest

import memwal
from memwal.ingest.engine.api.tokens import Token
from memwal.ingest.errors import Internal, Unavailable
from memwal.ingest.service.daemon.service import FlightService
from memwal.ingest.service.daemon.tables import OneTable
from memwal.ingest.spark.dlq.bad_rows import Rules
from memwal.ingest.spark.errors import found_in
from memwal.ingest.spark.sink.route import RouteTask
from memwal.ingest.spark.sink.send import SendTask
from memwal.ingest.spark.sink.small import PATHS_NEEDED, TOO_MANY, OneTask, in_order, unpacked
from memwal.ingest.spark.source.columns import BLOCK, BUCKET, FILE, LANDED, OFFSET, PART, PARTITION, PROBLEM, ROW, TOPIC
from memwal.ingest.spark.source.whole_input import RegionRows, by_region, until_end, with_counts
from memwal.ingest.spark.task import TaskError
from tests.conftest import SCHEMA, extent
from tests.messages import raises
from tests.routed import ended, placed, shuffled


def packed(rows: pa.Table, hashed: int, landed: int = 1_000) -> pa.RecordBatch:
    """Like `placed`, with one number for the place; `landed` in milliseconds."""
    return rows.append_column(PART, pa.array([landed << 20 | hashed] * rows.num_rows)).combine_chunks().to_batches()[0]


@pytest.fixture
def served(open_small: Callable[..., Any], uri: str) -> Iterator[tuple[Any, Callable[..., OneTask]]]:
    """Yield an open table, and a function that creates the task that writes a micro-batch into it."""
    table = open_small()
    service = FlightService(OneTable(table), "grpc://127.0.0.1:0")

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
    assert next(left, None) is None, "Spark's worker continues with the next task only if all was read"
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
        assert next(left, None) is None, "Spark's worker continues with the next task only if all was read"
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


BATCHES, EACH = extent(20, 50), 4
ROWS = BATCHES * EACH


@pytest.fixture(params=["keyed", "append_only"])
def owner(request: Any, open_small: Callable[..., Any], uri: str) -> Iterator[tuple[Any, str]]:
    """Yield an open table of two regions and its endpoint."""
    keyless = memwal.open(uri, schema=SCHEMA, key=(), regions=2) if request.param == "append_only" else None
    table = keyless or open_small()
    service = FlightService(OneTable(table), "grpc://127.0.0.1:0")
    yield table, f"grpc://127.0.0.1:{service.port}"
    service.shutdown()
    table.close()


def records(made: Any, bad: bool) -> list[pa.RecordBatch]:
    """Return a micro-batch of several Arrow batches; with `bad` each of them has a bad row."""
    rows = made.table(range(ROWS))
    for name, column in (
        (TOPIC, pa.array(["orders"] * ROWS)),
        (PARTITION, pa.array([0] * ROWS, pa.int32())),
        (OFFSET, pa.array(range(ROWS), pa.int64())),
        (PROBLEM, pa.array([None if at % EACH or not bad else "parse: odd" for at in range(ROWS)], pa.string())),
    ):
        rows = rows.append_column(name, column)
    return rows.combine_chunks().to_batches(EACH)


def applied_of(table: Any) -> set[int | None]:
    return set(table.applied("query", table.base.regions))


def check(table: Any, uri: str, bad: bool) -> None:
    """Assert that the table holds every good row once and, with `bad`, that every bad row is a letter once."""
    expected = [at for at in range(ROWS) if at % EACH or not bad]
    assert sorted(table.scan(["id"]).read_all()["id"].to_pylist()) == expected
    if bad:
        letters = lance.dataset(f"{uri}.dlq").to_table(["offset"])["offset"].to_pylist()
        assert sorted(letters) == list(range(0, ROWS, EACH))


def tasks(table: Any, endpoint: str, uri: str, bad: bool) -> tuple[RouteTask, SendTask]:
    rules = Rules("table" if bad else "fail", f"{uri}.dlq")
    send = SendTask(endpoint, table.base.regions, "query", 0, 30.0, letters=rules)
    return RouteTask(uri, (), letters=rules.mode), send


@pytest.mark.parametrize("bad", [False, True])
def test_one_task_that_is_cut_short_applies_nothing(owner: tuple[Any, str], made: Any, uri: str, bad: bool) -> None:
    table, endpoint = owner
    task = OneTask(*tasks(table, endpoint, uri, bad))
    batches = list(ended(records(made, bad)))
    for boundary in range(len(batches)):
        with raises(TaskError) as raised:
            list(task(iter(batches[:boundary])))
        assert isinstance(found_in(str(raised.value)), Unavailable)
    assert applied_of(table) == {None}
    assert table.count() == 0
    list(task(iter(batches)))
    check(table, uri, bad)


@pytest.mark.parametrize("bad", [False, True])
def test_a_send_task_that_is_cut_short_closes_no_region_that_misses_rows(
    owner: tuple[Any, str], made: Any, uri: str, bad: bool
) -> None:
    table, endpoint = owner
    route, send = tasks(table, endpoint, uri, bad)
    rows = shuffled([each for part in (records(made, bad)[:8], records(made, bad)[8:]) for each in route(iter(part))])
    batches = pa.table(rows).to_batches(EACH)
    buckets = rows[BUCKET].to_numpy()
    for boundary in range(len(batches)):
        whole = {int(bucket) for bucket in buckets[: boundary * EACH]} - set(buckets[boundary * EACH :].tolist())
        applied = [to for to in whole if to >= 0]
        if buckets[min(boundary * EACH, len(buckets) - 1)] not in buckets[: boundary * EACH]:
            continue  # a cut between two regions, where neither misses a row
        with pytest.raises(TaskError, match="cut short"):
            list(send(iter(batches[:boundary])))
        assert sum(each is not None for each in table.applied("query", table.base.regions)) == len(applied)
    list(send(iter(batches)))
    check(table, uri, bad)


def test_the_row_that_ends_a_micro_batch_is_the_last_and_the_only_one() -> None:
    rows = pa.record_batch({OFFSET: pa.array([1, 2], pa.int64())})
    end = pa.record_batch({OFFSET: pa.array([None], pa.int64())})
    both = pa.record_batch({OFFSET: pa.array([3, None], pa.int64())})
    empty = rows.slice(0, 0)
    assert [len(each) for each in until_end(iter([rows, end, empty]))] == [2]
    assert [len(each) for each in until_end(iter([rows, empty, both]))] == [2, 1]
    for wrong in ([end, rows], [both, end], [pa.record_batch({OFFSET: pa.array([None, 1], pa.int64())})]):
        with pytest.raises(Internal):
            list(until_end(iter(wrong)))
    with pytest.raises(Unavailable):
        list(until_end(iter([rows])))


def test_count_rows_say_what_came_of_each_region_in_each_part(made: Any) -> None:
    def part(buckets: list[int], block: int) -> Iterator[pa.RecordBatch]:
        batch = placed(made.table(range(len(buckets))), block=block)
        batch = batch.append_column(ROW, pa.array(range(len(buckets)), pa.int64()))
        return with_counts(iter([batch.append_column(BUCKET, pa.array(buckets, pa.int32()))]))

    assert list(with_counts(iter([]))) == []
    rows = shuffled([*part([0, 1, 1, 0, 1], 0), *part([1, 2], 1)])
    for size in (1, 2, 3, 100):
        found = [(each.bucket, each.count, sum(map(len, each))) for each in by_region(iter(cut(rows, size)))]
        assert found == [(0, 2, 2), (1, 4, 4), (2, 1, 1)]


def cut(rows: pa.RecordBatch, size: int) -> list[pa.RecordBatch]:
    return pa.table(rows).to_batches(size)


@pytest.mark.parametrize("count", [19, 21])
def test_a_region_takes_no_other_number_of_rows_than_counted(count: int, made: Any) -> None:
    rows = RegionRows(0, count, iter([placed(made.table(range(20)))]))
    with raises(Unavailable):
        list(rows)


def test_the_owner_takes_no_other_number_of_rows_than_announced(owner: tuple[Any, str], made: Any) -> None:
    table, endpoint = owner
    rows = made.table(range(30))
    rows = rows.filter(pa.array(np.asarray(table.base.route(rows)) == 0))
    with memwal.connect(endpoint) as client:
        for announced in (rows.num_rows - 1, rows.num_rows + 1, 0):
            stream = client.open_stream(table.base.regions[0], Token("query", 1), timeout=0.2, rows=announced)
            stream.write(rows.cast(client.schema).combine_chunks().to_batches()[0])
            with raises(Unavailable):
                stream.finish()
        assert table.count() == 0
        stream = client.open_stream(table.base.regions[0], Token("query", 1), rows=rows.num_rows)
        stream.write(rows.cast(client.schema).combine_chunks().to_batches()[0])
        assert stream.finish().rows == rows.num_rows
