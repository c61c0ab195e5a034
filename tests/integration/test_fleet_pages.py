"""The pages of a daemon of a fleet: the list of tables, the pages and actions of one, metrics, readiness, log lines."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import memwal
from memwal.ingest.service.daemon import fleet_metrics
from memwal.ingest.service.daemon.fleet_metrics import OTHER, FleetCollector
from memwal.ingest.service.ops.metrics import Scrape
from memwal.ingest.settings.load import load
from tests.conftest import Start, wait_until
from tests.fleet_daemon import FleetDaemon
from tests.opened import open_table
from tests.support.clock import FakeClock

NAMES = [f"t{number:02}" for number in range(30)]
HTTP = "[daemon]\nhttp_port = 0\nport = 0\n"


def rows(count: int) -> list[dict[str, Any]]:
    return [{"id": number, "v": 1.0} for number in range(count)]


@pytest.fixture
def fleet(tmp_path: Path, start: Start) -> Callable[..., FleetDaemon]:
    """Return a function that serves tables of these names until the end of the test."""
    return lambda names, settings=HTTP, **more: FleetDaemon(tmp_path, names, start, settings, **more)


def test_tables_are_searched_sorted_and_cut(fleet: Callable[..., FleetDaemon]) -> None:
    daemon = fleet(NAMES, broken=["broken"])
    with pytest.raises(memwal.MemWalError):
        daemon.connect("broken").count()
    quiet, busy = daemon.connect("t03"), daemon.connect("t17")

    def sorted_by_load() -> bool:
        quiet.put(rows(50))
        busy.put(rows(500))
        return daemon.names("sort=put&limit=2") == ["t17", "t03"]

    wait_until(sorted_by_load)
    shown = daemon.get("/tables?sort=put&limit=3")
    assert (shown["total"], shown["found"], shown["offset"]) == (31, 31, 0)
    first, second, _ = shown["tables"]
    assert (first["name"], second["name"]) == ("t17", "t03")
    assert first["put"] > second["put"] > 0
    assert (first["state"], first["regions"], first["elsewhere"]) == ("serving", 1, 0)
    assert first["unflushed"] > 0
    assert first["lag"] > 0
    assert daemon.names("sort=unflushed&limit=1") == ["t17"]
    assert daemon.names("sort=name&limit=2&offset=29") == ["t28", "t29"]
    assert daemon.names("sort=name&up=0&limit=2") == ["t29", "t28"]
    assert daemon.names("sort=state&limit=3") == ["broken", "t03", "t17"]
    assert daemon.names("search=T1&sort=name&limit=2") == ["t10", "t11"]
    assert daemon.get("/tables?search=T1")["found"] == 10
    assert daemon.get("/tables?search=nothing")["tables"] == []
    assert daemon.names("offset=1000") == []
    for wrong in ("sort=size", "limit=many"):
        assert daemon.ask("GET", f"/tables?{wrong}")[0] == 400
    assert daemon.ask("GET", "/tables", Sec_Fetch_Site="cross-site")[0] == 403

    wait_until(lambda: daemon.get("/tables?sort=put")["tables"][0]["put"] == 0)


def test_a_broken_table_is_reported_and_the_daemon_stays_ready(fleet: Callable[..., FleetDaemon]) -> None:
    daemon = fleet(["orders"], broken=["broken"])
    with pytest.raises(memwal.MemWalError):
        daemon.connect("broken").count()
    assert daemon.get("/health/readyz") == {"ready": True, "reasons": []}
    states = {each["name"]: (each["state"], each["error"]) for each in daemon.get("/status")["tables"]}
    assert states["orders"] == ("idle", None)
    state, error = states["broken"]
    assert state == "broken"
    assert "broken.lance" in error
    assert daemon.get("/status?table=broken")["state"] == "broken"
    wait_until(lambda: daemon.get("/live")["health"]["reason"] == "table_broken")
    assert daemon.get("/live?table=broken")["health"]["title"] == "Cannot be opened"
    assert daemon.get("/live?table=orders")["health"]["title"] == "Idle here"


def test_pages_and_actions_of_one_table(fleet: Callable[..., FleetDaemon]) -> None:
    daemon = fleet(["orders", "users"])
    with daemon.connect("orders") as table:
        table.put(rows(7))
        status = daemon.get("/status?table=orders")
        assert [region["memtable_rows"] for region in status["regions"]] == [7]
        assert daemon.get("/status?table=users")["state"] == "idle"
        live = daemon.get("/live?table=orders")
        assert (live["name"], live["whole"], len(live["regions"])) == ("orders", True, 1)
        assert daemon.ask("POST", "/query?table=orders", {"filter": "id < 3"})[1]["rows"] == [
            ["0", "1.0"],
            ["1", "1.0"],
            ["2", "1.0"],
        ]

        assert daemon.ask("POST", "/flush?table=orders") == (200, {"rows": 7, "regions": 1})
        assert daemon.ask("POST", "/commit?table=orders")[1]["rows_inserted"] == 7
        assert daemon.ask("POST", "/pause?table=orders", {"what": "commits"})[1]["paused"] is True
        assert list(daemon.get("/status?table=orders")["paused"]) == ["commits"]
        assert daemon.ask("POST", "/resume?table=orders", {"what": "commits"})[1]["paused"] is False

        events = daemon.get("/live?table=orders")["events"]
        assert {"claim", "flush", "commit", "paused"} <= {each["event"] for each in events}
        assert {each["table"] for each in events} == {"orders"}
    for path in ("/flush", "/commit", "/pause", "/query"):
        status, told = daemon.ask("POST", path, {})
        assert status == 400, path
        assert "table=" in told["error"]["message"]
    for path in ("/status?table=nothing", "/live?table=nothing", "/live/events?table=nothing"):
        status, told = daemon.ask("GET", path)
        assert (status, told["error"]["kind"]) == (400, "INVALID"), path
    assert daemon.ask("GET", "/metrics?table=orders")[0] == 400
    lines = [line for line in daemon.running.log if "memwal.region" in line or "memwal.commit" in line]
    assert lines
    assert all(": orders: " in line for line in lines), lines


def test_a_thousand_tables_are_listed_at_once(fleet: Callable[..., FleetDaemon]) -> None:
    names = [f"tenant_{number:04}" for number in range(1000)]
    daemon = fleet(names)
    took = []
    for asked in ("sort=put&limit=20", "search=_09&sort=name&limit=20", "sort=state&offset=900&limit=20"):
        began = time.monotonic()
        found = daemon.get(f"/tables?{asked}")
        took.append(time.monotonic() - began)
        assert (found["total"], len(found["tables"])) == (1000, 20)
    assert sorted(took)[1] < 0.5, "20 ms on two idle cores"
    assert len(json.dumps(daemon.get("/live"))) < 50_000
    assert "memwal_put_rows_total" in daemon.get("/metrics")


# ---- metrics -------------------------------------------------------------------------------------------------------


COLUMNS = {"id": "int64", "v": "float64"}


class Opened:
    """Open tables by name, as `daemon.tables.Tables` returns them."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._tables = folder, dict[str, Any]()

    def open(self) -> Mapping[str, Any]:
        return self._tables

    def listed(self, *, fresh: bool = True) -> list[dict[str, Any]]:
        return [{"name": name, "state": "serving"} for name in self._tables] + [{"name": "new", "state": "idle"}]

    def put(self, name: str, count: int) -> None:
        if name not in self._tables:
            table = {"uri": str(self._folder / f"{name}.lance"), "key": ["id"], "columns": COLUMNS}
            sections = {"table": table, "regions": {"count": 2}, "commit": {"interval": "0s"}}
            self._tables[name] = open_table(load(sections, os.environ), os.environ)
        self._tables[name].put(rows(count))

    def close(self, name: str) -> None:
        self._tables.pop(name).close()


