"""Commit: published SSTs become part of the base table, each exactly once.

 1. Read the regions' manifests, then the base table (in this order: see flush.commit_plan.uncommitted).
 2. Take per region the contiguous generations above the committed one, and agree on the range with other
    committers.
 3. Reduce them to the newest row of each key: a tombstone is a delete, any other an upsert.
 4. Deletes pass: one base-table version, no marker. Left out where there is nothing to delete.
 5. Upserts pass: one version with the progress marker. Without upserts the deletes pass carries the marker.
 6. Back to 1 until nothing is left.
 7. Index catch-up, where an index lags.
 8. Prune: the base is synced to the disk, then each manifest drops the SSTs that are committed.

Crash points. Before 4: nothing happened. Between 4 and 5: rows that were to be deleted are gone, nothing is
recorded; the next commit takes the same range and gives the same table, and readers meanwhile see the same
rows as before, because the SSTs still lie over the base. After 5: 7 and 8 are decided from what storage says,
by any later commit.

A second committer. The deletes pass touches only rows of the version it read and fails where one of them
changed; the upserts pass fails where a key of it was inserted meanwhile, and its marker is refused once the
range is committed. In each case storage has moved on, and this commit begins again at 1. Strangers' commits
end the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from uuid import UUID

import lance

from flush.base_table import BaseTable
from flush.changes import Changes, read_changes
from flush.commit_plan import PlanBehind, RegionPlan, agree, uncommitted
from flush.durability import sync_table
from flush.index_catchup import catch_up
from flush.merge_passes import delete_pass, rows_to_delete, upsert_pass
from flush.patience import Patience
from wal import Clock, Ids, ManifestStore, ObjectStore, RegionManifest
from wal.layout import regions


@dataclass(frozen=True)
class CommitReport:
    """What one commit did. All numbers are 0 where nothing was published."""

    version: int
    """Base-table version afterwards, index catch-up included."""
    regions: dict[str, int]
    """Region id -> highest generation this commit added."""
    rows_inserted: int
    rows_updated: int
    rows_deleted: int
    ssts: int
    seconds: float


class _Overtaken(Exception):
    """Another writer's version came between ours. Never leaves this module."""


@dataclass
class _Totals:
    """Sums over the rounds of one commit."""

    regions: dict[str, int] = field(default_factory=dict)
    inserted: int = 0
    updated: int = 0
    deleted: int = 0
    ssts: int = 0


def commit(
    uri: str,
    storage_options: Mapping[str, str] | None,
    store: ObjectStore,
    *,
    clock: Clock,
    ids: Ids | None = None,
    retries: int = 10,
) -> CommitReport:
    """Commit every published SST of the table at `uri`, catch its indexes up, prune the manifests.

    `retries`: conflicts with other writers in a row after which it gives up. `ids`: None for the system's.
    Holds the rows it commits in memory.
    Thread safety. Any number of threads and processes; they get in each other's way, nothing is committed
    twice.
    Durability. Lance's commits do not fsync on a local disk; the SSTs stay listed until the base is synced.
    Raises CommitConflict; CountMismatch; Corrupt (gap, missing or broken SST); errors of BaseTable.open;
    OutcomeUnknown, StoreUnavailable, StoreRefused, OSError of storage. After any of them commit again.
    """
    began = clock.monotonic()
    options = dict(storage_options or {})
    totals = _Totals()
    patience = Patience(uri, clock, retries)
    while _round(uri, options, store, clock, totals, patience):
        continue
    base = _caught_up(uri, options, patience)
    _prune_all(store, base, clock, ids)
    return CommitReport(
        version=base.version,
        regions=totals.regions,
        rows_inserted=totals.inserted,
        rows_updated=totals.updated,
        rows_deleted=totals.deleted,
        ssts=totals.ssts,
        seconds=clock.monotonic() - began,
    )


def _prune_all(store: ObjectStore, base: BaseTable, clock: Clock, ids: Ids | None) -> None:
    """Step 8, where there is something to drop: the base first becomes as durable as the SSTs it replaces."""
    manifests = [m for region in regions(store) if (m := ManifestStore(store, region, clock=clock).latest())]
    behind = [
        (m.region_id, done) for m in manifests if _without(m, done := base.committed.get(m.region_id, 0)) is not m
    ]
    if behind:
        sync_table(store.url(""))
    for region, done in behind:
        prune(store, region, done, clock=clock, ids=ids)


