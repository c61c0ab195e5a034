"""The page at / in Chromium: its appearance while all is well, and when something is wrong."""

from __future__ import annotations

import json
import logging
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import memwal
from memwal.ingest.service.ops.events import RecentEvents
from memwal.ingest.service.ops.http_server import HttpServer
from memwal.ingest.service.ops.live import Live
from memwal.ingest.service.rpc.guard import Guard
from memwal.ingest.settings.load import load
from memwal.ingest.spark.pipeline.metrics import RunMeter
from memwal.ingest.spark.pipeline.pages import RunPages, RunSource
from memwal.ingest.spark.sink.receipts import BatchReceipt, RegionReceipt
from tests.cluster import Cluster, spread
from tests.conftest import OpenSmall, SmallConfig, Start
from tests.fleet_daemon import FleetDaemon
from tests.page_site import JSON, MARKUP, Looked, Site
from tests.support.clock import FakeClock

Look = Callable[..., Looked]
URL = "metrics, health and status at"


@pytest.fixture
def daemon(start: Start, small_config: SmallConfig) -> Callable[..., tuple[Any, str, str]]:
    """Start `memwal serve` for the small table; return the process, its endpoint and the URL of its page."""

    def serve(**sections: Mapping[str, Any]) -> tuple[Any, str, str]:
        sections["daemon"] = {"http_port": 0, **sections.get("daemon", {})}
        running = start([sys.executable, "-m", "memwal.ingest.cli.app", "serve", str(small_config(**sections))])
        url = running.line_with(URL).rsplit(" ", 1)[1]
        return running, running.line_with("serving").rsplit(" ", 1)[1], url

    return serve


def test_a_healthy_daemon_with_rows_coming_in(daemon: Callable[..., Any], look: Look, made: Any) -> None:
    """One daemon, seen on a desktop in light and dark, and on a phone."""
    _, endpoint, url = daemon(commit={"interval": "1s"}, regions={"count": 4})
    views = [look(url), look(url, dark=True), look(url, phone=True)]
    light, dark, phone = views
    with memwal.connect(endpoint) as table:
        for at in range(0, 2000, 50):
            table.put(made.rows(range(at, at + 50)))
        for each in views:
            each.until("document.querySelectorAll('#commits tbody tr').length >= 1")
            table.put(made.rows(range(50)))
            each.until("document.querySelector('#health-text').textContent.includes('committed at most')")
    for each in views:
        each.says("healthy", "Healthy")
        assert each.text("#health-text").startswith("Rows are searchable ")
        assert each.page.title() == "● Healthy – memwal"
        each.until("document.querySelector('#connection').textContent.trim() === 'live'")
        assert each.page.locator("#regions tbody tr:not(.daemon)").count() == 4
        assert each.fits()
    assert light.texts("#regions tbody tr:not(.daemon) .badge") == ["serving"] * 4
    assert endpoint in light.text("#regions tr.daemon")
    assert light.text("#level-committed h3").startswith("Committed")
    assert "limit 1.0 s (commit.interval)" in light.text("#level-committed")
    assert light.page.locator("#charts figure:not([hidden]) canvas").count() == 3
    assert "commit" in light.texts("#events .kind")
    for each, name in ((light, "healthy-light"), (dark, "healthy-dark"), (phone, "healthy-phone")):
        each.picture(name)
    light.page.click("#events-more")
    assert {"claim", "serving", "flush", "commit"} <= set(light.texts("#events .kind"))
    background = "getComputedStyle(document.body).backgroundColor"
    assert light.page.evaluate(background) != dark.page.evaluate(background)


def test_a_commit_that_is_stuck(daemon: Callable[..., Any], look: Look, made: Any, uri: str) -> None:
    _, endpoint, url = daemon(commit={"interval": "1s"}, regions={"count": 2})
    view = look(url)
    with memwal.connect(endpoint) as table:
        table.put(made.rows(range(40)))
        table.flush()
        data = list(Path(uri).glob("_mem_wal/*/*_gen_*/data/*.lance"))
        for file in data:  # remove the data that the commit would read
            file.rename(file.with_suffix(".away"))
    view.says("failing", "Commits ")  # "Commits fail" or "Commits are stuck"
    assert "Last error: " in view.text("#health-text")
    assert "Rows stay safe in the log" in view.text("#health-text")
    assert view.text("#health-todo").startswith("What to do: Commits are tried again")
    view.until("document.querySelector('#level-committed').dataset.late")
    assert "late" in view.text("#level-committed .value")
    view.until("document.querySelector('#commits tr[data-state=failed]') !== null")
    assert "failed" in view.text("#commits tr[data-state=failed]")
    view.picture("stuck-commit")


