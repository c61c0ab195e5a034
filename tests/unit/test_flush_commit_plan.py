"""What a commit takes: everything contiguous above what is committed, one range for all committers."""

from __future__ import annotations

from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flush.commit_plan import PlanBehind, RegionPlan, agree, parse_plan_key, plan_key, uncommitted
from wal import Corrupt, FakeClock, MemoryStore, RegionManifest, SsTable, bucket_region

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
    with pytest.raises(Corrupt, match="generation 2 is missing"):
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


@pytest.mark.parametrize("data", [b"", b"[]", b'{"first": 1}', b'{"first": 2, "last": 3}', b'{"first": 1, "last": 0}'])
def test_a_broken_plan_is_reported(data: bytes) -> None:
    store = MemoryStore()
    store.put(plan_key(REGION, 1), data)
    with pytest.raises(Corrupt, match="is no commit plan"):
        agree(store, RegionPlan(REGION, ssts(1)), clock=FakeClock())
