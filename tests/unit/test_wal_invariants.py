"""The allowed successors of a manifest version, and that no other successor is written."""

from __future__ import annotations

from dataclasses import replace
from uuid import UUID

import pytest

from memwal.wal import (
    InvariantViolation,
    ManifestStore,
    RegionManifest,
    RegionStatus,
    SsTable,
    bucket_region,
    check_succession,
)
from tests.messages import raises
from tests.support.clock import SeededIds
from tests.support.memory_store import MemoryStore

REGION = bucket_region(0)
S3, S4, S5 = (SsTable(n, f"0000000{n}_gen_{n}", physical_rows=10 * n) for n in (3, 4, 5))
NOW = RegionManifest(
    version=7, writer_epoch=2, region_id=REGION, replay_after=10, last_seen=12, current_generation=5, ssts=(S3, S4)
)
NEXT = replace(NOW, version=8)


@pytest.mark.parametrize(
    "proposed",
    [
        NEXT,
        replace(NEXT, writer_epoch=3),
        replace(NEXT, last_seen=13),
        replace(NEXT, replay_after=12, current_generation=6, ssts=(S3, S4, S5)),
        replace(NEXT, replay_after=12, current_generation=6, ssts=(S5,)),
        replace(NEXT, ssts=(S4,)),
        replace(NEXT, ssts=()),
        replace(NEXT, status=RegionStatus.SEALED),
        replace(NEXT, ssts=(), released=2),
        replace(NEXT, writer_epoch=3, released=2),  # by another program; it proves nothing
    ],
)
def test_allowed(proposed: RegionManifest) -> None:
    check_succession(NOW, proposed)


@pytest.mark.parametrize(
    "proposed",
    [
        replace(NEXT, version=9),
        replace(NEXT, version=7),
        replace(NEXT, writer_epoch=1),
        replace(NEXT, writer_epoch=4),
        replace(NEXT, replay_after=9),
        replace(NEXT, last_seen=11),
        replace(NEXT, current_generation=4, ssts=(S3,)),
        replace(NEXT, ssts=(S4, S3)),
        replace(NEXT, ssts=(S3, S5), current_generation=6),
        replace(NEXT, ssts=(S3, S4, S5)),
        replace(NEXT, region_id=UUID(int=1)),
        replace(NEXT, spec_id=2),
        replace(NEXT, current_generation=7, ssts=(S3, S4, S5, SsTable(6, "00000006_gen_6"))),
        replace(NEXT, current_generation=7, ssts=(SsTable(6, "00000006_gen_6"),)),
        replace(NEXT, ssts=(S3,)),
        replace(NEXT, ssts=(S3, replace(S4, physical_rows=1))),
        replace(NEXT, ssts=(SsTable(2, "00000002_gen_2"), S3, S4)),
        replace(NEXT, ssts=(), writer_epoch=3, released=3),
        replace(NEXT, ssts=(), released=2, read_lease=500),
        replace(NEXT, ssts=(S4,), released=2),
    ],
)
def test_refused_naming_the_rule(proposed: RegionManifest) -> None:
    with raises(InvariantViolation):
        check_succession(NOW, proposed)


def test_a_region_at_rest_stays_at_rest_until_the_next_claim() -> None:
    now, following = replace(NOW, ssts=(), released=2), replace(NEXT, ssts=(), released=2)
    check_succession(now, following)  # an edit of a committer
    check_succession(now, replace(NEXT, ssts=(), writer_epoch=3))
    check_succession(now, replace(following, writer_epoch=3))  # by another program
    for wrong in (replace(following, released=0), replace(following, current_generation=6, ssts=(S5,))):
        with raises(InvariantViolation):
            check_succession(now, wrong)


def test_a_sealed_region_stays_sealed() -> None:
    with raises(InvariantViolation):
        check_succession(replace(NOW, status=RegionStatus.SEALED), NEXT)


def test_a_sealed_region_is_opened_by_a_newer_routing() -> None:
    sealed = replace(NOW, status=RegionStatus.SEALED)
    check_succession(sealed, replace(NEXT, spec_id=2))
    with raises(InvariantViolation):
        check_succession(sealed, replace(NEXT, spec_id=2, status=RegionStatus.SEALED))


def test_the_first_version_is_fresh() -> None:
    first = RegionManifest(version=1, writer_epoch=1, region_id=REGION)
    check_succession(None, first)
    check_succession(None, replace(first, current_generation=5))  # for a base table that holds generation 4
    for wrong in (replace(first, version=2), replace(first, writer_epoch=2), replace(first, current_generation=0)):
        with raises(InvariantViolation):
            check_succession(None, wrong)


def test_every_broken_rule_is_reported_at_once() -> None:
    with raises(InvariantViolation):
        check_succession(NOW, replace(NOW, version=3, writer_epoch=1, replay_after=0))


def test_attached_to_the_one_place_that_writes() -> None:
    store = MemoryStore()
    manifests = ManifestStore(store, REGION, ids=SeededIds())
    written = manifests.create(None, RegionManifest(version=1, writer_epoch=1, region_id=REGION))
    assert written is not None
    before = sorted(store.list(""))
    with pytest.raises(InvariantViolation):
        manifests.create(written, replace(written, version=2, writer_epoch=0))
    with pytest.raises(InvariantViolation):
        manifests.edit_unowned(lambda current: replace(current, current_generation=0))
    assert sorted(store.list("")) == before
