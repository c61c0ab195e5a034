"""What is counted: histograms, a pipeline's figures, back-pressure; and log lines with fields."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import memwal
from memwal.ingest.ops.counters import Histogram
from memwal.ingest.ops.health import Health, of_regions
from memwal.ingest.ops.logs import configure_logs
from memwal.ingest.ops.metrics import Scrape
from memwal.ingest.pipeline.metrics import RunCollector, RunMeter, rows_behind
from memwal.ingest.sink.receipts import BatchReceipt, RegionReceipt


def test_a_histogram_counts_up_to_each_bound() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(value)
    assert histogram.buckets() == [("1.0", 2.0), ("2.0", 3.0), ("+Inf", 4.0)]
    assert histogram.total == 12.0


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
    meter = RunMeter()
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


def test_values_between_the_least_and_the_most_are_counted_as_evenly_spread() -> None:
    histogram = Histogram((1.0, 2.0, 4.0))
    histogram.spread(0.5, 2.5, 8)
    histogram.spread(3.0, 3.0, 5)
    histogram.spread(6.0, 8.0, 1)
    assert histogram.buckets() == [("1.0", 2), ("2.0", 6), ("4.0", 13), ("+Inf", 14)]
    assert histogram.total == 12 + 15 + 7


def test_back_pressure_is_counted(open_small: Callable[..., Any], made: Any) -> None:
    """Flushes are held up, so that a put finds no room and gives up."""
    small = {"size_max": "140KiB", "unflushed_max": "140KiB"}
    table = open_small(regions=1, memtable=small, wal={"put_timeout": "50ms"})
    meter = table.regions.context.meters.of(table.base.regions[0])
    with ExitStack() as held:
        for _ in range(2):  # flush.at_once
            held.enter_context(table.regions.context.flushing)
        table.put(made.rows(range(100)))  # an empty memtable weighs 128 KiB
        with pytest.raises(memwal.Unavailable, match="wait to be flushed"):
            table.put(made.rows([100]))
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
    health.hold("moving", "to another", region="a")
    assert [each["text"] for each in health.reasons()] == ["two of two", "to another"]
    health.release("claiming")
    health.release("moving", "b")
    assert health.reasons() == [{"reason": "moving", "text": "to another", "region": "a"}]


def test_regions_that_serve_have_nothing_against_being_ready() -> None:
    serving = {"id": "a", "state": "serving", "failure": None, "flush_error": None}
    failing = {"id": "b", "state": "flush_failing", "failure": None, "flush_error": "disk full"}
    assert of_regions([serving, failing]) == [{"reason": "flush_failing", "text": "disk full", "region": "b"}]


@pytest.fixture
def logger() -> Any:
    """memwal's logger, put back as it was."""
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
