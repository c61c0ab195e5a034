"""Fencing: who may act for a region.

A region belongs to the writer with the highest epoch in its manifest. One `EpochGuard` stands for one claim
and is shared by everything that acts for that writer (appender, flusher); `claim` is the only place that
raises an epoch.

The claim, in steps:

 1. Read the newest manifest. None: create version 1 with epoch 1 and generation 1. SEALED: refuse.
 2. Otherwise create version+1 with epoch+1 by put-if-absent. Taken by another: back to 1.
 3. Find the WAL tip.
 4. Epoch >= 2: put a sentinel at tip+1, carrying the applied map of the entry at the tip. Taken by an older
    writer's entry: that entry is the tip now, again. Taken by a newer epoch: fenced. From here on the older
    writer's next append finds its slot taken, so nothing it is acknowledged for can be missed by step 6.
 5. Record the sentinel's position as `last_seen` in another manifest version (this also proves that we still
    own it).
 6. Replay from `replay_after`+1 to the sentinel.
 7. Read the newest manifest again: an epoch above ours means fenced.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NoReturn
from uuid import UUID

from wal.clock import Clock, Ids
from wal.codec import EntryCodec
from wal.errors import Corrupt, Fenced, Sealed
from wal.layout import entry_key, wal_prefix
from wal.manifest import ManifestStore, RegionManifest, RegionStatus
from wal.options import WalOptions
from wal.records import Entry, EntryHeader
from wal.replay import find_tip, read_header, replay
from wal.slot import settle
from wal.store import ObjectStore


class EpochGuard:
    """One claim's right to act for a region, until a higher epoch is seen.

    Thread safety. Any thread.
    Invariants. (1) The epoch never changes. (2) Once fenced, fenced for ever.
    """

    def __init__(self, region_id: UUID, epoch: int) -> None:
        self.region_id = region_id
        self.epoch = epoch
        self._lock = threading.Lock()
        self._theirs = 0

    @property
    def fenced(self) -> bool:
        """Whether a higher epoch has been seen."""
        return self._theirs > 0

    def check(self) -> None:
        """Raise Fenced where a higher epoch has been seen. Asks no storage."""
        if self._theirs:
            raise Fenced(self.region_id, self.epoch, self._theirs)

    def fenced_by(self, theirs: int) -> NoReturn:
        """Record that epoch `theirs` (above ours) owns the region, and raise Fenced."""
        assert theirs > self.epoch, f"epoch {theirs} does not fence epoch {self.epoch}"
        with self._lock:
            self._theirs = max(self._theirs, theirs)
        raise Fenced(self.region_id, self.epoch, self._theirs)


@dataclass
class Claim:
    """A region taken, and all that has to be restored before it takes writes."""

    guard: EpochGuard
    manifest: RegionManifest
    next_position: int
    applied: dict[str, int]
    """Highest sequence applied, per producer."""
    entries: list[Entry]
    """Entries after `manifest.replay_after` in the order their rows became visible; see
    `wal.replay.replay`."""


def claim(
    store: ObjectStore,
    region_id: UUID,
    *,
    spec_id: int,
    codec: EntryCodec,
    ids: Ids,
    clock: Clock,
    on_progress: Callable[[int, int], None] | None = None,
    options: WalOptions | None = None,
) -> Claim:
    """Take the region: raise its epoch, fence the older writer, read back what it left. Steps in the module's
    text.

    `spec_id` is the sharding spec the region belongs to (Lance's is always 1); `on_progress(read, total)` is
    told of entries replayed.
    Thread safety. Any number of threads and processes may claim one region: the last one to raise the epoch
    owns it.
    Durability. When it returns, no older writer's append can be acknowledged any more.
    Raises Sealed; Fenced (a newer claim overtook this one); Corrupt; StoreUnavailable; StoreRefused;
    OutcomeUnknown (harmless: claim again).
    """
    options = options or WalOptions()
    manifests = ManifestStore(store, region_id, ids=ids, clock=clock, options=options)
    manifest = _raise_epoch(manifests, region_id, spec_id)
    guard = EpochGuard(region_id, manifest.writer_epoch)
    tip = find_tip(store, region_id, codec.suffix, max(manifest.last_seen, manifest.replay_after))
    if guard.epoch == 1:
        applied = _expect_no_entries(store, guard, codec, tip)
    else:
        tip, applied = _put_sentinel(store, guard, codec, tip, manifest, ids, clock, options)
        seen = tip
        manifest = manifests.edit(guard, lambda current: replace(current, last_seen=max(current.last_seen, seen)))
    entries = replay(store, region_id, codec, manifest.replay_after, tip, guard=guard, on_progress=on_progress)
    manifest = manifests.owned(guard)
    return Claim(guard, manifest, tip + 1, applied, entries)


def _raise_epoch(manifests: ManifestStore, region_id: UUID, spec_id: int) -> RegionManifest:
    """Steps 1 and 2. A conflict means that somebody else got on, so the loop ends."""
    while True:
        current = manifests.latest()
        if current is None:
            proposed = RegionManifest(version=1, writer_epoch=1, region_id=region_id, spec_id=spec_id)
        else:
            _check_claimable(current, region_id, spec_id)
            proposed = replace(current, version=current.version + 1, writer_epoch=current.writer_epoch + 1)
        if (written := manifests.create(current, proposed)) is not None:
            return written


def _check_claimable(current: RegionManifest, region_id: UUID, spec_id: int) -> None:
    if current.status is RegionStatus.SEALED:
        raise Sealed(f"region {region_id} is sealed and takes no new writer; its rows stay readable")
    if current.spec_id != spec_id:
        raise Corrupt(
            f"region {region_id}: manifest version {current.version} belongs to sharding spec {current.spec_id}, "
            f"expected {spec_id}; open the table it was written for"
        )


def _expect_no_entries(store: ObjectStore, guard: EpochGuard, codec: EntryCodec, tip: int) -> dict[str, int]:
    """A region just created has no entries, unless a newer claim already put its sentinel."""
    if tip == 0:
        return {}
    newest = read_header(store, guard.region_id, codec, tip)
    if newest.writer_epoch > guard.epoch:
        guard.fenced_by(newest.writer_epoch)
    raise Corrupt(
        f"region {guard.region_id} has WAL entries up to position {tip} but had no manifest; "
        f"restore {guard.region_id}/manifest from a backup, or move {wal_prefix(guard.region_id)} away to start empty"
    )


def _put_sentinel(
    store: ObjectStore,
    guard: EpochGuard,
    codec: EntryCodec,
    tip: int,
    manifest: RegionManifest,
    ids: Ids,
    clock: Clock,
    options: WalOptions,
) -> tuple[int, dict[str, int]]:
    """Step 4. Returns the sentinel's position and the applied map it carries."""
    while True:
        applied: Mapping[str, int] = {}
        if tip:
            newest = read_header(store, guard.region_id, codec, tip)
            if newest.writer_epoch > guard.epoch:
                guard.fenced_by(newest.writer_epoch)
            applied = newest.applied
        header = EntryHeader(guard.epoch, manifest.current_generation, ids.entry_id(), applied, sentinel=True)
        key = entry_key(guard.region_id, tip + 1, codec.suffix)
        data = codec.encode(header, codec.no_rows)
        if settle(store, key, data, clock=clock, options=options) is None:
            return tip + 1, dict(applied)
        tip = find_tip(store, guard.region_id, codec.suffix, tip + 1)
