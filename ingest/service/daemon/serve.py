"""`memwal serve`: serve tables with their regions, or a share of them, over Arrow Flight until a signal stops it.

A daemon of a fleet answers calls at once; it opens tables and claims regions when calls need them (`daemon.fleet`).

A single daemon claims every region before it is ready. One of several daemons (`daemon.endpoints`) first answers
calls and then claims its share (`daemon.balancer`). With `daemon.workers` the process starts that many daemons
and serves nothing itself (`daemon.workers`).

A child daemon (of `memwal run`, or a worker) ends with its parent: its standard input is a pipe, and only the parent
holds the other end, which closes when the parent ends for any reason.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from typing import Any, TextIO, TypeVar

from memwal import wal
from memwal.ingest import tracing
from memwal.ingest.engine.region.context import OnReplay
from memwal.ingest.engine.table.embedded import Table
from memwal.ingest.engine.table.live_owners import Claimant
from memwal.ingest.engine.table.open import open_table, owners_of, refuse_served
from memwal.ingest.errors import FencedError, Invalid, Unavailable, classify
from memwal.ingest.log_limit import LogLimit
from memwal.ingest.service.daemon.balancer import Balancer
from memwal.ingest.service.daemon.claim_again import ClaimsAgain
from memwal.ingest.service.daemon.fleet import Fleet
from memwal.ingest.service.daemon.limits import Limits
from memwal.ingest.service.daemon.pages import DaemonPages
from memwal.ingest.service.daemon.peers import Place, refuse_other_protocols
from memwal.ingest.service.daemon.service import FlightService
from memwal.ingest.service.daemon.tables import OneTable, Tables
from memwal.ingest.service.daemon.workers import Supervisor, ports_of, worker_settings
from memwal.ingest.service.open import asking
from memwal.ingest.service.ops.logs import configure_logs
from memwal.ingest.service.ops.metrics import RefusedCollector, Scrape
from memwal.ingest.service.rpc.credentials import Access
from memwal.ingest.service.rpc.guard import Guard, check_address
from memwal.ingest.settings import endpoints as addresses
from memwal.ingest.settings.fleet import table_names
from memwal.ingest.settings.load import Settings
from memwal.ingest.settings.sections import DaemonSettings
from memwal.ingest.threads import stop_event

T = TypeVar("T")

COMMITS_AT_ONCE = 1
"""Tables of a fleet that flush and commit at a time by their policy: puts of the others need the processors."""
LOOK_EVERY = 1.0
"""Seconds between two checks whether a region has stopped itself."""
_LOG = logging.getLogger("memwal.daemon")


def serve(
    settings: Settings,
    environ: Mapping[str, str],
    *,
    lifeline: TextIO | None,
    ready: Callable[[str], None],
    on_replay: OnReplay | None = None,
    http_ready: Callable[[str], None] = lambda _: None,
    take_over: bool = False,
) -> int:
    """Serve the table of `settings` and return the exit code.

    Another live owner of the table is fenced only with `take_over`. Daemons of the same endpoints, and an owner that
    is about to end, do not count as live owners (`table.live_owners`). `http_ready`: called with the URL of
    the HTTP pages, if they are served, before any claim. `ready`: called with the endpoint once every region of the
    share is claimed and calls are answered. `on_replay`: see `open_table`. Ends on SIGTERM, SIGINT or the end of
    `lifeline`. A single daemon also ends when a region stopped itself after a storage failure, which only a new claim
    repairs. After a resize it continues with its share of the new regions.
    Raises: Invalid for an address that is in use, that other machines can reach without token and TLS, or that is not
    one of the endpoints, for unusable credentials, and if another daemon of the table speaks an incompatible protocol
    or rejects the credentials; Unavailable for a region that stopped itself, and for a served table; errors of
    `open_table`.
    """
    configure_logs(settings.log.level, settings.log.format)
    tracing.begin("memwal-daemon", settings.tracing, environ)
    guard, access = check_addresses(settings, environ), Access.of(settings)
    # report problems with its files now; later they would look like a peer that rejects the credentials
    access.options(environ)
    if settings.daemon.workers > 1:
        return _supervised(settings, environ, lifeline, ready, http_ready, take_over=take_over)
    stop, pages = stop_event(lifeline), DaemonPages(Scrape())
    place = Place(addresses.own_endpoint(settings.daemon) or "", list(settings.daemon.endpoints), ends=stop.is_set)
    if settings.is_fleet:
        place.address = settings.fleet.prefix or "fleet"
    if others := set(place.endpoints) - {place.endpoint}:
        address = place.address or wal.open_store(settings.table.uri, settings.storage_options(environ)).url("")
        refuse_other_protocols(others, access, address)
    with ExitStack() as stack:
        stack.enter_context(pages.events)
        if settings.daemon.http_port >= 0:
            url = _listening_http(settings, pages, place, guard, stack)
            http_ready(url)
            _LOG.info("page, metrics, health and status at %s", url, extra={"event": "http", "url": url})
        if settings.is_fleet:
            _serve_fleet(settings, environ, place, guard, stop, pages, ready)
            return 0
        _Daemon(settings, environ, place, guard, stop, pages, take_over=take_over).run(on_replay, ready)
    return 0


class _Daemon:
    """One daemon, for its lifetime.

    Thread safety. One thread.
    """

    def __init__(
        self,
        settings: Settings,
        environ: Mapping[str, str],
        place: Place,
        guard: Guard,
        stop: threading.Event,
        pages: DaemonPages,
        *,
        take_over: bool,
    ) -> None:
        self._settings, self._environ = settings, environ
        self._place, self._guard, self._stop, self._pages = place, guard, stop, pages
        self._alone = len(place.endpoints) < 2
        self._ask = asking(settings, environ)
        self._claimant = Claimant(take_over, daemon=True, peers=() if self._alone else place.endpoints)
        self._warnings = LogLimit(wal.SystemClock().monotonic)

    def run(self, on_replay: OnReplay | None, ready: Callable[[str], None]) -> None:
        """Serve the table until the daemon ends. Raises: errors of `serve`."""
        settings, place, stop = self._settings, self._place, self._stop
        with ExitStack() as stack:
            table = open_table(
                settings, self._environ, ask=self._ask, on_replay=on_replay, claim=self._alone, claimant=self._claimant
            )
            stack.callback(_close, table)
            context, pause = table.regions.context, settings.daemon.claim_again
            # several daemons agree on their shares instead
            owners = lambda: owners_of(table.base, context.store, self._ask)  # noqa: E731
            again = ClaimsAgain(table, owners, context.clock, pause) if self._alone else None
            served = OneTable(table, settings.name)
            service = _listen(settings.daemon, place, served, self._guard, self._pages)
            table.announce(place.endpoint)
            self._pages.shows(served, *(() if again is None else (again.notice,)))
            share = self._share(table, stack)
            if not stop.is_set():
                self._pages.serves(share)
                ready(place.endpoint)
                fields = {"event": "serving", "table": settings.table.uri, "endpoint": place.endpoint}
                _LOG.info("serving %s at %s", settings.table.uri, place.endpoint, extra=fields)

            broken = taken = None
            while not stop.wait(LOOK_EVERY) and not (broken or taken):
                broken = self._broken(table)
                what = f"{table.base.uri}: cannot check whether the table was resized"
                resized = self._looked(what, table.adopt_routing)
                with suppress(Exception):  # storage does not answer, which is logged
                    table.pauses.recent()
                if again is not None and not resized:
                    taken = self._looked("regions that another writer took cannot be claimed again yet", again.look)
            self._end(table, share, broken, service)
            if taken is not None:
                raise taken

    def _looked(self, what: str, look: Callable[[], T]) -> T | None:
        """Return the result of `look`; None if storage does not answer. `what`: the failure, for the log."""
        try:
            return look()
        except Exception as error:  # noqa: BLE001 - checked again in a moment
            if (line := self._warnings.text(what, f"{what}: {classify(error)}")) is not None:
                _LOG.warning("%s", line)
            return None

    def _share(self, table: Table, stack: ExitStack) -> Balancer | None:
        """Claim this daemon's share of the regions, and maintain it until `stack` ends; None for a single daemon.

        Returns once the share is complete, or `stop` is set. Raises: the refusal of a peer.
        """
        if self._alone:
            return None
        place, access, read_ahead = self._place, Access.of(self._settings), self._settings.daemon.read_ahead
        share = Balancer(place.endpoint, place.endpoints, wal.SystemClock(), access, read_ahead)
        share.serve(table)
        _start(share, place, table.identity["table"], stack)
        while not self._stop.is_set() and not share.wait_settled(LOOK_EVERY):
            if share.refusal is not None:  # both have started at the same time
                raise share.refusal
        return share

    def _broken(self, table: Table) -> str | None:
        """Return why a single daemon has to end. One of several claims a stopped region again instead."""
        return table.broken() if self._alone else None

    def _end(self, table: Table, share: Balancer | None, broken: str | None, service: FlightService) -> None:
        """Hand over, drain and end. Raises: Unavailable if a region stopped itself."""
        _hand_over(self._settings.daemon, self._pages, None if broken else share, service)
        broken = self._broken(table) or broken
        if broken:
            raise Unavailable(f"{broken}; this daemon ends, start it again: acknowledged rows are in the log")


def _serve_fleet(
    settings: Settings,
    environ: Mapping[str, str],
    place: Place,
    guard: Guard,
    stop: threading.Event,
    pages: DaemonPages,
    ready: Callable[[str], None],
) -> None:
    """Serve every table that `settings` names until `stop`. Raises: errors of `serve`."""
    daemon, clock, ask = settings.daemon, wal.SystemClock(), asking(settings, environ)
    if not place.endpoint:  # peers, notes and placement need it before the daemon listens
        (port,) = ports_of(daemon.host, daemon.port, 1)
        daemon = daemon.model_copy(update={"port": port})
        place.endpoint = addresses.endpoint_of(daemon.host, port, addresses.scheme_of(daemon.tls_cert))
        place.endpoints = [place.endpoint]
    claimant = Claimant(daemon=True, peers=place.endpoints)

    def address_of(name: str) -> str:
        return settings.of_table(name).table.uri

    def known() -> dict[str, str]:
        return {name: address_of(name) for name in table_names(settings, environ)}

    turn, probed = threading.Semaphore(COMMITS_AT_ONCE), set[str]()

    def opened(name: str) -> Table:
        of_table = settings.of_table(name)
        storage = of_table.table.uri.rpartition("/")[0]  # tables in one directory are on the same storage
        how: dict[str, Any] = {"name": name, "turn": turn, "probe": storage not in probed}
        table = open_table(of_table, environ, ask=ask, claim=False, claimant=claimant, lazy=True, **how)
        probed.add(storage)
        table.announce(place.endpoint, name)
        return table

    with ExitStack() as stack:
        share = Balancer(place.endpoint, place.endpoints, clock, Access.of(settings), daemon.read_ahead)
        fleet = Fleet(known, address_of, opened, share, clock, settings.fleet.idle_after)
        stack.callback(fleet.close)
        pages.health.hold("claiming", "the other daemons are being asked for their regions")
        pages.shows(fleet)
        service = _listen(daemon, place, fleet, guard, pages)
        _start(share, place, place.address, stack)
        while not stop.is_set() and not share.wait_settled(LOOK_EVERY):
            if share.refusal is not None:
                raise share.refusal
        pages.serves(share)
        ready(place.endpoint)
        _LOG.info("serving %d tables at %s", len(fleet.names), place.endpoint, extra={"event": "serving"})
        while not stop.wait(LOOK_EVERY):
            fleet.look()
        _hand_over(daemon, pages, share, service)


def _listen(daemon: DaemonSettings, place: Place, tables: Tables, guard: Guard, pages: DaemonPages) -> FlightService:
    """Answer calls to `tables` from now on. Raises: Invalid if the port is in use."""
    host, port, scheme = daemon.host, daemon.port, addresses.scheme_of(daemon.tls_cert)
    try:
        at = addresses.endpoint_of(host, port, scheme)
        service = FlightService(tables, at, place, guard, Limits(daemon), pages.events)
    except OSError as error:
        text = f"daemon.port: cannot listen on {host}:{port} ({error}); choose another port, or 0"
        raise Invalid(text) from None
    if not place.endpoint:
        place.endpoint = addresses.endpoint_of(host, service.port, scheme)
        place.endpoints = [place.endpoint]
    return service


def _start(share: Balancer, place: Place, address: str, stack: ExitStack) -> None:
    """Start `share`, until `stack` ends."""
    place.heard, place.look, place.gives = share.heard, share.look, share.gives
    share.start(address)
    stack.callback(share.stop)


def _hand_over(daemon: DaemonSettings, pages: DaemonPages, share: Balancer | None, service: FlightService) -> None:
    """Hand the regions over, and wait for running calls."""
    pages.health.hold("draining", "this daemon is ending and takes nothing new")
    _LOG.info("draining for up to %g s", daemon.drain_timeout, extra={"event": "drain"})
    if share is not None:
        share.hand_over()
    _drain(service, daemon.drain_timeout)


def _close(table: Table) -> None:
    """Close the table. Log a fence: rows that were never durable are lost if another owner took their region."""
    try:
        table.close()
    except FencedError as error:
        _LOG.warning("%s", error)


def _supervised(
    settings: Settings,
    environ: Mapping[str, str],
    lifeline: TextIO | None,
    ready: Callable[[str], None],
    http_ready: Callable[[str], None],
    *,
    take_over: bool,
) -> int:
    section, stop, clock = settings.daemon, stop_event(lifeline), wal.SystemClock()
    for number in range(section.workers if section.http_port > 0 else 0):
        scheme = "https" if section.tls_cert else "http"
        http_ready(f"{scheme}://{addresses.url_host(section.host)}:{section.http_port + number}")
    workers = worker_settings(settings, ports_of(section.host, section.port, section.workers))
    claimant = Claimant(take_over, daemon=True, peers=workers[0].daemon.endpoints)
    if not settings.is_fleet:
        refuse_served(settings, environ, claimant, asking(settings, environ), clock)
    return Supervisor(workers, clock).run(stop, ready)


def _listening_http(settings: Settings, pages: DaemonPages, place: Place, guard: Guard, stack: ExitStack) -> str:
    """Serve the pages over HTTP until `stack` ends; return their URL. Raises: Invalid if the port is in use."""
    from memwal.ingest.service.daemon.fleet_live import FleetSource
    from memwal.ingest.service.daemon.live import DaemonSource
    from memwal.ingest.service.ops.http_server import HttpServer
    from memwal.ingest.service.ops.live import Live
    from memwal.ingest.service.ops.storage import StorageCollector, StorageRates

    host, port, clock = settings.daemon.host, settings.daemon.http_port, wal.SystemClock()
    pages.scrape.add(storage := StorageCollector(settings.cost))
    pages.scrape.add(RefusedCollector(guard.refused))
    rates = StorageRates(storage, settings.cost, clock)
    access = Access.of(settings)
    if settings.is_fleet:
        fleet = FleetSource(pages, place, access, clock, rates)
        live = Live("daemon", fleet, pages.events, clock, fleet)
    else:
        source = DaemonSource(pages, place, settings.table.uri, access, clock, rates)
        live = Live("daemon", source, pages.events, clock)
    served: dict[str, Any] = {"live": live, "acts": pages.acts(), "of_tables": pages.of_tables()}
    server = HttpServer(host, port, pages.pages(), guard, setting="daemon.http_port", **served)
    stack.callback(server.close)
    live.start()
    stack.callback(live.stop)
    return server.url


def check_addresses(settings: Settings, environ: Mapping[str, str], *, free: bool = True) -> Guard:
    """Check the addresses of a daemon of `settings` and its workers; return the guard that admits their callers.

    `free`: see `check_address`. Raises: Invalid, before any region is claimed.
    """
    daemon = settings.daemon
    guard = Guard.of(daemon, environ)
    for setting, port in (("daemon.port", daemon.port), ("daemon.http_port", max(0, daemon.http_port))):
        for worker in range(daemon.workers if port else 1):
            check_address(setting, daemon.host, port + worker, guard, free=free)
    return guard


def _drain(service: FlightService, timeout: float) -> None:
    """Wait up to `timeout` seconds for running calls, then end the process.

    Acknowledged rows are in the WAL, so an abrupt end loses nothing.
    """
    ending = threading.Thread(target=service.shutdown, daemon=True)
    ending.start()
    ending.join(timeout)
    if ending.is_alive():
        _LOG.warning("calls still under way after %g s, ending", timeout)
        sys.stderr.flush()
        os._exit(0)
