"""Daemons that share a table, as processes that can be killed, stopped, frozen and started again."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from memwal.ingest.errors import MemWalError
from memwal.ingest.service.daemon.placement import TableRegion, target
from memwal.ingest.service.rpc.connection import Connection
from memwal.wal import bucket_region

DAEMONS = 2
PATIENCE = 120.0


def until(condition: Callable[[], Any]) -> None:
    """Return when `condition` is true. Raises: TimeoutError after PATIENCE seconds."""
    deadline = time.perf_counter() + PATIENCE
    while not condition():
        if time.perf_counter() > deadline:
            raise TimeoutError("the daemons do not come to rest")
        time.sleep(0.01)


class Daemons:
    """The processes of two daemons.

    Thread safety. One thread.
    """

    def __init__(self, at: Path, table: str, regions: int, environ: Mapping[str, str] | None = None) -> None:
        """Write the configuration.

        `table`: the section [table]; each daemon has half of the regions. 0 regions: `table` has the sections of a
        fleet. Standard error of each goes to a file in `at`. `environ`: variables that the configuration refers to.
        """
        self._environ = dict(environ or {})
        self._ids = [bucket_region(bucket) for bucket in range(regions)]
        self.endpoints = self._free_endpoints()
        self._config, self._at = at / "daemons.toml", at
        listed = json.dumps(self.endpoints)
        count = f"[regions]\ncount = {regions}\n" if regions else ""
        self._config.write_text(f"{table}{count}[daemon]\nendpoints = {listed}\n")
        self._running: dict[str, subprocess.Popen[str]] = {}
        self._connections: dict[str, Connection] = {}

    def __enter__(self) -> Self:
        for endpoint in self.endpoints:
            self._connections[endpoint] = Connection(endpoint)
            self.start(endpoint)
        until(self.settled)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for process in self._running.values():
            process.kill()
            process.wait()

    def start(self, endpoint: str) -> float:
        """Start a daemon, wait until it serves, and return the duration in seconds."""
        began = time.perf_counter()
        # Modules are compiled once, as in an installed package.
        environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        environ |= self._environ | {"MEMWAL__DAEMON__PORT": endpoint.rpartition(":")[2], "MEMWAL__LOG__LEVEL": "info"}
        command = [sys.executable, "-m", "memwal.ingest.cli.app", "serve", str(self._config)]
        with (self._at / f"{endpoint.rpartition(':')[2]}.log").open("a") as log:
            process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=log, text=True)
        self._running[endpoint] = process
        assert process.stdout is not None
        if "serving" not in process.stdout.readline():
            raise RuntimeError(f"the daemon at {endpoint} ended with exit code {process.wait()}")
        return time.perf_counter() - began

    def pid(self, endpoint: str) -> int:
        """Return the process id of a daemon."""
        return self._running[endpoint].pid

    def kill(self, endpoint: str) -> None:
        """Kill a daemon with SIGKILL."""
        self._running[endpoint].kill()
        self._running[endpoint].wait(PATIENCE)

    def end(self, endpoint: str) -> None:
        """Stop a daemon with SIGTERM; returns when it has ended."""
        self._running[endpoint].terminate()
        self._running[endpoint].wait(PATIENCE)

    @contextmanager
    def frozen(self, endpoint: str) -> Iterator[None]:
        """Stop a daemon with SIGSTOP inside the context, and continue it afterwards."""
        self._running[endpoint].send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._running[endpoint].send_signal(signal.SIGCONT)

    def regions(self, endpoint: str) -> Mapping[str, int]:
        """Return the regions of the daemon at `endpoint`; empty if it does not answer."""
        try:
            found: Mapping[str, int] = self._connections[endpoint].act("regions", None, 1.0)["regions"]
        except MemWalError:
            return {}
        return found

    def settled(self) -> bool:
        """Return whether every region is served by its target daemon."""
        shares = {endpoint: self.regions(endpoint) for endpoint in self.endpoints}
        return all(str(region) in shares[str(target(TableRegion("", region), self.endpoints))] for region in self._ids)

    def _free_endpoints(self) -> list[str]:
        """Return free ports that give each daemon the same number of regions."""
        while True:
            with ExitStack() as held:
                probes = [held.enter_context(socket.socket()) for _ in range(DAEMONS)]
                for probe in probes:
                    probe.bind(("127.0.0.1", 0))
                endpoints = [f"grpc://127.0.0.1:{probe.getsockname()[1]}" for probe in probes]
            shares = [
                sum(target(TableRegion("", region), endpoints) == endpoint for region in self._ids)
                for endpoint in endpoints
            ]
            if shares == [len(self._ids) // DAEMONS] * DAEMONS:
                return endpoints
