"""Flush: write a frozen memtable as an SST and publish it.

 1. Fence: raise Fenced if a higher epoch has been seen, in memory or in the newest manifest.
 2. Order: the generation must be the region's current one. If the generation below the current one is published with
    the same covered position, it is this flush, whose answer was lost: done. An empty memtable publishes nothing.
 3. Write the SST under a fresh random name: data, bloom filter, key sidecar, indexes; fsync; read back and compare the
    counts, and for some SSTs every value (flush.sst.files). A complete SST left by an earlier attempt is used instead.
    *Crash here: a directory that no manifest lists; the log replays its rows.* (model: Commit!WriteSst)
 4. Publish: one manifest edit appends the SST, sets replay_after to the last covered position, and adds one to the
    current generation. The edit is rejected if the writer's epoch has been superseded. *Crash here: published or not,
    never half. Calling `flush` again with the same arguments finds the published edit.* (model: Commit!Offer,
    Commit!Publish)

An SST published before its sidecar exists would break every reader. This determines the order within step 3, and step 3
before step 4.

An error in step 4 does not show whether the SST is published: storage may have lost the answer or returned a wrong one,
or the edit may land later. So an error alone never removes anything. An SST that was never offered to the manifest may
be removed at once; an offered one only when the manifest shows that it was not published and can no longer be
(`FlushAttempts.discard_unpublished`). (model: Commit!Discard)
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace

from memwal import wal
from memwal.flush.errors import FlushOutOfOrder
from memwal.flush.sst.files import SstFormat, discard, write_sst
from memwal.memtable import Snapshot
from memwal.wal.layout import sst_name


@dataclass
class FlushAttempts:
    """Files that the attempts to flush one memtable have left on storage, kept from attempt to attempt.

    Thread safety. One flush at a time.
    Invariants. (1) At most one complete SST is kept, however often its publication fails. (2) An SST that was offered
    to the manifest is removed only when no manifest version lists it or can list it.
    """

    sst: wal.SsTable | None = None
    """The SST that is written and verified, and not known to be published."""
    offered: int = 0
    """The newest manifest version that would have published it; 0: none yet."""
    abandoned: list[wal.SsTable] = field(default_factory=list)
    """SSTs whose writing failed; some may not be removed yet."""

    def discard_unpublished(self, store: wal.ObjectStore, manifests: wal.ManifestStore) -> None:
        """Remove the SST if it can no longer be published. Call it when no attempt follows.

        An SST offered as version v is removed only if the newest manifest is v or later (so a late edit finds its slot
        taken) and its generation is not published yet. Otherwise it stays, for the collector.
        """
        sst = self.sst
        if sst is None:
            return
        with suppress(wal.WalError, OSError):
            if self.offered:
                newest = manifests.latest()
                if newest is None or newest.version < self.offered or newest.current_generation > sst.generation:
                    return
            if discard(store, manifests.region_id, sst):
                self.sst = None


def flush(
    store: wal.ObjectStore,
    manifests: wal.ManifestStore,
    guard: wal.EpochGuard,
    snapshot: Snapshot,
    format: SstFormat,
    *,
    generation: int,
    covers_position: int,
    ids: wal.Ids,
    attempts: FlushAttempts | None = None,
) -> wal.RegionManifest:
    """Publish the frozen memtable `snapshot` as `generation`; return the newest manifest.

    `covers_position`: the last WAL position whose rows are in the memtable, or in one flushed before it.
    May be called again with the same arguments after any error; with the same `attempts`, the written SST is reused.
    Without `attempts`, an SST known to be unpublished is removed.
    Thread safety. One flush per region at a time, in generation order; the appender may run concurrently.
    Raises Fenced; FlushOutOfOrder; SstInvalid; Corrupt; OutcomeUnknown (the edit may have landed: call again);
    StoreUnavailable, StoreRefused, OSError of storage.
    """
    kept = attempts or FlushAttempts()
    try:
        manifest = _owned(manifests, guard)
        if not snapshot.n or _is_published(manifest, generation, covers_position):
            return manifest
        _expect_next(manifest, generation)
        if kept.sst is None:
            # Leftovers of failed attempts that could not be removed at the time, as far as storage works.
            kept.abandoned = [sst for sst in kept.abandoned if not discard(store, guard.region_id, sst)]
            new = wal.SsTable(generation, sst_name(ids.token(), generation))
            kept.abandoned.append(new)
            kept.sst = write_sst(
                store, guard.region_id, snapshot, format, generation=generation, ids=ids, name=new.path
            )
            kept.abandoned.remove(new)
        return _publish(manifests, guard, kept, kept.sst, covers_position)
    except BaseException as error:
        if attempts is None or isinstance(error, wal.Fenced):
            kept.discard_unpublished(store, manifests)
        raise


def _publish(
    manifests: wal.ManifestStore, guard: wal.EpochGuard, kept: FlushAttempts, sst: wal.SsTable, covers_position: int
) -> wal.RegionManifest:
    """Run step 4."""

    def published(current: wal.RegionManifest) -> wal.RegionManifest:
        changed = _published(current, sst, covers_position)
        if changed is not current:
            kept.offered = current.version + 1
        return changed

    return manifests.edit(guard, published)


def _owned(manifests: wal.ManifestStore, guard: wal.EpochGuard) -> wal.RegionManifest:
    """Run step 1; return the newest manifest.

    Avoids writing an SST that cannot be published; the edit of step 4 is decisive.
    """
    guard.check()
    manifest = manifests.latest()
    if manifest is None:
        raise wal.Corrupt(f"{wal.named(guard.region_id)} has no manifest; claim the region first")
    if manifest.writer_epoch > guard.epoch:
        guard.fenced_by(manifest.writer_epoch)
    return manifest


def _is_published(manifest: wal.RegionManifest, generation: int, covers_position: int) -> bool:
    return generation == manifest.current_generation - 1 and manifest.replay_after == covers_position


def _expect_next(manifest: wal.RegionManifest, generation: int) -> None:
    if generation != manifest.current_generation:
        raise FlushOutOfOrder(
            f"{wal.named(manifest.region_id)}: generation {generation} cannot be flushed, the next one is "
            f"{manifest.current_generation}; flush memtables in the order they were frozen"
        )


def _published(current: wal.RegionManifest, sst: wal.SsTable, covers_position: int) -> wal.RegionManifest:
    """Run step 4 as a pure edit. Returns `current` if a late edit of this writer has already published the generation.

    Under one epoch only its owner publishes, in order. So the generation has this writer's rows, whatever the name of
    its SST, even if the committer has already pruned it.
    """
    if _is_published(current, sst.generation, covers_position):
        return current
    _expect_next(current, sst.generation)
    return replace(
        current,
        replay_after=covers_position,
        last_seen=max(current.last_seen, covers_position),
        current_generation=sst.generation + 1,
        ssts=(*current.ssts, sst),
    )
