"""Garbage collection of SST directories: each rule alone, crashes at every call, and concurrent collectors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from memwal.flush import BaseNeeds, SstCollector, SstGarbage
from memwal.wal import LocalStore, ManifestStore, ObjectStore, RegionManifest, SsTable
from memwal.wal.layout import bucket_region, manifest_prefix, region_prefix, sst_key
from tests.failure_matrix import Killed
from tests.support.clock import FakeClock, SeededIds
from tests.support.scripted_store import ScriptedStore

REGION = bucket_region(0)
AGE = 600.0
FILES = (
    "_versions/latest_version_hint.json",
    f"_versions/{2**64 - 2:020}.manifest",
    f"_versions/{2**64 - 3:020}.manifest",
    "_pk_index/page_data.lance",
    "bloom_filter.bin",
    "data/rows.lance",
)
"""Files of an SST of Lance's writer, whose second version hides rows; each has 10 bytes."""


class World:
    """A region, its clock, and the progress of the base table."""

    def __init__(self, store: ObjectStore | None = None) -> None:
        self.clock = FakeClock()
        self.store: Any = store or ScriptedStore(self.clock.now)
        self.manifests = ManifestStore(self.store, REGION, ids=SeededIds(3), clock=self.clock)
        self.manifests.create(None, RegionManifest(version=1, writer_epoch=1, region_id=REGION))
        self.committed = 0
        self.opened: int | None = None
        self.indexed: Mapping[str, Mapping[UUID, int]] = {}
        self.tagged: tuple[Mapping[UUID, int], ...] = ()

    @property
    def needs(self) -> BaseNeeds:
        opened = self.committed if self.opened is None else self.opened
        return BaseNeeds({REGION: self.committed}, {REGION: opened}, self.indexed, self.tagged)

    def write(self, token: int, generation: int) -> str:
        """Write an SST directory without a reference to it; return its name."""
        name = f"{token:08x}_gen_{generation}"
        for file in FILES:
            self.store.put_if_absent(sst_key(REGION, name, file), b"0123456789")
        return name

    def publish(self, name: str) -> None:
        generation = int(name.rpartition("_")[2])
        self.manifests.edit_unowned(
            lambda m: replace(m, current_generation=generation + 1, ssts=(*m.ssts, SsTable(generation, name)))
        )

    def flush(self, generation: int) -> str:
        name = self.write(generation, generation)
        self.publish(name)
        return name

    def commit(self, generation: int) -> None:
        """Record every generation up to `generation` as committed, and drop them from the manifest."""
        self.committed = generation
        self.manifests.edit_unowned(
            lambda m: replace(m, ssts=tuple(sst for sst in m.ssts if sst.generation > generation))
        )

    def claim(self) -> int:
        current = self.manifests.latest()
        assert current is not None
        proposed = replace(current, version=current.version + 1, writer_epoch=current.writer_epoch + 1)
        self.manifests.create(current, proposed)
        return proposed.writer_epoch

    def collector(self) -> SstCollector:
        return SstCollector(self.store, REGION, self.clock, workers=1)

    def collect(self, *, dry_run: bool = False, collector: SstCollector | None = None) -> SstGarbage:
        collector = collector or self.collector()
        return collector.collect(collector.list_region(), self.needs, AGE, dry_run=dry_run)

    def names(self) -> set[str]:
        return set(self.collector().names())


@pytest.fixture
def world() -> World:
    return World()


# ---- the rules -------------------------------------------------------------------------------------------------------


def test_a_listed_one_stays_committed_or_not_however_old(world: World) -> None:
    first, second = world.flush(1), world.flush(2)
    world.committed = 1  # the committer crashed before it pruned
    world.clock.advance(1000 * AGE)
    assert world.collect() == SstGarbage(REGION, listed=2)
    assert world.names() == {first, second}


def test_one_of_the_current_generation_or_a_later_one_stays_however_old(world: World) -> None:
    names = {world.write(7, 1), world.write(8, 2)}
    world.clock.advance(1000 * AGE)
    assert world.collect() == SstGarbage(REGION, unpublished=2)
    assert world.names() == names


def test_it_goes_once_another_one_is_published_as_that_generation(world: World) -> None:
    world.write(7, 1)
    published = world.flush(1)
    world.clock.advance(AGE)
    assert world.collect() == SstGarbage(REGION, abandoned=1, bytes=60, abandoned_bytes=60, listed=1)
    assert world.names() == {published}


def test_it_goes_once_the_region_was_claimed_after_it_was_seen(world: World) -> None:
    seen = world.write(7, 1)
    collector = world.collector()
    left_behind = collector.names()
    collector.note_older_than_claim(left_behind, world.claim())
    later = world.write(8, 1)
    world.clock.advance(AGE)
    report = world.collect(collector=collector)
    assert (report.abandoned, report.unpublished) == (1, 1)
    assert seen not in world.names()
    assert world.names() == {later}


