"""Owner notes: the file `owner.json` beside a region's manifest names the process that serves the region.

`{"epoch", "endpoint"?, "daemon", "process": {"host", "machine", "boot", "space", "pid", "started"}}`: the writer epoch
of the claim, the Flight endpoint (absent while a daemon starts, and for a table that is open in a program), whether the
owner is a daemon, and its process (`ingest.rpc.processes`). Written after a claim, deleted by a clean close.

A note may be stale, missing or wrong. A client that follows a note asks the daemon for its identity (`Notes.are_of`). A
process that wants to claim a region checks whether its owner lives (`ingest.table.live_owners`). Only the epoch decides
who owns a region.

Invariant: while an owner lives, a note of its epoch or of a newer one exists, or is written again.

- `withdraw` cannot compare and delete in one step: 1. read our note; 2. delete it; 3. ask the region's manifest for a
  newer owner that has not released the region; 4. if one has, leave a note with its epoch alone, unless a note exists.
  *A newer owner claims and writes its note between 1 and 2: it is deleted, and 4 puts one in its place, of an unknown
  process, so that the table does not look free. It claims after 3: it writes its note after the delete.*
- `renew`, at each collection: the owner writes its note again if it is missing, of an older epoch or of an unknown
  process. *A crash between 2 and 4, or a request of a former owner that storage carries out late: until then the table
  looks free, or belongs to the former owner.*
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from pydantic import SecretStr

from memwal import wal
from memwal.flush.parallel_map import each
from memwal.ingest.errors import Unavailable
from memwal.ingest.rpc.processes import Process
from memwal.ingest.secret_refs import resolve
from memwal.wal.layout import owner_key

READ_AT_ONCE = 16
"""Notes that are read concurrently; each is one request."""


@dataclass(frozen=True, slots=True)
class Note:
    """The note of one region."""

    epoch: int
    endpoint: str = ""
    daemon: bool = False
    process: Process | None = None
    """None where it is not known: in a note that a former owner has left, or an earlier version of memwal."""


def announce(store: wal.ObjectStore, region: UUID, epoch: int, endpoint: str = "", *, daemon: bool = False) -> None:
    """Write the note of a new owner, which is this process."""
    store.put(owner_key(region), _encoded(epoch, endpoint, daemon=daemon))


def renew(store: wal.ObjectStore, region: UUID, epoch: int, endpoint: str = "", *, daemon: bool = False) -> None:
    """Write our note again if it is gone or overwritten by that of an older owner. One request if it is in place."""
    note = _read(store, region)
    if note is None or note.epoch < epoch or (note.epoch == epoch and note.process is None):
        announce(store, region, epoch, endpoint, daemon=daemon)


def withdraw(
    store: wal.ObjectStore, region: UUID, epoch: int, newer_owner: Callable[[], int | None], *, daemon: bool = False
) -> None:
    """Delete our note, unless a newer owner has written its own; leave one if a newer owner has claimed the region.

    `newer_owner`: asks the manifest for its epoch, None for none. `daemon`: whether it is one, as far as we know.
    """
    note = _read(store, region)
    if note is None or note.epoch != epoch:
        return
    store.delete(owner_key(region))
    if (newer := newer_owner()) is not None:
        store.put_if_absent(owner_key(region), json.dumps({"epoch": newer, "daemon": daemon}).encode())


def read(store: wal.ObjectStore, regions: Sequence[UUID]) -> dict[UUID, Note]:
    """Return the notes of `regions`, of those that have one. Raises: wal errors."""
    at_once = min(READ_AT_ONCE, len(regions)) if store.remote else 1
    notes = each(lambda region: _read(store, region), regions, max(1, at_once))
    return {region: note for region, note in zip(regions, notes, strict=True) if note is not None}


@dataclass(frozen=True, slots=True)
class Notes:
    """The daemons that claim to own some regions, and the epochs of their claims."""

    endpoints: tuple[str, ...]
    epochs: Mapping[str, int]
    """By region id, the epoch in its note; 1 for a region without a note."""

    def are_of(self, identity: Mapping[str, Any], table: str) -> bool:
        """Whether daemons that answer with `identity` own all these regions of `table`, by these claims or newer ones.

        Ports are reused: at the address of a stale note a daemon of another table may answer, whose regions have the
        same ids.
        """
        claimed = identity["epochs"]
        return identity["table"] == table and all(claimed.get(name, 0) >= epoch for name, epoch in self.epochs.items())


def find(store: wal.ObjectStore, regions: Sequence[UUID], also: Sequence[str] = ()) -> Notes | None:
    """Return the notes of `regions`, with the endpoints `also` added; None if no endpoint is known."""
    known = read(store, regions)
    endpoints = tuple(dict.fromkeys([*(note.endpoint for note in known.values() if note.endpoint), *also]))
    epochs = {str(region): known[region].epoch if region in known else 1 for region in regions}
    return Notes(endpoints, epochs) if endpoints else None


@dataclass(frozen=True, slots=True)
class NotesFinder:
    """Finds the daemons of a table by its owner notes, for daemons that no configuration lists.

    Thread safety. Immutable. Pickles: `options` are references, not secrets, and are resolved when it is called.
    """

    uri: str
    options: tuple[tuple[str, str], ...]
    regions: tuple[UUID, ...]

    def __call__(self) -> tuple[str, ...]:
        """Return the endpoints in the notes; some may be stale. Raises: wal errors."""
        secrets = {name: SecretStr(value) for name, value in self.options}
        notes = find(wal.open_store(self.uri, resolve(secrets, os.environ)), self.regions)
        return () if notes is None else notes.endpoints


def _encoded(epoch: int, endpoint: str, *, daemon: bool) -> bytes:
    note: dict[str, Any] = {"epoch": epoch, "daemon": daemon, "process": Process.here().noted()}
    return json.dumps(note | ({"endpoint": endpoint} if endpoint else {})).encode()


def _read(store: wal.ObjectStore, region: UUID) -> Note | None:
    data = store.get(owner_key(region))
    if data is None:
        return None
    try:
        note = json.loads(data)
        daemon = bool(note.get("daemon", True))  # notes of earlier versions are of daemons only
        return Note(int(note["epoch"]), str(note.get("endpoint") or ""), daemon, Process.of(note.get("process")))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None  # an incomplete note counts as none


def by_notes(find: NotesFinder) -> str:
    """Return the daemons on Spark executors, in the form that `memwal.connect` takes. Raises: Unavailable for none."""
    endpoints = ",".join(find())
    if not endpoints:
        raise Unavailable(f"no daemon serves {find.uri}; start them with `memwal serve --on-spark`")
    return endpoints
