"""`memwal serve`: a table with its regions, or a share of them, behind Arrow Flight, until told to stop.

One daemon without endpoints claims every region before it is ready. One of several (`daemon.endpoints`) answers calls
first and then claims its share (`ingest.balancer`). With `daemon.workers` the process starts so many daemons and serves
nothing itself (`ingest.workers`).

A child daemon (of `memwal run`, or a worker) lives exactly as long as its parent: its standard input is a pipe whose
other end only the parent holds, so the end of that pipe is the end of the parent, however it came about.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TextIO

import wal
from ingest import addresses
from ingest.balancer import Balancer
from ingest.errors import Invalid, Unavailable, classify
from ingest.flight_server import FlightService, Place
from ingest.logs import configure_logs
from ingest.metrics import serve_metrics
from ingest.opening import open_table
from ingest.region_context import OnReplay
from ingest.settings import Settings
from ingest.table import Table
from ingest.workers import Supervisor

LOOK_EVERY = 1.0
"""Seconds between two looks at whether a region has stopped itself."""
_LOG = logging.getLogger("memwal.daemon")


def serve(
    settings: Settings,
    environ: Mapping[str, str],
    *,
    lifeline: TextIO | None,
    ready: Callable[[str], None],
    on_replay: OnReplay | None = None,
) -> int:
    """Serve the table of `settings`; returns the exit code.

    `ready` is called with the endpoint once every region of its share is claimed and calls are answered, `on_replay` as
    in `open_table`. Ends on SIGTERM, SIGINT or the end of `lifeline`; a daemon that is alone also when storage made a
    region stop itself, which only a new claim mends. Raises: Invalid for an address that is taken, not on loopback or
    not one of the endpoints; Unavailable for such a region; what `open_table` does.
    """
    configure_logs(settings.log.level, settings.log.format)
    if settings.daemon.workers > 1:
        return _supervised(settings, lifeline, ready)
    host, port = settings.daemon.host, settings.daemon.port
    place = _place(settings)
    check_address("daemon.port", host, port)
    if settings.daemon.metrics_port > 0:
        check_address("daemon.metrics_port", "127.0.0.1", settings.daemon.metrics_port)
    stop = _stop_signals(lifeline)
    alone = len(place.endpoints) < 2
    with open_table(settings, environ, on_replay=on_replay, claim=alone) as table:
        service = _listening(table, host, port, place)
        table.announce(place.endpoint)
        serve_metrics(table, settings.daemon.metrics_port)
        with _sharing(table, place, stop) as share:
            if not stop.is_set():
                ready(place.endpoint)
                _LOG.info("serving %s at %s", settings.table.uri, place.endpoint)
            gone = None
            while not stop.wait(LOOK_EVERY) and not (alone and table.broken()) and not (gone := _resized(table)):
                pass
            if share is not None:
                share.hand_over()
            _drain(service, settings.daemon.drain_timeout)
            broken = (table.broken() if alone else None) or gone
    if broken:
        raise Unavailable(f"{broken}; this daemon ends, start it again: what was acknowledged is in the log")
    return 0


def _resized(table: Table) -> str | None:
    """See `Table.resized`; storage that does not answer says nothing."""
    try:
        return table.resized()
    except Exception as error:  # noqa: BLE001 - looked at again in a moment
        _LOG.warning("cannot look whether the table was resized: %s", classify(error))
        return None


def _supervised(settings: Settings, lifeline: TextIO | None, ready: Callable[[str], None]) -> int:
    daemon = settings.daemon
    for number in range(daemon.workers if daemon.port else 1):
        check_address("daemon.port", daemon.host, daemon.port and daemon.port + number)
    stop = _stop_signals(lifeline)
    return Supervisor(settings, wal.SystemClock()).run(stop, ready)


def _place(settings: Settings) -> Place:
    """Where this daemon is found, as far as the settings say. Raises: Invalid where it is none of the endpoints."""
    daemon = settings.daemon
    if not daemon.endpoints:
        return Place()
    mine = addresses.own(daemon.endpoints, daemon.host, daemon.port, daemon.advertise)
    if mine is None:
        raise Invalid(addresses.none_of_them(daemon.host, daemon.port))
    return Place(mine, list(daemon.endpoints))


def _listening(table: Table, host: str, port: int, place: Place) -> FlightService:
    """Answer calls from now on. Raises: Invalid where it cannot listen there."""
    try:
        service = FlightService(table, addresses.at(host, port), place)
    except OSError as error:
        raise Invalid(f"daemon.port: cannot listen on {host}:{port} ({error}); choose another port, or 0") from None
    if not place.endpoint:
        place.endpoint = addresses.at(host, service.port)
        place.endpoints = [place.endpoint]
    return service


@contextmanager
def _sharing(table: Table, place: Place, stop: threading.Event) -> Iterator[Balancer | None]:
    """Claim this daemon's share of the regions, and keep it that; None where it is alone and has them all.

    Returns once the share is here, or `stop` is set.
    """
    if len(place.endpoints) < 2:
        yield None
        return
    share = Balancer(table, place.endpoint, place.endpoints, wal.SystemClock())
    place.heard, place.look, place.gives = share.heard, share.look, share.gives
    share.start()
    try:
        while not stop.is_set() and not share.wait_settled(LOOK_EVERY):
            pass
        yield share
    finally:
        share.stop()


def check_address(setting: str, host: str, port: int) -> None:
    """Refuse an address that `serve` cannot listen on, before anything is claimed; `setting` names the port.

    Raises: Invalid when the address is not on loopback (there is no authentication yet), unknown, or taken.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise Invalid(f"daemon.host: '{host}' is no address ({error.strerror}); write 127.0.0.1") from None
    if not (str(address[0]).startswith("127.") or address[0] == "::1"):
        raise Invalid(f"daemon.host: {host} is not a loopback address; this version serves 127.0.0.1 only")
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            raise Invalid(
                f"{setting}: {port} on {host} is in use or not allowed ({error.strerror}); "
                "choose another port, or 0 for any free one"
            ) from None


def _stop_signals(lifeline: TextIO | None) -> threading.Event:
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    if lifeline is not None:
        threading.Thread(target=_watch, args=(lifeline, stop), name="lifeline", daemon=True).start()
    return stop


def _watch(lifeline: TextIO, stop: threading.Event) -> None:
    while lifeline.readline():
        pass
    stop.set()


def _drain(service: FlightService, timeout: float) -> None:
    """Let calls under way finish; a client that does not let go within `timeout` seconds is cut off.

    Acknowledged rows are in the WAL and the others were not acknowledged, so ending at once loses nothing.
    """
    ending = threading.Thread(target=service.shutdown, daemon=True)
    ending.start()
    ending.join(timeout)
    if ending.is_alive():
        _LOG.warning("calls still under way after %g s, ending", timeout)
        sys.stderr.flush()
        os._exit(0)
