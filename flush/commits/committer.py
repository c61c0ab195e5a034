"""Commit: move the rows of published SSTs into the base table, each row exactly once.

 1. Read the region manifests, then the base table. In the reverse order, a committer that prunes between the two reads
    would look like a gap in the generations (flush.commits.plan.uncommitted). (model: Commit!ReadManifests,
    Commit!OpenBase)
 2. Plan. For each region, take the contiguous generations above the committed one, oldest first, alternating between
    regions, up to `memory_max` bytes. Agree on each range with other committers (flush.commits.plan). If another
    committer planned a range first, wait up to `courtesy` seconds for it. Then read the newest base version; if its
    committed generations differ from step 1, restart at step 1. This catches a plan that this committer created after
    the original plan was collected (flush.garbage.plans). *Crash here: the next commit takes the same range.*
    (model: Commit!Plan, Commit!LookAgain)
 3. Reduce the SSTs to the newest row of each key: a tombstone is a delete, any other row an upsert.
    (model: Commit!Reduce)
 4. Check whether other programs added rows since the last commit and, if they did, whether a key has two rows in the
    base (flush.commits.foreign_writes). If a row must be repaired, delete it and restart at step 1. *Crash here: at
    most, a row was repaired.*
 5. Deletes pass: write one base-table version without the marker. Skipped if there is nothing to delete. *Crash here:
    the deleted keys are gone from the base but the progress is not recorded. Readers see the same rows as before,
    because the SSTs still shadow the base. The next commit takes the same range and produces the same table.*
    (model: Commit!DeletesPass)
 6. Upserts pass: write one version with the progress marker of every region. Without upserts, the deletes pass carries
    the marker. (model: Commit!UpsertsPass)
 7. Restart at step 1 until all SSTs that the first step 1 found are committed. SSTs published later are included if a
    round takes them, or wait for the next commit. If Lance rebased step 6 onto versions that step 4 had not read, run
    step 4 again. (model: Commit!Finish)
 8. Index catch-up, if an index lags (flush.commits.index_catchup). (model: Commit!CatchUp)
 9. Prune: sync the base to disk, then remove the committed SSTs from each manifest. *Crash here: the next commit
    prunes. Readers skip generations at or below the committed one in any case.* (model: Commit!Sync, Commit!Prune)

Steps 4, 8 and 9 depend only on the state of storage, so any later commit completes them after a crash.

Counts. Each pass is checked against the number of keys it received, the number of rows in the version below it and, if
step 4 read the base, the rows found there. A commit does not scan the base otherwise: at 4,000,000 rows a scan costs as
much as the merge, and finds nothing if only commits wrote.

A region that fails. A problem of one region (an SST that is unreadable or does not fit, a gap, a damaged plan or
manifest, a key with two rows) holds that region back for this commit, before any of its rows is written. Its SSTs stay
published, and the other regions are committed. If Lance rejects the rows of several regions together, the regions are
committed one by one. If the newest version has committed a generation of the region in the meantime, the failure came
from an outdated view: restart at step 1.

Conflicts. Lance's own retries are disabled: they would apply rows planned for an older state. A conflict is recognised
by a newer version of the table, never by the text of an error. The commit then waits briefly and restarts at step 1, up
to `retries` times in a row. Commits of other programs (append, delete, compaction) end a round the same way.

A second committer. The rows of a range and its marker are in one version, and Lance rejects a marker that is not above
the recorded one. The deletes pass has no marker, but it only affects rows of the version it read and fails if one of
them changed; it cannot reach rows that a newer commit inserted. The upserts pass fails if one of its keys was inserted
in the meantime.

Without a key. One append that carries the progress replaces steps 3 to 6. The append cannot carry Lance's own marker,
which is set before step 8: see flush.commits.append_pass.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import replace
from uuid import UUID

from memwal.flush.base.fsync import sync_table
from memwal.flush.base.open import LanceCaches
from memwal.flush.base.swap import ConflictRetries
from memwal.flush.base.table import BaseTable
from memwal.flush.commits.append_pass import mark, unmarked
from memwal.flush.commits.index_catchup import catch_up
from memwal.flush.commits.index_changes import drop_undeclared
from memwal.flush.commits.report import CommitReport, CommitRun, HeldBack
from memwal.flush.commits.rounds import Rounds
from memwal.wal import Clock, Ids, ManifestStore, ObjectStore, RegionManifest, SystemIds, WalOptions, regions
from memwal.wal.panics import panics_as_errors

MEMORY_MAX = 1 << 30
"""Default number of bytes of rows that one round of a commit takes."""
COURTESY = 3.0
"""Seconds. Longer than most commits take; a crash between steps 2 and 6 delays the next commit by this time."""


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
    """Commit every published SST of the table at `uri`, catch up its indexes, and prune the manifests.

    - `retries`: maximum number of consecutive conflicts with other writers.
    - `ids`: None for the system's.
    - `memory_max`: bytes taken in one round, counted as `SsTable.in_memory_bytes`, but at least one SST. A merge uses
      1.5 times this amount, and Lance itself about 300 MB.
    - `courtesy`: total seconds to wait for another committer that planned the same SSTs. A shorter wait only risks
      duplicate work.
    - `committer`: name of this committer in its plans; None for a fresh id. A process that commits repeatedly must pass
      the same name, so that it never waits for its own plan.
    - `caches`: those of the table's views in this process; None for separate ones.
    - `held`: receives the regions that could not be committed and the errors. If None, the first of these errors is
      raised after the other regions are committed.
    - `options`: how long storage calls for manifests and plans are retried.

    Thread safety. Any number of threads and processes; nothing is committed twice.
    Durability. Lance's commits do not fsync on a local disk. The SSTs stay listed until the base is synced; a version
    torn by a power cut before the sync is set aside when the table is opened (`flush.base.torn`).
    Raises CommitConflict; CountMismatch; Corrupt (gap, missing or broken SST); errors of BaseTable.open;
    OutcomeUnknown, StoreUnavailable, StoreRefused, OSError of storage. After any of them, commit again.
    """
    began = clock.monotonic()
    held_back = HeldBack() if held is None else held
    rounds = Rounds(
        uri,
        dict(storage_options or {}),
        store,
        clock,
        ids,
        ConflictRetries(uri, clock, retries),
        caches or LanceCaches(),
        options,
        memory_max=memory_max,
        courtesy=courtesy,
        committer=committer or (ids or SystemIds()).entry_id(),
        held_back=held_back,
    )
    while (base := rounds.next()) is None:
        continue
    base = finished(rounds, base, rounds.failed)
    held_back.regions = {**rounds.doubled, **rounds.failed}
    if held is None:
        held_back.raise_first()
    return rounds.totals.report(base.version, clock.monotonic() - began)


def finished(run: CommitRun, base: BaseTable, failed: Container[UUID] = ()) -> BaseTable:
    """Run steps 8 and 9, and before them set Lance's marker if the table has no key. Return the newest view.

    `failed`: regions to leave out. Raises as `commit`.
    """
    base = _caught_up(run, _marked(run, base))
    prune_all(run.store, base, run, failed)
    return base


def prune_all(store: ObjectStore, base: BaseTable, run: CommitRun, failed: Container[UUID]) -> None:
    """Run step 9: sync the base if a manifest lists committed SSTs, then remove these SSTs from the manifests.

    Skips the regions in `failed`, because nothing of them was committed.
    """
    found = (region for region in regions(store) if region not in failed)
    stores = (ManifestStore(store, region, clock=run.clock, options=run.options) for region in found)
    manifests = [manifest for versions in stores if (manifest := versions.latest())]
    to_prune = [
        (m.region_id, done) for m in manifests if _without(m, done := base.committed.get(m.region_id, 0)) is not m
    ]
    if to_prune:
        sync_table(base.dataset)
    for region, done in to_prune:
        prune(store, region, done, clock=run.clock, ids=run.ids, options=run.options)


def prune(
    store: ObjectStore,
    region_id: UUID,
    committed_generation: int,
    *,
    clock: Clock | None = None,
    ids: Ids | None = None,
    options: WalOptions | None = None,
) -> RegionManifest | None:
    """Remove the SSTs up to `committed_generation` from the region's manifest. Their directories stay.

    Returns the newest manifest; None if the region has no manifest. Writes nothing if the manifest lists no such SST.
    Thread safety. Any thread; the owner of the region may write concurrently. Raises as ManifestStore.edit_unowned.
    """
    manifests = ManifestStore(store, region_id, ids=ids, clock=clock, options=options)
    if manifests.latest() is None:
        return None
    return manifests.edit_unowned(lambda current: _without(current, committed_generation))


def _without(manifest: RegionManifest, committed_generation: int) -> RegionManifest:
    kept = tuple(sst for sst in manifest.ssts if sst.generation > committed_generation)
    return manifest if len(kept) == len(manifest.ssts) else replace(manifest, ssts=kept)


def _marked(run: CommitRun, base: BaseTable) -> BaseTable:
    """Raise Lance's own marker to the committed generations. Return the newest view."""
    while missing := unmarked(base):
        try:
            with panics_as_errors:
                mark(base.dataset, missing)
            run.totals.versions += 1
        except (OSError, RuntimeError) as error:
            run.conflict_retries.wait_if_newer(base.dataset, error)
        base = run.opened()
    return base


def _caught_up(run: CommitRun, base: BaseTable) -> BaseTable:
    """Run step 8. Return the newest view. `latest` does not serve here: a pass has moved the dataset of `base`."""
    while True:
        before = base.version
        try:
            with panics_as_errors:
                moved = catch_up(base.dataset, base.indexes)
                newest = run.opened() if moved else base
                dropped = moved and drop_undeclared(base, newest)
        except (OSError, RuntimeError, ValueError) as error:
            run.conflict_retries.wait_if_newer(base.dataset, error)
            base = run.opened()
            continue
        if not moved:
            return base
        run.totals.versions += base.dataset.version - before
        return run.opened() if dropped else newest
