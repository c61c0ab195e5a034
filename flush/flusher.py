"""Flush: a frozen memtable becomes a published SST.

 1. Fence: has a higher epoch been seen, in memory or in the newest manifest?
 2. Order: the generation must be the region's current one. One below it that covers the position is our own
    flush whose answer was lost: done.
 3. Write the SST under a fresh random name: data, bloom filter, key sidecar, indexes; fsync; read back and compare the
    counts.
 4. Publish: one manifest edit that appends the SST, sets replay_after to the last covered position, and makes
    the current generation one more. The edit is refused where the epoch is not ours any more.

A crash before 4 leaves a directory nobody refers to, and the log replays its rows. A crash after 4 leaves
nothing to do. The order within 3 and before 4 is the whole point: an SST published before its sidecar exists
breaks every reader.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from flush.errors import FlushOutOfOrder
from flush.file_options import FileOptions
from flush.sst import discard, write_sst
from flush.sst_indexes import SstIndexes
from memtable import Snapshot
from wal import (
    Corrupt,
    EpochGuard,
    Fenced,
    Ids,
    ManifestStore,
    ObjectStore,
    RegionManifest,
    SsTable,
    StoreRefused,
    StoreUnavailable,
)


def flush(
    store: ObjectStore,
    manifests: ManifestStore,
    guard: EpochGuard,
    snapshot: Snapshot,
    *,
    generation: int,
    covers_position: int,
    key: Sequence[str],
    storage_version: str | None,
    ids: Ids,
    field_ids: Sequence[int] | None = None,
    files: FileOptions | None = None,
    indexes: SstIndexes | None = None,
) -> RegionManifest:
    """Publish the frozen memtable `snapshot` as `generation`; returns the newest manifest.

    `covers_position`: the last WAL position whose rows are in the memtable, or in one flushed before it.
    `field_ids`, `files`, `indexes`: as for `write_sst`. An empty memtable publishes nothing. May be called again with
    the same arguments after any error.
    Thread safety. One flush per region at a time, in generation order; the appender may work beside it.
    Raises Fenced; FlushOutOfOrder; SstInvalid; Corrupt; OutcomeUnknown (the edit may be there: call again);
    StoreUnavailable, StoreRefused, OSError of storage.
    """
    manifest = _owned(manifests, guard)
    if not snapshot.n or _is_published(manifest, generation, covers_position):
        return manifest
    _expect_next(manifest, generation)
    sst = write_sst(
        store,
        guard.region_id,
        snapshot,
        generation=generation,
        key=key,
        storage_version=storage_version,
        ids=ids,
        field_ids=field_ids,
        files=files,
        indexes=indexes,
    )
    try:
        return manifests.edit(guard, lambda current: _published(current, sst, covers_position))
    except (Fenced, StoreRefused, StoreUnavailable):
        discard(store, guard.region_id, sst)  # certainly not published; after OutcomeUnknown it may be
        raise


def _owned(manifests: ManifestStore, guard: EpochGuard) -> RegionManifest:
    """Step 1. Saves the writing of an SST that could not be published; the edit itself decides."""
    guard.check()
    manifest = manifests.latest()
    if manifest is None:
        raise Corrupt(f"region {guard.region_id} has no manifest; claim the region first")
    if manifest.writer_epoch > guard.epoch:
        guard.fenced_by(manifest.writer_epoch)
    return manifest


def _is_published(manifest: RegionManifest, generation: int, covers_position: int) -> bool:
    return generation == manifest.current_generation - 1 and manifest.replay_after == covers_position


def _expect_next(manifest: RegionManifest, generation: int) -> None:
    if generation != manifest.current_generation:
        raise FlushOutOfOrder(
            f"region {manifest.region_id}: generation {generation} was to be flushed, but the next one is "
            f"{manifest.current_generation}; flush memtables in the order they were frozen"
        )


def _published(current: RegionManifest, sst: SsTable, covers_position: int) -> RegionManifest:
    """Step 4 as a pure edit; returns `current` itself where it already holds `sst`."""
    if any(each.path == sst.path for each in current.ssts):
        return current
    _expect_next(current, sst.generation)
    return replace(
        current,
        replay_after=covers_position,
        last_seen=max(current.last_seen, covers_position),
        current_generation=sst.generation + 1,
        ssts=(*current.ssts, sst),
    )
