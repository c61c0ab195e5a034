"""Commit: published SSTs become part of the base table, each exactly once.

 1. Read the regions' manifests, then the base table (in this order: see flush.commit_plan.uncommitted).
 2. Take per region the contiguous generations above the committed one, no more than `memory_max` holds, and agree on
    the range with other committers. A range that another one planned is left to it for `courtesy` seconds. Then look at
    the newest base version: where it says another generation than the ranges begin with, back to 1. A plan may be one
    that this committer made after the right one was collected (flush.plan_garbage).
 3. Reduce them to the newest row of each key: a tombstone is a delete, any other an upsert.
 4. Look whether strangers wrote since the last commit, and where they did, whether a key stands twice: see
    flush.strangers. A row to repair is deleted, and back to 1.
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

A second committer. The deletes pass touches only rows of the version it read and fails where one of them
changed; the upserts pass fails where a key of it was inserted meanwhile, and its marker is refused once the
range is committed. In each case storage has moved on, and this commit begins again at 1. Strangers' commits
end the same way.

Without a key. One append that carries the progress takes the place of 3 to 6, and Lance's own marker, which that cannot
carry, comes before 8: see flush.append_pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from uuid import UUID

import lance
import pyarrow as pa

from flush.append_pass import AppendedRows, mark, unmarked
from flush.base_table import BaseTable
from flush.changes import Changes, read_changes
from flush.commit_plan import PlanBehind, RegionPlan, agree, uncommitted, within
from flush.commit_report import CommitReport, Tally
from flush.durability import sync_table
from flush.errors import CountMismatch
from flush.index_catchup import catch_up
from flush.merge_passes import Written, delete_pass, rows_to_delete, upsert_pass
from flush.patience import Patience
from flush.restored import taken_back
from flush.strangers import added_keys, delete_rows, lance_tells_apart, look_back, rows_of, superseded
from wal import Clock, Corrupt, Ids, ManifestStore, ObjectStore, RegionManifest, SystemIds
from wal.layout import regions

MEMORY_MAX = 1 << 30
"""Bytes of rows that one round of a commit takes, where nothing else is said."""
COURTESY = 3.0
"""Seconds. Longer than most commits, and what a crash between 2 and 6 costs the next one."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 0.5


class _Overtaken(Exception):
    """Another writer's version came between ours. Never leaves this module."""


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
) -> CommitReport:
    """Commit every published SST of the table at `uri`, catch its indexes up, prune the manifests.

    `retries`: conflicts with other writers in a row after which it gives up. `ids`: None for the system's.
    `memory_max`: bytes, as `SsTable.in_memory_bytes` counts them, that are taken in one round, but at least one SST. A
    merge takes half as much again, and Lance about 300 MB by itself. `courtesy`: seconds for which another committer
    that planned the same SSTs is given way, in all; only double work depends on it. `committer`: who this is, in those
    plans; None for a fresh id. One that commits again and again gives the same, and so never waits for its own plan.
    Thread safety. Any number of threads and processes; nothing is committed twice.
    Durability. Lance's commits do not fsync on a local disk; the SSTs stay listed until the base is synced.
    Raises CommitConflict; CountMismatch; Corrupt (gap, missing or broken SST); errors of BaseTable.open;
    OutcomeUnknown, StoreUnavailable, StoreRefused, OSError of storage. After any of them commit again.
    """
    began = clock.monotonic()
    patience = Patience(uri, clock, retries)
    me = committer or (ids or SystemIds()).entry_id()
    rounds = _Rounds(uri, dict(storage_options or {}), store, clock, patience, memory_max, courtesy, me)
    while (base := rounds.next()) is None:
        continue
    base = _caught_up(_marked(base, patience, rounds.tally), patience, rounds.tally)
    _prune_all(store, base, clock, ids)
    return rounds.tally.report(base.version, clock.monotonic() - began)


def _prune_all(store: ObjectStore, base: BaseTable, clock: Clock, ids: Ids | None) -> None:
    """Step 9, where there is something to drop: the base first becomes as durable as the SSTs it replaces."""
    manifests = [m for region in regions(store) if (m := ManifestStore(store, region, clock=clock).latest())]
    behind = [
        (m.region_id, done) for m in manifests if _without(m, done := base.committed.get(m.region_id, 0)) is not m
    ]
    if behind:
        sync_table(base.dataset)
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
    tally: Tally = field(default_factory=Tally)
    unchecked: pa.Table | None = None
    """Keys of an upserts pass that Lance put on top of versions nobody had read."""
    appended: AppendedRows | None = None
    """Without a key: what was written last, and is written no more where a conflict has it appended again."""

    def next(self) -> BaseTable | None:
        """One round; the base table once nothing is left to do."""
        found = [ManifestStore(self.store, region, clock=self.clock).latest() for region in regions(self.store)]
        base = BaseTable.open(self.uri, self.options)
        try:
            plans = self._agreed([each for each in found if each is not None], base)
            if not plans and self.unchecked is None:
                return base
            if not self._gave_way(plans, base):
                _expect_unmoved(base.latest(), base, plans)
                self._commit(base, plans)
        except (PlanBehind, _Overtaken) as news:
            self.patience.wait(news)
        except (OSError, RuntimeError, ValueError, Corrupt) as error:
            # Corrupt: others committed these SSTs, which were collected. ValueError: this version was cleaned up.
            _expect_conflict(base.dataset, error)
            self.patience.wait(error)
        else:
            self.patience.reset()
        return None

    def _agreed(self, manifests: Sequence[RegionManifest], base: BaseTable) -> list[RegionPlan]:
        """Step 2."""
        everything = uncommitted(manifests, base.committed, partial(taken_back, self.store, base.version))
        whole = {plan.region: plan for plan in everything}
        return [
            agree(self.store, whole[part.region], clock=self.clock, last=part.last, by=self.me)
            for part in within(everything, self.memory_max)
        ]

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
                self.appended.write()
            self.tally.wrote(self.appended.append(base))
            self.tally.committed(plans, sum(sst.physical_rows or 0 for plan in plans for sst in plan.ssts))
            return
        changes = read_changes(self.store, plans, base.schema, base.key, base.shape.rows)
        beside, there = look_back(self.store, base), None
        if beside.somebody:
            keys = [changes.keys(base.key), added_keys(base, beside)]
            there = rows_of(base, pa.concat_tables(keys if self.unchecked is None else [*keys, self.unchecked]))
            if twice := superseded(base, there, beside):
                self.tally.repaired += delete_rows(base.dataset, twice)
                self.tally.versions += 1
                return
        self.unchecked = None
        if plans:
            self._write(base, changes, there, {plan.region: plan.last for plan in plans})
            self.tally.committed(plans, changes.taken)

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
            mark(base.dataset, missing)
            tally.versions += 1
        except (OSError, RuntimeError) as error:
            _expect_conflict(base.dataset, error)
            patience.wait(error)
        base = BaseTable.open(base.uri, base.storage_options)
    return base


def _caught_up(base: BaseTable, patience: Patience, tally: Tally) -> BaseTable:
    """Step 8; returns the newest view."""
    while True:
        before = base.version
        try:
            moved = catch_up(base.dataset, base.indexes)
        except (OSError, RuntimeError, ValueError) as error:
            _expect_conflict(base.dataset, error)
            patience.wait(error)
            base = BaseTable.open(base.uri, base.storage_options)
            continue
        if not moved:
            return base
        tally.versions += base.dataset.version - before
        return BaseTable.open(base.uri, base.storage_options)


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
