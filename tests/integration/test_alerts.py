"""Each alert of the shipped rules fires for its own fault and for no other; none fires on a healthy table."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import lance
import psutil
import pyarrow as pa
import pytest

import memwal
from memwal import flush, wal
from memwal.ingest.engine.region.core import RegionCore
from memwal.ingest.engine.table.create import initialise
from memwal.ingest.engine.table.embedded import Table
from memwal.ingest.service.daemon.pages import DaemonPages
from memwal.ingest.service.daemon.tables import OneTable
from memwal.ingest.service.ops.metrics import Scrape
from memwal.ingest.service.ops.storage import StorageCollector
from memwal.ingest.settings.load import load
from memwal.ingest.spark.pipeline.metrics import RunMeter
from memwal.ingest.spark.pipeline.pages import RunPages
from memwal.ingest.spark.pipeline.pausing import Pausing
from tests.alerts import EVERY, RULES, Scrapes
from tests.conftest import Running, small_sections, toml, wait_until
from tests.opened import open_table
from tests.promtool import promtool
from tests.support.clock import FakeClock
from tests.support.flushes import flushes_held
from tests.support.interpose import puts_answered

MINUTE = 60 // EVERY
"""Scrapes per minute."""
HEALTHY, LONG = 5 * MINUTE, 12 * MINUTE
QUICK = {"put_timeout": "50ms", "retry_budget": "200ms"}
Opened = tuple[Table, Scrapes]


@pytest.fixture
def watched(tmp_path: Path, uri: str) -> Iterator[Callable[..., Opened]]:
    """Open the small table of one region with settings, and a scraper that reads it like a daemon's /metrics."""
    with ExitStack() as stack:

        def opened(**sections: Mapping[str, Any]) -> Opened:
            config = tmp_path / "config.toml"
            given = small_sections(uri) | {"regions": {"count": 1}, "gc": {"interval": "0s"}} | sections
            config.write_text(toml(given))
            settings = load(config, os.environ)
            table = open_table(settings, os.environ)
            stack.callback(_closed, table)
            scrape = Scrape()
            scrape.add(StorageCollector(settings.cost))
            pages = DaemonPages(scrape)
            pages.shows(OneTable(table))
            return table, Scrapes(partial(_page, pages))

        yield opened


def _page(pages: DaemonPages | RunPages) -> str:
    return pages.pages()["/metrics"]().body.decode()


def _closed(table: Table) -> None:
    with suppress(memwal.MemWalError):  # fenced, or its storage fails
        table.close()


def test_the_rules_are_valid_and_each_says_what_to_do() -> None:
    ran = promtool("check", "rules", "--lint=all", "--lint-fatal", RULES)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "15 rules found" in ran.stdout


def test_a_healthy_table_fires_no_alert(watched: Callable[..., Opened], made: Any) -> None:
    table, scrapes = watched(commit={"interval": "30s"})
    numbers = iter(range(1_000))

    def work() -> None:
        number = next(numbers)
        table.put(made.rows([number]))
        if number % 10 == 9:
            table.flush()
            table.commit()

    scrapes.take(LONG, work)
    assert scrapes.newest("memwal_commit_ssts_total") > 0
    scrapes.expect(set())


