"""A claimer that knows the ends of manifest and log from the former owner sends fewer requests and finds the same."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from memwal.wal import (
    Corrupt,
    Fenced,
    Known,
    OutcomeUnknown,
    Released,
    Sealed,
    SystemIds,
    WalOptions,
    bucket_region,
)
from memwal.wal.layout import manifest_key
from tests.log_rows import rows
from tests.messages import raises
from tests.support.log_world import LogWorld, found
from tests.support.scripted_store import ScriptedStore

REGION = bucket_region(0)
LEASE = WalOptions(read_lease=2.0)


class Owner:
    """A claim of the region, and its log."""

    def __init__(self, store: ScriptedStore, known: Known | None = None, options: WalOptions = LEASE) -> None:
        world = LogWorld(store=store)
        world.ids = SystemIds()
        self.store, self.clock, self.manifests = store, world.clock, world.manifests
        self.claimed = world.claim(known=known, options=options, settle=False)
        self.epoch, self.found, self.manifest = self.claimed.guard.epoch, found(self.claimed), self.claimed.manifest
        self._log = world.writer(self.claimed)

    def put(self, *ids: int) -> None:
        self._log.append(rows(*ids), generation=1, applied={"p": ids[-1]})

    def flush(self) -> None:
        upto = self._log.next_position - 1
        self.manifest = self.manifests.edit(
            self.claimed.guard, lambda now: replace(now, replay_after=upto), self.manifest
        )

    @property
    def told(self) -> Known:
        """What the owner would report to the next one."""
        return Known(released=Released(self.manifest, self._log.next_position - 1))

    @property
    def waits(self) -> float:
        return max(0.0, self.claimed.others_read_until - self.clock.monotonic())


def test_what_was_told_is_not_asked_for() -> None:
    store = ScriptedStore()
    former = Owner(store)
    former.put(1, 2)
    former.put(3)
    store.calls.clear()
    owner = Owner(store, former.told)
    assert store.transcript() == [
        "get wal/2",
        "get wal/1",
        "get wal/2",
        "put_if_absent manifest/2",
        "get manifest/1",
        "put_if_absent wal/3",
    ]
    assert (owner.epoch, owner.found, owner.waits) == (2, [1, 2, 3], 0)
    assert (owner.claimed.applied, owner.claimed.next_position) == ({"p": 3}, 4)
    with pytest.raises(Fenced):
        former.put(4)
    owner.put(5)
    assert Owner(store).found == [1, 2, 3, 5]


def _claimed(former: Owner) -> None:
    between = Owner(former.store)
    between.put(10)


def _claimed_and_died(former: Owner) -> None:
    """Claim the region and die before the sentinel is put."""
    current = former.manifests.latest()
    assert current is not None
    assert former.manifests.create(
        current, replace(current, version=current.version + 1, writer_epoch=current.writer_epoch + 1)
    )


def _edited(former: Owner) -> None:
    former.manifests.edit_unowned(lambda now: replace(now, read_lease=now.read_lease + 1))


def _pruned(former: Owner) -> None:
    """Prune, so that the slot after the reported version is free again."""
    for _ in range(3):
        _edited(former)
    for version in range(1, former.manifest.version + 2):
        former.store.delete(manifest_key(REGION, version))


@pytest.mark.parametrize("happens", [_claimed, _claimed_and_died, _edited, _pruned])
def test_what_is_old_is_left_aside(happens: Callable[[Owner], None]) -> None:
    store = ScriptedStore()
    former = Owner(store)
    former.put(1)
    former.put(2)
    told = former.told
    happens(former)
    newest = former.manifests.latest()
    assert newest is not None
    owner = Owner(store, told)
    assert owner.epoch == newest.writer_epoch + 1
    assert owner.found == ([1, 2, 10] if happens is _claimed else [1, 2])
    assert (owner.waits > 0) == (newest.writer_epoch > former.epoch), "who claimed in between may answer reads"
    owner.put(20)
    assert Owner(store).found == [*owner.found, 20]


def test_a_seal_in_between_is_seen() -> None:
    store = ScriptedStore()
    former = Owner(store)
    former.put(1)
    told = former.told
    LogWorld(store=store).claim(seal=True)
    with pytest.raises(Sealed):
        Owner(store, told)


def test_a_publication_that_the_owner_knows_nothing_of_is_found() -> None:
    """The answer to the publication was lost, and the generation was committed: the manifest that the former owner
    reports is too old for the table."""
    store = ScriptedStore()
    former = Owner(store)
    former.put(1)
    told = replace(former.told, committed=1)
    former.manifests.edit(former.claimed.guard, lambda now: replace(now, replay_after=1, current_generation=2))
    assert Owner(store, told).found == []


def test_a_log_that_ends_below_the_position_told_is_corrupt() -> None:
    store = ScriptedStore()
    former = Owner(store)
    former.put(1)
    former.put(2)
    LogWorld(store=store).delete(2)
    with raises(Corrupt):
        Owner(store, former.told)


def test_an_answer_goes_through_a_message() -> None:
    former = Owner(ScriptedStore())
    former.put(1)
    released = former.told.released
    assert released is not None
    again = Released.of_json(released.to_json())
    assert again == released
    assert (again.manifest.edit_id, again.manifest.claim_id) == (former.manifest.edit_id, former.manifest.claim_id)
    manifest = released.to_json()["manifest"]
    with pytest.raises(Corrupt):
        Released.of_json(released.to_json() | {"manifest": manifest[:-1] + ("1" if manifest[-1] == "0" else "0")})


@pytest.mark.parametrize("readers", [1, 4])
@pytest.mark.parametrize("seed", range(20))
def test_who_was_told_finds_what_others_find(seed: int, readers: int) -> None:
    """Claimers use the report of a former owner at once, late, twice or never, while others claim, flush and edit the
    manifest."""
    rng, store, options = random.Random(seed), ScriptedStore(), WalOptions(readers=readers, read_lease=1.0)
    owner, acked, told = Owner(store, options=options), list[int](), list[Known]()
    for number in range(80):
        step = rng.choice(["put", "put", "put", "tell", "claim", "flush", "edit"])
        if step == "put":
            owner.put(number)
            acked.append(number)
        elif step == "tell":
            told.append(owner.told)
        elif step == "edit":
            _edited(owner)
        elif step == "flush":
            owner.flush()
            acked.clear()
        else:
            before, owner = owner, Owner(store, rng.choice([*told, owner.told, None]), options)
            assert (owner.epoch, owner.found) == (before.epoch + 1, acked)
            with pytest.raises((Fenced, OutcomeUnknown)):
                before.put(-1)