def test_one_seen_before_a_claim_that_never_came_to_be_stays(world: World) -> None:
    """The directory is noted as older than an epoch that is not in the manifest, so its writer may still publish it."""
    name = world.write(7, 1)
    collector = world.collector()
    collector.note_older_than_claim([name], 2)
    world.clock.advance(AGE)
    assert world.collect(collector=collector).unpublished == 1


def test_one_seen_before_a_claim_and_published_by_then_stays(world: World) -> None:
    name = world.write(7, 1)
    collector = world.collector()
    left_behind = collector.names()
    world.publish(name)
    collector.note_older_than_claim(left_behind, world.claim())
    world.clock.advance(AGE)
    assert world.collect(collector=collector) == SstGarbage(REGION, listed=1)


def test_a_committed_one_goes(world: World) -> None:
    world.flush(1)
    world.write(9, 1)
    second = world.flush(2)
    world.commit(1)
    world.clock.advance(AGE)
    assert world.collect() == SstGarbage(REGION, committed=2, bytes=120, listed=1)
    assert world.names() == {second}


def test_one_that_is_neither_published_nor_committed_stays(world: World) -> None:
    """The base table was restored to a version from before the commit, so only the directories hold the rows."""
    names = {world.flush(1), world.flush(2)}
    world.commit(2)
    world.committed = 1
    world.clock.advance(AGE)
    report = world.collect()
    assert (report.unaccounted, report.committed) == (1, 1)
    assert world.names() == {name for name in names if name.endswith("2")}


def test_what_a_reader_under_way_may_hold_stays(world: World) -> None:
    world.flush(1)
    second = world.flush(2)
    world.commit(2)
    world.opened = 1
    world.clock.advance(AGE)
    report = world.collect()
    assert (report.committed, report.needed) == (1, 1)
    assert world.names() == {second}


def test_what_a_lagging_index_does_not_cover_stays(world: World) -> None:
    for generation in (1, 2, 3):
        world.flush(generation)
    world.commit(3)
    world.indexed = {"price_idx": {REGION: 2}, "body_idx": {REGION: 1}}
    world.clock.advance(AGE)
    assert world.collect().needed == 2
    world.indexed = {"price_idx": {}}
    assert world.collect().needed == 2
    world.indexed = {}
    assert world.collect().committed == 2


def test_a_tagged_version_keeps_what_was_published_while_it_was_the_newest_and_nothing_after(world: World) -> None:
    for generation in (1, 2, 3):
        world.flush(generation)
    world.commit(1)  # the tagged version; generations 2 and 3 lie above it, and later 4
    for generation in (4, 5, 6):
        world.flush(generation)
        world.commit(generation)
    world.tagged = ({REGION: 1},)
    world.clock.advance(AGE)
    report = world.collect()
    assert (report.needed, report.committed) == (3, 3)
    assert {int(name[-1]) for name in world.names()} == {2, 3, 4}
    world.tagged = ()
    assert world.collect().committed == 3


def test_young_garbage_waits_and_a_young_object_makes_a_directory_young(world: World) -> None:
    first, second = world.write(7, 1), world.write(8, 1)
    world.flush(1)
    world.clock.advance(AGE - 1)
    world.store.put_if_absent(sst_key(REGION, second, "_indices/late"), b"")
    world.clock.advance(1)
    report = world.collect()
    assert (report.abandoned, report.too_young) == (1, 1)
    assert first not in world.names()
    assert second in world.names()


def test_what_is_no_sst_is_left_alone(world: World) -> None:
    world.flush(1)
    world.commit(1)
    world.clock.advance(AGE)
    for other in ("commits/1.json", "wal/1.lance", "backup_gen_1/data", "0000000G_gen_1/data", "owner.json"):
        world.store.put_if_absent(region_prefix(REGION) + other, b"mine")
    before = world.store.list(manifest_prefix(REGION))
    assert world.collect().committed == 1
    assert world.store.list(manifest_prefix(REGION)) == before
    left = {key.removeprefix(region_prefix(REGION)) for key in world.store.list(region_prefix(REGION))}
    assert {"commits/1.json", "wal/1.lance", "backup_gen_1/data", "0000000G_gen_1/data", "owner.json"} < left


def test_a_region_without_a_manifest_is_left_alone() -> None:
    world = World()
    for key in world.store.list(manifest_prefix(REGION)):
        world.store.delete(key)
    world.write(1, 1)
    world.clock.advance(AGE)
    assert world.collect() == SstGarbage(REGION, unpublished=1)