def test_rows_that_are_not_committed_in_time(
    watched: Callable[..., Opened], made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit in progress blocks; a process makes one commit at a time."""
    ends, commit = threading.Event(), flush.commit
    monkeypatch.setattr(flush, "commit", lambda *given, **named: ends.wait(60) and commit(*given, **named))
    table, scrapes = watched(commit={"interval": "500ms"})
    scrapes.take(HEALTHY)
    table.put(made.rows([1]))
    wait_until(lambda: table.regions.writers[0].status()["behind"]["committed"] > 1.1)
    scrapes.take(LONG)
    ends.set()
    scrapes.expect({"MemwalCommittedLate"})


def test_commits_that_are_paused_are_not_late(watched: Callable[..., Opened], made: Any) -> None:
    """After an hour an alert reports a pause, since an operator may have forgotten it."""
    table, scrapes = watched(commit={"interval": "500ms"})
    scrapes.take(HEALTHY)
    table.pauses.pauses.pause("commits", "an operator")
    table.pauses.look()
    table.put(made.rows([1]))
    wait_until(lambda: table.regions.writers[0].status()["behind"]["committed"] > 1.1)
    scrapes.take(LONG)
    scrapes.expect(set())
    scrapes.take(60 * MINUTE)
    scrapes.expect({"MemwalPaused"})


def test_a_writer_that_was_fenced(watched: Callable[..., Opened], made: Any) -> None:
    table, scrapes = watched()
    scrapes.take(HEALTHY)
    _claimed_elsewhere(table)
    with pytest.raises(memwal.FencedError):
        table.put(made.rows([1]))
    scrapes.take(LONG)
    assert scrapes.newest("memwal_region_last_error_timestamp_seconds", **_of(table, what="fence")) > 0
    scrapes.expect({"MemwalRegionDown"})


def test_a_writer_that_storage_gave_no_answer(watched: Callable[..., Opened], made: Any) -> None:
    table, scrapes = watched(wal=QUICK)
    scrapes.take(HEALTHY)
    with puts_answered(wal.PutOutcome.OUTCOME_UNKNOWN), pytest.raises(memwal.UnknownOutcome):
        table.put(made.rows([1]))
    scrapes.take(LONG)
    for what in ("append", "poison"):
        assert scrapes.newest("memwal_region_last_error_timestamp_seconds", **_of(table, what=what)) > 0
    scrapes.expect({"MemwalRegionDown"})


def test_two_processes_that_take_a_region_from_each_other(watched: Callable[..., Opened], made: Any) -> None:
    table, scrapes = watched()
    scrapes.take(HEALTHY)

    def fight() -> None:
        _claimed_elsewhere(table)
        with pytest.raises(memwal.FencedError):
            table.put(made.rows([1]))
        table.acquire(table.base.regions[0])

    for _ in range(4):
        scrapes.take(1, fight)
    scrapes.take(HEALTHY)
    scrapes.expect({"MemwalFencing"})


def test_flushes_that_fail(watched: Callable[..., Opened], made: Any) -> None:
    table, scrapes = watched(wal=QUICK, memtable={"rows_max": 1}, flush={"retry_delay": "10ms"})
    scrapes.take(HEALTHY)
    meter = table.regions.context.meters.of(table.base.regions[0])
    with puts_answered(wal.PutOutcome.OUTCOME_UNKNOWN, of="/manifest/"):
        table.put(made.rows([1]))
        wait_until(lambda: meter.flush_failures > 3)
        scrapes.take(HEALTHY)
    assert scrapes.newest("memwal_region_last_error_timestamp_seconds", **_of(table, what="flush")) > 0
    scrapes.expect({"MemwalFlushFailing"})


def test_commits_that_fail(watched: Callable[..., Opened], made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    table, scrapes = watched(wal=QUICK)
    table.put(made.rows([1]))
    table.flush()
    scrapes.take(HEALTHY)

    def away(store: wal.LocalStore, key: str) -> bytes:
        raise wal.StoreUnavailable(f"{key}: storage is away")

    with monkeypatch.context() as silent:
        silent.setattr(wal.LocalStore, "get", away)
        for _ in range(4):
            with pytest.raises(memwal.Unavailable):
                table.commit()
            scrapes.take(MINUTE)
    assert scrapes.newest("memwal_region_last_error_timestamp_seconds", **_of(table, what="commit")) > 0
    assert "storage is away" in table.status()["regions"][0]["last_errors"]["commit"]["error"]
    scrapes.expect({"MemwalCommitFailing"})


def test_puts_that_wait_for_room(watched: Callable[..., Opened], made: Any) -> None:
    """Flushes are blocked, so puts find no room and fail after their wait."""
    size = {"size_max": "140KiB", "unflushed_max": "140KiB"}
    table, scrapes = watched(memtable=size, wal={"put_timeout": "300ms"})
    scrapes.take(HEALTHY)

    def refused(_: int) -> None:
        with pytest.raises(memwal.Unavailable) as full:
            table.put(made.rows([1]))
        assert full.value.details["reason"] == "busy"

    with flushes_held(), ThreadPoolExecutor(60) as pool:
        table.put(made.rows(range(100)))
        scrapes.take(3 * MINUTE, lambda: list(pool.map(refused, range(60))))
    scrapes.expect({"MemwalBackPressure"})


def test_an_indexer_that_stands_still(
    watched: Callable[..., Opened], made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, scrapes = watched()
    scrapes.take(HEALTHY)
    starts = iter(range(0, 1_000_000, 1500))
    rows = made.table(range(1500))

    def more() -> None:
        start = next(starts)
        table.put(rows.set_column(0, rows.schema.field("id"), [list(range(start, start + 1500))]))

    with monkeypatch.context() as still:
        still.setattr(RegionCore, "index_step", lambda _: False)
        scrapes.take(LONG, more)
    assert scrapes.newest("memwal_unindexed_rows", region=table.regions.writers[0].name) > 10_000
    scrapes.expect({"MemwalUnindexedRowsRising"})


def test_requests_that_cost_more_than_the_budget(
    watched: Callable[..., Opened], made: Any, s3_table: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One put per scrape is 120 PUTs an hour: 0.0006 dollars."""
    options = dict(s3_table.storage_options)
    for name in ("access_key_id", "secret_access_key"):
        monkeypatch.setenv(name.upper(), options[name])
        options[name] = f"env:{name.upper()}"
    place = small_sections(s3_table.uri)["table"] | {"storage_options": options}
    table, scrapes = watched(table=place, cost={"hourly_budget": 0.0001})
    scrapes.take(HEALTHY)
    numbers = iter(range(1_000))
    scrapes.take(LONG, lambda: table.put(made.rows([next(numbers)])))
    scrapes.expect({"MemwalRequestsOverBudget"})


def test_a_table_that_takes_many_times_its_newest_version(watched: Callable[..., Opened]) -> None:
    table, scrapes = watched()
    sizes = {"newest": 10**9, "older": 3 * 10**9, "ssts": 0, "log": 0, "orphans": 0}
    table.upkeep.space = flush.Space(sizes, 0.0)
    scrapes.take(HEALTHY)
    scrapes.expect(set())
    table.upkeep.space = flush.Space(sizes | {"older": 9 * 10**9}, 0.0)
    scrapes.take(125 * MINUTE)
    assert scrapes.newest("memwal_storage_bytes", kind="older") == 9e9
    scrapes.expect({"MemwalStorageGrows"})


def test_a_column_that_cannot_be_held(watched: Callable[..., Opened]) -> None:
    table, scrapes = watched()
    scrapes.take(HEALTHY)
    lance.dataset(table.base.uri).add_columns(pa.field("extra", pa.map_(pa.string(), pa.int64())))
    table.count()
    scrapes.take(HEALTHY)
    scrapes.expect({"MemwalPutsRejected"})


def _claimed_elsewhere(table: Table) -> None:
    context = table.regions.context
    wal.claim(
        context.store, table.base.regions[0], spec_id=1, codec=context.codec, ids=context.ids, clock=context.clock
    )


def _of(table: Table, **labels: str) -> dict[str, str]:
    return {"region": str(table.base.regions[0]), **labels}


@pytest.mark.parametrize("paused", [False, True])
def test_a_run_without_micro_batches_that_is_paused(tmp_path: Path, uri: str, paused: bool) -> None:
    """The source has rows, and the run reads none: because an operator paused it, or because of a fault."""
    config, clock = tmp_path / "config.toml", FakeClock()
    config.write_text(toml(small_sections(uri)))
    settings = load(config, os.environ)
    initialise(settings, os.environ)
    pages = RunPages(RunMeter(clock, settings.source.trigger), uri, clock)
    pages.pausing = Pausing(settings, os.environ, clock)
    pages.meter.progressed({})
    scrapes = Scrapes(partial(_page, pages))
    scrapes.take(HEALTHY)
    if paused:
        pages.pausing.watch.pauses.pause("ingestion", "an operator")
        pages.pausing.watch.look()
        scrapes.take(1)
        assert scrapes.newest("memwal_paused", what="ingestion") == 0, "the micro-batch under way may hang"
        pages.pausing.stands = True
    pages.meter.looked({"isTriggerActive": True, "isDataAvailable": True})
    scrapes.take(HEALTHY, lambda: clock.advance(EVERY))
    assert scrapes.newest("memwal_source_waiting_seconds") > 60
    scrapes.expect(set() if paused else {"MemwalNoMicroBatch"})


# ---- memwal run ------------------------------------------------------------------------------------------------------


class Run:
    """A `memwal run` that watches a directory, and its scrapes."""

    def __init__(self, running: Running, directory: Path) -> None:
        url = running.line_with("metrics, health and status at").rsplit(" ", 1)[1]
        self.running, self.url, self._directory = running, url, directory
        self.scrapes = Scrapes(lambda: self._page("/metrics"))
        self._landed = 0

    def _page(self, path: str) -> str:
        with urlopen(self.url + path, timeout=60) as answer:
            return str(answer.read().decode())

    def land(self, lines: list[str], age: float = 0.0) -> None:
        """Put a complete file into the source; its modification time is `age` seconds ago."""
        self._landed += 1
        file = self._directory / f"{self._landed:05d}.json"
        hidden = file.with_name(f".{file.name}")
        hidden.write_text("\n".join(lines))
        os.utime(hidden, (time.time() - age,) * 2)
        hidden.rename(file)

    def ingest(self, lines: list[str], age: float = 0.0) -> None:
        """Put a file into the source, and wait until its micro-batch has finished."""
        self.land(lines, age)
        wait_until(lambda: json.loads(self._page("/status"))["micro_batches"] == self._landed)

    def daemon(self) -> psutil.Process:
        """The run's own daemon."""
        children = psutil.Process(self.running.process.pid).children()
        (found,) = [each for each in children if "memwal.ingest.service.daemon" in " ".join(each.cmdline())]
        return found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, start_for_module: Callable[..., Running]) -> Run:
    """Start a run and warm it up: rows of the first micro-batch wait for Spark's start."""
    home = tmp_path_factory.mktemp("alerts")
    source = home / "source"
    source.mkdir()
    sections = small_sections(str(home / "t.lance"))
    sections["table"] |= {"columns": {"id": "int64", "name": "string"}, "indexes": {}}
    sections |= {
        "commit": {"interval": "30s"},
        "source": {"format": "json", "path": str(source), "trigger": "200ms"},
        "sink": {"http_port": 0},
        "dlq": {"mode": "skip", "max_bad_percent": 100},
    }
    (home / "run.toml").write_text(toml(sections))
    found = Run(
        start_for_module([sys.executable, "-m", "memwal.ingest.cli.app", "run", str(home / "run.toml")]), source
    )
    for _ in range(5):
        found.ingest(GOOD)
    return found


