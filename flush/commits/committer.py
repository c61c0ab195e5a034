"""Commit: published SSTs become part of the base table, each exactly once.

 1. Read the regions' manifests, then the base table (in this order: see flush.commits.plan.uncommitted).
 2. Take per region the contiguous generations above the committed one, no more than `memory_max` holds, and agree on
    the range with other committers. A range that another one planned is left to it for `courtesy` seconds. Then look at
    the newest base version: where it says another generation than the ranges begin with, back to 1. A plan may be one
    that this committer made after the right one was collected (flush.garbage.plans).
 3. Reduce them to the newest row of each key: a tombstone is a delete, any other an upsert.
 4. Look whether strangers wrote since the last commit, and where they did, whether a key stands twice: see
    flush.commits.foreign_writes. A row to repair is deleted, and back to 1.
 5. Deletes pass: one base-table version, no marker. Left out where there is nothing to delete.
 6. Upserts pass: one version with the progress marker. Without upserts the deletes pass carries the marker.
 7. Back to 1 until nothing is left. Where Lance put 6 on top of versions that 4 had not seen, 4 once more.
 8. Index catch-up, where an index lags.
 9. Prune: the base is synced to the disk, then each manifest drops the SSTs that are committed.

Crash points. Before 5: nothing happened, or a row was repaired. Between 5 and 6: rows that were to be deleted are gone,
nothing is recorded; the next commit takes the same range and gives the same table, and readers meanwhile see the same
rows as before, because the SSTs still lie over the base. After 6: 4, 8 and 9 are decided from what storage says,
by any later commit.

Counts. Every pass is held against the keys that were handed to it, the rows of the version below it and, where 4 read
the base, what it found there. Not by a scan of the base in every commit: at 4,000,000 rows that costs as much as the
merge itself, and says nothing where nobody but commits wrote.

A region that fails. What is wrong with one region (an SST that cannot be read or does not fit, a gap, a damaged plan or
manifest, a key of it that stands twice) holds that region back for this commit, before anything of it is written; the
others are committed. Where Lance refuses what several regions write together, they are committed one by one. Not so
where the failure is the word of an older state: if the newest version has committed something of the region, back to 1.

A second committer. The deletes pass touches only rows of the version it read and fails where one of them
changed; the upserts pass fails where a key of it was inserted meanwhile, and its marker is refused once the
range is committed. In each case storage has moved on, and this commit begins again at 1. Strangers' commits
end the same way.

Without a key. One append that carries the progress takes the place of 3 to 6, and Lance's own marker, which that cannot
carry, comes before 8: see flush.commits.append_pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from uuid import UUID

import lance
import pyarrow as pa

from memwal.flush.base.caches import LanceCaches
from memwal.flush.base.fsync import sync_table
from memwal.flush.base.table import BaseTable
from memwal.flush.commits.append_pass import AppendedRows, mark, unmarked
from memwal.flush.commits.changes import Changes, read_changes
from memwal.flush.commits.foreign_writes import (
    Beside,
    added_keys,
    delete_rows,
    lance_tells_apart,
    look_back,
    rows_of,
    superseded,
)
from memwal.flush.commits.held_back import HeldBack, is_failure
from memwal.flush.commits.index_catchup import catch_up
from memwal.flush.commits.merge_passes import Written, delete_pass, rows_to_delete, upsert_pass
from memwal.flush.commits.patience import Patience
from memwal.flush.commits.plan import PlanBehind, RegionPlan, agree, taken_back, uncommitted, within
from memwal.flush.commits.report import CommitReport, Tally
from memwal.flush.errors import CommitConflict, CountMismatch
from memwal.wal import (
    Clock,
    Corrupt,
    Ids,
    ManifestStore,
    ObjectStore,
    OutcomeUnknown,
    RegionManifest,
    StoreUnavailable,
    SystemIds,
    WalOptions,
)
from memwal.wal.layout import regions
from memwal.wal.panics import panics_as_errors

MEMORY_MAX = 1 << 30
"""Bytes of rows that one round of a commit takes, where nothing else is said."""
COURTESY = 3.0
"""Seconds. Longer than most commits, and what a crash between 2 and 6 costs the next one."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 0.5
_CONFLICTS = (OSError, RuntimeError, ValueError, Corrupt)
"""What a writer's own version that came between looks like."""


