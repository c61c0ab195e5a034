"""Maintain the base table on schedule; `flush.commits.maintenance` contains the steps."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence

import lance

from memwal import flush
from memwal.flush.base.fsync import sync_table
from memwal.flush.commits.expiry import GRACE, ExpiredRows
from memwal.flush.commits.maintenance import CompactionLimits, MaintenanceRules, clean_up, compact, merge_segments
from memwal.flush.commits.thinning import VersionRules
from memwal.ingest.errors import classify
from memwal.ingest.settings.load import Settings
from memwal.wal import Clock, open_store
from memwal.wal.panics import as_exception

_LOG = logging.getLogger("memwal.maintenance")
_CHANGES_MARGIN = 7200.0
"""Seconds that versions stay beyond `changes_age_min`: twice the time that rule 3 of `changes.start` needs."""


def maintenance_rules(settings: Settings) -> MaintenanceRules:
    """Return when to maintain the base table, from [commit] and [gc]."""
    commit, gc = settings.commit, settings.gc
    return MaintenanceRules(
        optimize_interval=commit.optimize_interval,
        segments_min=commit.optimize_segments,
        compact_interval=commit.compact_interval,
        compaction=CompactionLimits(
            fragments_min=commit.compact_fragments,
            rows_max=commit.compact_rows_max,
            deleted_min=commit.compact_deleted_percent / 100,
            bytes_max=commit.compact_bytes_max,
        ),
        versions_interval=gc.versions_interval,
        versions=VersionRules(
            age_min=gc.versions_age_min,
            hourly=gc.versions_hourly,
            daily=gc.versions_daily,
            newest=gc.versions_min,
            space_max=gc.space_max,
        ),
        changes_age_min=gc.changes_age_min,
    )


class BaseUpkeep:
    """Run the maintenance steps that are due, after each commit.

    Thread safety. One thread at a time, the one that commits.
    Invariants. It never raises: a step that fails, for example because of another writer's commit, is logged and
    retried at its next interval.
    """

    def __init__(
        self,
        base: flush.BaseTable,
        clock: Clock,
        rules: MaintenanceRules,
        expired: Callable[[int], object] | None = None,
    ) -> None:
        """`base`: any version of the table. Every step is due at first.

        `expired`: called with the number of expired rows that were deleted.
        """
        self._base, self._clock, self._rules, self._tell_expired = base, clock, rules, expired
        self._store = open_store(base.uri, base.storage_options)
        self._expired, self._expired_at = ExpiredRows(), -math.inf
        self._indexes = tuple(spec.name for spec in base.indexes)
        self._vectors = tuple(spec for spec in base.indexes if spec.kind == "ivf_pq")
        # Compaction runs after merging: it joins only fragments that are in one index segment.
        self._steps: Mapping[str, tuple[float, Callable[[lance.LanceDataset], str]]] = {
            "optimize": (rules.optimize_interval, self._merge),
            "compact": (rules.compact_interval, self._compact),
            "clean up": (rules.versions_interval, self._clean_up),
        }
        self._due = {
            name: clock.monotonic()
            for name, (interval, _) in self._steps.items()
            if interval and (name != "clean up" or rules.versions.age_min)
        }

    def run(self, newest: flush.BaseTable | None = None) -> Sequence[str]:
        """Run the steps that are due; return one line per step that changed something.

        `newest`: as for `expire`.
        """
        now = self._clock.monotonic()
        lines = list(self.expire(newest))  # before fragments are compacted: that drops deleted rows from the files
        for name in [name for name, when in self._due.items() if when <= now]:
            interval, step = self._steps[name]
            self._due[name] = self._clock.monotonic() + interval
            lines += self._try(name, step, interval)
        return lines

    def expire(
        self, newest: flush.BaseTable | None = None, unless: Callable[[], bool] = lambda: False
    ) -> Sequence[str]:
        """Delete expired rows if that is due; return a line if there were some.

        `newest`: the newest known version, None for that of the constructor. If it has no ttl, no request is made.
        `unless`: called when the step is due; True postpones it.
        """
        ttl, now = (newest or self._base).ttl, self._clock.monotonic()
        if ttl is None or not ttl.column or now < self._expired_at + (interval := self._expired.interval(ttl)):
            return []
        if unless():
            return []
        self._expired_at = now
        return self._try("deleting expired rows", self._expire, interval)

    def _try(self, name: str, step: Callable[[lance.LanceDataset], str], interval: float) -> Sequence[str]:
        """Run a step; log and return what it did, nothing if it failed."""
        try:
            base = self._base
            dataset = lance.dataset(base.uri, storage_options=dict(base.storage_options), session=base.caches.session)
            if done := step(dataset):
                sync_table(dataset)  # otherwise a power cut may leave an unreadable newest version
        except BaseException as raised:  # noqa: BLE001 - pylance raises any type
            error = classify(as_exception(raised))
            _LOG.warning("%s: %s failed, will try again in %g s: %s", self._base.uri, name, interval, error)
            return []
        if done:
            _LOG.info("%s: %s", self._base.uri, done)
        return [done] if done else []

    def _merge(self, dataset: lance.LanceDataset) -> str:
        least = self._rules.segments_min
        merged = merge_segments(dataset, self._indexes, least, self._vectors) if self._indexes else []
        return f"index segments merged: {', '.join(merged)}" if merged else ""

    def _compact(self, dataset: lance.LanceDataset) -> str:
        replaced, by = compact(dataset, self._rules.compaction)
        return f"fragments compacted: {replaced} into {by}" if replaced else ""

    def _expire(self, dataset: lance.LanceDataset) -> str:
        base = self._base.latest()  # its ttl applies: another process may have changed it
        expiry = base.expiry(self._clock.now() - GRACE)

        def still() -> bool:
            return self._base.latest().ttl == base.ttl

        rows = 0 if expiry is None else self._expired.collect(dataset, expiry, base.storage_options, still)
        if rows and self._tell_expired is not None:
            self._tell_expired(rows)
        return f"expired rows deleted: {rows:,}" if rows else ""

    def _clean_up(self, dataset: lance.LanceDataset) -> str:
        rules = self._rules
        since = self._clock.now() - rules.changes_age_min - _CHANGES_MARGIN if rules.changes_age_min else None
        gone = clean_up(self._store, dataset, rules.versions, self._clock.now(), since)
        return f"old versions removed: {gone}" if gone else ""
