"""Check the other daemons of a table, with one thread for each, so that a silent one delays no other check.

A check is the operation "regions". It returns the peer's regions, and shows the peer that this daemon is alive. A
refused connection means that the peer's process has ended. A timeout means that it hangs, is busy or is unreachable.
A peer that rejects the credentials counts as alive and keeps its regions.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import pyarrow as pa
import pyarrow.flight as flight

from memwal.ingest.engine.region.state import Backlog
from memwal.ingest.errors import PROTOCOL, MemWalError, denies_access
from memwal.ingest.protocol import known, refusal_of_daemon
from memwal.ingest.service.daemon.placement import Answer, TableRegion
from memwal.ingest.service.rpc.connection import Connection
from memwal.ingest.service.rpc.credentials import Access, bearer
from memwal.ingest.service.rpc.exchange import command_of, exchanged, message_of
from memwal.ingest.service.rpc.tls import ClientTls
from memwal.ingest.threads import Worker
from memwal.wal import Released, SystemIds, WalError

_LOG = logging.getLogger("memwal.peers")
LOOK_EVERY, LOOK_IDLE, LOOK_AGAIN, LOOK_TIMEOUT = 0.25, 1.0, 0.05, 1.0
"""Seconds between two checks, the same while neither daemon has a region, until the next check after the first refused
connection, and until a check times out. A peer that refuses again is down and checked at the normal interval, since
each attempt needs a new client."""
AT_ONCE = 16
"""Peers that are asked concurrently, once, when a daemon starts."""
ASK_TIMEOUT = 5.0
"""Seconds for a peer to release a region. A later release shows at the next check."""
_OPTIONS = [("grpc.use_local_subchannel_pool", 1), ("grpc.initial_reconnect_backoff_ms", 100)]
"""Give each client its own connection state. Otherwise gRPC remembers a refused connection for seconds, for all
clients."""
_ROLE = "role"
"""Reason of an error of a daemon whose tokens give this daemon's token too low a role."""
_UNANSWERED = (flight.FlightTimedOutError, flight.FlightCancelledError)
_ERRORS = (flight.FlightError, pa.ArrowException, OSError)


@dataclass
class Place:
    """A daemon's endpoint, and the endpoints of all daemons of its table, including its own.

    The callbacks handle calls of peers: `heard` for a peer that checks this daemon, `look` for one that asks to be
    checked, `gives` for one that requests a region (returns whether to release it).
    """

    endpoint: str = ""
    endpoints: Sequence[str] = ()
    address: str = ""
    """Of the fleet; "" for one table, which has its own."""
    heard: Callable[[str], object] = lambda _: None
    look: Callable[[str], object] = lambda _: None
    gives: Callable[[TableRegion, str], bool] = lambda *_: True
    ends: Callable[[], bool] = lambda: False
    """Returns whether the daemon is stopping."""
    process: str = field(default_factory=lambda: SystemIds().entry_id())
    """Identity of this process. A daemon that is restarted at the same endpoint has another identity."""


