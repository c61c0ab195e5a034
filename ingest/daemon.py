"""`memwal serve`: a table with all its regions claimed, behind Arrow Flight, until told to stop.

A child daemon (of `memwal run`) lives exactly as long as its parent: its standard input is a pipe whose other end only
the parent holds, so the end of that pipe is the end of the parent, however it came about.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TextIO

from ingest.addresses import check_address, url_host
from ingest.errors import Invalid, Unavailable
from ingest.flight_server import FlightService, Place
from ingest.http_pages import DaemonPages, listening
from ingest.logs import configure_logs
from ingest.metrics import Scrape
from ingest.opening import open_table
from ingest.region_context import OnReplay
from ingest.security import Guard
from ingest.settings import Settings

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
    http_ready: Callable[[str], None] = lambda _: None,
) -> int:
    """Serve the table of `settings`; returns the exit code.

    `http_ready` is called with the URL of the HTTP edge, where there is one, before anything is claimed; `ready` with
    the endpoint once every region is claimed and calls are answered, `on_replay` as in `open_table`. Ends on SIGTERM,
    SIGINT or the end of `lifeline`; also when storage made a region stop itself, which only a new claim mends.
    Raises: Invalid for an address that is taken, or that others reach without token and TLS; Unavailable for such a
    region; and what `open_table` does.
    """
    configure_logs(settings.log.level, settings.log.format)
    guard = check_addresses(settings, environ)
    host, port = url_host(settings.daemon.host), settings.daemon.port
    stop, pages = _stop_signals(lifeline), DaemonPages(Scrape())
    with ExitStack() as stack:
        http = listening(settings.daemon.host, settings.daemon.http_port, pages, guard, setting="daemon.http_port")
        if (url := stack.enter_context(http)) is not None:
            http_ready(url)
        table = stack.enter_context(open_table(settings, environ, on_replay=on_replay))
        place, scheme = Place(), guard.scheme("grpc", "grpc+tls")
        try:
            service = FlightService(table, f"{scheme}://{host}:{port}", place, guard)
        except OSError as error:
            raise Invalid(f"daemon.port: cannot listen on {host}:{port} ({error}); choose another port, or 0") from None
        endpoint = place.endpoint = f"{scheme}://{host}:{service.port}"
        place.endpoints = [endpoint]
        table.announce(endpoint)
        pages.opened(table)
        ready(endpoint)
        fields = {"event": "serving", "table": settings.table.uri, "endpoint": endpoint}
        _LOG.info("serving %s at %s", settings.table.uri, endpoint, extra=fields)
        while not stop.wait(LOOK_EVERY) and not table.broken():
            pass
        pages.health.hold("draining", "this daemon is ending and takes nothing new")
        _LOG.info("draining for up to %g s", settings.daemon.drain_timeout, extra={"event": "drain"})
        _drain(service, settings.daemon.drain_timeout)
        broken = table.broken()
    if broken:
        raise Unavailable(f"{broken}; this daemon ends, start it again: what was acknowledged is in the log")
    return 0


def check_addresses(settings: Settings, environ: Mapping[str, str]) -> Guard:
    """What a daemon of `settings` asks of its callers, once its addresses are found free and fit for that.

    Raises: Invalid, before anything is claimed.
    """
    daemon = settings.daemon
    guard = Guard.of(daemon, environ)
    check_address("daemon.port", daemon.host, daemon.port, guard)
    if daemon.http_port > 0:
        check_address("daemon.http_port", daemon.host, daemon.http_port, guard)
    return guard


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
