"""Owner notes: the file `owner.json` beside a region's manifest names the process that serves the region.

`{"epoch", "endpoint"?, "name"?, "daemon", "process": {"host", "machine", "boot", "space", "pid", "started"}}`: the
writer epoch of the claim, the Flight endpoint (absent while a daemon starts, and for a table that is open in a
program), the table's name in a fleet, whether the owner is a daemon, and its `Process`. The owner writes the note after
its claim and deletes it when it closes.

A note may be stale, missing or wrong. A client that follows a note verifies the daemon's identity (`Notes.are_of`). A
process that wants to claim a region checks whether its owner is alive (`table.live_owners`). Only the epoch
decides who owns a region.

Invariant: while an owner is alive, a note of its epoch or of a newer one exists, or is written again.

`withdraw`, which cannot compare and delete in one step:

1. Read the own note; stop if it is missing or has another epoch.
2. Delete it. *If a newer owner claimed the region and wrote its note after step 1, this deletes the newer note.*
3. Read the region's manifest for a newer owner that has not released the region. *An owner that claims after this
   step writes its note after the delete.*
4. If there is a newer owner, create a note with its epoch and an unknown process, unless a note exists. The table
   does not appear free.

`renew`, at each collection: the owner writes its note again if it is missing, has an older epoch or names no process.
*After a crash between 2 and 4, or a delayed request of a former owner, the table appears free, or owned by the former
owner, until this renewal.*
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self
from uuid import UUID

from pydantic import SecretStr

from memwal import wal
from memwal.ingest.errors import Unavailable
from memwal.ingest.secret_refs import resolve
from memwal.wal.layout import owner_key
from memwal.wal.parallel_map import each

_PROC = Path("/proc")
_TEXTS = ("host", "machine", "boot", "space", "started")
_NO_MACHINE = ("uninitialized",)  # as in container images
_ENDED = ("Z", "X")
"""States in /proc of a process that has ended and whose parent has not waited for it."""


@dataclass(frozen=True, slots=True)
class Process:
    """One process of one machine, as notes hold it; a note's reader checks without a write whether it still runs.

    Process ids are reused. Together with the boot id of the machine, the pid namespace (each container has its own) and
    the start time of the process, an id identifies one process permanently.
    Thread safety. Immutable.
    """

    host: str
    machine: str
    """/etc/machine-id; "" if missing."""
    boot: str
    """Boot id of the kernel; "" outside Linux."""
    space: str
    """The pid namespace."""
    pid: int
    started: str
    """Clock ticks between the boot and the start of the process."""

    @classmethod
    def here(cls) -> Self:
        """Return this process."""
        return cls(*_here(os.getpid()))

    @classmethod
    def of(cls, noted: Any) -> Self | None:
        """Parse the process of a note, the result of `asdict`; return None if it has none."""
        try:
            host, machine, boot, space, started = (str(noted[name]) for name in _TEXTS)
            return cls(host, machine, boot, space, int(noted["pid"]), started)
        except (KeyError, TypeError, ValueError):
            return None

    def runs(self, here: Process) -> bool | None:
        """Return whether the process runs now; None if `here`, this process, cannot know.

        It cannot know about another machine or container, or about a process that the system hides. After a restart
        of the machine none of its old processes run. The same holds for a container: after a restart it has the same
        host name and another pid namespace. (Two containers of one pod, or on the host network of one machine, share
        their host name too: the container that opens a table later takes it over.)
        """
        if self.host != here.host and not (self.boot and self.boot == here.boot):
            return None
        if self.boot and self.boot != here.boot:
            return False if self.machine and self.machine == here.machine else None
        if self.space != here.space:
            return False if self.host == here.host else None
        if not self.boot:
            return _answers(self.pid)
        began = _running(self.pid)
        if began is None:  # ended, or hidden: /proc may be mounted with hidepid
            return None if _answers(self.pid) else False
        return began == self.started

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


@cache
def _here(pid: int) -> tuple[str, str, str, str, int, str]:
    boot, space = _text(_PROC / "sys/kernel/random/boot_id"), ""
    with suppress(OSError):
        space = str((_PROC / "self/ns/pid").readlink())
    machine = _text(Path("/etc/machine-id"))
    return socket.gethostname(), "" if machine in _NO_MACHINE else machine, boot, space, pid, _running(pid) or ""


def _running(pid: int) -> str | None:
    """Return when the process with this id started, in clock ticks; "" if it has ended, None if it is hidden."""
    stat = _text(_PROC / str(pid) / "stat")
    fields = stat.rpartition(")")[2].split()  # the process name in brackets may contain any characters
    if not fields:
        return None
    return "" if fields[0] in _ENDED else fields[19]


def _answers(pid: int) -> bool:
    """Return whether a process with this id exists."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _text(path: Path) -> str:
    with suppress(OSError):
        return path.read_text().strip()
    return ""


READ_AT_ONCE = 16
"""Notes that are read concurrently. Each is one request."""


