"""`regions.count = "auto"`: a table splits under load, and keeps every acknowledged row once."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import memwal
from memwal import wal
from memwal.flush import BaseTable, resize
from memwal.flush.resizing.routing import routing_key
from memwal.ingest.engine.table.embedded import Table
from memwal.ingest.engine.table.growth import Growth
from memwal.ingest.engine.table.resize import PASSES
from memwal.ingest.errors import Internal, MemWalError, Unavailable
from memwal.ingest.settings.load import load
from memwal.ingest.settings.sections import RegionsSettings
from memwal.wal import bucket_region
from tests.conftest import Running, Start, serve_with, toml
from tests.integration.test_fleet import until
from tests.opened import open_table
from tests.s3_server import free_ports

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), ("v", pa.int64())])
FAST = {"count": "auto", "count_max": 4, "split_rate": 1, "split_interval": "1s"}
"""Settings under which any load splits a table twice."""
QUIET = {"commit": {"interval": "0s"}}
LONGEST = 1.5
"""Seconds. `python -m bench.fleet` measures the pause, 0.1 to 0.2 s; here other tests use the same processors."""


class Ledger:
    """Threads that put rows until the end, and the newest acknowledged version of each key.

    Each thread has its own keys, so that the order of its puts is the order of their versions.
    """

    def __init__(self, put: Callable[..., Any], threads: int = 4, tokens: bool = False) -> None:
        self._put, self._tokens = put, tokens
        self.acked: dict[int, int] = {}
        self.tried: dict[int, int] = {}
        self.longest = 0.0
        self.errors: list[BaseException] = []
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(threads)]

    @contextmanager
    def running(self) -> Iterator[None]:
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self._ended.set()
            for thread in self._threads:
                thread.join()
        assert self.errors == []

    def check(self, table: Any) -> None:
        """Every key has the newest acknowledged version, or one that was sent after it and not answered."""
        rows = table.scan().read_all().to_pylist()
        found = {row["id"]: row["v"] for row in rows}
        assert len(found) == len(rows)
        assert found.keys() == self.acked.keys() | (found.keys() & self.tried.keys())
        wrong = {key: (v, found[key]) for key, v in self.acked.items() if not v <= found[key] <= self.tried[key]}
        assert wrong == {}
        assert len(found) > 100

    def _run(self, thread: int) -> None:
        for version in range(1_000_000):
            if self._ended.is_set():
                return
            keys = [thread * 100_000 + (version * 7 + step) % 500 for step in range(10)]
            self.tried |= dict.fromkeys(keys, version)
            rows = pa.table({"id": keys, "v": [version] * len(keys)}, schema=SCHEMA)
            began = time.monotonic()
            try:
                self._put(rows, **({"token": f"thread{thread}:{version}"} if self._tokens else {}))
            except BaseException as error:  # noqa: BLE001 - reported by the test
                self.errors.append(error)
                return
            self.longest = max(self.longest, time.monotonic() - began)
            self.acked |= dict.fromkeys(keys, version)


def opened(uri: Path | str, **settings: Any) -> Table:
    return open_table(load({"table": {"uri": str(uri), "key": ["id"]}} | settings, {}), {}, SCHEMA)


def regions(table: Any) -> int:
    return len(table.status()["regions"])


def test_a_table_splits_twice_under_its_writers(tmp_path: Path) -> None:
    uri = tmp_path / "t.lance"
    with opened(uri, regions=FAST, commit={"interval": "10s"}) as table:
        assert regions(table) == 1
        ledger = Ledger(table.put)
        with ledger.running():
            until(lambda: regions(table) == 4)
            time.sleep(1.5)
        print(f"longest put beside two splits: {ledger.longest * 1000:.0f} ms")
        assert ledger.longest < LONGEST
        ledger.check(table)
        status = table.status()
        assert (status["routing"], status["regions_max"], len(status["regions"])) == (3, 4, 4)  # count_max is kept
    with memwal.open(str(uri), regions="auto") as table:
        assert regions(table) == 4
        ledger.check(table)


def test_every_call_goes_on_over_a_split(tmp_path: Path) -> None:
    """Reads of every level, deletes, tokens, the status: none fails, and no read misses an acknowledged row."""
    with opened(tmp_path / "t.lance", regions={"count": 1}, **QUIET) as table:
        table.put(pa.table({"id": list(range(1000)), "v": [0] * 1000}, schema=SCHEMA), token="a:1")
        ended, errors = threading.Event(), list[BaseException]()

        def again(call: Callable[[], Any]) -> None:
            while not ended.is_set():
                try:
                    call()
                except BaseException as error:  # noqa: BLE001 - reported below
                    errors.append(error)
                    return

        def counted(level: str, least: int) -> None:
            assert table.count("id < 500", level=level) >= least

        def halves() -> None:
            with table.gate.passing():
                shares = [table.only([region]) for region in table.base.regions]
            with suppress(Unavailable):  # resized between the two calls
                assert sum(share.count("id < 500") for share in shares) == 500

        def filtered() -> None:
            table.put([{"id": 2000, "v": 1}])
            assert table.delete(filter="id = 2000").rows == 1

        calls: list[Callable[[], Any]] = [
            *(lambda level=level: counted(level, 500) for level in ("latest", "durable")),
            *(lambda level=level: counted(level, 0) for level in ("flushed", "committed")),
            lambda: table.get(list(range(10))),
            lambda: table.put([{"id": 600, "v": 1}], durable=False),
            table.status,
            halves,
            filtered,
        ]
        threads = [threading.Thread(target=again, args=(call,)) for call in calls]
        for thread in threads:
            thread.start()
        for number in (2, 4, 3, 8):
            patiently(lambda number=number: table.resize(number))
            assert not table.put(pa.table({"id": [1], "v": [5]}, schema=SCHEMA), token="a:1").applied
        ended.set()
        for thread in threads:
            thread.join()
        assert errors == []
        assert table.count() == 1000


def patiently(call: Callable[[], Any]) -> None:
    """Resize; calls that do not end in time keep the gate open, and then nothing has changed."""
    for _ in range(20):
        with suppress(Unavailable):
            call()
            return
    raise AssertionError


def test_on_s3(s3_table: Any) -> None:
    uri, options = s3_table
    with memwal.open(uri, schema=SCHEMA, key="id", regions=1, storage_options=options) as table:
        ledger = Ledger(table.put)
        with ledger.running():
            until(lambda: len(ledger.acked) > 500)
            patiently(lambda: table.resize(2))
            patiently(lambda: table.resize(4))
        assert (regions(table), table.status()["routing"]) == (4, 3)
        ledger.check(table)


def test_a_call_that_does_not_end_keeps_the_routing(tmp_path: Path) -> None:
    with opened(tmp_path / "t.lance", regions={"count": 1}, **QUIET) as table:
        gate = table.gate
        with gate.passing(), pytest.raises(Unavailable):
            threaded(lambda: table.resize(2))
        table.put([{"id": 1, "v": 1}])
        assert table.resize(2).before == 1
        with gate.passing(2), pytest.raises(Unavailable) as refused, gate.passing(1):
            pass
        assert refused.value.details == {"reason": "resized", "routing": 2}
        assert table.count() == 1


@pytest.mark.parametrize("level", ["flushed", "committed"])
def test_an_owner_that_missed_a_resize_gives_no_half_of_the_rows(tmp_path: Path, level: str) -> None:
    """Neither level asks for a lease, so that only the routing of the base table tells."""
    uri = str(tmp_path / "t.lance")
    with opened(uri, regions={"count": 2}, **QUIET) as table:
        table.put(pa.table({"id": list(range(100)), "v": [0] * 100}, schema=SCHEMA))
        table.flush()
        table.commit()
        share = table.only([bucket_region(0)])
        assert 0 < share.count(level=level) < 100
        resize(uri, {}, wal.open_store(uri), 4, clock=wal.SystemClock(), ids=wal.SystemIds())
        reads = [share, *([table] if level == "flushed" else [])]
        for each in reads:
            with pytest.raises(Unavailable) as refused:
                each.count(level=level)
            assert refused.value.details["reason"] == "resized"
        assert table.count(level="committed") == 100
        assert table.adopt_routing() is not None
        assert (regions(table), table.count(level=level)) == (4, 100)


@pytest.mark.parametrize("decided", [True, False])
def test_a_process_that_makes_way_serves_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, decided: bool) -> None:
    """Nothing is left in its logs. Its calls wait for the decision, but not for one that never comes."""
    import memwal.ingest.engine.table.resize as resizing

    monkeypatch.setattr(resizing, "WAY_WITHIN", 60.0 if decided else 0.5)
    uri = str(tmp_path / "t.lance")
    with opened(uri, regions={"count": 2}, **QUIET) as table, ThreadPoolExecutor() as pool:
        table.put(pa.table({"id": list(range(100)), "v": [0] * 100}, schema=SCHEMA))
        table.resizing.make_way(1)
        with pytest.raises(Unavailable):
            table.resizing.make_way(1)
        call = pool.submit(table.put, [{"id": 100, "v": 0}])
        assert table.adopt_routing() is None
        assert (table.regions.writers, call.done()) == ([], False)
        if decided:
            store = wal.open_store(uri)
            assert resize(uri, {}, store, 4, clock=wal.SystemClock(), ids=wal.SystemIds()).rows_drained == 0
            table.look_at_commits()
            assert table.adopt_routing() is not None
        else:
            time.sleep(0.5)
            assert table.adopt_routing() is None
        assert call.result(5).applied
        assert (regions(table), table.count()) == (4 if decided else 2, 101)


def threaded(call: Callable[[], Any]) -> Any:
    """Return the result of a call by another thread. Raises: its error."""
    outcome = list[Any]()

    def run() -> None:
        try:
            outcome.append(call())
        except Exception as error:  # noqa: BLE001 - raised below
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return outcome[0]


@pytest.mark.parametrize("step", ["decide", "finish"])
def test_a_split_that_fails_is_ended_without_an_operator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Before the decision the regions are sealed; the table goes back by itself. After it, the split is completed."""
    import memwal.flush.resizing.steps as steps
    import memwal.ingest.engine.table.embedded as embedded

    monkeypatch.setattr(embedded, "BROKEN_OFF", 0.1)
    real, failed = getattr(steps, step), list[int]()

    def fails_once(*of: Any, **how: Any) -> Any:
        begins = step == "decide" or (of[0].routing_version == 1 and wal.open_store(uri).get(routing_key(2)))
        if begins and not failed:
            failed.append(1)
            raise wal.StoreUnavailable("planted")
        return real(*of, **how)

    uri = str(tmp_path / "t.lance")
    monkeypatch.setattr(steps, step, fails_once)
    with opened(uri, regions=FAST | {"count_max": 2}, commit={"interval": "2s"}) as table:
        ledger = Ledger(lambda rows: retried(lambda: table.put(rows)), threads=2)
        with ledger.running():
            until(lambda: failed)
            until(lambda: table.status()["regions"] and regions(table) == 2)
        ledger.check(table)


