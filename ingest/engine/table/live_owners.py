"""Detect another process that serves a table before its regions are claimed, so that no owner is fenced by accident.

Invariant: a claim without `take_over` never fences an owner that is known to live. The knowledge comes from the owners'
notes (`table.owner_notes`) and costs one read of a note per region and one request per daemon; nothing is written,
and an idle owner writes nothing either. The notes decide nothing else: if a claim meets a live owner nevertheless (two
processes open the table at the same moment), the epoch decides, as always.

    ==============================================  ==============================================================
    the note                                        means
    ==============================================  ==============================================================
    none, or of this very process                   free: as after a crash; a program may open its table again
    its process has ended                           free: it crashed
    its daemon answers and has the region           it lives
    its daemon answers, but does not have it        free
    its daemon answers, and drains                  it ends: wait; after `ENDS_WITHIN` it lives
    its daemon rejects access, or is not trusted    it lives: it does answer
    its daemon does not answer, its process runs    it starts or ends: wait; after `ENDS_WITHIN` it lives
    its daemon does not answer, on another machine  free: it most likely crashed
    no endpoint, its process runs here              it lives: a table that is open in a program
    no endpoint to ask, on another machine          unknown
    only the epoch: its process is not known        unknown
    ==============================================  ==============================================================

An unknown owner is rejected like a live one, with one exception: a daemon may replace a daemon of unknown state, so
that a supervisor that restarts a daemon elsewhere needs no operator. This is logged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from uuid import UUID

from memwal import wal
from memwal.ingest.engine.table import owner_notes as owners
from memwal.ingest.engine.table.owner_notes import Note, Process
from memwal.ingest.errors import PROTOCOL, MemWalError, Unavailable, denies_access
from memwal.ingest.settings.endpoints import is_loopback

_LOG = logging.getLogger("memwal.owners")
ENDS_WITHIN = 30.0
"""Seconds to wait for an owner that starts or ends: more than the default `daemon.drain_timeout`."""
_LOOK_EVERY = 0.1
_ANYWHERE = ("0.0.0.0", "[::]", "")  # noqa: S104 - addresses in notes; this process does not listen on them
SERVED = "served"
"""The `reason` in the details of an error: the table has a live owner."""

State = Literal["free", "ends", "lives", "unknown"]
Answer = Mapping[str, Any] | MemWalError | None
Ask = Callable[[str], Mapping[str, Any] | MemWalError]
"""Returns the regions of the daemon at an endpoint, or the error of the call. A callable, because the engine has no
transport (`service.open.asking`). Raises: Invalid if this process cannot resolve its own credentials."""


@dataclass(frozen=True, slots=True)
class Claimant:
    """The process that is about to claim the regions of a table."""

    take_over: bool = False
    """Whether it may fence a live owner."""
    daemon: bool = False
    peers: Sequence[str] = ()
    """Endpoints of the daemons that share the table with this one; they hand regions over to each other."""

    def remedy_for(self, owner: Owner) -> str:
        """Return the remedy if `owner` has the regions."""
        if self.daemon:
            return "stop that first, or start with `memwal serve --take-over`, which fences it"
        return f"{'use connect()' if owner.endpoint else 'close it there, read_only=True'}, or take_over=True"


@dataclass(frozen=True, slots=True)
class Owner:
    """One owner, from its notes.

    Thread safety. Immutable.
    """

    endpoint: str
    daemon: bool
    process: Process | None
    epochs: Mapping[str, int]
    """Writer epochs of its claims, by region id."""

    def __str__(self) -> str:
        process = str(self.process) if self.process is not None else ""
        epoch = f"writer epoch {max(self.epochs.values())}"
        if self.endpoint:
            return f"served by {self.endpoint} ({', '.join(filter(None, (process, epoch)))})"
        return f"{'served' if self.daemon else 'opened'} by {process or 'an unknown process'} ({epoch})"


@dataclass(frozen=True, slots=True)
class OwnerState:
    """The known state of one owner. `why`: an addition for messages, or ""."""

    owner: Owner
    state: State
    why: str = ""

    def __str__(self) -> str:
        return f"{self.owner}{', ' if self.why else ''}{self.why}"


@dataclass(frozen=True, slots=True)
class LiveOwners:
    """Detect which owners of a table's regions live.

    Thread safety. Any thread.
    """

    uri: str
    store: wal.ObjectStore
    regions: Sequence[UUID]
    table_id: str
    """The table's id, as daemons report it."""
    ask: Ask

    def find(self, peers: Sequence[str] = ()) -> list[OwnerState]:
        """Return the known state of the owners in the notes.

        This process, and daemons that share the table with one of `peers`, count as free.
        Raises: wal errors; errors of `ask`.
        """
        here = Process.here()
        found = []
        for owner in noted_owners(owners.read(self.store, self.regions)):
            answer = self.ask(endpoint_to_ask(owner.endpoint)) if can_be_asked(owner, here) else None
            found.append(judge(owner, here, answer, self.table_id, peers))
        return found

    def epochs(self) -> dict[UUID, int]:
        """Return the writer epoch in each region's note. Raises: wal errors."""
        return {region: note.epoch for region, note in owners.read(self.store, self.regions).items()}

    def refuse(self, claimant: Claimant, clock: wal.Clock) -> None:
        """Return if `claimant` may claim the regions; wait up to `ENDS_WITHIN` for owners that end.

        Raises: Unavailable (reason "served") if another process serves them; as `find`.
        """
        if claimant.take_over:
            for each in self.find(claimant.peers):
                if each.state != "free":
                    _LOG.warning("%s: taking over what is %s", self.uri, each)
            return
        until = clock.monotonic() + ENDS_WITHIN
        while True:
            found = [each for each in self.find(claimant.peers) if each.state != "free"]
            if not any(each.state == "ends" for each in found) or clock.monotonic() >= until:
                break
            clock.sleep(_LOOK_EVERY)
        for each in found:
            if each.state == "unknown" and claimant.daemon and each.owner.daemon:
                _LOG.warning("%s: was %s; if it still serves, it is fenced now", self.uri, each)
                continue
            details = {"reason": SERVED, "endpoint": each.owner.endpoint or None}
            raise Unavailable(f"{self.uri}: {each}: {claimant.remedy_for(each.owner)}", details)


