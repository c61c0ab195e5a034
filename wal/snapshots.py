"""Snapshots of the applied map: objects that entries name instead of holding the whole map.

    _mem_wal/{region uuid}/applied/{rev(position)}-{32 hex}.json    created once, never changed
        8 hex digits: CRC-32 of everything after the line feed; a line feed; then JSON:
        {"applied": {"producer": sequence, …}, "by": "32 hex", "retired": "base64"}
        applied: ascending by the last change; retired: 8 bytes, little-endian, of each retired name, ascending;
        absent without retired names

An entry names a snapshot as "{position}-{32 hex}". `position` is that of the first entry that names it. Protocol of a
writer whose next entry has this position:

 1. Create the snapshot under a fresh name. *Crash or failure: an object that no entry names.*
 2. Append the entry that names it. *Crash before: as 1. After: the entry is durable, and its snapshot was durable
    before it.*

Invariants.

 (1) A snapshot is first named by the entry at the position in its name: it is created for the very next slot, and a
     writer whose put of that slot failed without landing retries the same slot.
 (2) Along the log, an entry names the snapshot of the preceding entry with a map, or one of its own position, or none
     if it holds the whole map. The writer enforces this (`AppliedMap.fits`): it knows the snapshot that its last entry
     named, and creates a new one if the given map is relative to another. A claim's sentinel names the same snapshot as
     the newest entry.

Garbage. Let E be the newest entry with a map. A snapshot S of position p is deleted when p <= E's position and E does
not name it (`superseded`). Proof that S is not needed: slot p is filled, so by (1) no entry can begin to name S; E does
not name S, so by (2) no entry after E does. Entries before E may name it, but the map is read from the newest entry
only. A reader may read an entry that names S and pause while newer entries are appended and S is collected. It then
finds S missing, searches for a newer entry, and finds one (`wal.replay.newest_applied`). The rule uses no clock. A
snapshot of a position that is not reached yet is kept: its writer may be about to name it.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterable
from uuid import UUID

import numpy as np

from memwal.wal.applied import NONE_RETIRED, AppliedMap, Hashes, Snapshot
from memwal.wal.clock import Clock, Ids
from memwal.wal.errors import Corrupt, OutcomeUnknown, StoreUnavailable
from memwal.wal.layout import parse_snapshot_key, snapshot_key, snapshot_prefix
from memwal.wal.options import WalOptions
from memwal.wal.slot import put_until_known
from memwal.wal.store.port import ObjectInfo, ObjectStore

_CRC = 9


def write_snapshot(
    applied: AppliedMap,
    store: ObjectStore,
    region: UUID,
    position: int,
    *,
    ids: Ids,
    clock: Clock,
    options: WalOptions,
) -> None:
    """Make `applied` relative to a new snapshot, for an entry at `position`.

    Its contents stay the same, except that its oldest names may be retired.
    Raises: StoreUnavailable, StoreRefused; if an object landed nevertheless, no entry names it.
    """
    snapshot = applied.rebased(f"{position}-{ids.entry_id()}")
    key = snapshot_key(region, snapshot.name)
    try:
        taken = put_until_known(store, key, encoded(snapshot), clock=clock, options=options)
    except OutcomeUnknown as error:
        raise StoreUnavailable(f"{key}: no answer; no entry was written ({error})") from error
    if taken is not None:
        raise Corrupt(
            f"{key}: another object has this name; find out which program wrote it before you write to this region"
        )
    applied.rebase(snapshot)


def read_snapshot(store: ObjectStore, region: UUID, name: str) -> Snapshot | None:
    """Return the snapshot that entries call `name`; None if it was collected.

    Raises: Corrupt, naming the key; StoreUnavailable; StoreRefused.
    """
    key = snapshot_key(region, name)
    data = store.get(key)
    if data is None:
        return None
    if data[:_CRC] != b"%08x\n" % zlib.crc32(memoryview(data)[_CRC:]):
        raise Corrupt(f"{key}: its checksum does not hold; the object was damaged; restore it from a backup")
    found = json.loads(memoryview(data)[_CRC:].tobytes())
    return Snapshot(name, found["applied"], decoded_hashes(found.get("retired", "")), len(data))


def superseded(store: ObjectStore, region: UUID, position: int, named: str) -> list[ObjectInfo]:
    """Return the snapshots that are not needed, by the rule in the module docstring.

    `position`: that of the newest entry with a map; `named`: the snapshot that it names, "" for none.
    """
    found: Iterable[ObjectInfo] = store.describe(snapshot_prefix(region))
    parsed = ((each, parse_snapshot_key(each.key)) for each in found)
    return [each for each, name in parsed if name and name != named and int(name.partition("-")[0]) <= position]


def encoded(snapshot: Snapshot) -> bytes:
    """Return the object's bytes."""
    said = {"applied": snapshot.applied, "by": snapshot.name.partition("-")[2]}
    if len(snapshot.retired):
        said["retired"] = encoded_hashes(snapshot.retired)
    data = json.dumps(said).encode()
    return b"%08x\n%b" % (zlib.crc32(data), data)


def encoded_hashes(hashes: Hashes) -> str:
    """Return hashes of retired names as text."""
    return base64.b64encode(hashes.astype("<u8").tobytes()).decode()


def decoded_hashes(text: str) -> Hashes:
    """Return the hashes of a text from `encoded_hashes`. Raises ValueError."""
    return np.frombuffer(base64.b64decode(text), "<u8").astype(np.uint64) if text else NONE_RETIRED
