"""Metrics: histograms, the figures of a pipeline and back-pressure; and log lines with fields."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import memwal
from memwal.ingest.engine.region.counters import Histogram, RegionMeter
from memwal.ingest.service.ops.health import Health, of_regions
from memwal.ingest.service.ops.logs import configure_logs
from memwal.ingest.service.ops.metrics import Scrape
from memwal.ingest.service.ops.storage import StorageCollector, StorageRates
from memwal.ingest.settings.sections import CostSettings
from memwal.ingest.spark.pipeline.metrics import RunCollector, RunMeter, rows_behind
from memwal.ingest.spark.sink.receipts import BatchReceipt, RegionReceipt
from memwal.wal import bucket_region
from memwal.wal.store.requests import RequestCounts
from tests.support.clock import FakeClock
from tests.support.flushes import flushes_held

REGION = bucket_region(0)


def kafka(end: Any, latest: Any) -> dict[str, Any]:
    return {"startOffset": None, "endOffset": end, "latestOffset": latest}


@pytest.mark.parametrize(
    ("sources", "behind"),
    [
        ([], None),
        ([kafka({"logOffset": 4}, {"logOffset": 9})], None),
        ([kafka({"a": {"0": 5, "1": 7}}, {"a": {"0": 8, "1": 7}, "b": {"0": 2}})], 5),
        ([kafka('{"a": {"0": 5}}', '{"a": {"0": 6}}'), kafka({"b": {"0": 1}}, {"b": {"0": 1}})], 1),
        ([kafka({"a": {"0": 9}}, {"a": {"0": 3}})], 0),
        ([kafka(None, None)], None),
    ],
)
def test_rows_behind_are_what_the_sources_hold_beyond_the_last_trigger(sources: list[Any], behind: int | None) -> None:
    assert rows_behind({"sources": sources}) == behind


def test_a_pipeline_counts_its_micro_batches() -> None:
    meter = RunMeter(FakeClock(100.0))
    here = RegionReceipt("a", 10, True, 5, 0.25, landed_first=90.0, landed_last=95.0, acked_at=100.0)
    there = RegionReceipt("b", 4, False, 6, 0.5, landed_first=98.0, landed_last=99.0, acked_at=101.0)
    meter.add(BatchReceipt(7, (here, there), bad=3, letters=2))
    meter.progressed({"sources": [kafka({"t": {"0": 1}}, {"t": {"0": 3}})], "durationMs": {"addBatch": 250}})
    scrape = Scrape()
    scrape.add(RunCollector(meter))
    families = text_string_to_metric_families(scrape.text().decode())
    told = {sample.name: sample.value for family in families for sample in family.samples if "le" not in sample.labels}
    expected = {
        "memwal_run_rows_total": 14,
        "memwal_run_repeated_rows_total": 4,
        "memwal_run_micro_batches_total": 1,
        "memwal_run_batch_id": 7,
        "memwal_run_last_batch_timestamp_seconds": 101,
        "memwal_run_ack_seconds_sum": 0.75,
        "memwal_source_lag_seconds": 10,
        "memwal_source_lag_rows": 2,
        "memwal_bad_rows_total": 3,
        "memwal_dead_letters_total": 2,
    }
    assert {name: told[name] for name in expected} == expected
    assert meter.steps == {"addBatch": 0.25}
    assert {region: (each.buckets()[-1][1], each.total) for region, each in meter.queryable.items()} == {
        "a": (10, 75.0),  # between 5 and 10 s
        "b": (4, 10.0),
    }


WORKS = {"isTriggerActive": True, "isDataAvailable": True}
IDLE = {"isTriggerActive": False, "isDataAvailable": False}


def batch(number: int, landed: float, acked: float) -> BatchReceipt:
    region = RegionReceipt("a", 10, True, 5, 0.25, landed_first=landed, landed_last=landed, acked_at=acked)
    return BatchReceipt(number, (region,))


def test_the_lag_rises_while_the_source_has_rows_and_no_micro_batch_ends() -> None:
    clock = FakeClock(100.0)
    meter = RunMeter(clock)
    meter.add(batch(0, landed=99.0, acked=100.0))
    assert (meter.lag_seconds, meter.waiting_seconds) == (1.0, 0.0)
    for _ in range(20):
        clock.advance(1)
        meter.looked(IDLE)
    assert (meter.lag_seconds, meter.waiting_seconds) == (1.0, 0.0), "an idle source does not fall behind"
    meter.looked(WORKS)
    clock.advance(30)
    assert (meter.lag_seconds, meter.waiting_seconds) == (30.0, 30.0), "also without a look, as a daemon may not answer"
    meter.add(batch(1, landed=119.0, acked=150.0))
    meter.looked(IDLE)
    assert (meter.lag_seconds, meter.waiting_seconds) == (31.0, 0.0)


def test_the_freshness_of_a_micro_batch_counts_for_a_minute() -> None:
    clock = FakeClock(100.0)
    meter = RunMeter(clock, freshness_max=30.0)
    meter.add(batch(0, landed=9.0, acked=100.0))
    assert (meter.lag_seconds, meter.is_late) == (91.0, True)
    meter.looked(IDLE)
    clock.advance(60)
    assert meter.is_late
    clock.advance(1)
    assert (meter.lag_seconds, meter.is_late) == (0.0, False)
    meter.looked(WORKS)
    clock.advance(31)
    assert meter.is_late, "rows wait, and no micro-batch has ended"
    assert not RunMeter(clock).is_late, "without an objective"


def test_rows_left_in_the_topic_are_as_old_as_the_newest_row_read_at_most() -> None:
    clock = FakeClock(100.0)
    meter = RunMeter(clock)
    behind = {"sources": [kafka({"t": {"0": 1}}, {"t": {"0": 3}})]}
    for second in range(5):  # each micro-batch takes a second, and its rows are a minute old
        clock.advance(1)
        meter.add(batch(second, landed=clock.now() - 60, acked=clock.now()))
        meter.progressed(behind)
        meter.looked(WORKS)
        assert (meter.lag_seconds, meter.waiting_seconds) == (60.0, 0.0)
    clock.advance(10)
    assert (meter.lag_seconds, meter.waiting_seconds) == (70.0, 10.0)


def test_a_source_that_does_not_answer_counts_as_waiting() -> None:
    clock = FakeClock(100.0)
    meter = RunMeter(clock)
    meter.looked(None)
    clock.advance(7)
    assert (meter.lag_seconds, meter.waiting_seconds) == (7.0, 7.0)
    meter.looked(IDLE)
    assert meter.waiting_seconds == 0.0


def test_the_newest_error_of_each_step_is_remembered_with_its_time() -> None:
    meter = RegionMeter()
    assert meter.errors_told() == {}
    meter.flush_failed(OSError("disk full"), 10.0)
    meter.erred("flush", OSError("disk gone"), 20.0)
    meter.erred("claim", TimeoutError(), 30.0)
    told = {"flush": {"at": 20.0, "error": "disk gone"}, "claim": {"at": 30.0, "error": "TimeoutError"}}
    assert (meter.errors_told(), meter.flush_failures) == (told, 1)


def test_values_between_the_least_and_the_most_are_counted_as_evenly_spread() -> None:
    histogram = Histogram((1.0, 2.0, 4.0))
    histogram.spread(0.5, 2.5, 8)
    histogram.spread(3.0, 3.0, 5)
    histogram.spread(6.0, 8.0, 1)
    assert histogram.buckets() == [("1.0", 2), ("2.0", 6), ("4.0", 13), ("+Inf", 14)]
    assert histogram.total == 12 + 15 + 7


def test_back_pressure_is_counted(open_small: Callable[..., Any], made: Any) -> None:
    """Flushes are blocked, so that a put finds no room and fails."""
    small = {"size_max": "140KiB", "unflushed_max": "140KiB"}
    table = open_small(regions=1, memtable=small, wal={"put_timeout": "50ms"})
    meter = table.regions.context.meters.of(table.base.regions[0])
    with flushes_held():
        table.put(made.rows(range(100)))  # an empty memtable weighs 128 KiB
        with pytest.raises(memwal.Unavailable) as refused:
            table.put(made.rows([100]))
        assert refused.value.details["reason"] == "busy"
        assert (meter.refused_puts, meter.waited_puts, meter.waiting_puts) == (1, 1, 0)
        assert meter.waited_seconds > 0
    table.flush()
    table.put(made.rows([1]))
    assert meter.refused_puts == 1
    assert meter.flush_rows > 0


def test_reasons_are_held_until_they_are_released() -> None:
    health = Health()
    health.hold("claiming", "one of two")
    health.hold("claiming", "two of two")
    health.hold("moving", "to another")
    assert [each["text"] for each in health.reasons()] == ["two of two", "to another"]
    health.release("claiming")
    health.release("draining")
    assert health.reasons() == [{"reason": "moving", "text": "to another"}]


def test_regions_that_serve_have_nothing_against_being_ready() -> None:
    serving = {"id": "a", "state": "serving", "failure": None, "flush_error": None}
    failing = {"id": "b", "state": "flush_failing", "failure": None, "flush_error": "disk full"}
    assert of_regions([serving, failing]) == [{"reason": "flush_failing", "text": "disk full", "region": "b"}]


@pytest.fixture
def logger() -> Any:
    """Yield memwal's logger, and restore its state after the test."""
    found = logging.getLogger("memwal")
    before = (found.handlers[:], found.level, found.propagate)
    yield found
    found.handlers[:], found.propagate = before[0], before[2]
    found.setLevel(before[1])


