"""A client of two daemon processes: one is killed and restarted, no call fails, and no row is lost or doubled."""

from __future__ import annotations

import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest

import memwal
from memwal.flush import BaseTable
from memwal.ingest.service.client import remote as client
from memwal.ingest.service.client import retry as attempts
from memwal.ingest.service.client.remote import RemoteTable
from tests import append_rows
from tests.cluster import spread, start_daemon
from tests.conftest import Start, WaitUntil, wait_until
from tests.messages import raises
from tests.s3_server import free_ports

REGIONS = 4


class Writers:
    """Threads that put and stream rows with tokens, each number once, until `end`."""

    def __init__(self, table: Any, uri: str) -> None:
        self.acked, self.problems, self._stop = Counter[int](), list[BaseException](), threading.Event()
        self._table, self._base, self._steps = table, BaseTable.open(uri), [0, 0]
        self._threads = [threading.Thread(target=self._run, args=each) for each in ((0, self._put), (1, self._stream))]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(120)

    def went_on(self) -> Callable[[], bool]:
        """Return a function that returns whether each thread has had several more steps acked, or one has failed."""
        before = list(self._steps)
        return lambda: bool(self.problems) or all(now > then + 3 for now, then in zip(self._steps, before, strict=True))

    def _run(self, first: int, step: Callable[[int, range], None]) -> None:
        number = 0
        try:
            while not self._stop.is_set():
                numbers = range(first * 1_000_000 + number * 10, first * 1_000_000 + number * 10 + 10)
                step(number, numbers)
                self.acked.update(numbers)
                number += 1
                self._steps[first] = number
        except BaseException as error:  # noqa: BLE001 - reported by the main thread
            self.problems.append(error)

    def _put(self, number: int, numbers: range) -> None:
        self._table.put(append_rows.rows(numbers), token=("puts", number))

    def _stream(self, number: int, numbers: range) -> None:
        rows = append_rows.rows(numbers)
        buckets = self._base.route(rows)
        for bucket, region in enumerate(self._base.regions):
            stream = self._table.open_stream(UUID(str(region)), memwal.Token("spark", number), timeout=120)
            for batch in rows.filter(pa.array(buckets == bucket)).to_batches():
                stream.write(batch)
            stream.finish()


def test_a_daemon_that_is_killed_costs_time_only(tmp_path: Path, start: Start, wait_until: WaitUntil) -> None:
    endpoints = [f"grpc://127.0.0.1:{port}" for port in free_ports(2)]
    uri = str(tmp_path / "rows.lance")
    daemon = {"endpoints": endpoints}
    config = append_rows.configured(
        tmp_path, uri, regions={"count": REGIONS}, daemon=daemon, commit={"interval": "500ms"}
    )
    running = [start_daemon(start, config, endpoint) for endpoint in endpoints]
    for each in running:
        each.line_with("serving")
    with memwal.connect(endpoints) as table:
        writers = Writers(table, uri)
        wait_until(writers.went_on())
        running[0].kill()
        wait_until(writers.went_on())
        start_daemon(start, config, endpoints[0]).line_with("serving")
        wait_until(writers.went_on())
        writers.end()
        assert writers.problems == []
        assert append_rows.counted(table) == writers.acked


def stand_still(process: subprocess.Popen[str]) -> None:
    """Stop a process, and wait until it stands still: its threads run until one of them handles the signal."""
    process.send_signal(signal.SIGSTOP)
    tasks = Path(f"/proc/{process.pid}/task")
    wait_until(lambda: all(" T " in (task / "stat").read_text() for task in tasks.iterdir()))


def two_that_are_waited_for(
    tmp_path: Path, uri: str, start: Start, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[str], list[Any]]:
    """Return the endpoints and processes of a table's two daemons. Only a claim ends the wait for a stopped daemon."""
    endpoints = spread(2, REGIONS)
    config = append_rows.configured(tmp_path, uri, regions={"count": REGIONS}, daemon={"endpoints": endpoints})
    running = [start_daemon(start, config, endpoint) for endpoint in endpoints]
    for each in running:
        each.line_with("serving")
    monkeypatch.setattr(attempts, "FIRST_PATIENCE", 3600.0)
    return endpoints, running


