"""How long writes stop when a daemon dies, ends in order, or starts.

`python -m bench.take_over [--smoke | --trials N]` prints a table.

Two daemons share a table on a local disk. One client for each region puts a row, durable, as soon as the one before was
acked, and asks all endpoints who has the region when a put fails; so what is measured holds the client's part too.

* kill: from the SIGKILL of a daemon until every region that it had has acked a row that was put after it.
* hand-over: the longest time between two acks of a region that moves when a daemon gets SIGTERM.
* start: from the start of the process until it says that it serves its share, Python's start and imports included.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight

from flush import BaseTable
from ingest.client import RemoteTable
from ingest.errors import MemWalError
from ingest.flight_wire import pack
from ingest.placement import target
from wal import bucket_region

REGIONS, DAEMONS = 4, 2
SMOKE, FULL = 1, 20
PATIENCE = 120.0
ROWS = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("value", pa.string())])
_OPTIONS = [("grpc.use_local_subchannel_pool", 1)]


def asked(endpoint: str) -> dict[str, int]:
    """The regions that the daemon at `endpoint` has, none where it does not answer."""
    with (
        suppress(flight.FlightError, pa.ArrowException),
        flight.FlightClient(endpoint, generic_options=_OPTIONS) as client,
    ):
        answer = list(client.do_action(flight.Action("regions", pack({})), flight.FlightCallOptions(timeout=0.5)))
        found: dict[str, int] = json.loads(answer[0].body.to_pybytes())["regions"]
        return found
    return {}


class Writer:
    """Puts rows of one region without a pause, wherever it is; remembers when each was sent and acked."""

    def __init__(self, region: str, key: int, endpoints: Sequence[str], stop: threading.Event) -> None:
        self.region, self._endpoints, self._stop = region, endpoints, stop
        self._row = pa.table([pa.array([key]), pa.array(["value"])], schema=ROWS)
        self.acks: list[tuple[float, float]] = []
        self._client: RemoteTable | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        number = 0
        while not self._stop.is_set():
            sent = time.perf_counter()
            try:
                self._owner().put(self._row, token=f"{self.region}:{number}", timeout=2.0)
                self.acks.append((sent, time.perf_counter()))
                number += 1
            except MemWalError:
                self._client = None
                time.sleep(0.005)

    def _owner(self) -> RemoteTable:
        while self._client is None and not self._stop.is_set():
            having = [(regions[self.region], at) for at in self._endpoints if self.region in (regions := asked(at))]
            if having:
                self._client = RemoteTable(max(having)[1], patience=2.0)
            else:
                time.sleep(0.005)
        if self._client is None:
            raise MemWalError("the trial is over")
        return self._client

    def accepted_after(self, moment: float) -> float | None:
        """When the first row that was sent after `moment` was acked."""
        return next((acked for sent, acked in list(self.acks) if sent >= moment), None)

    def longest_pause(self, since: float) -> float:
        """The longest time between two acks, from the last one before `since` on."""
        times = [acked for _, acked in list(self.acks)]
        first = max((number for number, acked in enumerate(times) if acked <= since), default=0)
        return float(np.max(np.diff(times[first:]), initial=0.0))


class Daemons:
    """The processes of the two daemons."""

    def __init__(self, at: Path) -> None:
        self.endpoints = _endpoints()
        self._config = at / "take_over.toml"
        listed = json.dumps(self.endpoints)
        self._config.write_text(
            f'[table]\nuri = "{at / "table.lance"}"\nkey = ["id"]\n[table.columns]\nid = "int64"\nvalue = "string"\n'
            f"[regions]\ncount = {REGIONS}\n[daemon]\nendpoints = {listed}\n"
        )
        self._running: dict[str, subprocess.Popen[str]] = {}

    def start(self, endpoint: str) -> float:
        """Start one and wait until it serves; returns how long that took."""
        began = time.perf_counter()
        environ = {**os.environ, "MEMWAL__DAEMON__PORT": endpoint.rpartition(":")[2]}
        command = [sys.executable, "-m", "ingest.cli", "serve", str(self._config)]
        process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)
        self._running[endpoint] = process
        assert process.stdout is not None
        if "serving" not in process.stdout.readline():
            raise RuntimeError(f"the daemon at {endpoint} ended with exit code {process.wait()}")
        return time.perf_counter() - began

    def signal(self, endpoint: str, number: int) -> None:
        """Send a signal to one."""
        self._running[endpoint].send_signal(number)

    def wait(self, endpoint: str) -> None:
        """Wait until one has ended."""
        self._running[endpoint].wait(PATIENCE)

    def settled(self) -> bool:
        """Whether every region is where it belongs."""
        shares = {endpoint: set(asked(endpoint)) for endpoint in self.endpoints}
        regions = [bucket_region(bucket) for bucket in range(REGIONS)]
        return all(str(region) in shares[str(target(region, self.endpoints))] for region in regions)

    def close(self) -> None:
        """End all."""
        for process in self._running.values():
            process.kill()
            process.wait()


def _endpoints() -> list[str]:
    """Free ports by which each daemon has two regions."""
    regions = [bucket_region(bucket) for bucket in range(REGIONS)]
    while True:
        with ExitStack() as held:
            probes = [held.enter_context(socket.socket()) for _ in range(DAEMONS)]
            for probe in probes:
                probe.bind(("127.0.0.1", 0))
            endpoints = [f"grpc://127.0.0.1:{probe.getsockname()[1]}" for probe in probes]
        shares = [sum(target(region, endpoints) == endpoint for region in regions) for endpoint in endpoints]
        if shares == [REGIONS // DAEMONS] * DAEMONS:
            return endpoints


def until(condition: Callable[[], Any]) -> Any:
    """The first true answer of `condition`. Raises: TimeoutError after PATIENCE seconds."""
    deadline = time.perf_counter() + PATIENCE
    while not (answer := condition()):
        if time.perf_counter() > deadline:
            raise TimeoutError("the daemons do not come to rest")
        time.sleep(0.005)
    return answer


def all_accepted(writers: Sequence[Writer], moment: float) -> float:
    """When the last of `writers` had a row acked that was sent after `moment`; waits for it."""
    until(lambda: all(writer.accepted_after(moment) for writer in writers))
    return max(writer.accepted_after(moment) or 0.0 for writer in writers)


def keys_by_region(uri: str) -> dict[str, int]:
    """A key of each region."""
    base = BaseTable.open(uri, {})
    numbers = pa.table({"id": pa.array(range(1000))}, schema=pa.schema([ROWS.field("id")]))
    buckets = base.route(numbers).tolist()
    return {str(region): buckets.index(bucket) for bucket, region in enumerate(base.regions)}


def measure(at: Path, trials: int) -> dict[str, list[float]]:
    """Seconds of every trial, by what was measured."""
    daemons, stop = Daemons(at), threading.Event()
    found: dict[str, list[float]] = {"kill": [], "hand-over": [], "start": []}
    try:
        for endpoint in daemons.endpoints:
            daemons.start(endpoint)
        until(daemons.settled)
        keys = keys_by_region(str(at / "table.lance"))
        writers = [Writer(region, key, daemons.endpoints, stop) for region, key in keys.items()]
        for trial in range(trials):
            endpoint = daemons.endpoints[trial % DAEMONS]
            for name in ("kill", "hand-over"):
                moving = [writer for writer in writers if writer.region in asked(endpoint)]
                found[name].append(_trial(name, daemons, endpoint, moving))
                found["start"].append(daemons.start(endpoint))
                until(daemons.settled)
                all_accepted(writers, time.perf_counter())
    finally:
        stop.set()
        daemons.close()
    return found


def _trial(name: str, daemons: Daemons, endpoint: str, moving: Sequence[Writer]) -> float:
    began = time.perf_counter()
    daemons.signal(endpoint, signal.SIGKILL if name == "kill" else signal.SIGTERM)
    daemons.wait(endpoint)
    if name == "kill":
        return all_accepted(moving, began) - began
    all_accepted(moving, time.perf_counter())
    return max(each.longest_pause(began) for each in moving)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.take_over", description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="one trial of each")
    parser.add_argument("--trials", type=int, default=FULL, help="trials of each (%(default)s)")
    given = parser.parse_args()
    trials = SMOKE if given.smoke else given.trials
    with tempfile.TemporaryDirectory() as directory:
        found = measure(Path(directory), trials)
    print(f"{'':<12} {'trials':>6} {'p50':>9} {'p99':>9} {'worst':>9}")
    for name, seconds in found.items():
        p50, p99 = np.percentile(seconds, [50, 99])
        print(f"{name:<12} {len(seconds):>6} {p50:>7.3f} s {p99:>7.3f} s {max(seconds):>7.3f} s")


if __name__ == "__main__":
    main()
