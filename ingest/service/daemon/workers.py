"""`daemon.workers`: one process that starts several daemons on this host and keeps them running.

One Python process uses one core. Each worker is an ordinary daemon, at its own port, with its share of the regions,
and treats workers on the same host like any peer. The supervisor serves nothing and handles no rows:

1. It starts all workers in parallel, and is ready when all of them are.
2. It restarts a worker that ends, at the same port. Other daemons take over its regions meanwhile, and the worker
   requests its share when it is back. The pauses before repeated restarts double.
3. SIGTERM, or the end of the supervisor for any reason, ends every worker in order: each worker's standard input is a
   pipe that only the supervisor holds.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from memwal.ingest.errors import MemWalError, Unavailable
from memwal.ingest.service.daemon.child import ChildDaemon, Restarts, how_it_ended, start_child
from memwal.ingest.settings import endpoints as addresses
from memwal.ingest.settings.load import Settings
from memwal.wal import Clock

_LOG = logging.getLogger("memwal.workers")
LOOK_EVERY = 0.25
PAUSE_FIRST, PAUSE_MOST = 0.5, 30.0
"""Seconds between two starts of a worker, doubling."""


def worker_settings(settings: Settings, ports: Sequence[int]) -> list[Settings]:
    """Return the configuration of each worker: its port, and the endpoints of all workers, including those on other
    hosts.

    Raises: Invalid if `daemon.endpoints` does not contain this daemon.
    """
    daemon = settings.daemon
    if (mine := addresses.own_endpoint(daemon)) is None:
        scheme = addresses.scheme_of(daemon.tls_cert)
        every = own = [addresses.endpoint_of(daemon.host, port, scheme) for port in ports]
    else:
        every, own = (addresses.expanded(each, len(ports)) for each in (daemon.endpoints, [mine]))
    configured = []
    for number, (port, endpoint) in enumerate(zip(ports, own, strict=True)):
        http = daemon.http_port + number if daemon.http_port > 0 else daemon.http_port
        of_worker = {"port": port, "workers": 1, "endpoints": every, "advertise": endpoint, "http_port": http}
        configured.append(settings.model_copy(update={"daemon": daemon.model_copy(update=of_worker)}))
    return configured


_LOWEST_PORT, _PORTS = 20_000, 12_000


def ports_of(host: str, first: int, workers: int) -> list[int]:
    """Return the workers' ports: from `first` on, or free ones if it is 0.

    Free ports are chosen below the range that the system assigns to connections, since a worker binds seconds later.
    """
    if first:
        return [first + number for number in range(workers)]
    found: list[int] = []
    with socket.socket() as probe:
        probe.bind((host, 0))  # raises for a wrong host
    for number in range(_PORTS):
        port = _LOWEST_PORT + (os.getpid() * workers + number) % _PORTS
        with socket.socket() as probe, suppress(OSError):
            probe.bind((host, port))
            found.append(port)
        if len(found) == workers:
            return found
    raise Unavailable(f"{host}: no {workers} ports from {_LOWEST_PORT} on are free; set daemon.port")


class Supervisor:
    """The worker processes of this host.

    Thread safety. One thread.
    """

    def __init__(self, workers: Sequence[Settings], clock: Clock) -> None:
        """Prepare the workers. `workers`: the configuration of each, see `worker_settings`."""
        self._settings = workers
        self._timeout = workers[0].daemon.drain_timeout
        self._pool = ThreadPoolExecutor(len(workers), "worker")
        self._children: list[ChildDaemon | None] = [None] * len(workers)
        self._restarts = [Restarts(clock, PAUSE_FIRST, PAUSE_MOST) for _ in workers]

    def run(self, stop: threading.Event, ready: Callable[[str], None]) -> int:
        """Start the workers and keep them running until `stop`; return the exit code.

        Raises: the error of a worker whose first start fails.
        """
        try:
            starting = [self._pool.submit(self._start, number) for number in range(len(self._children))]
            for each in starting:
                each.result()
            if not stop.is_set():
                ready(self._settings[0].daemon.advertise)
            while not stop.wait(LOOK_EVERY):
                self._look()
        finally:
            codes = self._stop()
        return max((abs(code) for code in codes), default=0)

    def _start(self, number: int) -> None:
        self._restarts[number].started()
        # The supervisor has checked for live owners at its start; earlier workers of this host may still be ending.
        self._children[number] = start_child(self._settings[number], take_over=True)

    def _look(self) -> None:
        """Restart workers that have ended."""
        for number, child in enumerate(self._children):
            code = None if child is None else child.exit_code()
            if child is None or code is None or self._restarts[number].left:
                continue
            _LOG.warning("worker %d ended (%s) and is started again", number, how_it_ended(code))
            self._children[number] = None
            self._pool.submit(self._start_again, number, child)

    def _start_again(self, number: int, before: ChildDaemon) -> None:
        try:
            self._start(number)
        except MemWalError as error:
            _LOG.warning("worker %d does not start, will try again: %s", number, error)
            self._children[number] = before  # `_look` tries again after the pause

    def _stop(self) -> list[int]:
        """End all workers in parallel; return their exit codes."""
        self._pool.shutdown()
        running = [child for child in self._children if child is not None]
        with ThreadPoolExecutor(max(1, len(running)), "ending") as ending:
            return list(ending.map(lambda child: child.stop(self._timeout + PAUSE_MOST), running))
