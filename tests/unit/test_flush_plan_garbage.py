"""Collection of commit plans that no committer can need, and a committer that sleeps meanwhile."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import lance
import pytest

from memwal.flush import PlanCollector, PlanGarbage
from memwal.flush.base.manifest import read_progress, set_up_generations
from memwal.flush.commits import committer, rounds
from memwal.flush.commits import plan as commit_plan
from memwal.flush.commits.plan import parse_plan_key, plan_key, plan_prefix
from memwal.flush.commits.report import CommitTotals
from memwal.flush.garbage import plans
from memwal.wal import Corrupt, LocalStore, StoreUnavailable, bucket_region
from tests.commit_world import World
from tests.messages import raises
from tests.support.clock import FakeClock
from tests.support.interpose import Once

REGION = bucket_region(0)


@pytest.fixture
def world(uri: str) -> World:
    """Return a table of one region after four commits of one generation each."""
    world = World(uri, buckets=1)
    for n in range(4):
        world.put([n, 100], n)
        world.commit()
    return world


def starts(world: World) -> list[int]:
    keys = map(parse_plan_key, world.store.list(plan_prefix(REGION)))
    return sorted(key[1] for key in keys if key is not None)


def clean_up(world: World) -> None:
    """Delete old versions, except those from before the set-up, as `flush.commits.maintenance` does."""
    dataset = lance.dataset(world.uri)
    set_up = next(
        each["version"]
        for each in dataset.versions()
        if lance.dataset(world.uri, version=each["version"]).mem_wal_index_details() is not None
    )
    dataset.cleanup_old_versions(
        older_than=timedelta(0),
        versions=[each["version"] for each in dataset.versions() if each["version"] >= set_up],
        error_if_tagged_old_versions=False,
    )


def collect(world: World, **options: Any) -> PlanGarbage:
    return PlanCollector(world.store).collect(REGION, **options)


def test_a_plan_stays_while_a_version_without_its_range_could_be_put_back(world: World) -> None:
    assert starts(world) == [1, 2, 3, 4]
    assert (collect(world).plans, collect(world).needed) == (0, 4)
    assert starts(world) == [1, 2, 3, 4]


def test_plans_go_with_the_last_version_that_lacks_their_range(world: World) -> None:
    clean_up(world)
    world.put([9], 9)  # a plan that is not committed yet
    (todo,) = commit_plan.uncommitted(world.latest(), {REGION: 4})
    commit_plan.agree(world.store, todo, clock=FakeClock())
    dry = collect(world, dry_run=True)
    assert (dry.plans, dry.needed, dry.dry_run) == (4, 1, True)
    assert starts(world) == [1, 2, 3, 4, 5]
    found = collect(world)
    assert (found.plans, found.needed, found.bytes) == (4, 1, dry.bytes)
    assert found.bytes > 0
    assert starts(world) == [5]
    assert collect(world).plans == 0
    world.commit()
    assert world.found() == world.oracle


def test_a_tagged_version_keeps_the_plans_behind_it(world: World) -> None:
    dataset = lance.dataset(world.uri)
    at = next(each["version"] for each in dataset.versions() if _committed(world, each["version"]) == 2)
    dataset.tags.create("kept", at)
    clean_up(world)
    assert collect(world).plans == 2
    assert starts(world) == [3, 4]
    lance.dataset(world.uri, version=at).restore()
    assert _committed(world, world.version()) == 2


def _committed(world: World, version: int) -> int:
    return read_progress(world.store, version).committed.get(REGION, 0)


def test_few_plans_are_not_worth_a_look(world: World) -> None:
    clean_up(world)
    assert collect(world, at_least=5) == PlanGarbage(REGION, needed=4)
    assert collect(world, at_least=4).plans == 4


def test_a_collector_that_goes_on_reads_each_version_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    collector, reads = PlanCollector(world.store), list[int]()

    def read(store: Any, version: int) -> Any:
        reads.append(version)
        return set_up_generations(store, version)

    monkeypatch.setattr("memwal.flush.garbage.plans.set_up_generations", read)
    collector.collect(REGION)
    first = len(reads)
    collector.collect(REGION)
    assert len(reads) == first
    world.put([7], 7)
    world.commit()
    collector.collect(REGION)
    assert reads[first:] == [world.version()]


def test_a_version_that_is_cleaned_up_meanwhile_counts_no_more(world: World, once: Once) -> None:
    collector = PlanCollector(world.store)
    once(plans, "set_up_generations", lambda: clean_up(world))
    collector.collect(REGION)
    assert collector.collect(REGION).needed == 0
    assert starts(world) == []


def test_a_version_that_cannot_be_read_deletes_nothing(world: World) -> None:
    clean_up(world)
    (newest,) = [key for key in world.store.list("_versions/") if str(2**64 - 1 - world.version()) in key]
    world.store.put(newest, b"nonsense")
    with raises(Corrupt):
        collect(world)
    assert starts(world) == [1, 2, 3, 4]


@pytest.mark.parametrize("done", range(4))
def test_a_collection_that_dies_in_the_middle_is_finished_by_the_next(
    world: World, done: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clean_up(world)
    left, delete = [done], LocalStore.delete

    def dying(store: LocalStore, key: str) -> None:
        if not left[0]:
            raise StoreUnavailable("gone")
        left[0] -= 1
        delete(store, key)

    with monkeypatch.context() as patched:
        patched.setattr(LocalStore, "delete", dying)
        with pytest.raises(StoreUnavailable):
            collect(world)
    world.put([1, 50], 50)
    world.delete([2])
    world.commit()
    assert world.found() == world.oracle
    clean_up(world)
    assert collect(world).needed == 0
    assert starts(world) == []


def test_a_committer_that_slept_while_its_plan_was_collected_commits_nothing(
    uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The committer read manifests with three generations and a base without any. Then other committers committed two
    of the generations and cleaned up.

    If the committer wrote a new plan for all three generations, the rows of the first two would stay in the base for
    ever: their deletion was planned on a version without them and deletes nothing, and the marker of the plan is above
    the recorded one.
    """
    world = World(uri, buckets=1)
    world.put([1], 1)
    world.put([2], 2)
    world.delete([1, 2])
    agreed, agree, slept = [], rounds.agree, []

    def sleepy(store: Any, plan: Any, **options: Any) -> Any:
        if not slept:
            slept.append(plan.last)
            monkeypatch.setattr(rounds, "agree", lambda store, plan, **o: agree(store, plan, **(o | {"last": 2})))
            monkeypatch.setattr(committer, "prune_all", lambda *_: None)
            with pytest.raises(_Enough):  # the first two generations, by another committer
                world.commit(committer="other")
            clean_up(world)
            assert collect(world).plans == 1
            monkeypatch.undo()
            found = agree(store, plan, **options)
            agreed.append((found.first, found.last))
            return found
        return agree(store, plan, **options)

    commit = CommitTotals.committed

    def once(totals: Any, *arguments: Any) -> None:
        commit(totals, *arguments)
        if slept:
            raise _Enough

    monkeypatch.setattr(rounds, "agree", sleepy)
    monkeypatch.setattr(CommitTotals, "committed", once)
    world.commit()
    assert agreed == [(1, 3)]  # the plan that must not be carried out
    assert world.found() == world.oracle
    assert world.committed() == {0: 3}


class _Enough(Exception):
    """Ends the other committer."""


def test_the_key_of_a_plan_is_below_its_prefix() -> None:
    assert plan_key(REGION, 7).startswith(plan_prefix(REGION))