@contextmanager
def collected(tables: Any, clock: FakeClock) -> Iterator[Callable[[], dict[tuple[str, str], float]]]:
    """Return a function that scrapes, and returns each number by metric and table."""
    scrape = Scrape()
    collector = FleetCollector(tables, clock)
    scrape.add(collector)

    def take() -> dict[tuple[str, str], float]:
        families = list(text_string_to_metric_families(scrape.text().decode()))
        found = [each for family in families for each in family.samples if "le" not in each.labels]
        return {(each.name, each.labels["table"]): each.value for each in found if set(each.labels) == {"table"}}

    take.look = collector.look  # type: ignore[attr-defined]
    yield take


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opened]:
    found = Opened(tmp_path)
    with ExitStack() as stack:
        stack.callback(lambda: [found.close(name) for name in list(found.open())])
        yield found


PUT = "memwal_put_rows_total"


def test_tables_beyond_the_bound_are_summed(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_metrics, "SHOWN", 2)
    clock = FakeClock()
    with collected(opened, clock) as scrape:
        for name, count in (("a", 10), ("b", 20), ("c", 30), ("d", 40)):
            opened.put(name, count)
            scrape()
        first = scrape()
        assert {table: value for (name, table), value in first.items() if name == PUT} == {"a": 10, "b": 20, OTHER: 70}
        assert first["memwal_ack_seconds_count", "a"] >= 1
        assert first["memwal_memtable_rows", OTHER] == 70
        assert len({table for _, table in first}) == 3

        # Those with the most rows since the last choice get the labels; the counters of a label begin at 0.
        opened.put("d", 5)
        clock.advance(fleet_metrics.CHOOSE_EVERY)
        scrape()
        opened.put("d", 2)
        found = scrape()
        labels = {table for name, table in found if name == PUT}
        assert labels == {"c", "d", OTHER}
        assert found[PUT, "d"] == 2
        assert found[PUT, OTHER] == 75, "what it had counted"


def test_counters_never_decrease(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are closed, with rows that no scrape has seen, and opened again."""
    monkeypatch.setattr(fleet_metrics, "SHOWN", 1)
    with collected(opened, FakeClock()) as scrape:
        total, before = 0, dict[tuple[str, str], float]()
        for turn in range(4):
            for name in ("a", "b", "c"):
                opened.put(name, 10 + turn)
                total += 10 + turn
            if turn % 2:
                opened.put("c", 3)
                opened.put("new", 1)
                total += 4
                scrape.look()  # type: ignore[attr-defined]
                for name in ("a", "c", "new"):
                    opened.close(name)
            now = scrape()
            fallen = {
                key: (before[key], now.get(key))
                for key in before
                if key[0].endswith(("_total", "_count", "_sum")) and now.get(key, 0) < before[key]
            }
            assert fallen == {}
            assert now[PUT, "a"] + now[PUT, OTHER] == total
            before = now


def test_metrics_of_a_daemon_have_a_table_and_no_region(fleet: Callable[..., FleetDaemon]) -> None:
    daemon = fleet(["orders", "users"])
    with daemon.connect("orders") as table:
        table.put(rows(7))
    families = list(text_string_to_metric_families(daemon.get("/metrics")))
    samples = [each for family in families for each in family.samples if each.name.startswith("memwal_")]
    assert {each.labels.get("table") for each in samples} == {None, "orders"}
    assert not any("region" in each.labels for each in samples)
    values = {(each.name, *sorted(each.labels.values())): each.value for each in samples}
    assert values[PUT, "orders"] == 7
    assert values["memwal_region_state", "orders", "serving"] == 1
    assert (values["memwal_tables", "serving"], values["memwal_tables", "idle"]) == (1, 1)
