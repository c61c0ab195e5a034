"""Several daemons share one table: they divide its regions, take over from a dead daemon, and hand regions over."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cluster import Cluster, ask, spread, start_daemon

REGIONS = 6


@pytest.fixture
def cluster(small_config: Callable[..., Path], start: Callable[..., Any], uri: str) -> Callable[..., Cluster]:
    """Start a number of daemons for one table and wait until each serves."""

    def begin(daemons: int, **sections: Any) -> Cluster:
        endpoints = spread(daemons, REGIONS)
        found = Cluster(uri, endpoints)
        daemon = {"endpoints": endpoints, **sections.pop("daemon", {})}
        config = small_config(regions={"count": REGIONS}, daemon=daemon, **sections)
        found.begin = lambda endpoint: start_daemon(start, config, endpoint)
        for endpoint in endpoints:
            found.start(endpoint)
        for running in found.running.values():
            running.line_with("serving")
        return found

    return begin


@contextmanager
def writing(found: Cluster, made: Any) -> Iterator[Callable[[], bool]]:
    """Put rows of 60 keys in all regions inside the context. Yield a function that returns whether every key was acked
    since its first call, or since it last returned True.
    """
    stop = threading.Event()
    seen: list[int] = []

    def write() -> None:
        version = max(found.tried.values(), default=0)
        while not stop.is_set():
            version += 1
            for first in range(0, 60, 10):
                found.put(made, list(range(first, first + 10)), version, until=stop.is_set)

    def all_acked() -> bool:
        acked = dict(found.acked)
        seen.append(max(acked.values(), default=0))
        if len(acked) == 60 and min(acked.values()) > seen[0]:
            seen.clear()
            return True
        return False

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    try:
        yield all_acked
    finally:
        stop.set()
        thread.join()


def test_regions_of_a_killed_daemon_are_served_again_and_it_gets_its_share_back(
    cluster: Callable[..., Cluster], made: Any, wait_until: Callable[..., Any]
) -> None:
    found = cluster(2, commit={"interval": "1s"})
    wait_until(lambda: found.placed(found.endpoints))
    dead, alive = found.endpoints
    with writing(found, made) as all_acked:
        wait_until(all_acked)
        found.running[dead].kill()
        wait_until(lambda: found.placed([alive]))
        wait_until(all_acked)
    found.check()
    with writing(found, made) as all_acked:
        found.start(dead).line_with("serving")
        wait_until(lambda: found.placed(found.endpoints))
        wait_until(all_acked)
    found.check()
    wait_until(lambda: found.base.dataset.count_rows() == 60)


def test_a_daemon_that_ends_hands_its_regions_over(
    cluster: Callable[..., Cluster], made: Any, wait_until: Callable[..., Any]
) -> None:
    found = cluster(3)
    wait_until(lambda: found.placed(found.endpoints))
    found.put(made, list(range(60)), 1)
    leaving, *left = found.endpoints
    share = len(ask(leaving, "regions")["regions"])
    found.running[leaving].process.send_signal(signal.SIGTERM)
    assert found.running[leaving].wait() == 0
    wait_until(lambda: found.placed(left))
    found.put(made, list(range(60)), 2)
    found.check()
    wait_until(lambda: len([line for line in found.running[leaving].log if "is handed over" in line]) == share)


def test_a_daemon_starts_without_what_it_does_not_need_yet(
    small_config: Callable[..., Path], start: Callable[..., Any], wait_until: Callable[..., Any]
) -> None:
    """Each of these imports takes 0.05 to 0.3 s, during which the regions have no owner."""
    running = start([sys.executable, "-X", "importtime", "-m", "memwal.ingest.cli.app", "serve", str(small_config())])
    running.line_with("serving")
    wait_until(lambda: any(line.endswith(" memwal.ingest.service.daemon.serve") for line in running.errors))
    imported = {line.rpartition("|")[2].strip() for line in running.errors if line.startswith("import time:")}
    assert not imported & {"pandas.core", "sqlglot", "datafusion", "pyspark", "fastavro", "aiobotocore", "aiohttp"}


def test_workers_of_one_daemon_share_its_regions(
    small_config: Callable[..., Path], start: Callable[..., Any], uri: str, made: Any, wait_until: Callable[..., Any]
) -> None:
    """One command starts three worker processes; a killed worker is restarted, and all end with the supervisor."""
    config = small_config(regions={"count": REGIONS}, daemon={"workers": 3})
    supervisor = start([sys.executable, "-m", "memwal.ingest.cli.app", "serve", str(config)])
    endpoint = supervisor.line_with("serving").rsplit(" ", 1)[1]
    endpoints = ask(endpoint, "regions")["endpoints"]
    found = Cluster(uri, endpoints)
    assert len(endpoints) == 3
    wait_until(lambda: found.placed(endpoints))
    found.put(made, list(range(60)), 1)
    workers = psutil.Process(supervisor.process.pid).children()
    assert len(workers) == 3
    workers[0].kill()
    wait_until(lambda: workers[0].pid not in [each.pid for each in workers_of(supervisor)])
    found.put(made, list(range(60)), 2)
    wait_until(lambda: len(workers_of(supervisor)) == 3)
    wait_until(lambda: found.placed(endpoints))
    found.check()
    workers = workers_of(supervisor)
    supervisor.process.send_signal(signal.SIGTERM)
    assert supervisor.wait() == 0
    assert not any(each.is_running() for each in workers)


def workers_of(supervisor: Any) -> list[psutil.Process]:
    """Return the processes that have not ended."""
    found = []
    for each in psutil.Process(supervisor.process.pid).children():
        with suppress(psutil.NoSuchProcess):  # it ended before its status was read
            if each.status() != psutil.STATUS_ZOMBIE:
                found.append(each)
    return found


def test_a_daemon_that_was_stopped_acks_nothing_wrongly(
    cluster: Callable[..., Cluster], made: Any, wait_until: Callable[..., Any]
) -> None:
    """SIGSTOP in the middle of writes, a take-over, SIGCONT: no acked row is lost, and the daemon
    gets its share again.
    """
    found = cluster(2)
    asleep, awake = found.endpoints
    with writing(found, made) as all_acked:
        wait_until(all_acked)
        found.running[asleep].process.send_signal(signal.SIGSTOP)
        try:
            wait_until(lambda: found.placed([awake]))
            wait_until(all_acked)
        finally:
            found.running[asleep].process.send_signal(signal.SIGCONT)
        wait_until(lambda: found.placed(found.endpoints))
        wait_until(all_acked)
    found.check()