def retried(call: Callable[[], Any]) -> Any:
    """Return the result of a call, repeated as its error says: nothing was applied."""
    deadline = time.monotonic() + 30
    while True:
        try:
            return call()
        except Unavailable:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_a_table_that_was_left_sealed_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import memwal.ingest.engine.table.open as opening

    monkeypatch.setattr(opening, "BROKEN_OFF", 0.1)
    uri = str(tmp_path / "t.lance")
    with opened(uri, regions={"count": 1}) as table:
        table.put([{"id": 1, "v": 1}])
    store, base = wal.open_store(uri), BaseTable.open(uri)
    how: dict[str, Any] = {"codec": base.codec, "ids": wal.SystemIds(), "clock": wal.SystemClock()}
    wal.claim(store, bucket_region(0), spec_id=1, seal=True, **how)
    with opened(uri, regions={"count": "auto"}) as table:
        assert (regions(table), table.count()) == (1, 1)


def test_the_size_of_a_table_splits_it(tmp_path: Path) -> None:
    settings = {"count": "auto", "split_rows": 50, "split_interval": "0s"}
    with opened(tmp_path / "t.lance", regions=settings, commit={"interval": "1s"}) as table:
        table.put(pa.table({"id": list(range(150)), "v": [0] * 150}, schema=SCHEMA))
        until(lambda: regions(table) == 4)  # 150 rows in 2 regions are more than 50 in each
        time.sleep(1.5)
        assert (regions(table), table.count()) == (4, 150)