class Peer:
    """One of the other daemons.

    Thread safety. Any thread.
    """

    def __init__(
        self,
        endpoint: str,
        me: str,
        table: str,
        seen: Callable[[Peer, Answer | None, bool], float],
        access: Access,
    ) -> None:
        """Start to check the daemon at `endpoint`.

        `me`: this daemon's endpoint. `table`: the address of the table or the fleet, which the peer must serve too.
        `seen`: called after every check, by a thread of this peer, with the answer, or with None and whether the
        connection was refused; returns the seconds until the next check. `access`: credentials for the peer. Raises:
        Invalid if a reference in `access` cannot be resolved.
        """
        self.endpoint = endpoint
        self.backlogs: Mapping[str, tuple[Backlog, int]] = {}
        """By table, the backlog of the peer's regions, and the newest base version whose commits the peer knows."""
        self._me, self._table, self._seen = me, table, seen
        shown = access.options()
        self._tls: ClientTls = shown["tls"]
        self._headers = bearer(endpoint, shown["token"])
        self.refusal: MemWalError | None = None
        """Why this daemon does not call the peer; None if it does. The peer has another protocol, or rejects the
        credentials."""
        self.denies = False
        """Whether the peer rejected the credentials at the last check."""
        self._client: flight.FlightClient | None = None
        self._connecting = threading.Lock()
        self._stopped, self._wake = threading.Event(), threading.Event()
        self._warned = self._refused = False
        self._every = LOOK_EVERY
        self._worker = Worker(f"peer-{endpoint.rpartition('/')[2]}", self._run)

    def look(self) -> None:
        """Check the peer now."""
        self._wake.set()

    def stop(self) -> None:
        """End the thread after a running check."""
        self._stopped.set()
        self._wake.set()
        self._worker.wait()
        self._drop()

    def tell(self) -> None:
        """Ask the peer to check this daemon now, if it can be reached."""
        with suppress(*_ERRORS):
            self._act("look", LOOK_TIMEOUT)

    def flush(self, table: str, routing: int, make_way: bool) -> None:
        """Let the peer flush its regions of a table, if it can be reached, and make way (`table.resize`)."""
        with suppress(*_ERRORS):
            within = LOOK_TIMEOUT if make_way else ASK_TIMEOUT
            self._act("flush", within, table, routing=routing, make_way=make_way)

    def ask(self, region: TableRegion, read: int) -> Released | None:
        """Ask the peer to release `region`. Return its information for the claim, if readable.

        `read`: the newest position of the region's log that this daemon has read. Raises: MemWalError if the peer keeps
        it.
        """
        try:
            answer = self._act("release", ASK_TIMEOUT, region.table, region=str(region.id), read=read)
        except _ERRORS as error:
            raise self._tls.translated(error, self.endpoint) from None
        # Earlier versions only report whether the writer has ended; the claim then reads storage.
        with suppress(WalError, ValueError, TypeError, KeyError):
            released = Released.of_json(answer["ended"])
            return released if released.manifest.region_id == region.id else None
        return None

    # ---- inside --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopped.is_set():
            refused_before, self._refused = self._refused, not self._look()
            if self._refused and not refused_before:
                self._stopped.wait(LOOK_AGAIN)  # `look` does not shorten it
            else:
                self._wake.wait(self._every)
            self._wake.clear()

    def _look(self) -> bool:
        """Check the peer once. Return False if it refused the connection, to check again soon."""
        try:
            told = self._act("regions", LOOK_TIMEOUT)
            answer = self._understood(told)
        except Exception as error:  # noqa: BLE001 - an error here would freeze the view of the peer
            self._drop()
            return self._missed(error)
        self.denies = False
        self._every = self._seen(self, answer, False)
        return True

    def _missed(self, error: Exception) -> bool:
        """Record a failed check; return the result of `_look`."""
        denial = None
        with suppress(Exception):  # an unreadable error
            problem = self._tls.translated(error, self.endpoint)
            if denies_access(problem) or problem.details.get("reason") == _ROLE:
                denial = problem  # the peer is alive and rejects the credentials
        self.denies, self.refusal = denial is not None, denial or self.refusal
        has_ended = isinstance(error, flight.FlightUnavailableError) and denial is None
        if denial is not None:
            self._warn(f"{denial}; while it does not let us in it keeps its regions, and gets none of ours")
        elif not has_ended and not isinstance(error, _UNANSWERED):
            self._warn(str(error).partition("\n")[0])
        self._every = self._seen(self, None, has_ended)
        return not has_ended

    def _understood(self, told: Mapping[str, Any]) -> Answer:
        """Return the content of an answer. For an incompatible protocol, read only the fields that never change their
        meaning."""
        if told["table"] != self._table:
            raise ValueError(f"it serves {told['table']}, not this table; correct daemon.endpoints")
        self.refusal = refusal_of_daemon(told, self.endpoint)
        if self.refusal is not None and not self._warned:
            self._warned = True
            _LOG.warning("%s; until then it keeps its regions, and gets none of ours", self.refusal)
        # One table has no name. Its fields, and those of each table of a fleet, are the same.
        tables = told.get("tables", {"": told})
        self.backlogs = (
            {}
            if self.refusal is not None
            else {name: (known(Backlog, each["waiting"]), int(each["base_version"])) for name, each in tables.items()}
        )
        having = dict[TableRegion, int]()
        for name, each in tables.items():
            # A region that the peer is claiming counts as its own; a request to release it waits for the claim.
            claimed = dict.fromkeys(each["claiming"], 0) | each["regions"]
            having |= {TableRegion(name, UUID(region)): epoch for region, epoch in claimed.items()}
        return Answer(having, told["draining"])

    def _warn(self, reason: str) -> None:
        if not self._warned:
            _LOG.warning("cannot look at the daemon at %s: %s", self.endpoint, reason)
        self._warned = True

    def _act(self, name: str, timeout: float, table: str = "", **request: Any) -> dict[str, Any]:
        with self._connecting:
            if self._client is None:
                tls = self._tls.flight_options()
                self._client = flight.FlightClient(self.endpoint, generic_options=_OPTIONS, **tls)
            client = self._client
        options = flight.FlightCallOptions(timeout=timeout, headers=self._headers)
        command = command_of(name, {"from": self._me, **request} | ({"table_name": table} if table else {}))
        answer: dict[str, Any] = exchanged(client, command, options, lambda _, reader: message_of(reader))
        return answer

    def _drop(self) -> None:
        with self._connecting:
            client, self._client = self._client, None
        if client is not None:
            with suppress(*_ERRORS):
                client.close()


def refuse_other_protocols(endpoints: Iterable[str], access: Access, table: str) -> None:
    """Raise if a daemon at `endpoints` answers with an incompatible protocol, or rejects the credentials.

    `table`: the table's address; a daemon that serves another table is ignored, as ports are reused.
    Raises: Invalid, also for files of `access`; Unavailable.
    """
    shown = access.options()

    def ask(endpoint: str) -> None:
        with closing(Connection(endpoint, **shown)) as connection:
            connection.act("regions", None, LOOK_TIMEOUT)

    with ThreadPoolExecutor(AT_ONCE, "protocol") as asking:
        for asked in [asking.submit(ask, endpoint) for endpoint in endpoints]:
            error = asked.exception()
            if not isinstance(error, MemWalError) or error.details.get("table", table) != table:
                continue
            if error.details.get("reason") == PROTOCOL or denies_access(error):
                raise error