def test_a_dry_run_says_the_same_and_deletes_nothing(world: World) -> None:
    world.flush(1)
    world.write(9, 2)
    world.flush(2)
    world.commit(1)
    world.clock.advance(AGE)
    before = world.store.list("")
    dry = world.collect(dry_run=True)
    assert world.store.list("") == before
    assert replace(dry, dry_run=False) == world.collect()
    assert (dry.committed, dry.abandoned) == (1, 1)


# ---- the order of reading and deleting -------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", range(1, 8))
def test_a_publication_and_a_commit_in_the_middle_of_a_look_are_seen_whole(world: World, moment: int) -> None:
    """A publication and a commit happen before each of the collector's calls in turn. The collector never takes the
    published SST for an abandoned one."""
    world.flush(1)
    second = world.write(2, 2)
    world.clock.advance(AGE)
    collector, needs = world.collector(), world.needs
    world.store.run_at(moment, lambda: (world.publish(second), world.commit(1)))
    report = collector.collect(collector.list_region(), needs, AGE)
    assert second in world.names()
    assert report.abandoned == 0
    assert world.collect().listed == 1


def test_a_directory_is_a_whole_dataset_of_its_newest_version_or_none(world: World) -> None:
    name = world.write(7, 1)
    world.flush(1)
    world.clock.advance(AGE)
    world.collect()
    gone = [key.removeprefix(sst_key(REGION, name) + "/") for key in world.store.keys("delete")]
    assert gone[:3] == [FILES[0], FILES[1], FILES[2]]
    assert sorted(gone) == sorted(FILES)


def test_older_names_of_versions_are_deleted_from_the_oldest_too(world: World) -> None:
    name = "00000009_gen_1"
    for version in (10, 9, 2):
        world.store.put_if_absent(sst_key(REGION, name, f"_versions/{version}.manifest"), b"")
    world.flush(1)
    world.clock.advance(AGE)
    world.collect()
    assert [key.rpartition("/")[2] for key in world.store.keys("delete")] == ["2.manifest", "9.manifest", "10.manifest"]


# ---- crashes and company ---------------------------------------------------------------------------------------------


def prepared() -> World:
    """Return a region with one SST of each kind: listed, committed, abandoned, and possibly in progress."""
    world = World()
    world.flush(1)
    world.write(9, 2)
    world.flush(2)
    world.write(10, 3)
    world.commit(1)
    world.clock.advance(AGE)
    return world


def calls_of_a_collection() -> tuple[int, list[str]]:
    """Return the number of calls of a collection, and the keys that it leaves."""
    world = prepared()
    world.store.calls.clear()
    world.collect()
    return len(world.store.calls), sorted(world.store.list(""))


def test_a_crash_at_any_call_leaves_what_the_next_collection_deletes() -> None:
    """`integration/test_failure_matrix` does the same with a table on each store."""

    def crash() -> None:
        raise Killed

    calls, expected = calls_of_a_collection()
    assert calls > 15
    for at in range(1, calls + 1):
        world = prepared()
        world.store.run_at(at, crash)
        with pytest.raises(Killed):
            world.collect()
        world.collect()
        assert sorted(world.store.list("")) == expected, f"after a crash at call {at}"
        assert world.collect() == SstGarbage(REGION, listed=1, unpublished=1)


def test_another_collector_at_any_call_does_no_harm() -> None:
    calls, expected = calls_of_a_collection()
    for at in range(1, calls + 1):
        world = prepared()
        world.store.run_at(at, world.collect)
        world.collect()
        assert sorted(world.store.list("")) == expected, f"the other one at call {at}"


def test_on_a_local_disk_what_a_killed_put_left_goes_with_its_directory(tmp_path: Path) -> None:
    world = World(LocalStore(tmp_path))
    kept, gone = world.write(8, 2), world.write(7, 1)
    for name in (kept, gone):
        (tmp_path / sst_key(REGION, name, ".memwal-put-7-1")).write_bytes(b"half")
    world.flush(1)
    world.clock.advance(1e9)
    assert (world.collect().abandoned, world.collect().abandoned) == (1, 0)
    assert gone not in world.names()
    assert (tmp_path / sst_key(REGION, kept, ".memwal-put-7-1")).exists(), "its flush may be under way"


def test_on_a_local_disk_no_empty_directories_stay(tmp_path: Path) -> None:
    world = World(LocalStore(tmp_path))
    world.flush(1)
    world.commit(1)
    emptied = tmp_path / sst_key(REGION, "0000000a_gen_1") / "data"
    emptied.mkdir(parents=True)
    world.clock.advance(1e9)
    assert world.collect().committed == 2
    assert world.names() == set()
    assert not emptied.parent.exists()
    assert (tmp_path / manifest_prefix(REGION)).is_dir()
