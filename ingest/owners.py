"""Who serves a region: a note on storage for readers, and nothing more.

The owner leaves `owner.json` beside the region's manifests: its Flight endpoint and its epoch. The note may be stale,
missing or wrong: whoever follows it asks the daemon who it is (`Note.is_of`). Ownership is decided by the epoch alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import wal
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
class Note:
    """One daemon that says it owns every region asked for, with the epochs of its claims."""

    endpoint: str
    epochs: Mapping[str, int]

    def is_of(self, identity: Mapping[str, Any], table: str) -> bool:
        """Whether a daemon that answers with `identity` wrote this note for `table`.

        Ports are used again: behind a stale note another table's daemon may answer, with regions of the same ids.
        """
        return identity.get("table") == table and identity.get("epochs") == self.epochs


def find(store: wal.ObjectStore, regions: Sequence[UUID]) -> Note | None:
    """The note that all of `regions` agree on, or None when there is no single owner."""
    notes = {str(region): _read(store, region) for region in regions}
    known = {region: note for region, note in notes.items() if note is not None}
    endpoints = {endpoint for endpoint, _ in known.values()}
    if len(endpoints) != 1 or len(known) != len(notes):
        return None
    return Note(endpoints.pop(), {region: epoch for region, (_, epoch) in known.items()})


def _read(store: wal.ObjectStore, region: UUID) -> tuple[str, int] | None:
    data = store.get(owner_key(region))
    if data is None:
        return None
    try:
        note = json.loads(data)
        return str(note["endpoint"]), int(note["epoch"])
    except (ValueError, KeyError, TypeError):
        return None  # half a note is no note
