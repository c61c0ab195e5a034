"""Who serves a region: a note on storage for readers, and nothing more.

The owner leaves `owner.json` beside the region's manifests: its Flight endpoint and its epoch. The note may be stale,
missing or wrong: whoever follows it asks the daemon who it is (`Notes.are_of`). The epoch alone decides who owns.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from pydantic import SecretStr

import wal
from ingest.references import resolve
from wal.layout import owner_key


def announce(store: wal.ObjectStore, region: UUID, epoch: int, endpoint: str) -> None:
    """Leave the note of a new owner."""
    store.put(owner_key(region), json.dumps({"endpoint": endpoint, "epoch": epoch}).encode())


def withdraw(store: wal.ObjectStore, region: UUID, epoch: int) -> None:
    """Take the note back, unless a newer owner has written its own."""
    note = _read(store, region)
    if note is not None and note[1] == epoch:
        store.delete(owner_key(region))


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
    notes = {str(region): _read(store, region) for region in regions}
    known = {region: note for region, note in notes.items() if note is not None}
    endpoints = tuple(dict.fromkeys([*(endpoint for endpoint, _ in known.values()), *also]))
    epochs = {region: known[region][1] if region in known else 1 for region in notes}
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


def _read(store: wal.ObjectStore, region: UUID) -> tuple[str, int] | None:
    data = store.get(owner_key(region))
    if data is None:
        return None
    try:
        note = json.loads(data)
        return str(note["endpoint"]), int(note["epoch"])
    except (ValueError, KeyError, TypeError):
        return None  # half a note is no note
