"""Plan which generations the next commit takes from each region, agreed once between all committers.

    {table}/_mem_wal/{region}/commits/{rev(first)}.json = {"first": 4, "last": 6, "by": "1f3a90cc…"}

Lance rejects a marker that is not above the recorded one, but accepts two overlapping ranges in ascending order. A
committer that saw generations 1-2 and one that saw 1-3 have different markers, and if their rows have different keys
both would succeed. A slow committer could therefore restore a key inserted by generation 2 after generation 3 deleted
it. So a conditional create decides the end of the range that starts at generation `first`: the first committer proposes
it, and every committer commits that range. This makes the marker a compare-and-swap: of any number of commits of one
range exactly one is accepted. A commit that crashed between its two passes is repeated with the same range.

The objects are small, and a commit never deletes one: a committer suspended since before the plan was created could
then create a different plan for the same start. Plans become garbage once every retained base version has committed
their start (`flush.garbage.plans`); for this reason a committer reads the newest version between its plan and its first
write.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

from memwal.flush.base.state import read_state, versions
from memwal.wal import Clock, Corrupt, ObjectStore, RegionManifest, SsTable, WalOptions, named
from memwal.wal.layout import parse_rev, region_prefix, rev
from memwal.wal.slot import put_until_known

_KEY = re.compile(r"_mem_wal/(?P<region>[0-9a-f-]{36})/commits/(?P<rev>[01]{64})\.json")


@dataclass(frozen=True)
class RegionPlan:
    """SSTs of one region to commit together: contiguous generations, ascending, at least one."""

    region: UUID
    ssts: tuple[SsTable, ...]
    by_other: bool = False
    """Whether another committer planned the range first; that committer is running, or crashed."""

    @property
    def first(self) -> int:
        """Lowest generation."""
        return self.ssts[0].generation

    @property
    def last(self) -> int:
        """Highest generation: the progress marker of the commit."""
        return self.ssts[-1].generation


@dataclass(frozen=True)
class StoredPlan:
    """A plan as stored."""

    key: str
    data: bytes
    last: int
    """Last generation of its range."""


class PlanBehind(Exception):
    """Another committer planned SSTs that this committer's manifest does not list yet: read again.

    Never leaves this package.
    """


def plan_prefix(region: UUID) -> str:
    """Return the prefix of the keys of a region's plans."""
    return f"{region_prefix(region)}commits/"


def plan_key(region: UUID, first: int) -> str:
    """Return the key of the plan whose range starts at generation `first`."""
    return f"{plan_prefix(region)}{rev(first)}.json"


def parse_plan_key(key: str) -> tuple[UUID, int] | None:
    """Return region and first generation of a plan's key; None for any other key."""
    match = _KEY.fullmatch(key)
    return (UUID(match["region"]), parse_rev(match["rev"])) if match else None


def plans_above(store: ObjectStore, region: UUID, committed: int) -> tuple[StoredPlan, ...]:
    """Return the plans of `region` whose range begins above generation `committed`, ascending.

    Raises Corrupt if a plan cannot be parsed; StoreUnavailable, StoreRefused.
    """
    starts = {}
    for key in store.list(plan_prefix(region)):
        if (parsed := parse_plan_key(key)) is not None and parsed[1] > committed:
            starts[parsed[1]] = key
    stored = ((first, key, store.get(key)) for first, key in sorted(starts.items()))
    return tuple(StoredPlan(key, data, agreed(key, first, data)[0]) for first, key, data in stored if data is not None)


def uncommitted(
    manifests: Sequence[RegionManifest],
    committed: Mapping[UUID, int],
    restored: Callable[[], Mapping[UUID, int]] = dict,
) -> list[RegionPlan]:
    """Return, per region, all published generations above the committed one.

    `committed` must be read *after* the manifests: another committer prunes them only after its commit. `restored`:
    returns `restored_generations`; only called if generations are missing between the two.
    Raises Corrupt if generations are missing that no restore took back.
    """
    plans = []
    for manifest in manifests:
        done = committed.get(manifest.region_id, 0)
        ssts = tuple(sst for sst in manifest.ssts if sst.generation > done)
        if ssts:
            if ssts[0].generation > done + 1:
                done = max(done, min(restored().get(manifest.region_id, 0), ssts[0].generation - 1))
            published = [sst.generation for sst in ssts]
            wanted = list(range(done + 1, done + 1 + len(published)))
            if published != wanted:
                raise Corrupt(
                    f"{named(manifest.region_id)}: generation {done} is committed, published next are {published}, "
                    f"generation {min(set(wanted) - set(published))} is missing; restore its manifest from a backup, "
                    "or the base table if that lost its newest versions"
                )
            plans.append(RegionPlan(manifest.region_id, ssts))
    return plans


def fitting(plans: Sequence[RegionPlan], memory_max: int) -> list[RegionPlan]:
    """Return the SSTs of `plans` that fit into `memory_max` bytes, at least one.

    The oldest come first, alternating between regions. An SST of unknown size is taken alone. The next round takes the
    rest. Pure.
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
    """Return the range from `plan.first` that every committer commits: the proposal, if this committer plans it first.

    - `plan`: everything uncommitted.
    - `last`: proposed last generation, by default the last of `plan`.
    - `by`: name of this committer, the same in all rounds of one commit.

    A range planned by another committer is taken unchanged, whatever its length.
    Raises PlanBehind; Corrupt if the stored plan cannot be parsed; OutcomeUnknown, StoreUnavailable, StoreRefused
    (harmless: agree again).
    """
    key, last = plan_key(plan.region, plan.first), plan.last if last is None else last
    proposal = json.dumps({"first": plan.first, "last": last, "by": by}).encode()
    existing = put_until_known(store, key, proposal, clock=clock, options=options or WalOptions())
    last, owner = (last, by) if existing is None else agreed(key, plan.first, existing)
    if last > plan.last:
        raise PlanBehind(f"{key}: generations up to {last} are planned, our manifest ends at {plan.last}")
    return RegionPlan(plan.region, tuple(sst for sst in plan.ssts if sst.generation <= last), owner != by)


def agreed(key: str, first: int, data: bytes) -> tuple[int, str]:
    """Return the last generation of a stored plan and its committer; "" for old plans without a committer.

    Raises Corrupt unless `data` is a plan that begins at generation `first`.
    """
    try:
        stored = json.loads(data)
        if stored["first"] == first and stored["last"] >= first:
            return int(stored["last"]), str(stored.get("by", ""))
    except (ValueError, TypeError, KeyError):
        pass
    raise Corrupt(f"{key}: {data[:80]!r} is no commit plan from generation {first}; restore it from a backup")


def restored_generations(store: ObjectStore, newest: int) -> Mapping[UUID, int]:
    """Return, per region, the highest generation that restores up to version `newest` took back; absent = none.

    Reads the manifests of all versions. Raises StoreUnavailable, StoreRefused.
    """
    generations: dict[UUID, int] = {}
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
                generations[region] = max(generation, generations.get(region, 0))
    return generations
