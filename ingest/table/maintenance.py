"""Maintain the base table on schedule; `flush.commits.maintenance` has the steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import lance

from memwal import flush
from memwal.flush.base.fsync import sync_table
from memwal.flush.commits.maintenance import MaintenanceRules, clean_up, compact, merge_segments
from memwal.ingest.errors import classify
from memwal.wal import Clock
from memwal.wal.panics import as_exception

_LOG = logging.getLogger("memwal.maintenance")
_CHANGES_MARGIN = 7200.0
"""Seconds for which versions stay beyond `changes_age_min`: twice what `changes.base_versions` asks in its rule 3."""


class BaseUpkeep:
    """Runs the maintenance steps that are due, after each commit.

    Thread safety. One thread at a time, the one that commits.
    Invariants. It never raises: a step that fails, for example by another writer's commit, is logged and tried again
    at its next interval.
    """

    def __init__(self, base: flush.BaseTable, clock: Clock, rules: MaintenanceRules) -> None:
        """Everything is due at first. `base`: any version of the table."""
        self._base, self._clock = base, clock
        self._indexes = tuple(spec.name for spec in base.indexes)
        self._vectors = tuple(spec for spec in base.indexes if spec.kind == "ivf_pq")
        # Compaction goes after merging: it joins only fragments that are in one index segment.
        self._steps: Mapping[str, tuple[float, Callable[[lance.LanceDataset], str]]] = {
            "optimize": (rules.optimize_interval, lambda dataset: self._merge(dataset, rules)),
            "compact": (rules.compact_interval, lambda dataset: self._compact(dataset, rules)),
            "clean up": (rules.versions_interval, lambda dataset: self._clean_up(dataset, rules)),
        }
        self._due = {
            name: clock.monotonic()
            for name, (interval, _) in self._steps.items()
            if interval and (name != "clean up" or rules.versions_age_min)
        }

    def run(self) -> Sequence[str]:
        """Run the steps that are due; return one line per step that changed something."""
        now = self._clock.monotonic()
        due = [name for name, when in self._due.items() if when <= now]
        lines = [line for name in due if (line := self._guarded(name))]
        for line in lines:
            _LOG.info("%s: %s", self._base.uri, line)
        return lines

    def _guarded(self, name: str) -> str:
        interval, step = self._steps[name]
        self._due[name] = self._clock.monotonic() + interval
        try:
            base = self._base
            dataset = lance.dataset(base.uri, storage_options=dict(base.storage_options), session=base.caches.session)
            if done := step(dataset):
                sync_table(dataset)  # otherwise a power cut may leave an unreadable newest version
            return done
        except BaseException as raised:  # noqa: BLE001 - pylance raises any type
            error = classify(as_exception(raised))
            _LOG.warning("%s: %s failed, will try again in %g s: %s", self._base.uri, name, interval, error)
            return ""

    def _merge(self, dataset: lance.LanceDataset, rules: MaintenanceRules) -> str:
        merged = merge_segments(dataset, self._indexes, rules.segments_min, self._vectors) if self._indexes else []
        return f"index segments merged: {', '.join(merged)}" if merged else ""

    @staticmethod
    def _compact(dataset: lance.LanceDataset, rules: MaintenanceRules) -> str:
        replaced, by = compact(dataset, rules.fragments_min, rules.rows_max, rules.deleted_min)
        return f"fragments compacted: {replaced} into {by}" if replaced else ""

    def _clean_up(self, dataset: lance.LanceDataset, rules: MaintenanceRules) -> str:
        since = self._clock.now() - rules.changes_age_min - _CHANGES_MARGIN if rules.changes_age_min else None
        gone = clean_up(dataset, rules.versions_age_min, rules.versions_min, since)
        return f"old versions removed: {gone}" if gone else ""