def test_paused_commits_look_paused_and_not_stuck(daemon: Callable[..., Any], look: Look, made: Any) -> None:
    _, endpoint, url = daemon(commit={"interval": "500ms"}, regions={"count": 2})
    view = look(url)
    asked = urllib.request.Request(f"{url}/pause", b'{"what": "commits", "reason": "<b>rewritten</b>"}', JSON)
    urllib.request.urlopen(asked, timeout=60).close()
    with memwal.connect(endpoint) as table:
        table.put(made.rows(range(8)))
    view.says("busy", "Commits are paused")
    assert "by 127.0.0.1 over HTTP: <b>rewritten</b>." in view.text("#health-text")
    assert "memwal resume CONFIG --commits" in view.text("#health-todo")
    view.picture("paused")


def test_a_fenced_writer(daemon: Callable[..., Any], look: Look, made: Any, open_small: OpenSmall) -> None:
    _, endpoint, url = daemon(commit={"interval": "0s"}, daemon={"claim_again": "1h"}, regions={"count": 2})
    table = memwal.connect(endpoint)
    table.put(made.rows(range(8)))
    open_small(take_over=True)
    with pytest.raises(memwal.FencedError):
        table.put(made.rows(range(8)))
    view = look(url, phone=True)
    view.says("failing", "Fenced by another writer in 2 of 2 regions")
    assert "was fenced by epoch 2" in view.text("#health-text")
    assert "end the other writer" in view.text("#health-todo")
    assert view.texts("#regions tbody tr:not(.daemon) .badge") == ["fenced", "fenced"]
    assert view.page.locator("#regions .badge[data-severity=bad]").count() == 2
    assert "fence" in view.texts("#events .kind")
    assert view.fits()
    view.picture("fenced-phone")


def test_a_dead_daemon_of_two(small_config: SmallConfig, start: Start, look: Look, uri: str, made: Any) -> None:
    endpoints = spread(2, 6)
    config = small_config(regions={"count": 6}, daemon={"endpoints": endpoints, "http_port": 0})
    cluster, urls = Cluster(uri, endpoints), {}
    for endpoint in endpoints:
        env = {"MEMWAL__DAEMON__PORT": endpoint.rpartition(":")[2]}
        cluster.running[endpoint] = start(
            [sys.executable, "-m", "memwal.ingest.cli.app", "serve", str(config)], env=env
        )
    for endpoint, running in cluster.running.items():
        urls[endpoint] = running.line_with(URL).rsplit(" ", 1)[1]
        running.line_with("serving")
    with memwal.connect(",".join(endpoints)) as table:
        table.put(made.rows(range(60)))
    living, dying = endpoints
    view = look(urls[living])
    view.until("document.querySelectorAll('#regions tbody').length === 2")
    view.until("document.querySelectorAll('#regions .badge[data-severity=good]').length === 8")
    view.says("healthy", "Healthy")
    view.picture("two-daemons")

    view.page.fill("#query-filter", "id < 10")
    view.page.click("#query button")
    view.until("document.querySelectorAll('#query-rows tbody tr').length === 10")

    cluster.running[dying].kill()
    view.until("document.querySelectorAll('#regions tbody[data-state=serving] tr[data-state=serving]').length === 6")
    view.says("warning", "Another daemon does not answer")
    assert dying in view.text("#health-text")
    dead = view.page.locator("#regions tbody[data-state=ended]")
    assert dead.locator(".badge").inner_text() == "dead"
    assert dying in dead.inner_text()
    assert "0 regions, last answer " in dead.inner_text()
    decoration = "getComputedStyle(document.querySelector('#regions tbody[data-state=ended] .mono')).textDecorationLine"
    assert view.page.evaluate(decoration) == "line-through"
    view.picture("dead-daemon")


