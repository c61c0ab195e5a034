"""The tables of a daemon of a fleet: each is opened by the first call that names it, and closed again when it is idle.

1. A call names a table. The first one opens it: its schema is read, no region is claimed. Others wait for it.
   *An error is raised to the calls of this table, and opening it is tried again by the next call after `AGAIN`.*
2. A call that needs a region claims it, if the region belongs to this daemon (`RegionSet.serving`).
3. A region that no call has used for `fleet.idle_after` is released as soon as all its rows are committed.
4. A table that no call has used for this time, and that has no region here, is closed. A call that comes in between
   waits and opens it again.

Invariants. (1) At most one handle of a table is open here. (2) A handle is not closed while a call uses it, except at
the end of the daemon. (3) A table that is not open has no thread, no connection and no request to storage.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from memwal.ingest.engine.table.embedded import Table
from memwal.ingest.errors import MISFIT, NO_TABLE, Invalid, MemWalError, classify
from memwal.ingest.log_limit import LogLimit
from memwal.ingest.refusals import wrong_table
from memwal.ingest.service.daemon.balancer import Balancer
from memwal.ingest.service.daemon.tables import described
from memwal.ingest.settings.fleet import listed
from memwal.ingest.suggest import near
from memwal.wal import Clock

_LOG = logging.getLogger("memwal.fleet")
AGAIN = 1.0
"""Seconds after which opening a table is tried again. Until then its calls get the error, without a request."""


@dataclass(slots=True)
class _Entry:
    """One table. `turn` is held while it is opened or closed; the other fields change under the lock of the fleet."""

    address: str
    turn: threading.Lock = field(default_factory=threading.Lock)
    table: Table | None = None
    calls: int = 0
    """Number of calls in progress."""
    used: float = 0.0
    """Monotonic time (s) at which the last call ended."""
    error: MemWalError | None = None
    failed: float = 0.0
    """Monotonic time (s) of `error`."""


class Fleet:
    """The tables of one daemon, by name.

    Thread safety. Any thread.
    """

    def __init__(
        self,
        addresses: Callable[[], Mapping[str, str]],
        address_of: Callable[[str], str],
        open_table: Callable[[str], Table],
        share: Balancer,
        clock: Clock,
        idle_after: float,
    ) -> None:
        """Prepare; nothing is opened.

        `addresses`: returns the address of each table by name; called again for an unknown name. `address_of`: returns
        the address of a new table, or raises Invalid. `open_table`: opens or creates a table without a claim.
        `idle_after`: see `fleet.idle_after`.
        """
        self._addresses, self._address_of, self._open_table, self._share = addresses, address_of, open_table, share
        self._clock, self._idle_after = clock, idle_after
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}
        self._ended = False
        self._warnings = LogLimit(clock.monotonic)
        share.open = self.opened
        self.refresh()

    def refresh(self) -> None:
        """Read the names again. Raises: errors of listing a prefix."""
        found = self._addresses()
        with self._lock:
            kept = (
                (name, each)
                for name, each in self._entries.items()
                if name in found or each.calls or each.table is not None
            )
            known = dict(kept)
            self._entries = {name: known.get(name) or _Entry(address) for name, address in found.items()} | known

    @contextmanager
    def using(self, name: str | None, id: str | None, covers: Callable[[str], bool] = bool) -> Iterator[Table]:
        """See `Tables.using`."""
        if name is not None and name not in self._entries:
            self.refresh()
        with self._lock:
            entry = None if name is None else self._entries.get(name)
            if entry is not None:
                entry.calls += 1
        if name is None or entry is None:
            raise self._unknown(name, covers)
        with self._counted(entry):
            table = self._opened(name, entry)
            if id not in (None, table.id):
                raise wrong_table(table.base.uri)
            yield table

    @property
    def names(self) -> list[str]:
        """The names of the known tables."""
        return sorted(self._entries)

    def create(self, name: str) -> None:
        """See `Tables.create`."""
        if name not in self._entries:
            self.refresh()
        with self._lock:  # if it cannot be created, the next `refresh` removes it
            entry = self._entries.setdefault(name, _Entry(self._address_of(name)))
            entry.calls += 1
        with self._counted(entry):
            self._opened(name, entry)

    def opened(self, name: str) -> Table:
        """Open a table for the balancer, unless it is open. Raises: errors of `using`."""
        with self.using(name, None) as table:
            return table

    def open(self) -> Mapping[str, Table]:
        """See `Tables.open`."""
        return {name: each.table for name, each in list(self._entries.items()) if each.table is not None}

    def listed(self, *, fresh: bool = True) -> list[dict[str, Any]]:
        """See `Tables.listed`."""
        if fresh:
            self.refresh()
        return [_told(name, entry) for name, entry in sorted(self._entries.items())]

    def known(self, name: str) -> dict[str, Any]:
        """See `Tables.known`."""
        if (entry := self._entries.get(name)) is None:
            raise Invalid(f"this daemon knows no table {name!r:.120}")
        return _told(name, entry)

    def look(self) -> None:
        """Look after the open tables: resizes, pauses, idle regions. Call it about once a second. Never raises."""
        for name, table in self.open().items():
            try:
                self._look_at(name, table)
            except Exception as error:  # noqa: BLE001 - an error of one table must not stop the others
                text = f"{name}: cannot look after the table, will try again: {classify(error)}"
                if (line := self._warnings.text(name, text)) is not None:
                    _LOG.warning("%s", line)

    def close(self) -> None:
        """Close every table."""
        self._ended = True
        for name, entry in list(self._entries.items()):
            self._close(name, entry, "this daemon ends", used=True)

    # ---- inside --------------------------------------------------------------------------------------------------

    @contextmanager
    def _counted(self, entry: _Entry) -> Iterator[None]:
        """Return the context of a call that is counted in `entry`, which `refresh` and `_close` leave alone."""
        try:
            yield
        finally:
            with self._lock:
                entry.calls -= 1
                entry.used = self._clock.monotonic()

    def _unknown(self, name: str | None, covers: Callable[[str], bool]) -> Invalid:
        names, why = list(filter(covers, self.names)), {"reason": NO_TABLE}
        some = listed(names)
        if name is None:
            return Invalid(f"this daemon serves several tables, name one with table=: {some or 'it has none yet'}", why)
        hint = near(name, names) or f"; it has {some or 'none yet'}"
        return Invalid(f"this daemon has no table {name!r:.120}{hint}", why)

    def _opened(self, name: str, entry: _Entry) -> Table:
        if (table := entry.table) is not None and not table.closed:
            return table
        with entry.turn:
            if entry.table is not None and not entry.table.closed:
                return entry.table
            if self._ended:
                raise Invalid("this daemon is ending")
            if entry.error is not None and self._clock.monotonic() - entry.failed < AGAIN:
                raise entry.error
            try:
                table = self._open_table(name)
            except Exception as error:
                entry.error, entry.failed = classify(error), self._clock.monotonic()
                if isinstance(entry.error, Invalid):
                    entry.error.details.setdefault("reason", MISFIT)
                raise entry.error from error
            self._share.serve(table, name)
            entry.table, entry.error = table, None
            _LOG.info("%s: opened", name, extra={"event": "open", "table": name})
            return table

    def _look_at(self, name: str, table: Table) -> None:
        entry, now = self._entries[name], self._clock.monotonic()
        with suppress(Exception):  # storage does not answer, which is logged
            table.pauses.recent()
        table.adopt_routing()
        table.regions.rest_idle(self._idle_after)
        if now - entry.used >= self._idle_after and not table.regions.writers:
            self._close(name, entry, "it is idle")

    def _close(self, name: str, entry: _Entry, why: str, *, used: bool = False) -> None:
        """Close the handle. `used`: even if calls use it; their errors become a pause."""
        with entry.turn:
            with self._lock:  # a call that counts itself after this finds no table, and waits for its turn to open it
                if entry.table is None or (entry.calls and not used):
                    return
                table, entry.table = entry.table, None
            try:
                table.close()
            except MemWalError as error:
                _LOG.warning("%s: %s", name, error)
            self._share.leave(name)
            _LOG.info("%s: closed, %s", name, why, extra={"event": "close", "table": name})


def _told(name: str, entry: _Entry) -> dict[str, Any]:
    return described(name, entry.address, entry.table, None if entry.error is None else str(entry.error))