def test_a_quiet_table_a_pause_and_the_interval_keep_the_number(tmp_path: Path) -> None:
    with opened(tmp_path / "t.lance", regions={"count": 1}, commit={"interval": "0s"}) as table:
        limits = RegionsSettings.model_validate(FAST | {"split_interval": "500ms"})
        assert table.upkeep.leads()
        growth = Growth(table.regions, table.upkeep, limits)
        assert growth.due() is None
        table.put([{"id": id, "v": 1} for id in range(100)])
        assert growth.due() is None  # within the interval after the start
        time.sleep(0.5)
        assert growth.due() == 2
        assert growth.due() is None  # once


def test_bad_counts_are_one_line(tmp_path: Path) -> None:
    for count, why in (("many", 'must be a whole number, or "auto"'), (0, "must be at least 1"), (True, "must be a")):
        with pytest.raises(memwal.Invalid) as refused:
            opened(tmp_path / "t.lance", regions={"count": count})
        assert f"[regions] count = {count!r} {why}" in str(refused.value)
        assert len(str(refused.value).splitlines()) == 1


# ---- daemons ---------------------------------------------------------------------------------------------------------


def daemon(start: Start, at: Path, port: int, **sections: Any) -> Running:
    config = at / f"{port}.toml"
    table = {"uri": str(at / "t.lance"), "key": ["id"], "columns": {"id": "int64", "v": "int64"}}
    given = {"table": table, "regions": FAST, "commit": {"interval": "2s"}, **sections}
    config.write_text(toml(given | {"daemon": {"port": port, **sections.get("daemon", {})}}))
    return serve_with(start, config)[0]