def test_a_process_that_ended_looks_ended(daemon: Callable[..., Any], look: Look) -> None:
    running, _, url = daemon(commit={"interval": "0s"}, regions={"count": 2})
    view = look(url, dark=True, expected=("ERR_CONNECTION", "ERR_INCOMPLETE", "ERR_SOCKET", "Failed to load"))
    view.says("healthy", "Healthy")
    running.process.terminate()
    assert running.wait() == 0, "an open page keeps no process from ending"
    assert running.errors == []
    view.says("failing", "No answer from this process")
    assert view.text("#connection").strip() == "no answer"
    assert float(view.page.evaluate("getComputedStyle(document.querySelector('#charts').parentElement).opacity")) < 1
    view.picture("ended-dark")


# ---- a fleet -------------------------------------------------------------------------------------------------------


NAMES = "[...document.querySelectorAll('#tables tbody a')].map((each) => each.textContent).join()"
LIMITED = """
[daemon]
port = 0
http_port = 0
token = "env:ADMIN"
tokens = [{ token = "env:SOME", role = "read", tables = ["tenant_00*"] }]
"""


def fleet_rows(count: int) -> list[dict[str, Any]]:
    return [{"id": number, "v": 1.0} for number in range(count)]


def test_a_fleet_lists_its_tables_and_opens_one(tmp_path: Path, start: Start, look: Look) -> None:
    names = [f"tenant_{number:03}" for number in range(200)]
    fleet = FleetDaemon(tmp_path, names, start, "[daemon]\nport = 0\nhttp_port = 0\n", broken=["wrong"])
    with pytest.raises(memwal.MemWalError):
        fleet.connect("wrong").count()
    ended = threading.Event()

    def put(number: int, size: int) -> None:
        with fleet.connect(f"tenant_{number:03}") as client:
            while not ended.wait(0.3):
                client.put(fleet_rows(size))

    putting = [threading.Thread(target=put, args=each, daemon=True) for each in ((7, 200), (42, 900), (120, 50))]
    for thread in putting:
        thread.start()
    views = [look(fleet.url), look(fleet.url, dark=True), look(fleet.url, phone=True)]
    for view in views:
        view.until(f"({NAMES}).startsWith('tenant_042,tenant_007,tenant_120,')")
        assert view.text("#tables-range") == "1 to 20 of 201"
        view.says("warning", "A table is broken")
        assert view.text("#tables-note") == "201 tables"
        assert view.fits()
    light, dark, phone = views
    assert light.page.locator("#commits, #query, #query-title").filter(visible=True).count() == 0
    assert light.texts("#regions tbody tr") == [f"{fleet.endpoint} serving this daemon, 3 regions"]
    for view, name in ((light, "fleet"), (dark, "fleet-dark"), (phone, "fleet-phone")):
        view.picture(name)

    light.page.click("#tables-after")
    light.until("document.querySelector('#tables-range').textContent === '21 to 40 of 201'")
    light.page.click("#tables [data-sort=state]")
    light.until(f"({NAMES}).startsWith('wrong,tenant_007,')")
    assert "wrong.lance" in light.text("#tables tr.why")
    light.page.fill("#tables-search", "NT_19")
    light.until(f"{NAMES} === '{','.join(names[190:200])}'")
    assert light.text("#tables-note") == "10 of 201 tables"
    light.page.fill("#tables-search", "nothing")
    light.until("document.querySelector('#tables-empty').textContent === 'No table has a name like this.'")

    light.page.fill("#tables-search", "042")
    light.page.click("#tables tbody a")
    light.until("document.querySelectorAll('#regions tbody tr[data-state=serving]').length === 1")
    light.says("healthy", "Healthy")
    assert light.page.title() == "● Healthy – tenant_042 – memwal"
    light.until("!document.querySelector('#query').hidden")
    light.page.fill("#query-filter", "id < 4")
    light.page.click("#query button")
    light.until("document.querySelectorAll('#query-rows tbody tr').length === 4")
    assert light.page.locator("#tables-section").filter(visible=True).count() == 0
    assert str(light.page.get_attribute("#links .of-table", "href")).endswith("/status?table=tenant_042")
    assert light.fits()
    light.picture("fleet-table")
    light.page.click("#back a")
    light.until(f"({NAMES}).startsWith('tenant_')")
    ended.set()
    for thread in putting:
        thread.join()