def prune(
    store: ObjectStore,
    region_id: UUID,
    committed_generation: int,
    *,
    clock: Clock | None = None,
    ids: Ids | None = None,
) -> RegionManifest | None:
    """Drop the SSTs up to `committed_generation` from the region's manifest; their directories stay.

    Returns the newest manifest, None where the region has none. Writes nothing where there is nothing to
    drop.
    Thread safety. Any; the owner of the region goes on beside it. Raises as ManifestStore.edit_unowned does.
    """
    manifests = ManifestStore(store, region_id, ids=ids, clock=clock)
    if manifests.latest() is None:
        return None
    return manifests.edit_unowned(lambda current: _without(current, committed_generation))


def _without(manifest: RegionManifest, committed_generation: int) -> RegionManifest:
    kept = tuple(sst for sst in manifest.ssts if sst.generation > committed_generation)
    return manifest if len(kept) == len(manifest.ssts) else replace(manifest, ssts=kept)


def _round(
    uri: str, options: dict[str, str], store: ObjectStore, clock: Clock, totals: _Totals, patience: Patience
) -> bool:
    """Steps 1 to 5 once. False where nothing was left to commit."""
    manifests = [m for region in regions(store) if (m := ManifestStore(store, region, clock=clock).latest())]
    base = BaseTable.open(uri, options)
    try:
        plans = [agree(store, plan, clock=clock) for plan in uncommitted(manifests, base.committed)]
        if not plans:
            return False
        changes = read_changes(store, plans, base.schema, base.key)
        _write(base, changes, plans, totals, look_first=patience.conflicts > 0)
    except (PlanBehind, _Overtaken) as news:
        patience.wait(news)
    except (OSError, RuntimeError) as error:
        _expect_conflict(base.dataset, error)
        patience.wait(error)
    else:
        patience.reset()
    return True


def _write(base: BaseTable, changes: Changes, plans: list[RegionPlan], totals: _Totals, *, look_first: bool) -> None:
    """Steps 4 and 5. `base` was opened for this round alone: the passes move its dataset on.

    `look_first`: after a conflict, leave out a deletes pass with nothing left to delete. It would make a
    version all the same, and two committers could overtake each other with those for ever.
    """
    marker = {plan.region: plan.last for plan in plans}
    if not changes.upserts.num_rows:
        totals.deleted += delete_pass(base.dataset, changes.deletes, marker)
    else:
        if changes.deletes.num_rows and not (look_first and not rows_to_delete(base.dataset, changes.deletes)):
            totals.deleted += delete_pass(base.dataset, changes.deletes)
            _expect_not_overtaken(base)
        inserted, updated = upsert_pass(base.dataset, changes.upserts, base.key, marker)
        totals.inserted += inserted
        totals.updated += updated
    totals.regions |= {str(region): generation for region, generation in marker.items()}
    totals.ssts += sum(len(plan.ssts) for plan in plans)


def _caught_up(uri: str, options: dict[str, str], patience: Patience) -> BaseTable:
    """Step 7; returns the newest view."""
    while True:
        base = BaseTable.open(uri, options)
        try:
            moved = catch_up(base.dataset, base.indexes)
        except (OSError, RuntimeError) as error:
            _expect_conflict(base.dataset, error)
            patience.wait(error)
            continue
        return BaseTable.open(uri, options) if moved else base


def _expect_not_overtaken(base: BaseTable) -> None:
    """After the deletes pass: Lance may have put it on top of commits to other rows; then read again."""
    found = base.dataset.version
    if found > base.version + 1:
        raise _Overtaken(f"{base.uri}: version {found} follows {base.version} in place of {base.version + 1}")


def _expect_conflict(dataset: lance.LanceDataset, error: Exception) -> None:
    """Raise `error` again unless the table has moved on meanwhile: a conflict is known by that, not by its
    text.
    """
    if dataset.latest_version == dataset.version:
        raise error
