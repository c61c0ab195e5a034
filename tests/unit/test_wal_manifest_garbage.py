"""Pruning of manifest versions: what it deletes, what it keeps, and that a suspended writer stays safe when its slot is
empty again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest

from memwal.wal import (
    Claim,
    EpochGuard,
    Fenced,
    ManifestCollector,
    ManifestGarbage,
    ManifestStore,
    RegionManifest,
    StoreUnavailable,
    bucket_region,
    claim,
)
from memwal.wal.layout import manifest_key, manifest_prefix, parse_manifest_key, version_hint_key
from memwal.wal.manifest_garbage import pruned_below
from tests.log_rows import CODEC
from tests.messages import raises
from tests.support.clock import FakeClock, SeededIds
from tests.support.scripted_store import ScriptedStore

REGION = bucket_region(0)
FIRST = RegionManifest(1, 1, REGION)
AGE = 86_400.0


class World:
    """A region whose newest version is 100; each version is a second older than the next one."""

    def __init__(self, versions: int = 100) -> None:
        self.clock, self.ids = FakeClock(), SeededIds(3)
        self.store = ScriptedStore(self.clock.now)
        self.manifests = self.opened()
        assert self.manifests.create(None, FIRST)
        self.write(versions - 1)

    def opened(self) -> ManifestStore:
        return ManifestStore(self.store, REGION, ids=self.ids, clock=self.clock)

    def newest(self) -> RegionManifest:
        """Return the manifest that a process without a memory of earlier versions finds."""
        found = self.opened().latest()
        assert found is not None
        return found

    def claim(self) -> Claim:
        return claim(self.store, REGION, spec_id=1, codec=CODEC, ids=SeededIds(9), clock=self.clock)

    def write(self, versions: int) -> None:
        for _ in range(versions):
            self.clock.advance(1)
            self.manifests.edit_unowned(lambda found: replace(found, replay_after=found.replay_after + 1))

    def prune(
        self,
        *,
        age: float = 0.0,
        kept: int = 10,
        needed: Callable[[RegionManifest], bool] = lambda _: False,
        dry: bool = False,
    ) -> ManifestGarbage:
        return ManifestCollector(self.store, REGION, self.clock, kept).collect(needed, age, dry_run=dry)

    def versions(self) -> list[int]:
        keys = map(parse_manifest_key, self.store.list(manifest_prefix(REGION)))
        return sorted(key.version for key in keys if key is not None)


@pytest.fixture
def world() -> World:
    return World()


def test_all_but_the_newest_go(world: World) -> None:
    dry = world.prune(dry=True)
    assert len(world.versions()) == 100
    found = world.prune()
    assert found == replace(dry, dry_run=False)
    assert (found.versions, found.kept, world.versions()) == (90, 10, list(range(91, 101)))
    assert pruned_below(world.store, REGION) == 91
    assert world.prune().versions == 0
    assert world.newest().version == 100


def test_age_delays_and_nothing_goes_before_what_is_older(world: World) -> None:
    assert world.prune(age=50.0).versions == 50
    assert world.versions()[0] == 51
    world.store.put(manifest_key(REGION, 50), b"left by a sleeper")  # younger than all that is kept
    assert world.prune(age=30.0).versions == 0
    world.clock.advance(31.0)
    assert world.prune(age=30.0).versions == 41  # including 50
    assert world.versions() == list(range(91, 101))


def test_what_others_need_stays(world: World) -> None:
    world.prune(needed=lambda manifest: manifest.replay_after >= 30)
    assert world.versions() == list(range(31, 101))


def test_the_oldest_goes_first_and_a_collection_that_is_ended_leaves_no_hole(world: World) -> None:
    deletes = iter(range(20))

    def ends(call: str, key: str) -> None:
        if call == "delete" and next(deletes, None) is None:
            raise StoreUnavailable("gone")

    world.store.before = ends
    with pytest.raises(StoreUnavailable):
        world.prune()
    assert world.versions() == list(range(21, 101))
    assert all(after == before + 1 for before, after in pairwise(world.versions()))
    assert world.newest().version == 100


def test_nothing_goes_while_the_hint_cannot_be_written(world: World) -> None:
    def no_hints(call: str, key: str) -> None:
        if call == "put":
            raise StoreUnavailable("no")

    world.store.before = no_hints
    found = world.prune()
    assert (found.versions, found.kept, len(world.versions())) == (0, 100, 100)


# ---- sleepers --------------------------------------------------------------------------------------------------------


def overtaken(world: World) -> Callable[[], None]:
    def meanwhile() -> None:
        """Let another writer claim and write, and prune every version that the sleeping process knows."""
        claim(world.store, REGION, spec_id=1, codec=CODEC, ids=world.ids, clock=world.clock)
        world.write(50)
        world.prune()

    return meanwhile


@pytest.mark.parametrize("method", ["put_if_absent", "exists", "get"])
def test_a_writer_that_sleeps_and_finds_its_slot_empty_is_fenced(world: World, method: str) -> None:
    """The writer sleeps before the put of version 101, before the check that the slot is empty, or after that check."""
    sleeper = ManifestStore(world.store, REGION, ids=SeededIds(9), clock=world.clock)
    world.store.run_once(method, manifest_key(REGION, 100 if method == "get" else 101), overtaken(world))
    with raises(Fenced):
        sleeper.edit(EpochGuard(REGION, 1), lambda found: replace(found, replay_after=found.replay_after + 5))
    newest = world.newest()
    assert (newest.version, newest.writer_epoch) == (152, 2)


def test_a_claim_that_sleeps_before_its_epoch_takes_the_next_one(world: World) -> None:
    world.store.run_once("put_if_absent", manifest_key(REGION, 101), overtaken(world))
    claimed = world.claim()
    assert claimed.guard.epoch == 3
    assert claimed.manifest.version == 154


def test_a_first_claim_that_sleeps_is_no_first_claim() -> None:
    world = World(versions=2)
    world.store = ScriptedStore(world.clock.now)
    world.manifests = world.opened()

    def meanwhile() -> None:
        assert world.manifests.create(None, FIRST)
        world.write(49)
        world.prune()

    world.store.run_once("put_if_absent", manifest_key(REGION, 1), meanwhile)
    claimed = world.claim()
    assert (claimed.guard.epoch, claimed.manifest.version) == (2, 52)


@pytest.mark.parametrize("hint", ["lost", "of the version before", "of the false one", "of the true one"])
def test_a_false_version_is_never_taken_for_the_newest(world: World, hint: str) -> None:
    """A sleeping writer puts version 101 into a pruned slot and is killed before it checks the version below. The
    version hint is then lost, set back or correct."""
    before = world.manifests.read(100)
    assert before is not None
    hints = {"of the version before": world.store.get(version_hint_key(REGION))}
    world.write(1)
    hints["of the true one"] = world.store.get(version_hint_key(REGION))
    world.write(50)
    world.prune()
    late = replace(before, version=101, writer_epoch=2, edit_id="f" * 32)
    world.store.put_if_absent(manifest_key(REGION, 101), late.encode())
    hints["of the false one"] = b'{"version":101,"edit":"%s"}' % (b"0" * 32)
    world.store.delete(version_hint_key(REGION))
    if (data := hints.get(hint)) is not None:
        world.store.put(version_hint_key(REGION), data)
    newest = world.newest()
    assert (newest.version, newest.writer_epoch) == (151, 1)
    assert world.opened().latest(before) == newest  # a reader that knows only an old version
    claimed = world.claim()
    assert (claimed.guard.epoch, claimed.manifest.version) == (2, 153)
    world.prune()
    assert world.versions() == list(range(144, 154))


def test_a_false_version_that_comes_behind_a_listing_is_not_taken_for_the_newest(world: World) -> None:
    """The hint is missing. A reader lists version 100 and finds no 101. Before it reads 100, that version is pruned and
    an old put lands in the slot."""
    before = world.manifests.read(100)
    assert before is not None

    def meanwhile() -> None:
        world.write(50)
        world.prune()
        late = replace(before, writer_epoch=2, edit_id="f" * 32)
        world.store.put_if_absent(manifest_key(REGION, 100), late.encode())

    world.store.delete(version_hint_key(REGION))
    world.store.run_once("get", manifest_key(REGION, 100), meanwhile)
    newest = world.newest()
    assert (newest.version, newest.writer_epoch) == (150, 1)