def test_a_token_for_some_tables_shows_those(tmp_path: Path, start: Start, look: Look) -> None:
    names = [f"tenant_{number:03}" for number in range(12)]
    fleet = FleetDaemon(tmp_path, names, start, LIMITED, env={"ADMIN": "the-admins-token", "SOME": "the-tenants-token"})
    view = look(fleet.url, expected=("401", "403"))
    view.until("!document.querySelector('#token-form').hidden")
    view.page.fill("#token", "the-tenants-token")
    view.page.click("#token-form button")
    view.until(f"{NAMES} === '{','.join(names[:10])}'")
    assert view.page.locator("main > section").filter(visible=True).count() == 1
    assert view.text("#table") == "the tables of your token"
    view.picture("fleet-limited")
    view.page.click("#tables tbody a")
    view.says("healthy", "Idle here")


# ---- a run ---------------------------------------------------------------------------------------------------------


class FakeRun:
    """The page of a run with artificial micro-batches and source; the counting and the page are real."""

    def __init__(self, settings: Any) -> None:
        self.clock = FakeClock()
        self.meter = RunMeter(self.clock, settings.source.trigger, settings.source.freshness_max)
        self.pages = RunPages(self.meter, settings.table.uri, self.clock)
        self.live = Live("run", RunSource(self.pages, settings, self.clock), RecentEvents(), self.clock)
        self.server = HttpServer("127.0.0.1", 0, self.pages.pages(), Guard(), setting="sink.http_port", live=self.live)
        self.batch = 0

    def second(self, *, ahead: int, rows: int = 100, reasons: str = "", bad: int = 0, age: float = 0.5) -> None:
        """End a micro-batch of `rows`, up to `age` seconds old, within a second; the source has
        `ahead` further rows.
        """
        self.clock.advance(1.0)
        now = self.clock.now()
        region = RegionReceipt(
            "a",
            rows,
            applied=True,
            position=1,
            ack_seconds=0.02,
            landed_first=now - age,
            landed_last=now - 0.1,
            acked_at=now,
        )
        self.pages.add(BatchReceipt(self.batch, (region,), bad, bad, reasons))
        offsets = {"endOffset": '{"t": {"0": 0}}', "latestOffset": json.dumps({"t": {"0": ahead}})}
        self.meter.progressed({"sources": [offsets]})
        self.batch += 1
        self.live.sample()


@pytest.fixture
def run(small_config: SmallConfig) -> Iterator[FakeRun]:
    """Yield a run that has started, with a table of two regions at a daemon."""
    fake = FakeRun(load(small_config(commit={"interval": "30s"}, dlq={"mode": "table"}), {}))
    fake.pages.health.release("starting")
    fake.pages.saw(status_of("grpc://a:1", "grpc://b:1"))
    yield fake
    fake.server.close()


SIZES = {"newest": 480_000_000, "older": 2_500_000_000, "ssts": 50_000_000, "log": 60_000_000, "orphans": 6_000_000}


def status_of(*owners: str) -> dict[str, Any]:
    """Return a status of daemons with one region each."""
    region = {
        "epoch": 1, "state": "serving", "failure": None, "flush_error": None, "ssts": [],
        "memtable_rows": 100, "memtable_bytes": 40_000, "behind": {"latest": 0.0, "flushed": 8.0, "committed": 20.0},
    }  # fmt: skip
    regions = [
        {**region, "bucket": bucket, "owner": owner, "id": f"0f5c2d1e-0000-4000-8000-{bucket:012}"}
        for bucket, owner in enumerate(owners)
    ]
    commit = {"time": 90.0, "seconds": 0.25, "version": 3, "rows": 700, "ssts": 4}
    event = {"number": 1, "time": 91.0, "level": "info", "text": "committed 4 SSTs", "event": "commit"}
    return {
        "base_version": 3, "rows": 1000, "routing": 1, "regions": regions, "commit_failures": [], "commits": [commit],
        "events": [event | {"daemon": owners[0]}],
        "storage": {"bytes": SIZES, "factor": 6.45, "time": 95.0},
    }  # fmt: skip


