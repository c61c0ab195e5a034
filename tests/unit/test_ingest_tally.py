"""Figures of a run, from the receipts of its micro-batches."""

from __future__ import annotations

import math

import pytest

from memwal.ingest.spark.pipeline.metrics import RunMeter
from memwal.ingest.spark.sink.receipts import BatchReceipt, RegionReceipt
from tests.support.clock import FakeClock


def receipt(
    region: str, rows: int, *, applied: bool = True, ack: float = 0.01, waited: float | None = 1.0
) -> RegionReceipt:
    landed = None if waited is None else 100.0 - waited
    return RegionReceipt(region, rows, applied, 1, ack, landed, landed, acked_at=100.0)


def test_rows_are_counted_per_region_and_over_time() -> None:
    clock = FakeClock()
    stats = RunMeter(clock)
    clock.sleep(50.0)
    stats.begin()
    clock.sleep(2.0)
    stats.add(BatchReceipt(4, (receipt("a", 30), receipt("b", 10))))
    clock.sleep(100.0)
    figures = stats.figures()
    assert (figures.rows, figures.micro_batches, figures.batch_id) == (40, 1, 4)
    assert figures.by_region == {"a": 30, "b": 10}
    assert figures.seconds == pytest.approx(2.0)
    assert figures.rows_per_second == pytest.approx(20.0)


def test_the_time_in_which_no_query_ran_does_not_count() -> None:
    clock = FakeClock()
    stats = RunMeter(clock)
    for number in range(2):  # the query is started again after a pause
        clock.sleep(1000.0)
        stats.begin()
        clock.sleep(2.0)
        stats.add(BatchReceipt(number, (receipt("a", 40),)))
    assert stats.figures().seconds == pytest.approx(4.0)
    assert stats.figures().rows_per_second == pytest.approx(20.0)


def test_rows_that_were_applied_before_are_told_apart() -> None:
    stats = RunMeter(FakeClock())
    stats.add(BatchReceipt(0, (receipt("a", 30, applied=False), receipt("b", 10))))
    assert (stats.figures().rows, stats.figures().repeated) == (40, 30)


def test_waiting_times_count_by_rows_and_acks_by_stream() -> None:
    stats = RunMeter(FakeClock())
    stats.add(BatchReceipt(0, (receipt("a", 1, ack=0.5, waited=9.0), receipt("b", 99, ack=0.1, waited=2.0))))
    figures = stats.figures()
    assert (figures.queryable_p50, figures.queryable_max) == (2.0, 9.0)
    assert figures.ack_p50 == pytest.approx(0.3)


def test_rows_of_a_topic_have_waited_for_different_times() -> None:
    stats = RunMeter(FakeClock())
    stats.add(BatchReceipt(0, (RegionReceipt("a", 10, True, 1, 0.01, 99.0, 99.5, acked_at=100.0),)))
    assert (stats.figures().queryable_p50, stats.figures().queryable_max) == (0.75, 1.0)


def test_nothing_measured_is_not_zero() -> None:
    stats = RunMeter(FakeClock())
    assert math.isnan(stats.figures().ack_p50)
    assert math.isnan(stats.figures().queryable_max)
    stats.add(BatchReceipt(0, (receipt("a", 5, waited=None),)))
    assert math.isnan(stats.figures().queryable_p50)
    assert stats.figures().ack_p50 == pytest.approx(0.01)
