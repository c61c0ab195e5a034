"""`daemon.workers`: one process that starts several daemons on this host and keeps them running.

One Python process is one core. Each worker is a daemon like any other, at a port of its own, with its share of the
regions; that it has siblings on the same host means nothing to it. The supervisor serves nothing and knows no rows:

1. It starts all workers side by side, and is ready when every one of them is.
2. A worker that ends is started again at its port. Its regions are taken over meanwhile, and it asks for its share when
   it is back. One that keeps ending is started less and less often.
3. SIGTERM, or the end of the supervisor however it comes about, ends every worker in order: each one's standard input
   is a pipe that only the supervisor holds.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from memwal.ingest.daemon.child import ChildDaemon, how_it_ended, start_child
from memwal.ingest.errors import Invalid, MemWalError
from memwal.ingest.settings import endpoints as addresses
from memwal.ingest.settings.load import Settings
from memwal.wal import Clock

_LOG = logging.getLogger("memwal.workers")
LOOK_EVERY = 0.25
PAUSE_FIRST, PAUSE_MOST, STEADY = 0.5, 30.0, 60.0
"""Seconds before a worker that ended is started again: at first, at most, and how long it ran if that is the first."""


def worker_settings(settings: Settings, ports: Sequence[int]) -> list[Settings]:
    """The configuration of each worker: its port, and the endpoints of all, those on other hosts among them.

    Raises: Invalid where this daemon is none of the endpoints.
    """
    daemon = settings.daemon
    scheme = addresses.scheme_of(daemon.tls_cert)
    mine = addresses.own(daemon.endpoints, daemon.host, daemon.port, daemon.advertise, scheme)
    if daemon.endpoints and mine is None:
        raise Invalid(addresses.none_of_them(daemon.host, daemon.port, scheme))
    if mine is None:
        every = own = [addresses.at(daemon.host, port, scheme) for port in ports]
    else:
        every, own = (addresses.expanded(each, len(ports)) for each in (daemon.endpoints, [mine]))
    found = []
    for number, (port, endpoint) in enumerate(zip(ports, own, strict=True)):
        http = daemon.http_port + number if daemon.http_port > 0 else daemon.http_port
        of_worker = {"port": port, "workers": 1, "endpoints": every, "advertise": endpoint, "http_port": http}
        found.append(settings.model_copy(update={"daemon": daemon.model_copy(update=of_worker)}))
    return found


def ports_of(host: str, first: int, workers: int) -> list[int]:
    """The workers' ports: from `first` on, or any that are free where it is 0."""
    if first:
        return [first + number for number in range(workers)]
    with ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in range(workers)]
        for probe in probes:
            probe.bind((host, 0))
        return [int(probe.getsockname()[1]) for probe in probes]


class Supervisor:
    """The worker processes of this host.

    Thread safety. One thread.
    """

    def __init__(self, workers: Sequence[Settings], clock: Clock) -> None:
        """`workers`: the configuration of each, see `worker_settings`."""
        self._settings, self._clock = workers, clock
        self._timeout = workers[0].daemon.drain_timeout
        self._pool = ThreadPoolExecutor(len(workers), "worker")
        self._children: list[ChildDaemon | None] = [None] * len(workers)
        self._started = [clock.monotonic()] * len(workers)
        self._pauses = [PAUSE_FIRST] * len(workers)

    def run(self, stop: threading.Event, ready: Callable[[str], None]) -> int:
        """Start the workers and keep them running until `stop`; returns the exit code. Raises: what a worker says that
        cannot start in the first place.
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
        self._started[number] = self._clock.monotonic()
        # Whoever started the supervisor has looked who serves the table; siblings of before may still be ending.
        self._children[number] = start_child(self._settings[number], take_over=True)

    def _look(self) -> None:
        """Start again what has ended."""
        now = self._clock.monotonic()
        for number, child in enumerate(self._children):
            code = None if child is None else child.exit_code()
            if child is None or code is None or now < self._started[number] + self._pauses[number]:
                continue
            steady = now - self._started[number] >= STEADY
            self._pauses[number] = PAUSE_FIRST if steady else min(2 * self._pauses[number], PAUSE_MOST)
            _LOG.warning("worker %d ended (%s) and is started again", number, how_it_ended(code))
            self._children[number] = None
            self._pool.submit(self._start_again, number, child)

    def _start_again(self, number: int, before: ChildDaemon) -> None:
        try:
            self._start(number)
        except MemWalError as error:
            _LOG.warning("worker %d does not start, will try again: %s", number, error)
            self._children[number] = before  # it has ended: looked at again after the pause

    def _stop(self) -> list[int]:
        """End every worker, side by side; returns their exit codes."""
        self._pool.shutdown()
        running = [child for child in self._children if child is not None]
        with ThreadPoolExecutor(max(1, len(running)), "ending") as ending:
            return list(ending.map(lambda child: child.stop(self._timeout + PAUSE_MOST), running))