class _Overtaken(Exception):
    """Another writer's version came between ours. Never leaves this module."""


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

    `retries`: conflicts with other writers in a row after which it gives up. `ids`: None for the system's.
    `memory_max`: bytes, as `SsTable.in_memory_bytes` counts them, that are taken in one round, but at least one SST. A
    merge takes half as much again, and Lance about 300 MB by itself. `courtesy`: seconds for which another committer
    that planned the same SSTs is given way, in all; only double work depends on it. `committer`: who this is, in those
    plans; None for a fresh id. One that commits again and again gives the same, and so never waits for its own plan.
    `caches`: those of the table's views in this process; None for its own. `held`: is told which regions could not be
    committed, and why; None: the first of these errors is raised once the others are committed.
    `options`: how long storage calls of manifests and plans are tried.
    Thread safety. Any number of threads and processes; nothing is committed twice.
    Durability. Lance's commits do not fsync on a local disk; the SSTs stay listed until the base is synced.
    Raises CommitConflict; CountMismatch; Corrupt (gap, missing or broken SST); errors of BaseTable.open;
    OutcomeUnknown, StoreUnavailable, StoreRefused, OSError of storage. After any of them commit again.
    """
    began = clock.monotonic()
    patience = Patience(uri, clock, retries)
    me = committer or (ids or SystemIds()).entry_id()
    holding = HeldBack() if held is None else held
    storage, caches = dict(storage_options or {}), caches or LanceCaches()
    rounds = _Rounds(uri, storage, store, clock, patience, memory_max, courtesy, me, caches, holding, options)
    while (base := rounds.next()) is None:
        continue
    base = _caught_up(_marked(base, patience, rounds.tally), patience, rounds.tally)
    _prune_all(store, base, clock, ids, rounds.aside, options)
    holding.regions = {**rounds.told, **rounds.aside}
    if held is None:
        holding.raise_first()
    return rounds.tally.report(base.version, clock.monotonic() - began)


def _prune_all(
    store: ObjectStore,
    base: BaseTable,
    clock: Clock,
    ids: Ids | None,
    aside: Mapping[UUID, BaseException],
    options: WalOptions | None,
) -> None:
    """Step 9, where there is something to drop: the base first becomes as durable as the SSTs it replaces. Not of the
    regions `aside`: of these nothing was committed.
    """
    stores = (
        ManifestStore(store, region, clock=clock, options=options) for region in regions(store) if region not in aside
    )
    manifests = [manifest for each in stores if (manifest := each.latest())]
    behind = [
        (m.region_id, done) for m in manifests if _without(m, done := base.committed.get(m.region_id, 0)) is not m
    ]
    if behind:
        sync_table(base.dataset)
    for region, done in behind:
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

    Returns the newest manifest, None where the region has none. Writes nothing where there is nothing to
    drop.
    Thread safety. Any; the owner of the region goes on beside it. Raises as ManifestStore.edit_unowned does.
    """
    manifests = ManifestStore(store, region_id, ids=ids, clock=clock, options=options)
    if manifests.latest() is None:
        return None
    return manifests.edit_unowned(lambda current: _without(current, committed_generation))


def _without(manifest: RegionManifest, committed_generation: int) -> RegionManifest:
    kept = tuple(sst for sst in manifest.ssts if sst.generation > committed_generation)
    return manifest if len(kept) == len(manifest.ssts) else replace(manifest, ssts=kept)


