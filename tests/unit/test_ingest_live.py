"""Parts of the page at /: the ring of samples, the newest events, the sentence about health, and uneven regions."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memwal.flush import BaseTable
from memwal.ingest.engine.region.counters import SECONDS, CommitMeter, Histogram
from memwal.ingest.service.ops.events import KEPT as EVENTS_KEPT
from memwal.ingest.service.ops.events import RecentEvents
from memwal.ingest.service.ops.history import OVERLAP, SHOWN, History, Sample, counts_of, quantiles
from memwal.ingest.service.ops.live import Live
from memwal.ingest.service.ops.logs import configure_logs
from memwal.ingest.service.ops.pages import Page
from memwal.ingest.service.ops.sentence import Situation, duration, health
from memwal.ingest.service.ops.skew import measured
from tests.support.clock import FakeClock


def filled(samples: Sequence[Sample], start: float = 1000.0) -> History:
    """Return a history with one sample per second."""
    history = History()
    for at, sample in enumerate(samples):
        history.add(float(at), start + at, sample)
    return history


# ---- samples -------------------------------------------------------------------------------------------------------


def test_rates_are_of_the_last_seconds_and_never_negative() -> None:
    history = filled([Sample(put_rows=100 * at, deleted_rows=at) for at in range(30)])
    assert history.figures()["rates"] == {"put": 100, "deleted": 1, "bad": 0}
    series = history.series()
    assert (series["first"], len(series["time"])) == (0, 30)
    assert series["put"] == [None] + [100] * 29
    assert series["time"][:2] == [1000.0, 1001.0]
    anew = filled([Sample(put_rows=1000 - at) for at in range(10)])  # counters start again after a resize
    assert set(anew.series()["put"][1:]) == {0}


def test_the_ring_keeps_fifteen_minutes_and_goes_on() -> None:
    history = filled([Sample(put_rows=at, committed=at % 7) for at in range(5000)])
    series = history.series()
    assert (series["first"], len(series["put"])) == (5000 - SHOWN, SHOWN)
    assert set(series["put"]) == {1}
    assert series["time"][-1] == 1000.0 + 4999
    assert history.figures()["most"] == {"latest": None, "flushed": None, "committed": 6}


def test_a_later_message_has_what_is_new_and_a_little_before_it() -> None:
    history = filled([Sample(put_rows=10 * at) for at in range(100)])
    series = history.series(since=98)
    assert (series["first"], len(series["put"])) == (98 - OVERLAP, 2 + OVERLAP)
    assert set(series["put"]) == {10}
    assert {len(values) for name, values in series.items() if name != "first"} == {2 + OVERLAP}


def test_nothing_is_measured_before_the_first_sample() -> None:
    figures = History().figures()
    assert figures["acks"] == {"p50": None, "p99": None, "count": 0}
    assert figures["rates"] == {"put": None, "deleted": None, "bad": None}
    assert History().series() == {name: [] for name in History().series()} | {"first": 0}
    json.dumps(figures, allow_nan=False)


def test_percentiles_are_those_of_the_values_within_a_bucket() -> None:
    values = np.random.default_rng(1).gamma(2.0, 0.01, 20_000)
    histogram = Histogram()
    for value in values:
        histogram.observe(value)
    counts = np.asarray([histogram.counts])
    for q in (0.5, 0.9, 0.99):
        true, told = np.quantile(values, q), float(quantiles(counts, q)[0])
        bucket = int(np.searchsorted(SECONDS, true))
        assert SECONDS[bucket - 1] <= told <= SECONDS[bucket]
    assert np.isnan(quantiles(np.zeros_like(counts), 0.5)[0])
    above = np.zeros_like(counts)
    above[0, -1] = 3
    assert quantiles(above, 0.99)[0] == SECONDS[-1]


def test_percentiles_are_of_the_last_minute_only() -> None:
    slow, fast = Histogram(), Histogram()
    samples = []
    for _ in range(100):
        slow.observe(8.0)
        samples.append(Sample(acks=counts_of([slow, fast])))
    for _ in range(70):
        fast.observe(0.002)
        samples.append(Sample(acks=counts_of([slow, fast])))
    acks = filled(samples).figures()["acks"]
    assert acks["count"] == 60
    assert acks["p99"] <= 0.0025


# ---- events --------------------------------------------------------------------------------------------------------


def test_events_are_kept_whatever_level_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("memwal")
    before = (logger.handlers[:], logger.level, logger.propagate)
    try:
        configure_logs("warning", "text")
        with RecentEvents() as events:
            log = logging.getLogger("memwal.region")
            log.info("claimed", extra={"event": "claim", "region": "a", "epoch": 3, "secret": "no"})
            log.info("only for debugging")
            log.warning("too slow: %d", 7)
            for number in range(2 * EVENTS_KEPT):
                log.info("flushed", extra={"event": "flush", "rows": number})
                if number == 0:
                    first, second, third = events.newest()
        assert (first["event"], second["text"], third["epoch"]) == ("flush", "too slow: 7", 3)
        assert "secret" not in third
        assert [each["number"] for each in events.newest()] == list(range(202, 102, -1))
        log.warning("not heard any more")
        assert events.newest()[0]["event"] == "flush"
    finally:
        logger.handlers[:], logger.propagate = before[0], before[2]
        logger.setLevel(before[1])
    written = capsys.readouterr().err.splitlines()
    assert [line.rpartition(": ")[2] for line in written] == ["7", "not heard any more"]


def test_a_commit_that_fails_again_is_one_entry() -> None:
    meter = CommitMeter()
    for at in range(5):
        meter.failed("no space", float(at))
    meter.failed("denied", 9.0)
    assert list(meter.recent) == [
        {"time": 4.0, "error": "no space", "times": 5},
        {"time": 9.0, "error": "denied", "times": 1},
    ]


# ---- the sentence --------------------------------------------------------------------------------------------------

GOOD = {
    "behind": {"committed": 10.0},
    "most": {"committed": 29.6},
    "interval": 30.0,
    "acks": {"p50": 0.0213, "count": 9},
}


def reason(name: str, text: str = "it is so", region: str = "") -> dict[str, str]:
    return {"reason": name, "text": text} | ({"region": region} if region else {})


def test_a_healthy_process_says_how_fresh_its_rows_are() -> None:
    told = health(Situation(**GOOD))
    assert (told["state"], told["title"]) == ("healthy", "Healthy")
    assert told["text"] == (
        "Rows are searchable 0.021 s after they arrive at this daemon, and committed at most 30 s after that."
    )
    assert (told["todo"], told["findings"]) == ("", [])
    quiet = health(Situation(behind={"committed": 0.0}, interval=30.0))
    assert quiet["text"] == "No rows have arrived in the last minute. All rows are committed."
    first = health(Situation(**GOOD | {"behind": {"committed": 31.0}}))  # no commit in sight
    assert first["text"].endswith("after they arrive at this daemon. The oldest row that is not committed is 31 s old.")
    run = health(Situation(**GOOD, run=True, freshness=0.4))
    assert run["text"].endswith("0.4 s after they land in the source, and committed at most 30 s after that.")
    idle = health(Situation(**GOOD | {"behind": {"committed": 0.0}}, run=True))
    assert idle["text"] == "No rows have landed in the source in the last minute. All rows are committed."


@pytest.mark.parametrize(
    ("trigger", "todo"), [(0.2, "Find the slow part"), (60.0, "Rows wait up to source.trigger, 60 s")]
)
def test_rows_that_are_searchable_late_are_a_warning(trigger: float, todo: str) -> None:
    late = [reason("not_fresh", "rows are searchable 91 s after they land in the source")]
    told = health(Situation(late, **GOOD, run=True, freshness=91.0, freshness_max=30.0, trigger=trigger))
    assert (told["state"], told["title"]) == ("warning", "Rows are searchable too late")
    assert told["text"] == "Rows are searchable 91 s after they land in the source."
    assert told["todo"].startswith(todo)


PAUSE = {"since": 9.0, "by": "hand", "reason": "so"}


@pytest.mark.parametrize(
    ("changes", "state", "title", "words"),
    [
        ({"reasons": [reason("claiming")]}, "busy", "Starting", "It is so."),
        ({"reasons": [reason("draining")]}, "busy", "Ending", "It is so."),
        (
            {"reasons": [reason("region_fenced", "epoch 1 was fenced by epoch 2", "a")], "regions": 4},
            "failing",
            "Fenced by another writer in 1 of 4 regions",
            "Epoch 1 was fenced by epoch 2.",
        ),
        ({"reasons": [reason("region_poisoned", region="a")], "regions": 1}, "failing", "Stopped after", "It is so."),
        (
            {"reasons": [reason("flush_failing", "disk full", "a")], "regions": 2},
            "failing",
            "Flushes fail",
            "Disk full.",
        ),
        (
            {"reasons": [reason("commit_failing", "no space")], "behind": {"committed": 240.0}},
            "failing",
            "Commits are stuck",
            "Rows have waited 4 min for the base table. Last error: No space.",
        ),
        ({"reasons": [reason("commit_failing")], "behind": {"committed": 9.0}}, "failing", "Commits fail", "9 s"),
        ({"behind": {"committed": 240.0}}, "warning", "Commits are late", "commit.interval is 30 s"),
        ({"behind": {"committed": 240.0}, "leads": False}, "warning", "Commits are late", "4 min"),
        ({"waiting_puts": 3}, "warning", "Puts wait", "3 puts wait for room"),
        ({"behind": {"latest": 12.0}}, "warning", "Writes are slow", "12 s for its ack"),
        ({"puts_rejected": "column 'm' is a map"}, "failing", "Puts are rejected", "Column 'm' is a map."),
        ({"gone": ["grpc://a:1"]}, "warning", "Another daemon does not answer", "grpc://a:1"),
        ({"reasons": [reason("no_daemon")], "run": True}, "failing", "No daemon answers", "It is so."),
        ({"reasons": [reason("source_silent")], "run": True}, "failing", "The source does not answer", "It is so."),
        (
            {"run": True, "lag_rows": 90_000.0, "lag_before": 20_000.0, "rates": {"put": 500.0}},
            "warning",
            "Falling behind",
            "The source is 90,000 rows ahead, 20,000 a minute ago; 500 rows/s are taken.",
        ),
        ({"paused": {"commits": PAUSE}, "behind": {"committed": 240.0}}, "busy", "Commits are paused", "by hand: so."),
        (
            {"run": True, "lag_rows": 9e4, "lag_before": 2e4, "rates": {"put": 5.0}, "paused": {"ingestion": PAUSE}},
            "busy",
            "Ingestion is paused",
            "Since 1970-01-01 00:00:09 UTC by hand: so. Rows wait in the source;",
        ),
    ],
)
def test_what_is_wrong_is_said_with_what_to_do(changes: dict[str, Any], state: str, title: str, words: str) -> None:
    told = health(Situation(**GOOD | changes))
    assert told["findings"] == []
    assert told["state"] == state
    assert told["title"].startswith(title)
    assert words in told["text"]
    assert told["todo"].endswith(".")


def test_the_worst_is_said_first_and_the_rest_is_kept() -> None:
    reasons = [reason("claiming"), reason("flush_failing", region="a")]
    told = health(Situation(reasons, waiting_puts=1, regions=2))
    assert told["reason"] == "flush_failing"
    assert [each["reason"] for each in told["findings"]] == ["back_pressure", "claiming"]


@pytest.mark.parametrize(
    ("before", "now", "rate"),
    [(None, 90_000.0, 500.0), (90_000.0, 90_000.0, 500.0), (100.0, 4_000.0, 500.0), (90_000.0, 20_000.0, 500.0)],
)
def test_a_lag_that_does_not_grow_or_is_soon_gone_is_no_finding(before: float | None, now: float, rate: float) -> None:
    told = health(Situation(**GOOD, run=True, freshness=0.4, lag_rows=now, lag_before=before, rates={"put": rate}))
    assert told["state"] == "healthy"


def test_durations_are_short() -> None:
    said = [duration(each) for each in (0, 0.0044, 0.0213, 0.456, 4.26, 12.4, 100, 240, 10_000)]
    assert said == ["0 s", "4.4 ms", "0.021 s", "0.46 s", "4.3 s", "12 s", "100 s", "4 min", "3 h"]


# ---- the message ---------------------------------------------------------------------------------------------------


class Counting:
    """A source that puts ten rows per second."""

    def __init__(self) -> None:
        self.rows = 0

    def sample(self) -> Sample:
        self.rows += 10
        return Sample(put_rows=self.rows)

    def show(self, figures: Mapping[str, Any]) -> dict[str, Any]:
        return {"table": "t", "health": health(Situation()), "levels": [], "regions": [], "daemons": []}

    def queryable(self) -> dict[str, Any] | None:
        return {"columns": []}

    def ask(self, request: Mapping[str, Any]) -> Page:
        return Page.of(request)


def test_the_first_message_has_all_and_later_ones_what_is_new() -> None:
    clock = FakeClock()
    live = Live("daemon", Counting(), RecentEvents(), clock)
    for _ in range(100):
        live.sample()
        clock.advance(1.0)
    whole = live.message()
    assert (whole["kind"], whole["rates"]["put"], whole["uptime"]) == ("daemon", 10, 100)
    assert (len(whole["history"]["put"]), whole["query"]) == (100, {"columns": []})
    live.sample()
    new = live.message(since=100)
    assert (whole["whole"], new["whole"]) == (True, False)
    assert len(new["history"]["put"]) == 1 + OVERLAP
    assert new["history"]["first"] + len(new["history"]["put"]) == live.newest == 101
    assert "query" not in new
    json.dumps(whole, allow_nan=False)


def regions(*rows: int) -> list[dict[str, Any]]:
    return [
        {"bucket": bucket, "rows_put": count, "memtable_rows": 0, "ssts": list[Any]()}
        for bucket, count in enumerate(rows)
    ]


@pytest.mark.parametrize("rows", [(5_000, 0), (9_999, 0, 0), (20_000,), (60_000, 7_000), (60_000, 0, 50_000), ()])
def test_a_spread_that_is_even_or_cannot_be_judged_is_not_mentioned(rows: tuple[int, ...]) -> None:
    assert measured(regions(*rows)) == ""


@pytest.mark.parametrize(
    ("rows", "said"), [((0, 10_000), "region 1 has 100 %"), ((50_000, 4_900, 0), "region 0 has 91 %")]
)
def test_one_region_far_above_the_others_is_named_with_the_remedy(rows: tuple[int, ...], said: str) -> None:
    text = measured(regions(*rows))
    assert text.startswith(said)
    assert "new table of wal.format = 'lance'" in text
    shown = health(Situation(skewed=text))
    assert (shown["state"], shown["reason"]) == ("warning", "skewed")
    assert said in shown["text"].replace("Region", "region")


def test_rows_that_are_not_committed_count_where_the_owner_says_no_more() -> None:
    uncommitted = {"ssts": [{"rows": 12_000, "committed": False}, {"rows": 10**6, "committed": True}]}
    first, second = regions(0, 0)
    assert "region 0 has 100 % of the last 12,000 rows" in measured([first | uncommitted, second])


CASES = {
    "arrow": (["name", "id"], "arrow", 2, True),
    "lance": (["name", "id"], "lance", 2, False),
    "one key column": (["id"], "arrow", 2, False),
    "one region": (["name", "id"], "arrow", 1, False),
}


@pytest.mark.parametrize("exists", [False, True], ids=["no table", "a table"])
@pytest.mark.parametrize("case", CASES)
def test_config_check_and_doctor_warn_where_the_first_key_column_alone_decides(
    small_config: Callable[..., Path], cli: Callable[..., Any], exists: bool, case: str
) -> None:
    key, wal_format, count, warned = CASES[case]
    config = small_config(table={"key": key}, wal={"format": wal_format}, regions={"count": count})
    if exists:
        assert cli("init", config).code == 0
    checked, examined = cli("config", "check", config), cli("doctor", config)
    told = f"the first key column 'name' alone decides which of the {count} regions a row goes to"
    assert checked.code == 0
    assert (told in checked.out, told in examined.out) == (warned, warned)
    assert ("wal.format = 'lance'" in checked.out) == warned


def test_a_table_of_an_older_version_is_warned_of_too(
    small_config: Callable[..., Path], cli: Callable[..., Any], uri: str
) -> None:
    config = small_config(table={"key": ["name", "id"]}, regions={"count": 2})
    assert cli("init", config).code == 0
    BaseTable.open(uri).dataset.update_schema_metadata({"memwal:routed_by": None, "memwal:storage": None})
    assert "the first key column 'name' alone decides" in cli("config", "check", config).out
