"""What the next commit takes from each region, agreed once for all committers.

    {table}/_mem_wal/{region}/commits/{rev(first)}.json = {"first": 4, "last": 6, "by": "1f3a90cc…"}

Two committers that see different numbers of SSTs would commit different ranges from the same start, and then
a slow one could put an old row back after a newer tombstone was committed: Lance refuses a marker that is not
above the recorded one, but accepts two overlapping ranges in ascending order. So the end of the range that
starts at generation `first` is decided by a conditional create: the first committer proposes, everybody
commits that range. With it the marker is a compare-and-swap: of any number of commits of one range exactly
one is accepted. A commit that crashed between its two passes is repeated with the same range too.

The objects are tiny and are never deleted by a commit: a committer asleep since before the plan was made
could otherwise make another one for the same start. Once every retained base version has committed that start they are
garbage (`flush.garbage.plans`), and a committer looks at the newest version between its plan and its first write.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

from memwal.flush.base.state import read_state, versions
from memwal.wal import Clock, Corrupt, ObjectStore, RegionManifest, SsTable, WalOptions
from memwal.wal.layout import parse_rev, region_prefix, rev
from memwal.wal.slot import settle

_KEY = re.compile(r"_mem_wal/(?P<region>[0-9a-f-]{36})/commits/(?P<rev>[01]{64})\.json")


@dataclass(frozen=True)
class RegionPlan:
    """SSTs of one region to commit together: contiguous generations, ascending, at least one."""

    region: UUID
    ssts: tuple[SsTable, ...]
    by_other: bool = False
    """Whether another committer agreed on it first: it is at work, or crashed."""

    @property
    def first(self) -> int:
        """Lowest generation."""
        return self.ssts[0].generation

    @property
    def last(self) -> int:
        """Highest generation: the progress marker of the commit."""
        return self.ssts[-1].generation


class PlanBehind(Exception):
    """Another committer agreed on SSTs that our manifest does not show yet: read again. Never leaves this
    package.
    """


def plan_prefix(region: UUID) -> str:
    """What the keys of a region's plans begin with."""
    return f"{region_prefix(region)}commits/"


def plan_key(region: UUID, first: int) -> str:
    """Key of the plan of the range that starts at generation `first`."""
    return f"{plan_prefix(region)}{rev(first)}.json"


def parse_plan_key(key: str) -> tuple[UUID, int] | None:
    """Region and first generation of a plan's key; None where `key` is no such key."""
    found = _KEY.fullmatch(key)
    return (UUID(found["region"]), parse_rev(found["rev"])) if found else None


def uncommitted(
    manifests: Sequence[RegionManifest],
    committed: Mapping[UUID, int],
    taken_back: Callable[[], Mapping[UUID, int]] = dict,
) -> list[RegionPlan]:
    """Per region everything above what is committed.

    `committed` must be read *after* the manifests: a committer beside us prunes them only after its commit.
    `taken_back`: asked only where generations are missing between the two; see `flush.commits.plan`.
    Raises Corrupt where some are missing that nobody took back.
    """
    plans = []
    for manifest in manifests:
        done = committed.get(manifest.region_id, 0)
        ssts = tuple(sst for sst in manifest.ssts if sst.generation > done)
        if ssts:
            if ssts[0].generation > done + 1:
                done = max(done, min(taken_back().get(manifest.region_id, 0), ssts[0].generation - 1))
            _check_contiguous(manifest, ssts, done)
            plans.append(RegionPlan(manifest.region_id, ssts))
    return plans


def within(plans: Sequence[RegionPlan], memory_max: int) -> list[RegionPlan]:
    """As many SSTs of `plans` as `memory_max` bytes hold, oldest first in every region by turns, at least one. Pure.

    An SST of unknown size is taken by itself. What is left out is for the next round.
    """
    taken = [0] * len(plans)
    free = memory_max
    for turn in range(max((len(plan.ssts) for plan in plans), default=0)):
        for place, plan in enumerate(plans):
            if turn >= len(plan.ssts):
                continue
            size = plan.ssts[turn].in_memory_bytes
            if any(taken) and (size is None or size > free):
                return _cut(plans, taken)
            taken[place] += 1
            free = 0 if size is None else free - size
    return list(plans)


def _cut(plans: Sequence[RegionPlan], counts: Sequence[int]) -> list[RegionPlan]:
    return [RegionPlan(plan.region, plan.ssts[:count]) for plan, count in zip(plans, counts, strict=True) if count]


def agree(
    store: ObjectStore,
    plan: RegionPlan,
    *,
    clock: Clock,
    last: int | None = None,
    by: str = "",
    options: WalOptions | None = None,
) -> RegionPlan:
    """The range every committer commits from `plan.first`: ours where we are the first to say so.

    `plan`: everything uncommitted; `last`: where to end, by default at its end; `by`: who we are, the same over all
    rounds of one commit. A range that another agreed on is taken as it is, however long.
    Raises PlanBehind; Corrupt where the stored plan cannot be read; OutcomeUnknown, StoreUnavailable,
    StoreRefused (harmless: agree again).
    """
    key, last = plan_key(plan.region, plan.first), plan.last if last is None else last
    proposal = json.dumps({"first": plan.first, "last": last, "by": by}).encode()
    taken = settle(store, key, proposal, clock=clock, options=options or WalOptions())
    other = False
    if taken is not None:
        last, owner = _agreed(key, plan.first, taken)
        other = owner != by
    if last > plan.last:
        raise PlanBehind(f"{key}: generations up to {last} are planned, our manifest shows {plan.last}")
    return RegionPlan(plan.region, tuple(sst for sst in plan.ssts if sst.generation <= last), other)


def _agreed(key: str, first: int, data: bytes) -> tuple[int, str]:
    """Where the stored plan ends, and whose it is; "" in plans of committers that did not say."""
    try:
        stored = json.loads(data)
        if stored["first"] == first and stored["last"] >= first:
            return int(stored["last"]), str(stored.get("by", ""))
    except (ValueError, TypeError, KeyError):
        pass
    raise Corrupt(f"{key}: {data[:80]!r} is no commit plan from generation {first}; restore it from a backup")


def _check_contiguous(manifest: RegionManifest, ssts: Sequence[SsTable], done: int) -> None:
    found = [sst.generation for sst in ssts]
    wanted = list(range(done + 1, done + 1 + len(found)))
    if found != wanted:
        raise Corrupt(
            f"region {manifest.region_id}: generation {done} is committed, published next are {found}, "
            f"generation {min(set(wanted) - set(found))} is missing; restore its manifest from a backup, or the base "
            "table if that lost its newest versions"
        )


def taken_back(store: ObjectStore, newest: int) -> Mapping[UUID, int]:
    """Per region the highest generation that a restore up to version `newest` took away; absent = none.

    Reads the manifests of all versions. Raises StoreUnavailable, StoreRefused.
    """
    found: dict[UUID, int] = {}
    for version in versions(store):
        if version > newest:
            break
        try:
            made = read_state(store, version)
            if made.transaction is None or made.transaction.operation != "restore":
                continue
            before = read_state(store, version - 1)
        except Corrupt:  # cleaned up
            continue
        for region, generation in before.committed.items():
            if generation > made.committed.get(region, 0):
                found[region] = max(generation, found.get(region, 0))
    return found
