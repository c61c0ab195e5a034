"""The applied map of a region: the highest sequence applied per producer, as a shared snapshot plus changes.

Every entry gives the whole map, so that a claim finds it in the newest one. A short map is in the entry itself. A
longer map is in a separate object, a snapshot; entries name that object and hold the changes since. When the
changes grow, the next snapshot is written. With names of equal length, n names in the snapshot and c changes, an entry
costs about (n / c + c / 2) names on average. The minimum is at c = sqrt(2 n), which is therefore the limit.

When a snapshot is written with too many names, the oldest are retired: the snapshot keeps a 64-bit hash of each. A
retired name is refused and never treated as a new one.

A snapshot is an object that entries name instead of holding the whole map:

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
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from hashlib import blake2b
from math import isqrt
from uuid import UUID

import numpy as np
import numpy.typing as npt

from memwal.wal.clock import Clock, Ids
from memwal.wal.errors import Corrupt, OutcomeUnknown, StoreUnavailable
from memwal.wal.layout import parse_snapshot_key, snapshot_key, snapshot_prefix
from memwal.wal.retries import WalOptions
from memwal.wal.slot import put_until_known
from memwal.wal.store.port import ObjectInfo, ObjectStore

PREFIX = "memwal:before:"
"""Prefix of map keys that are not producer names: exceptions of a resize, see `flush.resizing.applied_maps`."""
NAMES_MAX = 100_000
"""Maximum number of names in a snapshot; above it, names are retired until nine tenths of it remain."""
_INLINE_MAX = 16_384
"""Bytes of names and numbers that an entry holds before a snapshot is worth its own request."""
_OF_A_NAME = 64
"""Average bytes of one name."""
_OF_A_NUMBER = 24
SEQUENCE_MAX = 2**63 - 1
"""Highest sequence that a map accepts. Python integers have no bound, but JSON has: an entry that cannot be encoded
would end the region, together with buffered rows. Maps of older releases may hold higher numbers; they are kept.
"""
GONE = -2
"""Value, among the changes, of a key that is in the snapshot but not in the map. Sequences are at least -1."""
Hashes = npt.NDArray[np.uint64]
NONE_RETIRED: Hashes = np.empty(0, np.uint64)


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The map at one moment, as stored in an object. Immutable."""

    name: str = ""
    """Name of the object; "" without one."""
    applied: Mapping[str, int] = field(default_factory=dict)
    """In the order of each name's last change, oldest first, as far as that is known."""
    retired: Hashes = field(default_factory=lambda: NONE_RETIRED)
    """Hashes of retired names: uint64 [retired], ascending."""
    size: int = 0
    """Approximate size in bytes."""


