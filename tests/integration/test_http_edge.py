"""/metrics, /health and /status of real daemons over real HTTP, and their answers when something is wrong."""

from __future__ import annotations

import json
import signal
import socket
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prometheus_client.parser import text_string_to_metric_families

import memwal
from memwal.ingest.service.daemon.pages import DaemonPages
from memwal.ingest.service.ops.health import Reason
from memwal.ingest.service.ops.http_server import HttpServer
from memwal.ingest.service.ops.metrics import Scrape
from memwal.ingest.service.ops.pages import Page, pages_of
from memwal.ingest.service.rpc.connection import Connection
from memwal.ingest.service.rpc.guard import Guard
from memwal.ingest.settings.sections import DaemonSettings
from tests import fault_proxy as faults
from tests.conftest import small_sections, toml

QUIET = {"commit": {"interval": "0s"}, "gc": {"interval": "0s"}}


def fetch(url: str, context: Any = None, **headers: str) -> tuple[int, str]:
    """Return status and body of a GET, whatever the status."""
    request = urllib.request.Request(url, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=60, context=context) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def scraped(url: str, context: Any = None, **headers: str) -> Callable[..., float]:
    """Scrape once; return `sum_of(name, label="value", …)`, which adds up the samples of that name and those labels."""
    status, text = fetch(f"{url}/metrics", context, **headers)
    assert status == 200
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]

    def sum_of(name: str, **labels: str) -> float:
        found = [each.value for each in samples if each.name == name and labels.items() <= each.labels.items()]
        assert found, name
        return sum(found)

    return sum_of


def reasons(url: str) -> list[str]:
    """Return readyz's reasons for not being ready; check the status too."""
    status, text = fetch(f"{url}/health/readyz")
    said = json.loads(text)
    assert status == (200 if said["ready"] else 503)
    assert all(each["text"] for each in said["reasons"])
    return [each["reason"] for each in said["reasons"]]


@pytest.fixture
def daemon(start: Callable[..., Any]) -> Callable[..., tuple[Any, str, str]]:
    """Start `memwal serve CONFIG` with `daemon.http_port` set; return the process, its endpoint and the URL."""

    def serve(config: Path, env: Mapping[str, str | None] | None = None) -> tuple[Any, str, str]:
        running = start([sys.executable, "-m", "memwal.ingest.cli.app", "serve", str(config)], env=env)
        url = running.line_with("metrics, health and status at").rsplit(" ", 1)[1]
        return running, running.line_with("serving").rsplit(" ", 1)[1], url

    return serve


def test_metrics_move_with_puts_flushes_and_commits(
    small_config: Callable[..., Path],
    daemon: Callable[..., Any],
    made: Any,
    cli: Callable[..., Any],
    wait_until: Callable[..., Any],
) -> None:
    """Counters change right after the caller gets the answer."""
    config = small_config(daemon={"http_port": 0}, **QUIET)
    _, endpoint, url = daemon(config)
    assert fetch(f"{url}/health/livez") == (200, '{"alive": true}\n')
    assert reasons(url) == []
    table = memwal.connect(endpoint)
    for _ in range(2):
        table.put(made.rows(range(12)), token="loader:1")
    table.delete([3, 4])
    for counted, rows in (("put", 12), ("repeated", 12), ("deleted", 2)):
        wait_until(lambda name=f"memwal_{counted}_rows_total", rows=rows: scraped(url)(name) == rows)
    told = scraped(url)
    assert told("memwal_writes_total") == told("memwal_ack_seconds_count") == told("memwal_group_writes_sum")
    assert told("memwal_append_entries_total") == told("memwal_wal_position") == told("memwal_append_seconds_count")
    assert told("memwal_append_seconds_sum") <= told("memwal_ack_seconds_sum")
    assert told("memwal_append_bytes_total") > 12 * 32
    assert told("memwal_memtable_rows") == 14
    assert told("memwal_behind_seconds", level="flushed") > 0 == told("memwal_behind_seconds", level="latest")
    assert told("memwal_region_state", state="serving") == told("memwal_claims_total") == 2
    assert told("memwal_region_last_error_timestamp_seconds") == told("memwal_commit_interval_seconds") == 0
    assert told("memwal_store_requests_total", kind="log", operation="put") == told("memwal_append_entries_total")
    assert told("memwal_store_cost_dollars_total") == 0 < told("memwal_store_cost_budget_dollars")
    assert (told("memwal_pending_ssts"), told("memwal_flush_rows_total")) == (0, 0)

    table.flush()
    wait_until(lambda: scraped(url)("memwal_flush_rows_total") == 14)
    told = scraped(url)
    assert (told("memwal_memtable_rows"), told("memwal_flush_rows_total")) == (0, 14)
    assert told("memwal_pending_ssts") == told("memwal_flush_seconds_count") == 2
    assert told("memwal_pending_sst_rows") > 0
    assert told("memwal_behind_seconds", level="flushed") == 0 < told("memwal_behind_seconds", level="committed")
    assert told("memwal_commit_seconds_count") == 0

    version = table.commit().version
    wait_until(lambda: scraped(url)("memwal_commit_seconds_count") == 1)
    told = scraped(url)
    assert told("memwal_pending_ssts") == told("memwal_behind_seconds") == 0
    assert (told("memwal_commit_inserted_rows_total"), told("memwal_commit_ssts_total")) == (10, 2)
    assert told("memwal_commit_seconds_count") == 1
    assert told("memwal_base_version") == version
    assert told("process_resident_memory_bytes") > 0
    status, text = fetch(f"{url}/status")
    printed = json.loads(cli("status", config, "--json").out)
    assert printed.pop("events")
    assert (status, json.loads(text)) == (200, printed)
    assert [fetch(f"{url}{path}")[0] for path in ("/", "/nothing")] == [200, 404]


