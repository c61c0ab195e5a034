"""A task whose input is cut short at any batch boundary applies nothing; a task with the whole input applies all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest

import memwal
from memwal.ingest.engine.api.tokens import Token
from memwal.ingest.errors import Internal, Unavailable
from memwal.ingest.service.daemon.service import FlightService
from memwal.ingest.spark.dlq.bad_rows import Rules
from memwal.ingest.spark.errors import found_in
from memwal.ingest.spark.sink.route import RouteTask
from memwal.ingest.spark.sink.send import SendTask
from memwal.ingest.spark.sink.small import OneTask
from memwal.ingest.spark.source.columns import BUCKET, OFFSET, PARTITION, PROBLEM, ROW, TOPIC
from memwal.ingest.spark.source.whole_input import RegionRows, by_region, until_end, with_counts
from memwal.ingest.spark.task import TaskError
from tests.conftest import SCHEMA
from tests.messages import raises
from tests.routed import ended, placed, shuffled

BATCHES, EACH = 50, 4
ROWS = BATCHES * EACH


@pytest.fixture(params=["keyed", "append_only"])
def owner(request: Any, open_small: Callable[..., Any], uri: str) -> Iterator[tuple[Any, str]]:
    """Yield an open table of two regions and its endpoint."""
    keyless = memwal.open(uri, schema=SCHEMA, key=(), regions=2) if request.param == "append_only" else None
    table = keyless or open_small()
    service = FlightService(table, "grpc://127.0.0.1:0")
    yield table, f"grpc://127.0.0.1:{service.port}"
    service.shutdown()
    table.close()


def records(made: Any, bad: bool) -> list[pa.RecordBatch]:
    """Return a micro-batch of 50 Arrow batches; with `bad` each of them has a bad row."""
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
    rows = shuffled([each for part in (records(made, bad)[:20], records(made, bad)[20:]) for each in route(iter(part))])
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
