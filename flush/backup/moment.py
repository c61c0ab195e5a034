"""Capture one moment of a table beside running writers: the log positions, SSTs and base version that a backup copies.

 1. Open the base for its routing. For every region read its newest manifest, then the end of its log above the
    manifest's `replay_after`, and the applied map there (`wal.tail_end`, `wal.newest_applied`). The *frontier* is the
    highest sequence of each producer over all regions.
 2. Read the end of every log again. If the applied map there has passed the frontier, go back to the last position
    where it has not. The manifest stays that of step 1. An entry of a later writer epoch than the manifest's means that
    the region was claimed in the meantime: restart at 1. A copy with both would let its next claim take the same epoch
    again.
 3. Only now open the newest base version and tag it. Opened first, it would lack rows that were committed and pruned
    before steps 1 and 2, and so would the manifests.
 4. Check that the base has not passed a manifest: its committed generation, and the end of every uncommitted commit
    plan, are below the manifest's current generation. Check that no region was first claimed after the listing of step
    1: every region that has a manifest now was read. Otherwise remove the tag and restart at 1.

*Crash anywhere: nothing was written but a tag, whose name shows when it was made; see `flush.backup.take`.*

Invariants of the copy of a moment:

 (1) It has every write that was acknowledged as durable before step 1 began. Step 1 finds the end of the log or raises
     Overtaken (`wal.log_tail` has the proof), and step 2 omits no position that step 1 found, because its map is in the
     frontier.
 (2) It has no write that began after step 4 ended.
 (3) In each region it has a prefix of the log: the rows up to a position, each write whole or absent. Rows that are not
     in an entry above `replay_after` are in an SST of the manifest or, if the base has committed it, in the base. Step
     4 keeps rows of later entries out of the base: a commit, including its deletes pass before the marker, writes only
     rows of its plan, and the manifest has published every generation of the plan.
 (4) A writer that sends batch n only when n-1 is durable everywhere, as a query of Spark does, has at most one batch,
     n, in some regions and not in others; n is its number in the frontier. Batch n began before step 2, so n-1 was
     durable everywhere then, and step 2 found it, or step 4 its region; nothing above n passes the frontier. The
     applied maps are in the copy, so the replay of batch n completes it.

Regions are captured one after another: of two writes to two regions, without a token, the later one may be in the copy
and the earlier one not, if both were made during the capture.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from uuid import UUID

from memwal import wal
from memwal.flush.base.table import BaseTable
from memwal.flush.commits.plan import StoredPlan, plans_above
from memwal.flush.errors import BackupOvertaken, InvalidBackup
from memwal.wal.applied import names_of
from memwal.wal.entry_reader import EntryReader
from memwal.wal.parallel_map import AT_ONCE, each
from memwal.wal.replay import newest_applied

CAPTURES = 20
"""Attempts to capture a moment; a flush or commit rarely overtakes one."""


@dataclass(frozen=True)
class RegionMoment:
    """One region: its log up to the position `tip`, its SSTs, and the commit plans that the base has not finished."""

    manifest: wal.RegionManifest
    tip: int
    plans: tuple[StoredPlan, ...] = ()

    @property
    def region(self) -> UUID:
        """Id of the region."""
        return self.manifest.region_id


@dataclass(frozen=True)
class Moment:
    """A moment of a table. See the module docstring."""

    base: BaseTable
    regions: tuple[RegionMoment, ...]
    """All regions with a manifest, including those sealed by a resize."""
    frontier: Mapping[str, int]
    """The highest sequence of each producer in any region."""


def capture(begun: BaseTable, store: wal.ObjectStore, options: wal.WalOptions) -> Moment:
    """Run steps 1 to 4 for the table at the root of `store`, without the tag. Writes nothing.

    `begun`: any version of the table.
    Raises BackupOvertaken if writers overtake every attempt, or the table is being resized; InvalidBackup if its base
    lacks generations that no region lists; Corrupt, StoreUnavailable, StoreRefused.
    """
    at_once = AT_ONCE if store.remote else 1
    for _ in range(CAPTURES):
        with suppress(wal.Overtaken):
            begun = begun.latest()
            looks = [look for look in each(partial(_look, begun, store, options), wal.regions(store), at_once) if look]
            frontier: dict[str, int] = {}
            for _, applied in looks:
                frontier |= {name: max(applied[name], frontier.get(name, applied[name])) for name in names_of(applied)}
            ends = list(each(partial(_end, begun, store, options, frontier), (found for found, _ in looks), at_once))
            base = newest_base(begun)
            # The base was opened before its plans are read: a commit pass in the base had its plan by then, and a plan
            # is never deleted before its range is committed.
            found = [
                replace(end, plans=plans_above(store, end.region, base.committed.get(end.region, 0))) for end in ends
            ]
            # Regions first claimed after step 1 listed them. This finds every such region with rows in the opened base,
            # because a commit requires a manifest of the region.
            unread = set(wal.regions(store)).difference(end.region for end in found)
            new = (region for region in unread if wal.ManifestStore(store, region).latest() is not None)
            stays = base.routing_version == begun.routing_version
            if stays and not any(_is_passed(base, end) for end in found) and not any(new):
                _check(base, found)
                return Moment(base, tuple(found), frontier)
    raise BackupOvertaken(f"{begun.uri}: {CAPTURES} flushes or commits in a row overtook the backup; run it again")


def newest_base(begun: BaseTable) -> BaseTable:
    """Run step 3: return the newest version."""
    return begun.latest()


def _look(
    base: BaseTable, store: wal.ObjectStore, options: wal.WalOptions, region: UUID
) -> tuple[RegionMoment, Mapping[str, int]] | None:
    """Run step 1 for one region; return None if it was never claimed."""
    manifest = wal.ManifestStore(store, region, options=options).latest()
    if manifest is None:
        return None
    suffix, after = base.codec.suffix, manifest.replay_after
    tip = wal.tail_end(store, region, suffix, after, options=options)
    return RegionMoment(manifest, tip), newest_applied(_reader(base, store, manifest), tip, after)


def _end(
    base: BaseTable, store: wal.ObjectStore, options: wal.WalOptions, frontier: Mapping[str, int], look: RegionMoment
) -> RegionMoment:
    """Run step 2 for one region, by bisection: applied maps only grow along the log. Raises Overtaken after a claim."""
    reader = _reader(base, store, look.manifest)

    def is_passed(position: int) -> bool:
        applied = newest_applied(reader, position, look.manifest.replay_after)
        return any(applied[name] > frontier.get(name, -2) for name in names_of(applied))

    end = wal.tail_end(store, look.region, base.codec.suffix, look.tip, options=options)
    tip = look.tip + bisect_left(range(look.tip + 1, end + 1), True, key=is_passed)
    header = reader.header(tip) if tip else None
    if header is not None and header.writer_epoch > look.manifest.writer_epoch:  # epochs only grow along the log
        raise wal.Overtaken(look.region, tip, look.manifest.replay_after, look.manifest.current_generation)
    return replace(look, tip=tip)


def _reader(base: BaseTable, store: wal.ObjectStore, manifest: wal.RegionManifest) -> EntryReader:
    return EntryReader(store, manifest.region_id, base.codec, log_id=manifest.log_id)


def _is_passed(base: BaseTable, end: RegionMoment) -> bool:
    """Return whether the base may have rows that the manifest does not list: step 4."""
    highest = max((base.committed.get(end.region, 0), *(plan.last for plan in end.plans)))
    return highest >= end.manifest.current_generation


def _check(base: BaseTable, ends: Sequence[RegionMoment]) -> None:
    """Raise if the copy would not be a table that writers can continue."""
    for manifest in (end.manifest for end in ends):
        if manifest.region_id in base.regions and manifest.status is wal.RegionStatus.SEALED:
            raise BackupOvertaken(
                f"{base.uri}: the table is being resized; run the backup again when `memwal regions resize` is done"
            )
        committed = base.committed.get(manifest.region_id, 0)
        listed = {sst.generation for sst in manifest.ssts}
        if missing := sorted(set(range(committed + 1, manifest.current_generation)) - listed):
            raise InvalidBackup(
                f"{base.uri}: {wal.named(manifest.region_id)} has no SST of generation {missing[0]}, and the base "
                f"table has committed {committed}: was the base restored to an older version? `memwal verify` says "
                "more; back the table up after the next commit that writes rows"
            )