def test_a_daemon_that_was_fenced_is_alive_and_not_ready(
    small_config: Callable[..., Path], daemon: Callable[..., Any], made: Any, open_small: Callable[..., Any]
) -> None:
    _, endpoint, url = daemon(small_config(daemon={"http_port": 0, "claim_again": "1h"}, **QUIET))
    table = memwal.connect(endpoint)
    table.put(made.rows(range(8)))
    open_small(take_over=True)
    assert set(reasons(url)) == {"region_fenced"}, "at once, and not at the next write"
    with pytest.raises(memwal.FencedError):
        table.put(made.rows(range(8)))
    assert set(reasons(url)) == {"region_fenced"}
    said = json.loads(fetch(f"{url}/health/readyz")[1])["reasons"][0]
    assert "was fenced by epoch 2" in said["text"]
    assert UUID(said["region"])
    assert scraped(url)("memwal_fences_total") == scraped(url)("memwal_region_state", state="fenced") > 0
    assert fetch(f"{url}/health/livez")[0] == 200


def test_a_daemon_that_drains_says_so(
    small_config: Callable[..., Path], daemon: Callable[..., Any], made: Any, wait_until: Callable[..., Any]
) -> None:
    running, endpoint, url = daemon(small_config(daemon={"http_port": 0, "drain_timeout": "5min"}, **QUIET))
    connection, rows = Connection(endpoint), made.table([0])
    region = connection.act("status")["regions"][0]["id"]
    stream = connection.open_put(region, memwal.Token("query", 0), rows.schema)
    stream.write(rows)
    running.process.send_signal(signal.SIGTERM)
    wait_until(lambda: reasons(url) == ["draining"])
    stream.abort()
    assert running.wait() == 0
    assert running.errors == []


@pytest.fixture
def s3_daemon(s3_table_through_proxy: Any, tmp_path: Path, daemon: Callable[..., Any]) -> tuple[Any, str]:
    """Yield a client and the URL of a daemon whose storage a test can make fail."""
    sections = small_sections(s3_table_through_proxy.uri)
    options = s3_table_through_proxy.storage_options
    secrets = {"access_key_id": "env:S3_KEY", "secret_access_key": "env:S3_SECRET"}
    sections["table"]["storage_options"] = {**options, **secrets}
    sections |= QUIET | {"daemon": {"http_port": 0}, "wal": {"put_timeout": "1s"}, "flush": {"retry_delay": "100ms"}}
    config = tmp_path / "s3.toml"
    config.write_text(toml(sections))
    env = {"S3_KEY": options["access_key_id"], "S3_SECRET": options["secret_access_key"]}
    _, endpoint, url = daemon(config, env)
    return memwal.connect(endpoint), url


