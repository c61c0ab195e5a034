"""Commit: the rows of published SSTs become part of the base table, each exactly once.

 1. Read the regions' manifests, then the base table. In the other order a committer that prunes in between would look
    like a gap (flush.commits.plan.uncommitted). (model: Commit!ReadManifests, Commit!OpenBase)
 2. Plan. Take per region the contiguous generations above the committed one, oldest first, regions by turns, no more
    than `memory_max` holds, and agree on each range with other committers (flush.commits.plan). Wait up to `courtesy`
    seconds for a committer that planned a range first. Then read the newest base version: where it has another
    generation committed than in 1, back to 1. A plan may be one that this committer made after the right one was
    collected (flush.garbage.plans). *Crash here: the next commit takes the same range.* (model: Commit!Plan,
    Commit!LookAgain)
 3. Reduce the SSTs to the newest row of each key: a tombstone is a delete, any other row an upsert.
    (model: Commit!Reduce)
 4. Check whether other programs added rows since the last commit and, where they did, whether a key stands twice
    (flush.commits.foreign_writes). A row to repair is deleted, and back to 1. *Crash here: at most a row was repaired.*
 5. Deletes pass: one base-table version, without the marker. Left out where there is nothing to delete. *Crash here:
    the deleted keys are gone from the base and the progress is not recorded. Readers see the same rows as before,
    because the SSTs still shadow the base. The next commit takes the same range and gives the same table.*
    (model: Commit!DeletesPass)
 6. Upserts pass: one version with the progress marker of every region. Without upserts the deletes pass carries the
    marker. (model: Commit!UpsertsPass)
 7. Back to 1 until everything is committed that the first 1 found published; what was published since rides along, or
    waits for the next commit. Where Lance put 6 on top of versions that 4 had not seen, 4 once more. (model:
    Commit!Finish)
 8. Index catch-up, where an index lags (flush.commits.index_catchup). (model: Commit!CatchUp)
 9. Prune: sync the base to the disk, then remove the committed SSTs from each manifest. *Crash here: the next commit
    does it. Readers skip generations at or below the committed one anyway.* (model: Commit!Sync, Commit!Prune)

4, 8 and 9 are decided from what storage says, so any later commit completes them after a crash.

Counts. Every pass is checked against the keys given to it, the number of rows in the version below it and, where 4
read the base, the rows found there. The base is not scanned in every commit: at 4,000,000 rows that costs as much as
the merge itself, and says nothing where only commits wrote.

A region that fails. What is wrong with one region (an SST that cannot be read or does not fit, a gap, a damaged plan or
manifest, a key of it that stands twice) holds that region back for this commit, before any of its rows is written; its
SSTs stay published, and the others are committed. Where Lance refuses what several regions write together, they are
committed one by one. If the newest version has committed something of the region meanwhile, the failure came from an
outdated view: back to 1.

Conflicts. Lance's own retries are off: they would apply rows planned for an older state. A conflict is recognised by a
newer version of the table, never by the text of an error. The commit then waits a little and begins again at 1, up to
`retries` times in a row. Commits of other programs (append, delete, compaction) end a round the same way.

A second committer. The rows of a range and its marker land in one version, and Lance refuses a marker that is not above
the recorded one. The deletes pass has no marker, but it touches only rows of the version it read, and fails where one
of them changed; rows that a newer commit inserted are out of its reach. The upserts pass fails where one of its keys
was inserted meanwhile.

Without a key. One append that carries the progress replaces 3 to 6. Lance's own marker, which the append cannot carry,
is set before 8: see flush.commits.append_pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from uuid import UUID

import lance

from memwal.flush.base.caches import LanceCaches
from memwal.flush.base.fsync import sync_table
from memwal.flush.base.table import BaseTable
from memwal.flush.commits.append_pass import mark, unmarked
from memwal.flush.commits.conflict_retries import ConflictRetries
from memwal.flush.commits.held_back import HeldBack
from memwal.flush.commits.index_catchup import catch_up
from memwal.flush.commits.index_changes import drop_undeclared
from memwal.flush.commits.report import CommitReport, CommitTotals
from memwal.flush.commits.rounds import Rounds
from memwal.wal import Clock, Ids, ManifestStore, ObjectStore, RegionManifest, SystemIds, WalOptions, regions
from memwal.wal.panics import panics_as_errors

MEMORY_MAX = 1 << 30
"""Bytes of rows that one round of a commit takes by default."""
COURTESY = 3.0
"""Seconds. Longer than most commits; a crash between steps 2 and 6 delays the next commit by it."""


@panics_as_errors
def commit(
    uri: str,
    storage_options: Mapping[str, str] | None,
    store: ObjectStore,
    *,
    clock: Clock,
    ids: Ids | None = None,
    retries: int = 10,
    memory_max: int = MEMORY_MAX,
    courtesy: float = COURTESY,
    committer: str | None = None,
    caches: LanceCaches | None = None,
    held: HeldBack | None = None,
    options: WalOptions | None = None,
) -> CommitReport:
    """Commit every published SST of the table at `uri`, catch its indexes up, prune the manifests.

    `retries`: number of conflicts with other writers in a row that are tolerated. `ids`: None for the system's.
    `memory_max`: bytes taken in one round, as `SsTable.in_memory_bytes` counts them, but at least one SST. A merge
    takes half as much again, and Lance about 300 MB by itself. `courtesy`: seconds to wait, in all, for another
    committer that planned the same SSTs; only double work depends on it. `committer`: name of this committer in its
    plans; None for a fresh id. A process that commits repeatedly passes the same name, so that it never waits for its
    own plan. `caches`: those of the table's views in this process; None for its own. `held`: receives the regions that
    could not be committed, and why; None: the first of these errors is raised once the others are committed.
    `options`: how long storage calls for manifests and plans are retried.
    Thread safety. Any number of threads and processes; nothing is committed twice.
    Durability. Lance's commits do not fsync on a local disk; the SSTs stay listed until the base is synced, and a
    version that a power cut leaves torn before that is set aside when the table is opened (`flush.base.torn`).
    Raises CommitConflict; CountMismatch; Corrupt (gap, missing or broken SST); errors of BaseTable.open;
    OutcomeUnknown, StoreUnavailable, StoreRefused, OSError of storage. After any of them commit again.
    """
    began = clock.monotonic()
    conflict_retries = ConflictRetries(uri, clock, retries)
    name = committer or (ids or SystemIds()).entry_id()
    held_back = HeldBack() if held is None else held
    storage, caches = dict(storage_options or {}), caches or LanceCaches()
    rounds = Rounds(
        uri, storage, store, clock, conflict_retries, memory_max, courtesy, name, caches, held_back, options
    )
    while (base := rounds.next()) is None:
        continue
    base = finished(store, base, clock, ids, conflict_retries, rounds.totals, rounds.failed, options)
    held_back.regions = {**rounds.doubled, **rounds.failed}
    if held is None:
        held_back.raise_first()
    return rounds.totals.report(base.version, clock.monotonic() - began)


def finished(
    store: ObjectStore,
    base: BaseTable,
    clock: Clock,
    ids: Ids | None,
    conflict_retries: ConflictRetries,
    totals: CommitTotals,
    failed: Mapping[UUID, BaseException] | None = None,
    options: WalOptions | None = None,
) -> BaseTable:
    """Steps 8 and 9, and what a table without a key needs before; returns the newest view.

    `failed`: regions that are left out. Raises as `commit`.
    """
    base = _caught_up(_marked(base, conflict_retries, totals), conflict_retries, totals)
    _prune_all(store, base, clock, ids, failed or {}, options)
    return base


def _prune_all(
    store: ObjectStore,
    base: BaseTable,
    clock: Clock,
    ids: Ids | None,
    failed: Mapping[UUID, BaseException],
    options: WalOptions | None,
) -> None:
    """Step 9: where a manifest lists committed SSTs, make the base as durable as they are, then drop them.

    Leaves out the regions `failed`: nothing of them was committed.
    """
    stores = (
        ManifestStore(store, region, clock=clock, options=options) for region in regions(store) if region not in failed
    )
    manifests = [manifest for versions in stores if (manifest := versions.latest())]
    to_prune = [
        (m.region_id, done) for m in manifests if _without(m, done := base.committed.get(m.region_id, 0)) is not m
    ]
    if to_prune:
        sync_table(base.dataset)
    for region, done in to_prune:
        prune(store, region, done, clock=clock, ids=ids, options=options)


def prune(
    store: ObjectStore,
    region_id: UUID,
    committed_generation: int,
    *,
    clock: Clock | None = None,
    ids: Ids | None = None,
    options: WalOptions | None = None,
) -> RegionManifest | None:
    """Drop the SSTs up to `committed_generation` from the region's manifest; their directories stay.

    Returns the newest manifest, None where the region has none. Writes nothing where it lists no such SST.
    Thread safety. Any thread; the owner of the region may write meanwhile. Raises as ManifestStore.edit_unowned does.
    """
    manifests = ManifestStore(store, region_id, ids=ids, clock=clock, options=options)
    if manifests.latest() is None:
        return None
    return manifests.edit_unowned(lambda current: _without(current, committed_generation))


def _without(manifest: RegionManifest, committed_generation: int) -> RegionManifest:
    kept = tuple(sst for sst in manifest.ssts if sst.generation > committed_generation)
    return manifest if len(kept) == len(manifest.ssts) else replace(manifest, ssts=kept)


def _marked(base: BaseTable, conflict_retries: ConflictRetries, totals: CommitTotals) -> BaseTable:
    """Raise Lance's own marker to the committed generations; returns the newest view."""
    while missing := unmarked(base):
        try:
            with panics_as_errors:
                mark(base.dataset, missing)
            totals.versions += 1
        except (OSError, RuntimeError) as error:
            _expect_conflict(base.dataset, error)
            conflict_retries.wait(error)
        base = _opened_again(base)
    return base


def _caught_up(base: BaseTable, conflict_retries: ConflictRetries, totals: CommitTotals) -> BaseTable:
    """Step 8; returns the newest view."""
    while True:
        before = base.version
        try:
            with panics_as_errors:
                moved = catch_up(base.dataset, base.indexes)
                newest = _opened_again(base) if moved else base
                dropped = moved and drop_undeclared(base, newest)
        except (OSError, RuntimeError, ValueError) as error:
            _expect_conflict(base.dataset, error)
            conflict_retries.wait(error)
            base = _opened_again(base)
            continue
        if not moved:
            return base
        totals.versions += base.dataset.version - before
        return _opened_again(base) if dropped else newest


def _opened_again(base: BaseTable) -> BaseTable:
    """Return the newest view. Not by `latest`: a pass has moved the dataset of `base`."""
    return BaseTable.open(base.uri, base.storage_options, caches=base.caches)


def _expect_conflict(dataset: lance.LanceDataset, error: Exception) -> None:
    """Raise `error` again unless the table has a newer version: only that makes it a conflict, not its text."""
    if dataset.latest_version == dataset.version:
        raise error
