"""Commit plans that nobody can need again: those of ranges that every retained base version has committed.

A plan decides where the range that starts at generation `first` ends. Two ranges from one start must never be committed
side by side (`flush.commits.plan`), so a slot may be emptied only when whoever fills it anew does not go on from there.

The rule: a plan goes when every version in `_versions/`, tagged ones among them, has committed `first` of its region.
Versions from before the table's set-up do not count: no committer takes them for a table.

Why it is safe. A committer works in this order: region manifests; base version, which says that `first - 1` is
committed; the plan, made or found; then the newest base version once more, and only where that says the same it
goes on (`flush.commits.committer`). Suppose the slot was emptied before that last look. By the rule the newest version
had `first` then. What is newest later was made on top of it and has `first` too: generations only go up, but for a
`restore`, which can bring back a retained version only, and all of those had it. So the committer finds `first`
committed, and begins again. One whose last look came before the slot was emptied has a plan that nobody else could have
decided otherwise, because the slot was full when it looked.

A committer that sleeps through all this may leave its plan in the emptied slot. It is garbage like the first one.

Region manifests are judged by another rule: see `wal.manifest_garbage`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from uuid import UUID

from memwal.flush.base.manifest import manifest_version, set_up_generations
from memwal.flush.commits.plan import parse_plan_key, plan_prefix
from memwal.wal import Corrupt, ObjectStore

PLANS_MIN = 64
"""Plans of a region that are worth a look by themselves: the first look reads the manifest of every version."""


@dataclass(frozen=True)
class PlanGarbage:
    """What one collection of a region's commit plans found, and deleted unless `dry_run`."""

    region: UUID
    plans: int = 0
    """Plans deleted."""
    bytes: int = 0
    """Their size together."""
    needed: int = 0
    """Plans kept: an older version of the base table could be put back, or they are not committed yet."""
    dry_run: bool = False


class PlanCollector:
    """Collects the commit plans of a table, as often as it is asked.

    Thread safety. One thread at a time; any number of collectors, in any number of processes.
    Invariants. See the module's text. A base version never changes, so each is read once.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._committed: dict[int, Mapping[UUID, int] | None] = {}

    def collect(self, region: UUID, *, at_least: int = 1, dry_run: bool = False) -> PlanGarbage:
        """Delete the plans of `region` that go; where there are fewer than `at_least`, nothing is looked at.

        Raises Corrupt where a base version cannot be read; StoreUnavailable, StoreRefused (what was deleted by then is
        deleted; collect again).
        """
        found = {}
        for each in self._store.describe(plan_prefix(region)):
            if (parsed := parse_plan_key(each.key)) is not None:
                found[parsed[1]] = each
        if len(found) < at_least:
            return PlanGarbage(region, needed=len(found), dry_run=dry_run)
        settled = self.settled(region)
        gone = [each for first, each in sorted(found.items()) if first <= settled]
        if not dry_run:
            for each in gone:
                self._store.delete(each.key)
        return PlanGarbage(region, len(gone), sum(each.size for each in gone), len(found) - len(gone), dry_run)

    def settled(self, region: UUID) -> int:
        """The highest generation of `region` that every retained version holds. Raises as `collect`."""
        retained = self._versions()
        self._committed = {version: done for version, done in self._committed.items() if version in retained}
        for version in sorted(retained - self._committed.keys()):
            try:
                self._committed[version] = set_up_generations(self._store, version)
            except Corrupt:
                if version in self._versions():
                    raise
                # Cleaned up in this moment: nobody can put it back.
        return min((done.get(region, 0) for done in self._committed.values() if done is not None), default=0)

    def _versions(self) -> set[int]:
        found = (manifest_version(key) for key in self._store.list("_versions/"))
        return {version for version in found if version is not None}