def test_a_stream_to_a_daemon_that_stands_still_goes_to_its_successor(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = str(tmp_path / "rows.lance")
    endpoints, running = two_that_are_waited_for(tmp_path, uri, start, monkeypatch)
    with memwal.connect(endpoints) as table:
        base = BaseTable.open(uri)
        rows = append_rows.rows(range(200))
        buckets = base.route(rows)
        streams = []
        for bucket, region in enumerate(base.regions):
            streams.append(table.open_stream(region, memwal.Token("spark", 1), timeout=3600))
            for batch in rows.filter(pa.array(buckets == bucket)).to_batches():
                streams[-1].write(batch)
        stand_still(running[0].process)
        try:
            assert all(stream.finish().applied for stream in streams)
            assert append_rows.counted(table) == Counter(range(200))
        finally:
            running[0].process.send_signal(signal.SIGCONT)
        late = table.open_stream(base.regions[0], memwal.Token("spark", 1), timeout=120)
        for batch in rows.filter(pa.array(buckets == 0)).to_batches():
            late.write(batch)
        assert not late.finish().applied, "its region knows the token, whoever has it by now"


def test_calls_by_hand_to_a_daemon_that_stands_still_go_to_its_successor(
    tmp_path: Path, start: Start, wait_until: WaitUntil, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoints, running = two_that_are_waited_for(tmp_path, str(tmp_path / "rows.lance"), start, monkeypatch)
    monkeypatch.setattr(client, "READ_TIMEOUT", 3600.0)

    def shared(table: RemoteTable) -> bool:
        table.router.asked()
        with suppress(memwal.Unavailable):  # a region that is being handed over has no owner
            return set(table.router.owners(table.router.regions)) == set(endpoints)
        return False

    def frozen(number: int, call: Callable[[], Any]) -> Any:
        wait_until(lambda: shared(table))
        stand_still(running[number].process)
        try:
            return call()
        finally:
            running[number].process.send_signal(signal.SIGCONT)

    rows, token = append_rows.rows(range(200)), ("by hand", 1)
    with memwal.connect(endpoints) as table:
        assert frozen(0, lambda: table.put(rows, token=token, timeout=3600.0)).applied
        assert frozen(1, lambda: append_rows.counted(table)) == Counter(range(200))
        wait_until(lambda: shared(table))
        assert not table.put(rows, token=token).applied, "its regions know the token, whoever has them by now"
        assert append_rows.counted(table) == Counter(range(200))


def test_a_stream_waits_for_the_only_daemon_to_come_back(tmp_path: Path, start: Start, wait_until: WaitUntil) -> None:
    uri, (port,) = str(tmp_path / "rows.lance"), free_ports(1)
    endpoint = f"grpc://127.0.0.1:{port}"
    config = append_rows.configured(tmp_path, uri, regions={"count": 1}, daemon={"port": port})
    first = start_daemon(start, config, endpoint)
    first.line_with("serving")
    with RemoteTable(endpoint, restarts=120.0) as table:
        (region,) = BaseTable.open(uri).regions

        def streamed(number: int, between: Callable[[], object]) -> bool:
            stream = table.open_stream(region, memwal.Token("spark", number), timeout=120)
            stream.write(append_rows.rows(range(number * 10, number * 10 + 10)).to_batches()[0])
            between()
            return stream.finish().applied

        second: list[Any] = []
        assert streamed(1, lambda: None)
        assert streamed(2, lambda: (first.kill(), second.append(start_daemon(start, config, endpoint))))
        assert not streamed(2, lambda: None), "it was applied, once"
        assert append_rows.counted(table) == Counter(range(10, 30))
        second[0].kill()
    with raises(memwal.Unavailable):
        memwal.connect(endpoint).put(append_rows.rows(range(3)))  # a direct call fails at once