@pytest.mark.parametrize("form", ["text", "json"])
def test_events_are_one_line_each(form: str, logger: Any, capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("info", form)
    told = {"event": "claim", "region": "a", "epoch": 3}
    logging.getLogger("memwal.region").info("claimed %s\nwith %d", "a", 3, extra=told)
    logging.getLogger("memwal.region").debug("not at this level")
    lines = capsys.readouterr().err.splitlines()
    if form == "json":
        (found,) = (json.loads(line) for line in lines)
        assert found.pop("time").endswith("+00:00")
        expected = {"level": "info", "logger": "memwal.region", "message": "claimed a\nwith 3"}
        assert found == expected | told
    else:
        assert lines[0].endswith("INFO memwal.region: claimed a")
        assert "epoch" not in lines[0]


def test_the_page_has_requests_per_second_and_dollars_per_hour_of_the_last_minute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts, clock, cost = RequestCounts(), FakeClock(), CostSettings(put_price=5.0)
    monkeypatch.setattr("memwal.ingest.service.ops.storage.REQUESTS", counts)
    monkeypatch.setattr("memwal.ingest.service.ops.storage.snapshot_lance_metrics", list)
    rates = StorageRates(StorageCollector(cost), cost, clock)
    rates.sample()
    assert rates.show()["cost_per_hour"] == 0
    for _ in range(100):
        clock.advance(1.0)
        for _ in range(2):
            counts.add("put", f"_mem_wal/{REGION}/wal/1.lance", remote=True)
        counts.add("get", "t.lance/_versions/1", remote=False)
        rates.sample()
    shown = rates.show()
    kinds = {each["kind"]: each for each in shown["kinds"]}
    assert kinds["log"]["per_second"] == pytest.approx(2.0)
    assert kinds["log"]["total"] == 200
    assert kinds["log"]["cost_per_hour"] == pytest.approx(2 * 3600 * 5.0 / 1000)
    assert kinds["base"]["cost_per_hour"] == 0, "local files"
    assert shown["cost_per_hour"] == kinds["log"]["cost_per_hour"]
    assert shown["prices"].startswith("5 for 1,000 puts")
