"""A commit plan: all contiguous generations above the committed one, the same range for all committers."""

from __future__ import annotations

from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memwal.flush.commits.plan import PlanBehind, RegionPlan, agree, fitting, parse_plan_key, plan_key, uncommitted
from memwal.wal import Corrupt, PutOutcome, RegionManifest, SsTable, StoreUnavailable, WalOptions, bucket_region
from tests.messages import raises
from tests.support.clock import FakeClock
from tests.support.memory_store import MemoryStore

REGION = bucket_region(0)


def ssts(*generations: int) -> tuple[SsTable, ...]:
    return tuple(SsTable(each, f"{each:08x}_gen_{each}") for each in generations)


def manifest(*generations: int) -> RegionManifest:
    return RegionManifest(3, 1, REGION, current_generation=max(generations, default=0) + 1, ssts=ssts(*generations))


@given(st.uuids(), st.integers(1, 2**64 - 1))
def test_a_plan_key_is_read_as_it_was_built(region: UUID, first: int) -> None:
    assert parse_plan_key(plan_key(region, first)) == (region, first)


def test_other_keys_are_no_plan_keys() -> None:
    assert parse_plan_key(f"_mem_wal/{REGION}/wal/{'0' * 64}.json") is None


def test_takes_what_is_above_the_committed_generation() -> None:
    (plan,) = uncommitted([manifest(1, 2, 3)], {REGION: 1})
    assert (plan.first, plan.last) == (2, 3)


def test_takes_nothing_from_a_region_that_is_committed() -> None:
    assert uncommitted([manifest(1, 2), manifest()], {REGION: 2}) == []


def test_a_missing_generation_is_corruption() -> None:
    with raises(Corrupt):
        uncommitted([manifest(3, 4)], {REGION: 1})


def test_the_first_committer_decides_for_all() -> None:
    store, clock = MemoryStore(), FakeClock()
    first = agree(store, RegionPlan(REGION, ssts(1, 2)), clock=clock)
    second = agree(store, RegionPlan(REGION, ssts(1, 2, 3)), clock=clock)
    assert (first.last, second.last) == (2, 2)
    assert agree(store, RegionPlan(REGION, ssts(3)), clock=clock).last == 3


def test_a_committer_that_sees_less_than_was_agreed_reads_again() -> None:
    store, clock = MemoryStore(), FakeClock()
    agree(store, RegionPlan(REGION, ssts(1, 2)), clock=clock)
    with pytest.raises(PlanBehind):
        agree(store, RegionPlan(REGION, ssts(1)), clock=clock)


def test_a_plan_is_tried_as_long_as_the_tables_settings_say() -> None:
    class Refusing(MemoryStore):
        def put_if_absent(self, key: str, data: bytes) -> PutOutcome:
            return PutOutcome.UNAVAILABLE

    clock = FakeClock()
    with pytest.raises(StoreUnavailable):
        agree(Refusing(), RegionPlan(REGION, ssts(1)), clock=clock, options=WalOptions(0.5, 2.0))
    assert sum(clock.slept) <= 2.0


def test_a_plan_of_another_is_told_from_ones_own() -> None:
    store, clock = MemoryStore(), FakeClock()
    everything = RegionPlan(REGION, ssts(1, 2, 3))
    first = agree(store, everything, clock=clock, last=2, by="a")
    again, other = (agree(store, everything, clock=clock, last=1, by=who) for who in "ab")
    assert (first.last, again.last, other.last) == (2, 2, 2)
    assert (first.by_other, again.by_other, other.by_other) == (False, False, True)


def test_a_plan_made_before_committers_said_who_they_are_is_taken() -> None:
    store = MemoryStore()
    store.put(plan_key(REGION, 1), b'{"first": 1, "last": 2}')
    assert agree(store, RegionPlan(REGION, ssts(1, 2, 3)), clock=FakeClock(), by="a").last == 2


def sized(region: int, *sizes: int | None) -> RegionPlan:
    made = (SsTable(n, f"{n:08x}_gen_{n}", in_memory_bytes=size) for n, size in enumerate(sizes, 1))
    return RegionPlan(bucket_region(region), tuple(made))


@pytest.mark.parametrize(
    ("plans", "memory_max", "taken"),
    [
        ([sized(0, 10, 10, 10)], 30, [3]),
        ([sized(0, 10, 10, 10)], 29, [2]),
        ([sized(0, 10, 10), sized(1, 10, 10)], 30, [2, 1]),
        ([sized(0, 10, 10), sized(1, 10, 10)], 10, [1]),
        ([sized(0, 99), sized(1, 99)], 10, [1]),
        ([sized(0, None, 10), sized(1, 10)], 99, [1]),
        ([sized(0, 10, None), sized(1, 10)], 99, [1, 1]),
        ([], 10, []),
    ],
)
def test_takes_what_fits_oldest_first_by_turns(plans: list[RegionPlan], memory_max: int, taken: list[int]) -> None:
    found = fitting(plans, memory_max)
    assert [len(each.ssts) for each in found] == taken
    assert all(each.ssts == plan.ssts[: len(each.ssts)] for each, plan in zip(found, plans, strict=False))


@pytest.mark.parametrize("data", [b"", b"[]", b'{"first": 1}', b'{"first": 2, "last": 3}', b'{"first": 1, "last": 0}'])
def test_a_broken_plan_is_reported(data: bytes) -> None:
    store = MemoryStore()
    store.put(plan_key(REGION, 1), data)
    with raises(Corrupt):
        agree(store, RegionPlan(REGION, ssts(1)), clock=FakeClock())