def test_a_run_whose_lag_grows(run: FakeRun, look: Look) -> None:
    for _ in range(61):
        run.second(ahead=50)
    view = look(run.server.url)
    view.says("healthy", "Healthy")
    assert "after they land in the source" in view.text("#health-text")
    for at in range(61):
        run.second(ahead=1_000 * at, bad=2 if at == 30 else 0, reasons=f"parse: {MARKUP} (2x)" if at == 30 else "")
    view.says("warning", "Falling behind")
    assert "60,000 rows ahead" in view.text("#health-text")
    assert "Add regions and daemons" in view.text("#health-todo")
    view.until("document.querySelectorAll('#charts figure:not([hidden]) canvas').length === 4")
    assert "60,000" in view.text("#flow .tile:nth-child(4)")
    assert view.page.locator("#flow .tile[data-kind=warn] dt").all_inner_texts() == ["On storage", "Bad rows"]
    assert MARKUP in view.text("#letters tbody")
    assert view.text("#kind") == "run"
    assert view.page.locator("#query-empty").is_visible()
    view.picture("lag")


def test_a_run_whose_rows_are_searchable_late(run: FakeRun, look: Look) -> None:
    """The age counts from landing: beyond the objective the page and the health endpoint change."""
    ready = run.pages.pages()["/health/readyz"]
    run.second(ahead=0, age=29.0)
    assert ready().status == 200
    view = look(run.server.url)
    view.says("healthy", "Healthy")
    assert "searchable 29 s after they land in the source. " in view.text("#health-text")
    run.second(ahead=0, age=91.0)
    view.says("warning", "Rows are searchable too late")
    assert "Rows are searchable 91 s after they land in the source; source.freshness_max is 30 s" in view.text(
        "#health-text"
    )
    assert view.page.locator("#level-latest").get_attribute("data-late") == "very"
    assert "limit 30 s (source.freshness_max)" in view.text("#level-latest")
    assert ready().status == 503
    assert [each["reason"] for each in json.loads(ready().body)["reasons"]] == ["not_fresh"]
    view.picture("late")


def test_a_run_shows_rows_commits_and_events_of_its_daemons(run: FakeRun, look: Look) -> None:
    run.second(ahead=0)
    view = look(run.server.url)
    view.says("healthy", "Healthy")
    assert "1,000" in view.text("#flow .tile:nth-child(2)")
    assert view.texts("#commits tbody tr td")[1:] == ["version 3", "700", "4", "250 ms"]
    assert "committed 4 SSTs" in view.text("#events li")
    storage = view.page.locator("#flow .tile[data-kind=warn]").inner_text()
    assert storage.split("\n") == ["On storage", "3.1 GB", "6.5 times the newest version, older versions 2.5 GB"]
    assert view.fits()
    view.picture("run")


def test_regions_of_a_dead_daemon_are_not_green(run: FakeRun, look: Look) -> None:
    run.second(ahead=0)
    view = look(run.server.url)
    view.until("document.querySelectorAll('#regions .badge[data-severity=good]').length === 4")
    run.pages.saw(status_of("grpc://a:1"))  # only one of the two daemons has answered
    view.says("warning", "A daemon does not answer")
    silent = view.page.locator("#regions tbody[data-state=silent]")
    assert silent.locator(".badge").all_inner_texts() == ["does not answer"] * 2
    assert view.text("#regions-sum").startswith("1 of 2 serving")
    run.pages.health.hold("no_daemon", "no daemon answers")
    view.says("failing", "No daemon answers")
    view.until("document.querySelectorAll('#regions .badge[data-severity=good]').length === 0")
    view.picture("no-daemon")


# ---- the query box, texts of other programs, token -----------------------------------------------------------------