@dataclass(frozen=True, slots=True)
class Note:
    """The note of one region."""

    epoch: int
    endpoint: str = ""
    daemon: bool = False
    process: Process | None = None
    """None if unknown: in a note left by a former owner, and in one written by an earlier version of memwal."""
    name: str = ""
    """Of the table, if the owner serves a fleet."""


def announce(
    store: wal.ObjectStore, region: UUID, epoch: int, endpoint: str = "", *, daemon: bool = False, name: str = ""
) -> None:
    """Write the note of a new owner, which is this process."""
    note: dict[str, Any] = {"epoch": epoch, "daemon": daemon, "process": asdict(Process.here())}
    note |= {field: value for field, value in (("endpoint", endpoint), ("name", name)) if value}
    store.put(owner_key(region), json.dumps(note).encode())


def renew(
    store: wal.ObjectStore, region: UUID, epoch: int, endpoint: str = "", *, daemon: bool = False, name: str = ""
) -> None:
    """Write the own note again if it is missing or an older owner has overwritten it. One request if it is in place."""
    note = _read(store, region)
    if note is None or note.epoch < epoch or (note.epoch == epoch and note.process is None):
        announce(store, region, epoch, endpoint, daemon=daemon, name=name)


def withdraw(
    store: wal.ObjectStore, region: UUID, epoch: int, newer_owner: Callable[[], int | None], *, daemon: bool = False
) -> None:
    """Delete the own note unless a newer owner has replaced it. Leave a note for a newer owner that has claimed the
    region.

    `newer_owner` returns the epoch of a newer owner from the manifest, or None. `daemon`: whether the newer owner is
    believed to be a daemon.
    """
    note = _read(store, region)
    if note is None or note.epoch != epoch:
        return
    store.delete(owner_key(region))
    if (newer := newer_owner()) is not None:
        store.put_if_absent(owner_key(region), json.dumps({"epoch": newer, "daemon": daemon}).encode())


def read(store: wal.ObjectStore, regions: Sequence[UUID]) -> dict[UUID, Note]:
    """Return the notes of the `regions` that have one. Raises: wal errors."""
    notes = each(lambda region: _read(store, region), regions, READ_AT_ONCE if store.remote else 1)
    return {region: note for region, note in zip(regions, notes, strict=True) if note is not None}


@dataclass(frozen=True, slots=True)
class Notes:
    """The daemons that claim to own some regions, and the epochs of their claims."""

    endpoints: tuple[str, ...]
    epochs: Mapping[str, int]
    """By region id, the epoch in its note; 1 for a region without a note."""
    name: str | None = None
    """Of the table, if the daemons serve a fleet."""

    def are_of(self, identity: Mapping[str, Any], table: str) -> bool:
        """Return whether daemons that answer with `identity` own all these regions of `table`, by these claims or
        newer ones.

        Ports are reused: at the address of a stale note a daemon of another table may answer, and its regions have
        the same ids.
        """
        claimed = identity["epochs"]
        return identity["table"] == table and all(claimed.get(name, 0) >= epoch for name, epoch in self.epochs.items())


def find(store: wal.ObjectStore, regions: Sequence[UUID], also: Sequence[str] = ()) -> Notes | None:
    """Return the notes of `regions`, with the endpoints `also` added; None if no endpoint is known."""
    known = read(store, regions)
    endpoints = tuple(dict.fromkeys([*(note.endpoint for note in known.values() if note.endpoint), *also]))
    epochs = {str(region): known[region].epoch if region in known else 1 for region in regions}
    name = next((note.name for note in known.values() if note.name), None)
    return Notes(endpoints, epochs, name) if endpoints else None


@dataclass(frozen=True, slots=True)
class NotesFinder:
    """Finds the daemons of a table by its owner notes, when no configuration lists them.

    Thread safety. Immutable. Pickles: `options` are references, not secrets; each call resolves them.
    """

    uri: str
    options: tuple[tuple[str, str], ...]
    regions: tuple[UUID, ...]

    def __call__(self) -> tuple[str, ...]:
        """Return the endpoints in the notes; some may be stale. Raises: wal errors."""
        secrets = {name: SecretStr(value) for name, value in self.options}
        notes = find(wal.open_store(self.uri, resolve(secrets, os.environ)), self.regions)
        return () if notes is None else notes.endpoints


def _read(store: wal.ObjectStore, region: UUID) -> Note | None:
    data = store.get(owner_key(region))
    if data is None:
        return None
    try:
        note = json.loads(data)
        daemon = bool(note.get("daemon", True))  # earlier versions wrote notes of daemons only
        endpoint, name = (str(note.get(field) or "") for field in ("endpoint", "name"))
        return Note(int(note["epoch"]), endpoint, daemon, Process.of(note.get("process")), name)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None  # treat an incomplete note as a missing note


def by_notes(find: NotesFinder) -> str:
    """Return the endpoints of daemons on Spark executors in the form that `memwal.connect` accepts.

    Raises: Unavailable if no daemon is known.
    """
    endpoints = ",".join(find())
    if not endpoints:
        raise Unavailable(f"no daemon serves {find.uri}; start them with `memwal serve --on-spark`")
    return endpoints
