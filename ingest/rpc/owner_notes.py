"""The notes that owners leave beside their regions' manifests, in `owner.json`: who serves a region.

`{"epoch", "endpoint"?, "daemon", "process": {"host", "machine", "boot", "space", "pid", "started"}}`: the writer epoch
of the claim, the Flight endpoint (a table that is open in a program has none, nor has a daemon that still starts),
whether it is a daemon, and the process (`ingest.rpc.processes`). Written after a claim, deleted by a clean close.

A note may be stale, missing or wrong. Whoever follows one asks the daemon who it is (`Notes.are_of`); whoever is about
to claim a region asks whether its owner lives (`ingest.table.live_owners`). The epoch alone decides who owns.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
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
"""Notes; each is a request."""


@dataclass(frozen=True, slots=True)
class Note:
    """What one region's note says."""

    epoch: int
    endpoint: str = ""
    daemon: bool = False
    process: Process | None = None
    """None in notes of earlier versions."""


def announce(store: wal.ObjectStore, region: UUID, epoch: int, endpoint: str = "", *, daemon: bool = False) -> None:
    """Leave the note of a new owner, this process."""
    note: dict[str, Any] = {"epoch": epoch, "daemon": daemon, "process": Process.here().noted()}
    if endpoint:
        note["endpoint"] = endpoint
    store.put(owner_key(region), json.dumps(note).encode())


def withdraw(store: wal.ObjectStore, region: UUID, epoch: int) -> None:
    """Take the note back, unless a newer owner has written its own."""
    note = _read(store, region)
    if note is not None and note.epoch == epoch:
        store.delete(owner_key(region))


def read(store: wal.ObjectStore, regions: Sequence[UUID]) -> dict[UUID, Note]:
    """The notes of those of `regions` that have one. Raises: wal errors."""
    at_once = min(READ_AT_ONCE, len(regions)) if store.remote else 1
    notes = each(lambda region: _read(store, region), regions, max(1, at_once))
    return {region: note for region, note in zip(regions, notes, strict=True) if note is not None}


@dataclass(frozen=True, slots=True)
class Notes:
    """Who says that they own the regions asked for, with the least epochs of their claims."""

    endpoints: tuple[str, ...]
    epochs: Mapping[str, int]
    """Of every region; 1 where there is no note of it."""

    def are_of(self, identity: Mapping[str, Any], table: str) -> bool:
        """Whether daemons that answer with `identity` own all of these regions of `table`, and no older claims of them.

        Ports are used again: behind a stale note another table's daemon may answer, with regions of the same ids.
        """
        claimed = identity["epochs"]
        return identity["table"] == table and all(claimed.get(name, 0) >= epoch for name, epoch in self.epochs.items())


def find(store: wal.ObjectStore, regions: Sequence[UUID], also: Sequence[str] = ()) -> Notes | None:
    """The notes of `regions`; `also`: daemons to ask besides. None where nobody is known."""
    known = read(store, regions)
    endpoints = tuple(dict.fromkeys([*(note.endpoint for note in known.values() if note.endpoint), *also]))
    epochs = {str(region): known[region].epoch if region in known else 1 for region in regions}
    return Notes(endpoints, epochs) if endpoints else None


@dataclass(frozen=True, slots=True)
class FromNotes:
    """Where the daemons of a table are, by the notes of its owners: for daemons that nobody has configured.

    Thread safety. Immutable. Pickles; `options` are references and no secrets, resolved where it is called.
    """

    uri: str
    options: tuple[tuple[str, str], ...]
    regions: tuple[UUID, ...]

    def __call__(self) -> tuple[str, ...]:
        """The endpoints in the notes; some may be stale. Raises: wal errors."""
        secrets = {name: SecretStr(value) for name, value in self.options}
        notes = find(wal.open_store(self.uri, resolve(secrets, os.environ)), self.regions)
        return () if notes is None else notes.endpoints


def _read(store: wal.ObjectStore, region: UUID) -> Note | None:
    data = store.get(owner_key(region))
    if data is None:
        return None
    try:
        note = json.loads(data)
        daemon = bool(note.get("daemon", True))  # notes of earlier versions are all of daemons
        return Note(int(note["epoch"]), str(note.get("endpoint") or ""), daemon, Process.of(note.get("process")))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None  # half a note is no note


def by_notes(find: FromNotes) -> str:
    """The daemons that Spark has placed, in the form that `memwal.connect` takes. Raises: Unavailable for none."""
    found = ",".join(find())
    if not found:
        raise Unavailable(f"no daemon serves {find.uri}; start them with `memwal serve --on-spark`")
    return found