def test_what_users_stored_is_shown_as_text(
    site: Callable[..., Site], open_small: OpenSmall, made: Any, look: Look
) -> None:
    table = open_small()
    table.put(made.rows(range(10)))
    table.put([made.row(50) | {"name": MARKUP, "body": f"harbor {MARKUP}"}])
    pages = site(table)
    with pages.events:
        logging.getLogger("memwal.test").warning("cannot read %s", MARKUP)
        table.regions.context.meters.commits.failed(MARKUP, 1_700_000_000.0)
        pages.pages.health.hold("draining", MARKUP)
        view = look(pages.url, expected=("400",))
        view.until("document.querySelector('#events li') !== null")
        assert MARKUP in view.text("#health-text")
        assert MARKUP in view.text("#events li")
        assert MARKUP in view.text("#commits .error")
        view.page.fill("#query-filter", "id = 50")
        view.page.press("#query-filter", "Enter")
        view.until("document.querySelectorAll('#query-rows tbody tr').length === 1")
        assert MARKUP in view.text("#query-rows")
        view.page.fill("#query-filter", f"name = '{MARKUP}' and nothing = 1")
        view.page.press("#query-filter", "Enter")
        view.until("!document.querySelector('#query-error').hidden")
        assert "nothing" in view.text("#query-error")
        assert view.page.locator("#query-rows").is_hidden()
        assert view.page.locator("img").count() == 0
        assert "broken" not in view.page.title()


def test_the_query_box_searches_by_words_and_by_a_row(
    site: Callable[..., Site], open_small: OpenSmall, made: Any, look: Look
) -> None:
    table = open_small()
    table.put(made.rows(range(40)))
    view = look(site(table).url)
    view.until("!document.querySelector('#query').hidden")
    assert "id int64" in view.text("#query-columns")
    view.page.fill("#query-near", "7")
    view.page.fill("#query-words", "harbor")
    view.page.fill("#query-limit", "5")
    view.page.click("#query button")
    view.until("document.querySelectorAll('#query-rows tbody tr').length === 5")
    assert "5 rows in " in view.text("#query-status")
    assert "by vector and words, at level latest." in view.text("#query-status")
    assert view.texts("#query-rows thead th")[-1] == "_relevance_score"
    assert "vector" not in view.texts("#query-rows thead th")
    assert "Vectors are hidden: vector." in view.text("#query-status")
    assert view.page.locator("#query-scroll").is_hidden()
    view.picture("query")
    view.page.fill("#query-near", "")
    view.page.fill("#query-words", "")
    view.page.select_option("#query-level", "committed")
    view.page.click("#query button")
    view.until("document.querySelector('#query-status').textContent.startsWith('No row passes')")
    assert view.page.locator("#query-rows").is_hidden()


def test_rows_wider_than_a_phone_say_that_they_scroll(
    site: Callable[..., Site], open_small: OpenSmall, made: Any, look: Look
) -> None:
    table = open_small()
    table.put(made.rows(range(40)))
    view = look(site(table).url, phone=True, expected=("400",))
    view.until("!document.querySelector('#query').hidden")
    assert view.page.locator("#query-scroll").is_hidden()
    view.page.fill("#query-near", "7")
    view.page.fill("#query-words", "harbor")
    view.page.fill("#query-limit", "5")
    view.page.click("#query button")
    view.until("document.querySelectorAll('#query-rows tbody tr').length === 5")
    assert view.page.locator("#query-scroll").is_visible()
    assert view.text("#query-scroll") == "Scroll sideways for more columns →"
    assert view.fits()
    view.picture("query-phone")
    view.page.set_viewport_size({"width": 1280, "height": 900})
    view.until("document.querySelector('#query-scroll').hidden")
    view.page.set_viewport_size({"width": 390, "height": 844})
    view.until("!document.querySelector('#query-scroll').hidden")
    view.page.fill("#query-filter", "nothing = 1")
    view.page.press("#query-filter", "Enter")
    view.until("!document.querySelector('#query-error').hidden")
    assert view.page.locator("#query-scroll").is_hidden()


def test_empty_tables_say_what_they_lack(site: Callable[..., Site], tmp_path: Path, look: Look) -> None:
    import pyarrow as pa

    schema = pa.schema([pa.field("what", pa.string())])
    with memwal.open(tmp_path / "plain.lance", schema=schema, key=(), settings={"commit": {"interval": "0s"}}) as table:
        view = look(site(table).url, phone=True)
        view.until("!document.querySelector('#query').hidden")
        assert view.text("#health-text") == "No rows have arrived in the last minute. All rows are committed."
        assert "no full-text index" in view.text("#query-columns")
        assert "no vector column" in view.text("#query-columns")
        assert view.page.locator("#near-field").is_hidden()
        assert view.page.locator("#words-field").is_hidden()
        assert view.text("#commits-empty") == "None since this process started."
        assert view.fits()
        view.picture("empty-phone")


