"""Looking at the other daemons of a table: one thread for each, so that one that is silent holds up no look at another.

A look is the Flight action "regions". It says what the peer has, and tells the peer that we live. A connection that is
refused means that nobody listens: the process has ended. No answer in time means stopped, busy or out of reach.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any
from uuid import UUID

import pyarrow as pa
import pyarrow.flight as flight

from memwal.ingest.daemon.placement import Answer
from memwal.ingest.region.backlog import Waiting
from memwal.ingest.rpc.credentials import Access, bearer
from memwal.ingest.rpc.wire import from_flight, pack
from memwal.ingest.threads import Worker

_LOG = logging.getLogger("memwal.peers")
LOOK_EVERY, LOOK_AGAIN, LOOK_TIMEOUT = 0.25, 0.1, 1.0
"""Seconds between two looks, before the next one where nobody listened, and until one counts as unanswered."""
ASK_TIMEOUT = 5.0
"""Seconds that a peer has to release a region; what it does after that is seen at the next look."""
_OPTIONS = [("grpc.use_local_subchannel_pool", 1), ("grpc.initial_reconnect_backoff_ms", 100)]
"""A new client connects anew; otherwise gRPC would remember for all of them that nobody listened, for seconds."""
_UNANSWERED = (flight.FlightTimedOutError, flight.FlightCancelledError)
_ERRORS = (flight.FlightError, pa.ArrowException, OSError)


class Peer:
    """One of the other daemons.

    Thread safety. Any thread.
    """

    def __init__(
        self,
        endpoint: str,
        me: str,
        table: str,
        seen: Callable[[Peer, Answer | None, bool], None],
        access: Access,
    ) -> None:
        """`me`, `table`: our own endpoint, and the address of the table that the peer must have too.
        `seen`: told of every look, by a thread of this peer: what it answered, or None and whether nobody listens.
        `access`: how to reach the peer. Raises: Invalid for a reference of it that points nowhere.
        """
        self.endpoint, self.waiting, self.version = endpoint, Waiting(0, 0, None), 0
        self._me, self._table, self._seen = me, table, seen
        shown = access.options()
        self._tls_ca, self._headers = shown["tls_ca"], bearer(endpoint, shown["token"])
        self._client: flight.FlightClient | None = None
        self._connecting = threading.Lock()
        self._stopped, self._wake = threading.Event(), threading.Event()
        self._warned = False
        self._worker = Worker(f"peer-{endpoint.rpartition('/')[2]}", self._run)

    def look(self) -> None:
        """Look now."""
        self._wake.set()

    def stop(self) -> None:
        """End the thread; a look under way is finished first."""
        self._stopped.set()
        self._wake.set()
        self._worker.wait()
        self._drop()

    def tell(self) -> None:
        """Have the peer look at us now, if it can be reached."""
        with suppress(*_ERRORS):
            self._act("look", LOOK_TIMEOUT)

    def ask(self, region: UUID) -> None:
        """Have the peer release `region`. Raises: MemWalError where it does not."""
        try:
            self._act("release", ASK_TIMEOUT, region=str(region))
        except _ERRORS as error:
            raise from_flight(error, self.endpoint) from None

    # ---- inside --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopped.is_set():
            pause = LOOK_EVERY if self._look() else LOOK_AGAIN
            self._wake.wait(pause)
            self._wake.clear()

    def _look(self) -> bool:
        """Look once; False where it is to be done again soon."""
        try:
            told = self._act("regions", LOOK_TIMEOUT)
            found = self._understood(told)
        except flight.FlightUnavailableError:
            self._drop()
            self._seen(self, None, True)
            return False
        except Exception as error:  # noqa: BLE001 - ending here would leave the peer as it was seen last, for ever
            self._drop()
            self._warn("" if isinstance(error, _UNANSWERED) else str(error).partition("\n")[0])
            self._seen(self, None, False)
            return True
        self._seen(self, found, False)
        return True

    def _understood(self, told: Mapping[str, Any]) -> Answer:
        if told["table"] != self._table:
            raise ValueError(f"it serves {told['table']}, not this table; correct daemon.endpoints")
        self.waiting, self.version = Waiting(**told["waiting"]), int(told["base_version"])
        # What it claims at this moment it has in a moment; asked for it, it answers then.
        claiming = dict.fromkeys(map(UUID, told["claiming"]), 0)
        having = {UUID(region): epoch for region, epoch in told["regions"].items()}
        return Answer(claiming | having, told["draining"])

    def _warn(self, reason: str) -> None:
        if reason and not self._warned:
            _LOG.warning("the daemon at %s cannot be looked at: %s", self.endpoint, reason)
        self._warned = self._warned or bool(reason)

    def _act(self, name: str, timeout: float, **request: Any) -> dict[str, Any]:
        with self._connecting:
            if self._client is None:
                self._client = flight.FlightClient(self.endpoint, tls_root_certs=self._tls_ca, generic_options=_OPTIONS)
            client = self._client
        action = flight.Action(name, pack({"from": self._me, **request}))
        results = list(client.do_action(action, flight.FlightCallOptions(timeout=timeout, headers=self._headers)))
        answer: dict[str, Any] = json.loads(results[0].body.to_pybytes())
        return answer

    def _drop(self) -> None:
        with self._connecting:
            client, self._client = self._client, None
        if client is not None:
            with suppress(*_ERRORS):
                client.close()
