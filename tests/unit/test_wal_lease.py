"""Read leases: when an owner may answer from memory, and how long a new owner waits for the old lease to end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from memwal import wal
from memwal.wal.retries import CLOCK_RATE
from tests.log_rows import CODEC, SCHEMA
from tests.messages import raises
from tests.support.clock import FakeClock
from tests.support.memory_store import MemoryStore

REGION = wal.bucket_region(0)
LEASE = 0.5


class Machine:
    """A process with its own clock and a store."""

    def __init__(self, store: wal.ObjectStore, codec: wal.EntryCodec | None = None, lease: float = LEASE) -> None:
        self.store, self.clock, self.ids = store, FakeClock(), wal.SystemIds()
        self.codec = codec or CODEC
        self.options = wal.WalOptions(read_lease=lease)
        self.manifests = wal.ManifestStore(store, REGION, clock=self.clock)

    def claim(self, **more: Any) -> wal.Claim:
        given = {"spec_id": 1, "codec": self.codec, "ids": self.ids, "clock": self.clock, "options": self.options}
        return wal.claim(self.store, REGION, **(given | more))

    def lease(self, claim: wal.Claim) -> wal.ReadLease:
        return wal.ReadLease(claim.guard, self.manifests, claim.manifest, self.clock)

    def waits(self, claim: wal.Claim) -> float:
        return max(0.0, claim.others_read_until - self.clock.monotonic())

    def release(self, claim: wal.Claim) -> None:
        self.manifests.edit(claim.guard, lambda current: replace(current, read_lease=0))


@pytest.fixture
def store() -> wal.ObjectStore:
    return MemoryStore()


def test_a_proof_lasts_as_long_as_the_lease_and_the_next_read_asks(store: wal.ObjectStore) -> None:
    machine = Machine(store)
    lease = machine.lease(machine.claim())
    assert not lease.covers(lease.ticket())
    lease.prove()
    assert lease.fresh
    machine.clock.advance(LEASE - 0.01)
    assert lease.covers(lease.ticket())
    assert not lease.fresh, "time to prove it again"
    machine.clock.advance(0.02)
    assert not lease.covers(lease.ticket())


def test_a_deposed_owner_is_told_when_its_lease_is_over_and_the_next_one_waits_longer(store: wal.ObjectStore) -> None:
    older, newer = Machine(store), Machine(store)
    lease = older.lease(older.claim())
    lease.prove()
    claimed = newer.claim()
    assert newer.waits(claimed) == pytest.approx(CLOCK_RATE * LEASE)
    assert lease.covers(lease.ticket()), "nothing was acknowledged by the newer one yet"
    older.clock.advance(LEASE)
    with raises(wal.Fenced):
        lease.prove()
    assert not lease.covers(lease.ticket())


def test_a_proof_counts_from_its_beginning(store: wal.ObjectStore) -> None:
    machine = Machine(store)
    lease = machine.lease(machine.claim())
    begun = lease.begin()
    machine.clock.advance(LEASE - 0.1)  # as long as storage took for the append
    lease.confirm(begun)
    assert lease.covers(lease.ticket())
    machine.clock.advance(0.2)
    assert not lease.covers(lease.ticket())


def test_without_a_lease_a_read_is_covered_by_a_proof_that_was_begun_after_it_only(store: wal.ObjectStore) -> None:
    machine = Machine(store, lease=0.0)
    lease = machine.lease(machine.claim())
    ticket = lease.ticket()
    lease.prove()
    assert lease.covers(ticket)
    assert not lease.covers(lease.ticket())


def test_the_clock_by_which_more_time_has_passed_counts(store: wal.ObjectStore) -> None:
    machine = Machine(store)
    lease = machine.lease(machine.claim())
    lease.prove()
    machine.clock.start += LEASE  # suspended: the monotonic clock stood still, the wall clock did not
    assert not lease.covers(lease.ticket())
    lease.prove()
    machine.clock.start -= 1000.0
    machine.clock.advance(LEASE)
    assert not lease.covers(lease.ticket())


@pytest.mark.parametrize("told", [False, True], ids=["on storage", "to the claimer"])
def test_who_says_that_it_has_ended_is_not_waited_for(store: wal.ObjectStore, told: bool) -> None:
    older, newer = Machine(store), Machine(store)
    lease = older.lease(claimed := older.claim())
    lease.prove()
    lease.end()
    assert not lease.covers(lease.ticket())
    if told:
        claim = newer.claim(known=wal.Known(released=wal.Released(claimed.manifest, position=0)))
    else:
        older.release(claimed)
        claim = newer.claim()
    assert newer.waits(claim) == 0


def test_who_claimed_after_the_one_that_ended_is_waited_for(store: wal.ObjectStore) -> None:
    older, between, newer = Machine(store), Machine(store, lease=2.0), Machine(store)
    older.lease(claimed := older.claim()).end()
    between.lease(between.claim()).prove()
    known = wal.Known(released=wal.Released(claimed.manifest, position=0))
    assert newer.waits(newer.claim(known=known)) == pytest.approx(CLOCK_RATE * 2.0)


def test_a_claim_that_dies_at_once_passes_the_lease_on(store: wal.ObjectStore) -> None:
    older, between, newest = Machine(store, lease=2.0), Machine(store, lease=0.0), Machine(store)
    older.claim()
    assert between.waits(between.claim()) == pytest.approx(CLOCK_RATE * 2.0)
    assert newest.waits(newest.claim()) == pytest.approx(CLOCK_RATE * 2.0)


def test_a_resize_passes_the_lease_on_until_it_has_waited(store: wal.ObjectStore) -> None:
    owner, resizer, newest = Machine(store), Machine(store), Machine(store)
    owner.claim()
    sealed = resizer.claim(seal=True)
    assert resizer.waits(sealed) == pytest.approx(CLOCK_RATE * LEASE)
    assert resizer.claim(spec_id=2, opening={}, options=None).manifest.read_lease == 0
    newest.clock.advance(10)
    assert newest.waits(newest.claim(spec_id=2, options=None)) == 0


def test_an_arrow_table_has_no_leases(store: wal.ObjectStore) -> None:
    machine = Machine(store, codec=wal.ArrowCodec(SCHEMA))
    assert machine.claim().manifest.read_lease == 0


def test_the_lease_survives_an_edit_and_a_claim_may_not_lower_it(store: wal.ObjectStore) -> None:
    machine = Machine(store)
    claimed = machine.claim()
    edited = machine.manifests.edit(claimed.guard, lambda current: replace(current, last_seen=0, current_generation=2))
    assert wal.RegionManifest.decode(edited.encode()).read_lease == 1000 * LEASE
    lower = replace(edited, version=edited.version + 1, writer_epoch=2, read_lease=0)
    with raises(wal.InvariantViolation):
        wal.check_succession(edited, lower)