def test_requests_to_storage_are_shown_where_they_are_counted(
    site: Callable[..., Site], open_small: OpenSmall, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = site(open_small())
    show = pages.source.show
    monkeypatch.setattr(
        pages.source, "show", lambda figures: {name: part for name, part in show(figures).items() if name != "requests"}
    )
    plain = look(pages.url)
    plain.until("!document.querySelector('#query').hidden")
    assert plain.page.locator("#requests-section").is_hidden()
    kinds = [{"kind": "put", "per_second": 2.5, "total": 1234, "cost_per_hour": 0.045}]
    requests = {"currency": "USD", "prices": "list prices", "cost_per_hour": 0.0456, "kinds": kinds}
    monkeypatch.setattr(pages.source, "show", lambda figures: show(figures) | {"requests": requests})
    view = look(pages.url)
    view.until("!document.querySelector('#requests-section').hidden")
    assert "0.0456 USD per hour, at list prices" in view.text("#requests-title")
    assert view.texts("#requests tbody tr > *") == ["put", "2.5", "1,234", "0.0450 USD"]


def test_a_page_too_many_asks_every_few_seconds(
    site: Callable[..., Site], open_small: OpenSmall, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memwal.ingest.service.ops.live_server.READERS", 0)
    view = look(site(open_small()).url, expected=("503",))
    view.until("document.querySelector('#connection').textContent === 'every 5 s'")
    view.says("healthy", "Healthy")


def test_the_token_is_asked_for_and_kept_for_the_tab(
    site: Callable[..., Site], open_small: OpenSmall, look: Look
) -> None:
    """The page is opened before the table, and detects the table."""
    pages = site(token="of the daemon")
    view = look(pages.url, expected=("401",))
    view.page.wait_for_selector("#token:visible")
    assert view.page.locator("#main").is_hidden()
    view.page.fill("#token", "another")
    view.page.keyboard.press("Enter")
    view.until("document.querySelector('#token-error').textContent !== ''")
    view.picture("token")
    view.page.fill("#token", "of the daemon")
    view.page.keyboard.press("Enter")
    view.says("busy", "Starting")
    view.page.reload()
    view.says("busy", "Starting")
    assert view.page.evaluate("localStorage.length + document.cookie.length") == 0
    assert view.page.locator("#query").is_hidden()
    table = open_small()
    pages.show(table)
    view.says("healthy", "Healthy")
    view.until("!document.querySelector('#query').hidden")


def test_the_page_has_names_for_screen_readers_and_works_by_keyboard(
    site: Callable[..., Site], open_small: OpenSmall, look: Look
) -> None:
    view = look(site(open_small()).url)
    view.until("!document.querySelector('#query').hidden")
    unnamed = """[...document.querySelectorAll('input, select, button, [role=img], [role=meter], section')]
        .filter((node) => node.checkVisibility() && !(node.ariaLabel || node.labels?.length || node.textContent.trim()
            || node.getAttribute('aria-labelledby'))).map((node) => node.outerHTML)"""
    assert view.page.evaluate(unnamed) == []
    assert view.page.locator("#announce").get_attribute("aria-live") == "polite"
    assert view.page.locator("h1").count() == 1
    levels = view.page.evaluate("[...document.querySelectorAll('h1, h2, h3')].map((node) => Number(node.tagName[1]))")
    assert all(after <= before + 1 for before, after in pairwise(levels))
    view.page.keyboard.press("Tab")
    assert view.page.evaluate("document.activeElement.className") == "skip"
    for _ in range(30):
        view.page.keyboard.press("Tab")
        if view.page.evaluate("document.activeElement.id") == "query-filter":
            break
    assert view.page.evaluate("document.activeElement.id") == "query-filter"


def test_without_script_the_page_says_where_the_same_is(site: Callable[..., Site], look: Look) -> None:
    view = look(site().url, script=False)
    assert "This page needs JavaScript" in view.text("noscript")
