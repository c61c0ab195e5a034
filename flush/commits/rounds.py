"""Steps 1 to 7 of a commit (flush.commits.committer), repeated in rounds until the SSTs found first are committed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from uuid import UUID

import pyarrow as pa

from memwal.flush.base.table import BaseTable
from memwal.flush.commits import foreign_writes
from memwal.flush.commits.append_pass import AppendedSsts
from memwal.flush.commits.changes import Changes, read_changes
from memwal.flush.commits.foreign_writes import ForeignWrites
from memwal.flush.commits.merge_passes import Written, delete_pass, rows_to_delete, upsert_pass
from memwal.flush.commits.plan import PlanBehind, RegionPlan, agree, fitting, restored_generations, uncommitted
from memwal.flush.commits.report import FAILURES, CommitRun, HeldBack
from memwal.flush.errors import CommitConflict, CountMismatch, UnsupportedTable
from memwal.wal import Corrupt, ManifestStore, OutcomeUnknown, RegionManifest, StoreUnavailable, regions
from memwal.wal.errors import first_line
from memwal.wal.panics import panics_as_errors
from memwal.wal.retries import Backoff

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 0.5
"""Seconds between checks whether another committer has finished."""
_CONFLICTS = (OSError, RuntimeError, ValueError, Corrupt)
"""Errors that a round may raise if another writer created a version in between."""


class _Overtaken(Exception):
    """Another writer created a version in between; the round restarts. Never leaves this module."""


@dataclass(kw_only=True)
class Rounds(CommitRun):
    """The rounds of one commit.

    Thread safety. One thread only.
    """

    memory_max: int
    courtesy: float
    """Seconds left to wait for other committers."""
    committer: str
    """Name of this committer in its plans."""
    held_back: HeldBack
    unchecked: pa.Table | None = None
    """Keys of an upserts pass that Lance rebased onto versions that no round has read."""
    appended: AppendedSsts | None = None
    """Without a key: the rows written last. After a conflict they are appended again, not rewritten."""
    failed: dict[UUID, BaseException] = field(default_factory=dict)
    """Regions held back in this commit, with their errors."""
    doubled: dict[UUID, BaseException] = field(default_factory=dict)
    """Regions with a key that has two rows in the base and is not written by an SST, with their errors."""
    published: dict[UUID, int] = field(default_factory=dict)
    """The newest generation of each region that the first round found published. The commit ends with these: regions
    may publish faster than rounds complete, and steps 8 and 9 would never run.
    """
    one_by_one: bool = False
    """Whether regions are committed one by one, because Lance rejected them together."""

    def next(self) -> BaseTable | None:
        """Run one round. Return the base table if nothing is left to do, else None."""
        manifests = self._manifests()
        base = self.opened()
        plans: list[RegionPlan] = []
        try:
            plans = self.agreed(manifests, base)
            if not plans and self.unchecked is None:
                return base
            if not self._gave_way(plans, base):
                newest = base.latest()  # the last part of step 2
                for plan in plans:
                    _expect_same_progress(newest, base, plan.region)
                with panics_as_errors:
                    self._commit(base, plans)
        except (PlanBehind, _Overtaken) as conflict:
            self.conflict_retries.wait(conflict)
        except FAILURES as error:
            # Corrupt: another committer committed these SSTs and they were collected. ValueError: this version was
            # cleaned up.
            self._failed(base, plans, error)
        else:
            self.conflict_retries.reset()
        return None

    def _failed(self, base: BaseTable, plans: Sequence[RegionPlan], error: Exception) -> None:
        """Handle a failed round: repeat it if the table has a newer version, else commit its regions one by one.

        Raises `error` if it does not belong to one region, or if a pass had already written.
        """
        if isinstance(error, (CommitConflict, StoreUnavailable, OutcomeUnknown)):
            raise error
        dataset = base.dataset
        if dataset.latest_version != dataset.version:
            if not isinstance(error, _CONFLICTS):
                raise error
            self.conflict_retries.wait(error)
        elif isinstance(error, CountMismatch) or not plans:
            raise error
        elif len(plans) > 1:
            self.one_by_one = True
        else:
            self.failed[plans[0].region] = _explained(base, error)
            self.appended = None

    @contextmanager
    def _failing_alone(self, region: UUID, base: BaseTable) -> Iterator[None]:
        """Hold `region` back if the block fails."""
        try:
            yield
        except FAILURES as error:
            self._hold_back(base, {region: error})

    def _hold_back(self, base: BaseTable, failed: Mapping[UUID, BaseException]) -> None:
        """Hold the regions `failed` back. Raises _Overtaken if another committer has committed one in the meantime."""
        newest = base.latest()
        for region, error in failed.items():
            _expect_same_progress(newest, base, region)
            self.failed[region] = error

    def _manifests(self) -> list[RegionManifest]:
        """Return the newest manifest of every region that is not held back."""
        manifests = []
        for region in regions(self.store):
            if region in self.failed:
                continue
            try:
                manifest = ManifestStore(self.store, region, clock=self.clock, options=self.options).latest()
            except Corrupt as error:
                self.failed[region] = error
                continue
            if manifest is not None:
                manifests.append(manifest)
        self.published = self.published or {each.region_id: _newest(each) for each in manifests}
        return manifests

    def agreed(self, manifests: Sequence[RegionManifest], base: BaseTable) -> list[RegionPlan]:
        """Run step 2: return the ranges agreed between all committers."""
        restored = partial(restored_generations, self.store, base.version)
        everything: list[RegionPlan] = []
        for manifest in manifests:
            if base.committed.get(manifest.region_id, 0) >= self.published.get(manifest.region_id, 0):
                continue
            with self._failing_alone(manifest.region_id, base):
                everything += uncommitted([manifest], base.committed, restored)
        whole = {plan.region: plan for plan in everything}
        plans: list[RegionPlan] = []
        for part in fitting(everything[:1] if self.one_by_one else everything, self.memory_max):
            with self._failing_alone(part.region, base):
                plans.append(
                    agree(
                        self.store,
                        whole[part.region],
                        clock=self.clock,
                        last=part.last,
                        by=self.committer,
                        options=self.options,
                    )
                )
        return plans

    def _gave_way(self, plans: Sequence[RegionPlan], base: BaseTable) -> bool:
        """Wait for committers that planned the same ranges first. Return whether one of them has committed."""
        others = [plan for plan in plans if plan.by_other]
        view, backoff = base, Backoff(_FIRST_PAUSE, _LONGEST_PAUSE)
        while others and self.courtesy > 0:
            pause = backoff.pause()
            self.clock.sleep(pause)
            self.courtesy -= pause
            view = view.latest()
            if any(view.committed.get(plan.region, 0) >= plan.last for plan in others):
                return True
        return False

    def _commit(self, base: BaseTable, plans: Sequence[RegionPlan]) -> None:
        """Run steps 3 to 6. `base` must be opened for this round alone: the passes move its dataset."""
        if not base.key:
            self._append(base, plans)
            return
        changes = read_changes(self.store, plans, base.schema, base.key, base.shape.rows)
        if changes.failed:
            self._hold_back(base, changes.failed)
            plans = [plan for plan in plans if plan.region not in changes.failed]
        foreign = foreign_writes.look_back(self.store, base, [plan.region for plan in plans if plan.by_other])
        stored, doubled = None, self.held_back.doubled
        if doubled is not None and doubled.column_names != list(base.key):
            doubled = None
        if foreign.possible or doubled is not None:
            keys = [changes.keys(base.key), foreign_writes.added_keys(base, foreign)]
            keys += [more.cast(keys[0].schema) for more in (self.unchecked, doubled) if more is not None]
            stored = foreign_writes.rows_with_keys(base, pa.concat_tables(keys))
            if self._repaired_or_held(base, changes, stored, foreign):
                return
        self.unchecked = None
        if plans:
            self._write(base, changes, stored, {plan.region: plan.last for plan in plans})
            self.totals.committed(plans, changes.taken)

    def _append(self, base: BaseTable, plans: Sequence[RegionPlan]) -> None:
        """Run steps 3 to 6 of a table without a key."""
        if self.appended is None or not self.appended.serves(base, plans):
            self.appended = AppendedSsts(self.store, base, plans)
            try:
                self.appended.write()
            except FAILURES as error:
                if (region := self.appended.failed_at) is None:
                    raise
                self._hold_back(base, {region: error})
                return
        self.totals.wrote(self.appended.append(base))
        self.totals.committed(plans, sum(sst.physical_rows or 0 for plan in plans for sst in plan.ssts))

    def _repaired_or_held(self, base: BaseTable, changes: Changes, stored: pa.Table, foreign: ForeignWrites) -> bool:
        """Run step 4 for keys with two rows. Return whether a row was repaired or a region was held back."""
        older, doubled, errors = foreign_writes.duplicates(base, stored, foreign)
        self.held_back.doubled = doubled if doubled.num_rows else None
        self.doubled = dict(errors)
        written = doubled.join(changes.keys(base.key), list(base.key), join_type="left semi") if errors else doubled
        affected = {base.regions[bucket] for bucket in base.route(written).tolist()} if written.num_rows else set()
        if affected:
            self._hold_back(base, {region: error for region, error in errors.items() if region in affected})
        elif older:
            self.totals.repaired += foreign_writes.delete_rows(base.dataset, older)
            self.totals.versions += 1
        return bool(affected or older)

    def _write(self, base: BaseTable, changes: Changes, stored: pa.Table | None, marker: Mapping[UUID, int]) -> None:
        """Run steps 5 and 6. `stored`: the base's rows with keys of `changes`; None if step 4 did not read the base.

        After a conflict, a deletes pass without rows to delete is skipped. It would create a version all the same, and
        two committers could overtake each other with those versions forever.
        """
        dataset, look_first = base.dataset, self.conflict_retries.conflicts > 0
        if not changes.upserts.num_rows:
            self._done(base, delete_pass(dataset, changes.deletes, marker), changes.deletes, stored)
            return
        if changes.deletes.num_rows and not (look_first and not rows_to_delete(dataset, changes.deletes)):
            self._done(base, delete_pass(dataset, changes.deletes), changes.deletes, stored)
            if (version := dataset.version) > base.version + 1:  # rebased onto other commits: read the rows again
                raise _Overtaken(f"{base.uri}: version {version} follows {base.version} in place of {base.version + 1}")
        read = dataset.version
        written = upsert_pass(dataset, changes.upserts, base.key, marker)
        if dataset.version != read + 1:
            stored = None
            if not foreign_writes.lance_detects_duplicates(base.schema, base.key):
                self.unchecked = changes.upserts.select(list(base.key))
        self._done(base, written, changes.upserts, stored)

    def _done(self, base: BaseTable, written: Written, rows: pa.Table, stored: pa.Table | None) -> None:
        """Add a pass with `rows` to the totals.

        Raises CountMismatch if it replaced or deleted other rows than `stored`.
        """
        self.totals.wrote(written)
        if stored is None:
            return
        key = list(base.key)
        expected = stored.join(rows.select(key), key, join_type="left semi").num_rows
        if written.updated + written.deleted != expected:
            raise CountMismatch(
                f"{base.uri}: version {base.dataset.version} replaced or deleted {written.updated + written.deleted} "
                f"rows, version {base.version} held {expected} with these keys; compare the two, and stop other writers"
            )


def _explained(base: BaseTable, error: BaseException) -> BaseException:
    """Return the error of a commit that Lance rejected, with the remedy if memwal cannot hold a table column."""
    if base.puts_rejected is None or not isinstance(error, (OSError, ValueError, RuntimeError)):
        return error
    explained = UnsupportedTable(f"{base.uri}: rows cannot be committed ({first_line(error)}): {base.puts_rejected}")
    explained.__cause__ = error
    return explained


def _newest(manifest: RegionManifest) -> int:
    return max((sst.generation for sst in manifest.ssts), default=0)


def _expect_same_progress(newest: BaseTable, read: BaseTable, region: UUID) -> None:
    """Raise _Overtaken if `region` was committed since `read`."""
    done = newest.committed.get(region, 0)
    if done != read.committed.get(region, 0):
        raise _Overtaken(f"{newest.uri}: version {newest.version} has committed generation {done} of {region}")