@dataclass
class _Rounds:
    """Steps 1 to 7 of one commit, round after round.

    Thread safety. One thread only.
    """

    uri: str
    options: dict[str, str]
    store: ObjectStore
    clock: Clock
    patience: Patience
    memory_max: int
    courtesy: float
    """Seconds left of it."""
    me: str
    caches: LanceCaches
    held: HeldBack
    limits: WalOptions | None = None
    tally: Tally = field(default_factory=Tally)
    unchecked: pa.Table | None = None
    """Keys of an upserts pass that Lance put on top of versions nobody had read."""
    appended: AppendedRows | None = None
    """Without a key: what was written last, and is written no more where a conflict has it appended again."""
    aside: dict[UUID, BaseException] = field(default_factory=dict)
    """Regions that are held back in this commit, and why."""
    told: dict[UUID, BaseException] = field(default_factory=dict)
    """Regions that have a key twice in the base which nobody writes."""
    one_by_one: bool = False
    """Whether each region is committed by itself, since Lance refused them together."""

    def next(self) -> BaseTable | None:
        """One round; the base table once nothing is left to do."""
        found = self._manifests()
        base = BaseTable.open(self.uri, self.options, caches=self.caches)
        plans: list[RegionPlan] = []
        try:
            plans = self._agreed(found, base)
            if not plans and self.unchecked is None:
                return base
            if not self._gave_way(plans, base):
                _expect_unmoved(base.latest(), base, plans)
                with panics_as_errors:
                    self._commit(base, plans)
        except (PlanBehind, _Overtaken) as news:
            self.patience.wait(news)
        except BaseException as error:  # noqa: BLE001 - a panic of Lance is no Exception; `_failed` raises what is not ours
            # Corrupt: others committed these SSTs, which were collected. ValueError: this version was cleaned up.
            self._failed(base, plans, error)
        else:
            self.patience.reset()
        return None

    def _failed(self, base: BaseTable, plans: Sequence[RegionPlan], error: BaseException) -> None:
        """A round failed: it is made again if the table has moved on, else its regions one by one. Raises `error` where
        it is not one of a region's, or says what a pass did.
        """
        if not is_failure(error) or isinstance(error, (CommitConflict, StoreUnavailable, OutcomeUnknown)):
            raise error
        dataset = base.dataset
        if dataset.latest_version != dataset.version:
            if not isinstance(error, _CONFLICTS):
                raise error
            self.patience.wait(error)
        elif isinstance(error, CountMismatch) or not plans:
            raise error
        elif len(plans) > 1:
            self.one_by_one = True
        else:
            self.aside[plans[0].region] = error
            self.appended = None

    @contextmanager
    def _apart(self, region: UUID, base: BaseTable) -> Iterator[None]:
        """What fails within holds `region` back."""
        try:
            yield
        except (PlanBehind, _Overtaken):
            raise
        except BaseException as error:
            if not is_failure(error):
                raise
            self._hold_back(base, {region: error})

    def _hold_back(self, base: BaseTable, failed: Mapping[UUID, BaseException]) -> None:
        """Hold the regions `failed` back. Raises _Overtaken where one of them was committed by another meanwhile."""
        newest = base.latest()
        for region, error in failed.items():
            if (done := newest.committed.get(region, 0)) != base.committed.get(region, 0):
                raise _Overtaken(f"{self.uri}: version {newest.version} has committed generation {done} of {region}")
            self.aside[region] = error

    def _manifests(self) -> list[RegionManifest]:
        """Those of the regions that are not held back."""
        found = []
        for region in regions(self.store):
            if region in self.aside:
                continue
            try:
                manifest = ManifestStore(self.store, region, clock=self.clock, options=self.limits).latest()
            except Corrupt as error:
                self.aside[region] = error
                continue
            if manifest is not None:
                found.append(manifest)
        return found

    def _agreed(self, manifests: Sequence[RegionManifest], base: BaseTable) -> list[RegionPlan]:
        """Step 2."""
        restored = partial(taken_back, self.store, base.version)
        everything: list[RegionPlan] = []
        for manifest in manifests:
            with self._apart(manifest.region_id, base):
                everything += uncommitted([manifest], base.committed, restored)
        whole = {plan.region: plan for plan in everything}
        plans: list[RegionPlan] = []
        for part in within(everything[:1] if self.one_by_one else everything, self.memory_max):
            with self._apart(part.region, base):
                plans.append(
                    agree(
                        self.store,
                        whole[part.region],
                        clock=self.clock,
                        last=part.last,
                        by=self.me,
                        options=self.limits,
                    )
                )
        return plans

    def _gave_way(self, plans: Sequence[RegionPlan], base: BaseTable) -> bool:
        """Whether the committer that planned the same before us has finished in the meantime, or some of it."""
        others = [plan for plan in plans if plan.by_other]
        view, pause = base, _FIRST_PAUSE
        while others and self.courtesy > 0:
            self.clock.sleep(pause)
            self.courtesy -= pause
            pause = min(2 * pause, _LONGEST_PAUSE)
            view = view.latest()
            if any(view.committed.get(plan.region, 0) >= plan.last for plan in others):
                return True
        return False

    def _commit(self, base: BaseTable, plans: Sequence[RegionPlan]) -> None:
        """Steps 3 to 6. `base` was opened for this round alone: the passes move its dataset on."""
        if not base.key:
            if self.appended is None or not self.appended.serves(base, plans):
                self.appended = AppendedRows(self.store, base, plans)
                try:
                    self.appended.write()
                except BaseException as error:
                    region = self.appended.failed_at
                    if region is None or not is_failure(error):
                        raise
                    self._hold_back(base, {region: error})
                    return
            self.tally.wrote(self.appended.append(base))
            self.tally.committed(plans, sum(sst.physical_rows or 0 for plan in plans for sst in plan.ssts))
            return
        changes = read_changes(self.store, plans, base.schema, base.key, base.shape.rows)
        if changes.failed:
            self._hold_back(base, changes.failed)
            plans = [plan for plan in plans if plan.region not in changes.failed]
        behind = [plan.region for plan in plans if plan.by_other]
        beside, there, doubled = look_back(self.store, base, behind), None, self.held.doubled
        if doubled is not None and doubled.column_names != list(base.key):
            doubled = None
        if beside.somebody or doubled is not None:
            keys = [changes.keys(base.key), added_keys(base, beside)]
            keys += [each.cast(keys[0].schema) for each in (self.unchecked, doubled) if each is not None]
            there = rows_of(base, pa.concat_tables(keys))
            if self._repaired_or_held(base, changes, there, beside):
                return
        self.unchecked = None
        if plans:
            self._write(base, changes, there, {plan.region: plan.last for plan in plans})
            self.tally.committed(plans, changes.taken)

    def _repaired_or_held(self, base: BaseTable, changes: Changes, there: pa.Table, beside: Beside) -> bool:
        """Step 4, for keys that stand twice: whether a row was repaired or a region is held back now."""
        older, doubled, said = superseded(base, there, beside)
        self.held.doubled = doubled if doubled.num_rows else None
        self.told = dict(said)
        written = doubled.join(changes.keys(base.key), list(base.key), join_type="left semi") if said else doubled
        wanted = {base.regions[bucket] for bucket in base.route(written).tolist()} if written.num_rows else set()
        if wanted:
            self._hold_back(base, {region: error for region, error in said.items() if region in wanted})
        elif older:
            self.tally.repaired += delete_rows(base.dataset, older)
            self.tally.versions += 1
        return bool(wanted or older)

    def _write(self, base: BaseTable, changes: Changes, there: pa.Table | None, marker: Mapping[UUID, int]) -> None:
        """Steps 5 and 6. `there`: the base's rows with keys of `changes`, None where nobody had to look.

        After a conflict a deletes pass with nothing left to delete is left out. It would make a version all the same,
        and two committers could overtake each other with those for ever.
        """
        dataset, look_first = base.dataset, self.patience.conflicts > 0
        if not changes.upserts.num_rows:
            self._done(base, delete_pass(dataset, changes.deletes, marker), changes.deletes, there)
            return
        if changes.deletes.num_rows and not (look_first and not rows_to_delete(dataset, changes.deletes)):
            self._done(base, delete_pass(dataset, changes.deletes), changes.deletes, there)
            _expect_not_overtaken(base)
        read = dataset.version
        written = upsert_pass(dataset, changes.upserts, base.key, marker)
        if dataset.version != read + 1:
            there = None
            if not lance_tells_apart(base.schema, base.key):
                self.unchecked = changes.upserts.select(list(base.key))
        self._done(base, written, changes.upserts, there)

    def _done(self, base: BaseTable, written: Written, rows: pa.Table, there: pa.Table | None) -> None:
        """A pass with `rows` is in the base; says so where it did not meet the rows that were `there`."""
        self.tally.wrote(written)
        if there is None:
            return
        key = list(base.key)
        wanted = there.join(rows.select(key), key, join_type="left semi").num_rows
        if written.updated + written.deleted != wanted:
            raise CountMismatch(
                f"{base.uri}: version {base.dataset.version} replaced or deleted {written.updated + written.deleted} "
                f"rows, version {base.version} held {wanted} with these keys; compare the two, and stop other writers"
            )