def noted_owners(notes: Mapping[UUID, Note]) -> list[Owner]:
    """Return the distinct owners in `notes`."""
    found: dict[tuple[str, bool, Process | None], dict[str, int]] = {}
    for region, note in notes.items():
        found.setdefault((note.endpoint, note.daemon, note.process), {})[str(region)] = note.epoch
    return [Owner(*who, epochs) for who, epochs in found.items()]


def can_be_asked(owner: Owner, here: Process) -> bool:
    """Return whether to ask the owner's endpoint; a loopback endpoint of another machine cannot be asked."""
    if not owner.endpoint or owner.process == here:
        return False
    if owner.process is None:
        return True
    if owner.process.runs(here) is False:
        return False
    host = owner.endpoint.partition("://")[2].rpartition(":")[0]
    return owner.process.host == here.host or not (host in _ANYWHERE or is_loopback(host))


def judge(owner: Owner, here: Process, answer: Answer, table_id: str, peers: Sequence[str] = ()) -> OwnerState:
    """Apply the table in the module docstring. `answer`: the daemon's answer or error, None if it was not asked."""
    if owner.process == here:
        return OwnerState(owner, "free")
    runs = None if owner.process is None else owner.process.runs(here)
    if runs is False or owner.endpoint in peers:
        return OwnerState(owner, "free")
    if not can_be_asked(owner, here):
        return OwnerState(owner, "lives") if runs else OwnerState(owner, "unknown", "which cannot be asked from here")
    if isinstance(answer, MemWalError):
        reason = answer.details.get("reason")
        if reason == PROTOCOL and answer.details.get("id", table_id) != table_id:  # ports are reused
            return OwnerState(owner, "free")
        if reason == PROTOCOL or denies_access(answer):
            return OwnerState(owner, "lives", f"which does not say what it serves ({answer})")
        return OwnerState(owner, "ends", "which runs and does not answer") if runs else OwnerState(owner, "free")
    # A fleet answers for each of its open tables.
    tables = {} if answer is None else answer.get("tables", {"": answer})
    mine = next((each for each in tables.values() if each.get("id", table_id) == table_id), None)
    if answer is None or mine is None:  # ports are reused
        return OwnerState(owner, "free")
    # It has one of these regions by a claim at least as new as its note, or is claiming it now.
    having = dict.fromkeys(mine["claiming"], 2**63) | mine["regions"]
    has = any(having.get(region, 0) >= epoch for region, epoch in owner.epochs.items())
    if set(answer["endpoints"]) & set(peers) or not has:
        return OwnerState(owner, "free")
    return OwnerState(owner, "ends", "which is about to end") if answer["draining"] else OwnerState(owner, "lives")


def endpoint_to_ask(endpoint: str) -> str:
    """Return the address to connect to: a note may name a listening address, such as 0.0.0.0."""
    scheme, _, place = endpoint.partition("://")
    host, _, port = place.rpartition(":")
    return f"{scheme}://127.0.0.1:{port}" if host in _ANYWHERE else endpoint