GOOD = [json.dumps({"id": number, "name": "a"}) for number in range(100)]
BAD = [json.dumps({"id": "no number", "name": "a"}) for _ in range(3)]


def test_a_healthy_run_fires_no_alert(run: Run) -> None:
    """Retry, since a micro-batch of a healthy run takes seconds when the machine stalls for that long."""

    def quiet() -> bool:
        since = len(run.scrapes)
        run.scrapes.take(HEALTHY)
        run.scrapes.take(HEALTHY, lambda: run.ingest(GOOD))
        return not run.scrapes.unlike(set(), since)

    wait_until(quiet)
    assert run.scrapes.newest("memwal_store_requests_total", kind="base", operation="list") > 0


def test_bad_rows_above_one_percent(run: Run) -> None:
    since = len(run.scrapes)
    run.scrapes.take(HEALTHY)
    run.scrapes.take(2, lambda: run.ingest(GOOD + BAD))
    run.scrapes.expect({"MemwalBadRows"}, since)


def test_micro_batches_that_do_not_end(run: Run) -> None:
    """The daemon is stopped: the micro-batch waits for it, and the lag rises although no count rises."""
    since = len(run.scrapes)
    run.scrapes.take(HEALTHY)
    lag = run.scrapes.newest("memwal_source_lag_seconds")
    daemon = run.daemon()
    daemon.send_signal(signal.SIGSTOP)
    try:
        run.land(GOOD)

        def rising() -> bool:
            run.scrapes.take(1)
            return run.scrapes.newest("memwal_source_lag_seconds") > lag + 2

        wait_until(rising, every=0.5)
        run.scrapes.take(HEALTHY)
    finally:
        daemon.send_signal(signal.SIGCONT)
    run.scrapes.expect({"MemwalNoMicroBatch"}, since)
    run.ingest(GOOD)
    run.scrapes.take(1)
    assert run.scrapes.newest("memwal_source_waiting_seconds") < 2


def test_rows_that_are_queryable_late(run: Run) -> None:
    """The rows have waited in the source for longer than `source.freshness_max`."""
    since = len(run.scrapes)
    run.scrapes.take(HEALTHY)
    run.scrapes.take(HEALTHY, lambda: run.ingest(GOOD, age=90))
    run.scrapes.expect({"MemwalNotFresh"}, since)


def test_a_source_that_is_faster_than_the_run(run: Run) -> None:
    """Each file has waited in the source longer than the previous one, so its rows become queryable late too."""
    since, ages = len(run.scrapes), iter(range(70, 10_000, 40))
    run.scrapes.take(HEALTHY)
    run.scrapes.take(8 * MINUTE, lambda: run.ingest(GOOD, age=next(ages)))
    run.scrapes.expect({"MemwalSourceLagRising", "MemwalNotFresh"}, since)
