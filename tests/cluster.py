"""Several `memwal serve` processes that share one table, and a client that finds the owner of each region itself.

The client is simple on purpose: it requests the regions of every endpoint, sends each region's rows to its owner with a
token, and retries if that owner rejects them. It remembers acked rows only.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight

import memwal
from memwal import wal
from memwal.flush import BaseTable
from memwal.ingest.service.daemon.placement import TableRegion, target
from tests.raw_calls import message_from, rows_from
from tests.s3_server import free_ports

_OPTIONS = [("grpc.use_local_subchannel_pool", 1)]


def spread(daemons: int, regions: int, scheme: str = "grpc") -> list[str]:
    """Return endpoints that give every daemon a region: with few regions, random ones may leave a daemon without."""
    while True:
        endpoints = [f"{scheme}://127.0.0.1:{port}" for port in free_ports(daemons)]
        of_table = [TableRegion("", wal.bucket_region(bucket)) for bucket in range(regions)]
        if {target(region, endpoints) for region in of_table} == set(endpoints):
            return endpoints


def ask(endpoint: str, action: str, timeout: float = 5.0, **request: Any) -> Any:
    """Call one operation, on a separate connection."""
    client = flight.FlightClient(endpoint, generic_options=_OPTIONS)
    try:
        options = flight.FlightCallOptions(timeout=timeout)
        return message_from(client, action, request, options)
    finally:
        client.close()


@dataclass
class Cluster:
    """Endpoints of daemons, their processes, and the acked rows."""

    uri: str
    endpoints: list[str]
    begin: Callable[[str], Any] = lambda _: None
    running: dict[str, Any] = field(default_factory=dict)
    acked: dict[int, int] = field(default_factory=dict)
    tried: dict[int, int] = field(default_factory=dict)
    _tokens: int = 0
    _at: dict[str, str] = field(default_factory=dict)
    _routing: BaseTable | None = None
    _clients: dict[str, Any] = field(default_factory=dict)

    def start(self, endpoint: str) -> Any:
        """Start the daemon of `endpoint` without waiting for it."""
        self.running[endpoint] = self.begin(endpoint)
        return self.running[endpoint]

    @property
    def base(self) -> BaseTable:
        return BaseTable.open(self.uri, {})

    def owners(self) -> dict[str, str]:
        """Return for each region id the endpoint of the daemon that has it with the highest epoch."""
        found: dict[str, tuple[int, str]] = {}
        for endpoint in self.endpoints:
            with suppress(flight.FlightError, pa.ArrowException):
                for region, epoch in ask(endpoint, "regions", 1.0)["regions"].items():
                    found[region] = max(found.get(region, (0, "")), (epoch, endpoint))
        return {region: endpoint for region, (_, endpoint) in found.items()}

    def placed(self, live: Iterable[str]) -> bool:
        """Return whether every region is exactly where the placement assigns it."""
        alive = list(live)
        try:
            shares = {endpoint: set(ask(endpoint, "regions")["regions"]) for endpoint in alive}
        except (flight.FlightError, pa.ArrowException):
            return False
        regions = self.base.regions
        return sum(map(len, shares.values())) == len(regions) and all(
            str(region) in shares[str(target(TableRegion("", region), alive))] for region in regions
        )

    def put(self, made: Any, ids: list[int], version: int, *, until: Callable[[], bool] = lambda: False) -> None:
        """Put rows until they are acked, or until `until` returns True."""
        rows = made.table(ids, version)
        self.tried.update(dict.fromkeys(ids, version))
        base = self._routing = self._routing or self.base
        buckets = base.route(rows)
        for bucket in sorted(set(buckets.tolist())):
            part = rows.filter(pa.array(buckets == bucket))
            if self._sent(str(base.regions[bucket]), part, until):
                self.acked.update(dict.fromkeys(part.column("id").to_pylist(), version))

    def _sent(self, region: str, rows: pa.Table, until: Callable[[], bool]) -> bool:
        self._tokens += 1
        token = f"client {threading.current_thread().name}:{self._tokens}"
        while not until():
            if region not in self._at:
                self._at = self.owners()
            endpoint = self._at.get(region)
            if endpoint is not None:
                with suppress(memwal.Unavailable, memwal.UnknownOutcome, memwal.FencedError):
                    self.client(endpoint).put(rows, token=token, timeout=0.5)
                    return True
                self._clients.pop(endpoint, None)
            self._at = {}
            time.sleep(0.02)
        return False

    def client(self, endpoint: str) -> Any:
        if endpoint not in self._clients:
            self._clients[endpoint] = memwal.connect(endpoint)
        return self._clients[endpoint]

    def rows(self) -> dict[int, str]:
        """Return the name of each id, from all owners; no key may occur twice."""
        found: dict[int, str] = {}
        for region, endpoint in self.owners().items():
            client = flight.FlightClient(endpoint, generic_options=_OPTIONS)
            asked = {"columns": ["id", "name"], "level": "latest", "regions": [region]}
            part = rows_from(client, "scan", asked).to_pylist()
            client.close()
            assert not {row["id"] for row in part} & set(found)
            assert len({row["id"] for row in part}) == len(part)
            found.update((row["id"], row["name"]) for row in part)
        return found

    def check(self) -> None:
        """Check that every acked row has its acked value or a later tried one, and that no other rows exist."""
        found = self.rows()
        for id, version in self.tried.items():
            allowed = {f"row {id} v{version}"} | ({f"row {id} v{self.acked[id]}"} if id in self.acked else {None})
            assert found.get(id) in allowed, (id, found.get(id), allowed)
        assert set(found) <= set(self.tried)


def start_daemon(start: Callable[..., Any], config: Path, endpoint: str) -> Any:
    """Start the daemon of `endpoint` without waiting for it."""
    env = {"MEMWAL__DAEMON__PORT": endpoint.rpartition(":")[2], "MEMWAL__LOG__LEVEL": "info"}
    return start([sys.executable, "-m", "memwal.ingest.cli.app", "serve", str(config)], env=env)