def test_readiness_follows_storage(
    s3_daemon: tuple[Any, str], fault_proxy: Any, made: Any, wait_until: Callable[..., Any]
) -> None:
    table, url = s3_daemon
    table.put(made.rows(range(20)))
    assert reasons(url) == []
    fault_proxy.inject(faults.answers(403, "AccessDenied"), method="PUT", key="_gen_", times=None)
    flushing = threading.Thread(target=table.flush)
    flushing.start()
    wait_until(lambda: set(reasons(url)) == {"flush_failing"})
    assert scraped(url)("memwal_flush_failures_total") > 0
    table.put(made.rows([99]))
    fault_proxy.heal()
    flushing.join(90)
    assert reasons(url) == []

    fault_proxy.inject(faults.hangs(), method="LIST", times=None)
    assert reasons(url) == ["storage"]
    assert fetch(f"{url}/health/livez")[0] == 200
    assert scraped(url)("memwal_region_state", state="serving") == 2
    fault_proxy.heal()
    wait_until(lambda: reasons(url) == [])


# ---- the edge itself -----------------------------------------------------------------------------------------------


@pytest.fixture
def edge() -> Iterator[Callable[..., str]]:
    """Start an edge with pages; return its URL."""
    edges: list[HttpServer] = []

    def started(pages: Mapping[str, Callable[[], Page]]) -> str:
        edges.append(HttpServer("127.0.0.1", 0, pages, Guard(), setting="daemon.http_port"))
        return edges[-1].url

    yield started
    for each in edges:
        each.close()


def test_a_daemon_is_not_ready_before_it_has_its_regions(edge: Callable[..., str]) -> None:
    url = edge(DaemonPages(Scrape()).pages())
    assert reasons(url) == ["claiming"]
    assert fetch(f"{url}/health/livez")[0] == 200
    assert json.loads(fetch(f"{url}/status")[1])["regions"] == []
    assert scraped(url)("process_start_time_seconds") > 0


def test_a_page_that_hangs_is_given_up_and_keeps_no_other_waiting(
    edge: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memwal.ingest.service.ops.answers.PATIENCE", 0.2)
    going, begun = threading.Event(), []

    def hanging() -> Page:
        begun.append(1)
        going.wait()
        return Page.of("done")

    url = edge({"/hangs": hanging, "/fine": lambda: Page.of("fine"), "/broken": lambda: Page.of(1 / 0)})
    for _ in range(3):
        status, text = fetch(f"{url}/hangs")
        assert (status, json.loads(text)["reasons"][0]["reason"]) == (503, "no_answer")
    assert len(begun) == 1, "one at a time, whoever asks"
    assert fetch(f"{url}/fine") == (200, '"fine"\n')
    status, text = fetch(f"{url}/broken")
    assert (status, json.loads(text)["error"]["kind"]) == (500, "INTERNAL")
    going.set()


def test_who_has_no_token_is_told_only_whether_it_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers without the token get a recent state, so that they cannot cause a storage request each; a caller with the
    token gets the current state.
    """
    monkeypatch.setattr("memwal.ingest.service.ops.answers.BRIEF_AGE", 3600.0)
    asked: list[int] = []

    def found() -> list[Reason]:
        asked.append(1)
        return [{"reason": "storage", "text": "bucket-of-ours is away"}] if len(asked) < 3 else []

    pages = pages_of(Scrape(), found, dict)
    guard = Guard.of(DaemonSettings(token="env:TOKEN"), {"TOKEN": "secret"})
    with closing(HttpServer("127.0.0.1", 0, pages, guard, setting="daemon.http_port")) as server:
        page = f"{server.url}/health/readyz"
        for _ in range(3):
            assert fetch(page) == (503, '{"ready": false}\n')
        assert len(asked) == 1
        assert "bucket-of-ours" in fetch(page, Authorization="Bearer secret")[1]
        assert fetch(page, Authorization="Bearer secret") == (200, '{"ready": true, "reasons": []}\n')
        assert fetch(page) == (200, '{"ready": true}\n')
        assert len(asked) == 3
        assert [fetch(page, Authorization="Bearer other")[0], fetch(f"{server.url}/status")[0]] == [401, 401]


def test_slow_readers_harm_nobody(edge: Callable[..., str]) -> None:
    """Some clients open a connection and send nothing, or do not read a large page."""
    url = edge({"/large": lambda: Page(b"x" * (64 << 20)), "/fine": lambda: Page.of("fine")})
    host, port = url.removeprefix("http://").split(":")
    idle = [socket.create_connection((host, int(port))) for _ in range(20)]
    for each in idle[:5]:
        each.sendall(b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert fetch(f"{url}/fine") == (200, '"fine"\n')
    for each in idle:
        each.close()