def test_a_daemon_splits_its_table(start: Start, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    running = daemon(start, tmp_path, port)
    with memwal.connect(f"grpc://127.0.0.1:{port}") as table:
        ledger = Ledger(table.put, tokens=True)
        with ledger.running():
            until(lambda: regions(table) == 4)
            time.sleep(1.0)
        print(f"longest put through a daemon beside two splits: {ledger.longest * 1000:.0f} ms")
        assert ledger.longest < LONGEST
        ledger.check(table)
    running.process.terminate()
    assert running.wait() == 0
    assert not [line for line in running.errors if "failed" in line]


def test_a_daemon_that_is_killed_within_its_splits_loses_nothing(start: Start, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    sections = {"regions": FAST | {"count_max": 16}}
    running = daemon(start, tmp_path, port, **sections)
    manifests = wal.ManifestStore(wal.open_store(str(tmp_path / "t.lance")), bucket_region(0))
    with memwal.connect(f"grpc://127.0.0.1:{port}") as table:
        ledger = Ledger(lambda rows, token: again(lambda: table.put(rows, token=token)), tokens=True)
        with ledger.running():
            for _ in range(3):
                until(lambda: is_sealed(manifests))
                running.process.kill()
                running.wait()
                running = daemon(start, tmp_path, port, **sections)
            until(lambda: again(lambda: regions(table)) >= 4)
        ledger.check(table)
    running.process.terminate()
    assert running.wait() == 0


def is_sealed(manifests: wal.ManifestStore) -> bool:
    """Look for half a second whether a resize has sealed the region."""
    deadline = time.monotonic() + 0.5
    while time.monotonic() < deadline:
        newest = manifests.latest()
        if newest is not None and newest.status is wal.RegionStatus.SEALED:
            return True
        time.sleep(0.001)
    return False


def again(call: Callable[[], Any]) -> Any:
    """Return the result of a call with a token, or of a read, repeated while the daemon is away."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return call()
        except MemWalError as error:
            if isinstance(error, Internal | memwal.Invalid) or time.monotonic() > deadline:
                raise
            time.sleep(0.05)


class Daemons:
    """Two daemons of one table, or of a fleet, and a client of all."""

    def __init__(self, start: Start, at: Path, **sections: Any) -> None:
        self._start, self._at, self._sections = start, at, sections
        self.ports = free_ports(2)
        self.endpoints = [f"grpc://127.0.0.1:{port}" for port in self.ports]
        self.running = {port: self._process(port) for port in self.ports}
        for each in self.running.values():
            each.line_with("serving")

    def _process(self, port: int) -> Running:
        config = self._at / f"{port}.toml"
        config.write_text(toml(self._sections | {"daemon": {"port": port, "endpoints": self.endpoints}}))
        return self._start([sys.executable, "-m", "memwal.ingest.cli.app", "serve", str(config)])

    def replace(self, port: int) -> None:
        """Kill the daemon at `port`, and start it again."""
        self.running[port].process.kill()
        self.running[port].wait()
        self.running[port] = self._process(port)
        self.running[port].line_with("serving")


def sections(at: Path, *, fleet: bool, **limits: Any) -> dict[str, Any]:
    place: dict[str, Any] = {"fleet": {"prefix": str(at)}} if fleet else {}
    uri = {} if fleet else {"uri": str(at / "t.lance")}
    table = uri | {"key": ["id"], "columns": {"id": "int64", "v": "int64"}}
    return {"table": table, "regions": FAST | limits, "commit": {"interval": "2s"}, **place}


@pytest.mark.parametrize("fleet", [False, True])
def test_daemons_share_the_regions_of_a_split(start: Start, tmp_path: Path, fleet: bool) -> None:
    daemons = Daemons(start, tmp_path, **sections(tmp_path, fleet=fleet))
    connect = {"table": "t", "create": True} if fleet else {}
    with memwal.connect(daemons.endpoints, **connect) as table:
        ledger = Ledger(table.put, tokens=True)
        with ledger.running():
            until(lambda: again(lambda: (regions(table), table.status()["routing"]) == (4, 3)))
            time.sleep(1.0)
        print(f"longest put through two daemons beside two splits: {ledger.longest * 1000:.0f} ms")
        ledger.check(table)
    asked = [line for each in daemons.running.values() for line in each.log if "admin: flush" in line]
    assert len(asked) >= 2 * (PASSES + 1)  # the daemon that splits lets the other one flush, and make way


def test_a_daemon_of_a_fleet_that_is_killed_beside_splits_loses_nothing(start: Start, tmp_path: Path) -> None:
    daemons = Daemons(start, tmp_path, **sections(tmp_path, fleet=True, count_max=8))
    with memwal.connect(daemons.endpoints, table="t", create=True) as table:
        ledger = Ledger(lambda rows, token: again(lambda: table.put(rows, token=token)), tokens=True)
        with ledger.running():
            for kill in range(4):
                time.sleep(1.2 + 0.3 * kill)
                daemons.replace(daemons.ports[kill % 2])
            until(lambda: again(lambda: regions(table)) >= 4)
        ledger.check(table)