def _marked(base: BaseTable, patience: Patience, tally: Tally) -> BaseTable:
    """Lance's own marker as high as ours, where it is not; returns the newest view."""
    while missing := unmarked(base):
        try:
            with panics_as_errors:
                mark(base.dataset, missing)
            tally.versions += 1
        except (OSError, RuntimeError) as error:
            _expect_conflict(base.dataset, error)
            patience.wait(error)
        base = _opened_again(base)
    return base


def _caught_up(base: BaseTable, patience: Patience, tally: Tally) -> BaseTable:
    """Step 8; returns the newest view."""
    while True:
        before = base.version
        try:
            with panics_as_errors:
                moved = catch_up(base.dataset, base.indexes)
        except (OSError, RuntimeError, ValueError) as error:
            _expect_conflict(base.dataset, error)
            patience.wait(error)
            base = _opened_again(base)
            continue
        if not moved:
            return base
        tally.versions += base.dataset.version - before
        return _opened_again(base)


def _opened_again(base: BaseTable) -> BaseTable:
    """The newest view; not `latest`, since a pass has moved the dataset of this one."""
    return BaseTable.open(base.uri, base.storage_options, caches=base.caches)


def _expect_unmoved(newest: BaseTable, read: BaseTable, plans: Sequence[RegionPlan]) -> None:
    """The last part of step 2."""
    for region in (plan.region for plan in plans):
        if (done := newest.committed.get(region, 0)) != read.committed.get(region, 0):
            raise _Overtaken(f"{newest.uri}: version {newest.version} has committed generation {done} of {region}")


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