class AppliedMap(MutableMapping[str, int]):
    """Highest sequence applied per producer, and exceptions. Copying costs as much as the changes, not the map.

    Thread safety. One thread changes it; reads from any thread. To a reader, `rebase` changes nothing except that it
    removes retired names.
    """

    __slots__ = ("_state",)

    def __init__(
        self, changes: Mapping[str, int] | None = None, snapshot: Snapshot | None = None, size: int | None = None
    ) -> None:
        """`changes`: since `snapshot`; the value GONE removes the key. `size`: bytes of the changes, if known."""
        held = dict(changes or {})
        if size is None:
            size = sum(len(name) + _OF_A_NUMBER for name in held)
        self._state: tuple[Snapshot, dict[str, int], int] = (snapshot or Snapshot(), held, size)

    @staticmethod
    def of(applied: Mapping[str, int]) -> AppliedMap:
        """Return `applied` as an AppliedMap; the argument itself if it is one already."""
        return applied if isinstance(applied, AppliedMap) else AppliedMap(applied)

    @property
    def snapshot(self) -> Snapshot:
        """The snapshot that the changes are relative to."""
        return self._state[0]

    @property
    def changes(self) -> Mapping[str, int]:
        """The changes, which an entry holds beside the snapshot's name."""
        return self._state[1]

    def fits(self, before: str) -> bool:
        """Return whether an entry can hold the map as it is, without a new snapshot.

        True if the changes are short, and relative to nothing or to the snapshot that the preceding entry named
        (`before`).
        """
        snapshot, _, size = self._state
        known = snapshot.name == before if snapshot.name else not (snapshot.applied or len(snapshot.retired))
        return known and (size <= _INLINE_MAX or size <= isqrt(2 * _OF_A_NAME * snapshot.size))

    def copy(self) -> AppliedMap:
        """Return an independent copy."""
        snapshot, changes, size = self._state
        return AppliedMap(changes, snapshot, size)

    def rebased(self, name: str) -> Snapshot:
        """Return the whole map as a snapshot called `name`. Above NAMES_MAX, retire the oldest names and their
        exceptions.
        """
        snapshot, changes, _ = self._state
        applied = {key: value for key, value in snapshot.applied.items() if key not in changes}
        applied |= {key: value for key, value in changes.items() if value != GONE}
        retired, names = snapshot.retired, names_of(applied)
        if len(names) > NAMES_MAX:
            oldest = names[: len(names) - NAMES_MAX * 9 // 10]
            gone = set(oldest)
            applied = {key: value for key, value in applied.items() if producer_of(key) not in gone}
            retired = np.union1d(retired, hashes(oldest))
        size = sum(map(len, applied)) + _OF_A_NUMBER * len(applied) + 8 * len(retired)
        return Snapshot(name, applied, retired, size)

    def rebase(self, snapshot: Snapshot) -> None:
        """Make the map relative to `snapshot`, which `rebased` created from it."""
        self._state = snapshot, {}, 0

    def is_retired(self, producer: str) -> bool:
        """Return whether `producer` is not in the map because it was retired."""
        retired = self._state[0].retired
        if not len(retired) or producer in self:
            return False
        wanted = hashes([producer])[0]
        at = int(np.searchsorted(retired, wanted))
        return at < len(retired) and bool(retired[at] == wanted)

    def __getitem__(self, key: str) -> int:
        """Return the value of `key`. Raises KeyError."""
        snapshot, changes, _ = self._state
        found = changes.get(key)
        if found is None:
            found = snapshot.applied[key]
        if found == GONE:
            raise KeyError(key)
        return found

    def __setitem__(self, key: str, value: int) -> None:
        """Change one value. The key counts as changed last. Raises ValueError above SEQUENCE_MAX."""
        if value > SEQUENCE_MAX:
            raise ValueError(f"sequence of {key!r:.60} is above {SEQUENCE_MAX}")
        snapshot, changes, size = self._state
        if changes.pop(key, None) is None:
            size += len(key) + _OF_A_NUMBER
        changes[key] = value
        self._state = snapshot, changes, size

    def __delitem__(self, key: str) -> None:
        """Remove a key. Raises KeyError."""
        self[key]
        snapshot, changes, _ = self._state
        if key in snapshot.applied:
            self[key] = GONE
        else:
            del changes[key]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the keys."""
        snapshot, changes, _ = self._state
        yield from (key for key in snapshot.applied if key not in changes)
        yield from (key for key, value in changes.items() if value != GONE)

    def __len__(self) -> int:
        """Return the number of keys."""
        snapshot, changes, _ = self._state
        fresh = sum(value != GONE for key, value in changes.items() if key not in snapshot.applied)
        return len(snapshot.applied) + fresh - sum(value == GONE for value in changes.values())

    def __repr__(self) -> str:
        """Return the same text as a dict."""
        return repr(dict(self))


def names_of(applied: Mapping[str, int]) -> list[str]:
    """Return the producer names in a map, in its order, without exceptions."""
    return [key for key in applied if not key.startswith(PREFIX)]


def producer_of(key: str) -> str:
    """Return the producer of a map's key: the key itself, or the producer named in an exception."""
    return key.removeprefix(PREFIX).partition(":")[2] if key.startswith(PREFIX) else key


def hashes(names: list[str]) -> Hashes:
    """Return a 64-bit hash of each name: uint64 [names], in their order.

    Maps of older releases may have names with a lone surrogate, which tokens must not have now.
    """
    encoded = (name.encode(errors="surrogatepass") for name in names)
    digests = b"".join(blake2b(name, digest_size=8).digest() for name in encoded)
    return np.frombuffer(digests, "<u8").astype(np.uint64)


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
