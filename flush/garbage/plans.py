"""Delete commit plans that no committer can need: every retained base version has committed their ranges.

A plan decides the end of the range that starts at generation `first`. Two ranges with one start must never both be
committed (`flush.commits.plan`). A plan may therefore be deleted only if a committer that then creates another plan in
the empty slot does not commit by it.

The rule: a plan is deleted when every version in `_versions/`, tagged ones included, has committed `first` of its
region. Versions from before the table's set-up do not count: a committer rejects them. (model: Commit!ReadVersions,
Commit!DeletePlan)

Why it is safe. A committer reads the region manifests; then the base version, which has `first - 1` committed; creates
or finds the plan; then reads the newest base version again, and continues only if that still has `first - 1`
(`flush.commits.committer`). Suppose the plan was deleted before this last read. By the rule the newest version had
`first` committed then. Any newer version was made on top of it and has `first` too: generations only go up, except by a
`restore`, which can only bring back a retained version, and all of those had it. So the committer finds `first`
committed, and restarts. If the last read came before the plan was deleted, the slot was full when the committer read
it, and its plan is the one that all others have.

A committer that is suspended during all this may leave its own plan in the empty slot. That plan is garbage like the
first one.

Region manifests have another rule: see `wal.manifest_garbage`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from uuid import UUID

from memwal.flush.base.manifest import set_up_generations
from memwal.flush.base.state import versions
from memwal.flush.commits.plan import parse_plan_key, plan_prefix
from memwal.wal import Corrupt, ObjectStore

PLANS_MIN = 64
"""Number of plans of a region that makes a collection worthwhile: the first one reads the manifest of every version."""


@dataclass(frozen=True)
class PlanGarbage:
    """The result of one collection of a region's commit plans: deleted plans, or plans to delete with `dry_run`."""

    region: UUID
    plans: int = 0
    """Deleted plans."""
    bytes: int = 0
    """Total size of these plans."""
    needed: int = 0
    """Plans kept: an older version of the base table could be restored, or they are not committed yet."""
    dry_run: bool = False


class PlanCollector:
    """Collects the commit plans of a table; may be called repeatedly.

    Thread safety. One thread at a time; any number of collectors, in any number of processes.
    Invariants. See the module docstring. A base version never changes, so each is read once.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._committed: dict[int, Mapping[UUID, int] | None] = {}

    def collect(self, region: UUID, *, at_least: int = 1, dry_run: bool = False) -> PlanGarbage:
        """Delete the plans of `region` that are garbage; with fewer than `at_least` plans do nothing.

        Raises Corrupt if a base version cannot be read; StoreUnavailable, StoreRefused (some plans may be deleted by
        then; collect again).
        """
        plans = {}
        for info in self._store.describe(plan_prefix(region)):
            if (parsed := parse_plan_key(info.key)) is not None:
                plans[parsed[1]] = info
        if len(plans) < at_least:
            return PlanGarbage(region, needed=len(plans), dry_run=dry_run)
        settled = self.settled(region)
        garbage = [info for first, info in sorted(plans.items()) if first <= settled]
        if not dry_run:
            for info in garbage:
                self._store.delete(info.key)
        size = sum(info.size for info in garbage)
        return PlanGarbage(region, len(garbage), size, len(plans) - len(garbage), dry_run)

    def settled(self, region: UUID) -> int:
        """Return the highest generation of `region` that every retained version holds. Raises as `collect`."""
        retained = set(versions(self._store))
        self._committed = {version: done for version, done in self._committed.items() if version in retained}
        for version in sorted(retained - self._committed.keys()):
            try:
                self._committed[version] = set_up_generations(self._store, version)
            except Corrupt:
                if version in versions(self._store):
                    raise
                # Cleaned up meanwhile, so it cannot be restored.
        return min((done.get(region, 0) for done in self._committed.values() if done is not None), default=0)
