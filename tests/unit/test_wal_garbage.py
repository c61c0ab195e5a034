"""Garbage collection of WAL entries: what it deletes, what it keeps, and that a suspended writer stays safe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from unittest.mock import patch

import pytest

from memwal.flush import SstCollector
from memwal.wal import (
    ArrowCodec,
    Claim,
    Corrupt,
    EntryCodec,
    EntryHeader,
    Fenced,
    FencedAfterWrite,
    LanceCodec,
    ManifestStore,
    ObjectInfo,
    ObjectStore,
    Poisoned,
    PutOutcome,
    StoreUnavailable,
    WalAppender,
    WalCollector,
    WalGarbage,
    WalOptions,
    bucket_region,
    claim,
)
from memwal.wal.layout import entry_key, manifest_key, parse_entry_key, wal_prefix
from tests.log_rows import CODEC, SCHEMA, FailingReads, rows
from tests.messages import raises
from tests.support.clock import FakeClock, SeededIds
from tests.support.memory_store import MemoryStore

REGION = bucket_region(0)
AGE = 600.0


class World:
    """A store, a clock, and the steps of the tests."""

    def __init__(self, codec: EntryCodec = CODEC) -> None:
        self.clock = FakeClock()
        self.store = MemoryStore(self.clock.now)
        self.ids = SeededIds(7)
        self.codec = codec

    def take(self) -> Claim:
        return claim(self.store, REGION, spec_id=1, codec=self.codec, ids=self.ids, clock=self.clock)

    def writer(self, claimed: Claim) -> WalAppender:
        return WalAppender(self.store, REGION, claimed.guard, self.codec, claimed.next_position, self.ids, self.clock)

    def open(self) -> WalAppender:
        return self.writer(self.take())

    def flushed_up_to(self, position: int) -> None:
        """Set the cursor as if every row up to `position` were in SSTs."""
        manifests = ManifestStore(self.store, REGION, ids=self.ids, clock=self.clock)
        manifests.edit_unowned(lambda current: replace(current, replay_after=position))

    def collect(self, *, age: float = AGE, dry_run: bool = False, store: ObjectStore | None = None) -> WalGarbage:
        collector = WalCollector(store or self.store, REGION, self.codec, self.clock, workers=1)
        return collector.collect(age, dry_run=dry_run)

    def positions(self) -> list[int]:
        keys = map(parse_entry_key, self.store.list(wal_prefix(REGION)))
        return sorted(key.position for key in keys if key is not None)


@pytest.fixture
def world() -> World:
    return World()


def put(log: WalAppender, *ids: int, applied: dict[str, int] | None = None) -> None:
    for each in ids:
        log.append(rows(each), generation=1, applied=applied or {})


def found(claimed: Claim) -> list[int]:
    return [each for entry in claimed.entries for each in entry.rows["id"].to_pylist()]


def test_what_is_flushed_and_old_goes_and_the_rest_stays(world: World) -> None:
    put(world.open(), 1, 2, 3, 4, 5)
    world.flushed_up_to(3)
    world.clock.advance(AGE)
    report = world.collect()
    assert world.positions() == [4, 5]
    assert (report.boundary, report.entries, report.too_young, report.fences) == (3, 3, 0, 0)
    assert report.bytes > 0
    assert found(world.take()) == [4, 5]


def test_nothing_above_replay_after_goes_however_old(world: World) -> None:
    put(world.open(), 1, 2, 3)
    world.clock.advance(1000 * AGE)
    assert world.collect().entries == 0
    assert world.positions() == [1, 2, 3]


def test_young_entries_stay(world: World) -> None:
    log = world.open()
    put(log, 1, 2)
    world.clock.advance(AGE - 1)
    put(log, 3, 4)
    world.flushed_up_to(4)
    world.clock.advance(1)
    report = world.collect()
    assert world.positions() == [3, 4]
    assert (report.entries, report.too_young) == (2, 1)


def test_a_dry_run_says_the_same_and_deletes_nothing(world: World) -> None:
    put(world.open(), 1, 2, 3)
    world.flushed_up_to(3)
    world.clock.advance(AGE)
    dry = world.collect(dry_run=True)
    assert world.positions() == [1, 2, 3]
    assert replace(dry, dry_run=False) == world.collect()
    assert world.positions() == [3]


def test_the_newest_entry_stays_and_with_it_the_applied_map(world: World) -> None:
    put(world.open(), 1, 2, applied={"query": 7})
    world.flushed_up_to(2)
    world.clock.advance(AGE)
    world.collect()
    assert world.positions() == [2]
    assert world.take().applied == {"query": 7}


def test_every_fence_stays(world: World) -> None:
    for number in range(4):
        put(world.open(), number)
    world.flushed_up_to(7)
    world.clock.advance(AGE)
    report = world.collect()
    assert world.positions() == [2, 4, 6, 7]  # three sentinels and the newest entry
    assert (report.entries, report.fences) == (3, 3)


def test_a_sleeping_writer_wakes_after_the_collection_and_is_fenced(world: World) -> None:
    sleeper = world.open()
    put(sleeper, 1)
    put(world.open(), 2, 3)
    put(world.open(), 4, 5)
    world.flushed_up_to(6)
    world.clock.advance(AGE)
    assert world.collect().entries > 0
    with pytest.raises(Fenced) as caught:
        put(sleeper, 6)
    assert (caught.value.ours, caught.value.theirs) == (1, 2)
    assert found(world.take()) == [5]


class SleepsBefore(MemoryStore):
    """Calls `meanwhile` once, before the put of the entry at `position` that comes from a new claim."""

    def __init__(self, world: World, position: int) -> None:
        super().__init__(world.clock.now)
        self.position = position
        self.meanwhile: Callable[[], None] | None = None

    def put_if_absent(self, key: str, data: bytes) -> PutOutcome:
        if self.meanwhile is not None and key == entry_key(REGION, self.position, "lance"):
            meanwhile, self.meanwhile = self.meanwhile, None
            meanwhile()
        return super().put_if_absent(key, data)


@pytest.mark.parametrize("settle", [False, True])
def test_a_claimer_that_sleeps_before_its_sentinel_acks_nothing_after_the_collection(
    world: World, settle: bool
) -> None:
    """While the claimer sleeps, the older writer fills the slot of the claimer's sentinel. A later claim puts its fence
    at a higher position, and the entries below are flushed and collected. The claimer's slots are then empty again, so
    a successful put there proves nothing."""
    world.store = store = SleepsBefore(world, 2)
    older = world.open()
    put(older, 1)
    world.flushed_up_to(1)

    def meanwhile() -> None:
        put(older, 2, 3)
        put(world.open(), 4)
        world.flushed_up_to(5)
        world.clock.advance(AGE)
        world.collect()
        assert world.positions() == [4, 5]

    store.meanwhile = meanwhile
    with pytest.raises(Fenced if settle else FencedAfterWrite) as caught:
        put(
            world.writer(claim(store, REGION, spec_id=1, codec=CODEC, ids=world.ids, clock=world.clock, settle=settle)),
            9,
        )
    assert (caught.value.ours, caught.value.theirs) == (2, 3)


def test_a_claim_proves_itself_once(world: World) -> None:
    """The note of the sentinel's position is the proof; without the note, the first append is."""
    world.open()
    store = world.store
    for settle, looks in ((True, 0), (False, 1)):
        log = world.writer(
            claim(store, REGION, spec_id=1, codec=CODEC, ids=world.ids, clock=world.clock, settle=settle)
        )
        with patch.object(ManifestStore, "owned", autospec=True, side_effect=ManifestStore.owned) as owned:
            put(log, 1, 2)
        assert owned.call_count == looks


def test_even_with_the_fences_deleted_by_hand_nothing_is_acked_into_nothing(world: World) -> None:
    """An operator or a lifecycle rule deletes every entry below the boundary, including the fence in the slot of the
    suspended writer."""
    sleeper = world.open()
    put(sleeper, 1)
    put(world.open(), 2, 3)
    world.flushed_up_to(4)
    world.clock.advance(AGE)
    for position in (1, 2, 3):
        world.store.delete(entry_key(REGION, position, "lance"))
    with pytest.raises(FencedAfterWrite) as caught:
        put(sleeper, 9)
    assert (caught.value.ours, caught.value.theirs) == (1, 2)
    with pytest.raises(Fenced):
        put(sleeper, 9)


def test_a_table_made_anew_in_the_same_place_ends_the_older_ones_writer(world: World) -> None:
    """Both tables are at epoch 1: only the manifest that the writer claimed distinguishes them."""
    writer = world.open()
    put(writer, 1)
    for key in world.store.list(""):
        world.store.delete(key)
    put(world.open(), 7)
    world.clock.advance(60)
    with raises(Corrupt):
        put(writer, 2)
    with pytest.raises(Poisoned):
        put(writer, 3)


def test_a_busy_writer_reads_no_manifest_and_an_idle_one_reads_it_once(world: World) -> None:
    class Counting(MemoryStore):
        reads = 0

        def get(self, key: str) -> bytes | None:
            self.reads += 1
            return super().get(key)

    world.store = counting = Counting(world.clock.now)
    log = world.open()
    before = counting.reads
    for number in range(10):
        put(log, number)
        world.clock.advance(0.4)
    assert counting.reads == before
    world.clock.advance(3600)
    put(log, 11)
    once = counting.reads
    assert once > before
    put(log, 12)
    assert counting.reads == once


def test_a_fence_cut_short_or_damaged_is_kept_and_reported(world: World) -> None:
    put(world.open(), 1, 2, 3)
    key = entry_key(REGION, 2, "lance")
    data = world.store.get(key)
    assert data is not None
    world.store.put(key, data[:-20])
    world.flushed_up_to(3)
    world.clock.advance(AGE)
    report = world.collect()
    assert (report.entries, report.unreadable) == (1, 1)
    assert world.positions() == [2, 3]


def test_objects_of_others_are_left_alone(world: World) -> None:
    put(world.open(), 1, 2)
    world.store.put(f"{wal_prefix(REGION)}notes.txt", b"mine")
    world.store.put(entry_key(REGION, 1, "arrow"), b"another format's")
    world.flushed_up_to(2)
    world.clock.advance(AGE)
    world.collect()
    assert sorted(world.store.list(wal_prefix(REGION))) == sorted(
        [f"{wal_prefix(REGION)}notes.txt", entry_key(REGION, 1, "arrow"), entry_key(REGION, 2, "lance")]
    )


@pytest.mark.parametrize("codec", [CODEC, ArrowCodec(SCHEMA)], ids=["lance", "arrow"])
def test_a_fence_larger_than_any_sentinel_of_today_stays(codec: EntryCodec) -> None:
    """A resize shrinks the applied map, so older sentinels are larger than any sentinel that is written now."""
    world = World(codec)
    names = {f"memwal:before:2/1:{number:040}": 1 for number in range(3000)}
    with patch("memwal.wal.applied._INLINE_MAX", 1 << 20):  # as in releases without snapshots of the map
        put(world.open(), 1, applied=names)
        sleeper = world.open()
        put(world.open(), 2, applied={"query": 1})
    world.flushed_up_to(4)
    world.clock.advance(AGE)
    assert len(world.store.get(entry_key(REGION, 3, codec.suffix)) or b"") > 100_000
    assert world.collect().fences == 2
    assert world.positions() == [2, 3, 4]
    sleeper_is_fenced(world, sleeper)


def sleeper_is_fenced(world: World, sleeper: WalAppender) -> None:
    """Assert that the slot alone fences the suspended writer: it reads no manifest."""
    with patch.object(WalAppender, "_prove_ownership", lambda *_: None), pytest.raises(Fenced):
        put(sleeper, 9)


def test_a_fence_is_the_first_entry_of_its_epoch_whatever_its_form(world: World) -> None:
    """A writer without a sentinel fences by its first rows. An entry without rows that a writer appends later is not a
    fence."""
    first = world.open()
    put(first, 1)
    first.append(None, generation=1, applied={"query": 1})
    second = world.open()
    second.append(None, generation=1, applied={"query": 2})
    key = entry_key(REGION, 3, "lance")
    header = EntryHeader(2, 1, world.ids.entry_id(), {})
    world.store.put(key, CODEC.encode(header, rows(7)))
    put(second, 3)
    world.flushed_up_to(5)
    world.clock.advance(AGE)
    assert world.collect().fences == 1
    assert world.positions() == [3, 5]


def test_a_refused_sentinel_that_lands_once_its_slot_is_collected_does_not_pass_for_the_fence(world: World) -> None:
    """The put of a sentinel got no answer, and the next attempt found the older writer's entry in the slot. The first
    attempt lands after that entry is collected: below the fence, with the epoch of the fence."""
    sleeper = world.open()
    put(sleeper, 1)
    put(world.open(), 2)
    refused = world.store.get(entry_key(REGION, 2, "lance"))
    assert refused is not None
    world.flushed_up_to(3)
    world.clock.advance(AGE)
    world.collect()
    assert world.positions() == [2, 3]
    world.store.put_if_absent(entry_key(REGION, 1, "lance"), refused)
    put(world.open(), 3, 4)
    world.flushed_up_to(6)
    world.clock.advance(AGE)
    report = world.collect()
    assert world.positions() == [1, 2, 4, 6]
    assert (report.entries, report.fences) == (2, 2)
    sleeper._guard.confirm((world.clock.monotonic(), world.clock.now()))  # its clocks stood still while it slept
    with pytest.raises(Fenced):
        put(sleeper, 9)


def test_nor_does_it_where_the_collection_was_cut_short(world: World) -> None:
    """Older entries remain between the late sentinel and the fence, so the epochs at both ends of this range are
    equal."""
    sleeper = world.open()
    put(sleeper, 1, 2, 3)
    put(world.open(), 4)
    refused = world.store.get(entry_key(REGION, 4, "lance"))
    assert refused is not None
    world.flushed_up_to(5)
    world.clock.advance(AGE)
    world.store.delete(entry_key(REGION, 1, "lance"))  # and here the collector was killed
    world.store.put_if_absent(entry_key(REGION, 1, "lance"), refused)
    for _ in range(2):
        world.collect()
        assert world.positions() == [1, 4, 5]
        world.clock.advance(AGE)
    sleeper._guard.confirm((world.clock.monotonic(), world.clock.now()))
    with pytest.raises(Fenced):
        put(sleeper, 9)


class Overtaken(MemoryStore):
    """Calls `meanwhile` once, after the first listing of the log."""

    def __init__(self, world: World) -> None:
        super().__init__(world.clock.now)
        self.meanwhile: Callable[[], None] | None = None

    def describe(self, prefix: str) -> list[ObjectInfo]:
        listed = list(super().describe(prefix))
        if self.meanwhile is not None and prefix == wal_prefix(REGION):
            meanwhile, self.meanwhile = self.meanwhile, None
            meanwhile()
        return listed


def test_nor_does_it_where_it_lands_behind_the_listing_of_a_collector(world: World) -> None:
    """Another collector empties the slot meanwhile. The first collector listed the times before that, and reads the
    epochs after it."""
    world.store = store = Overtaken(world)
    sleeper = world.open()
    put(sleeper, 1)
    put(world.open(), 2)
    refused = store.get(entry_key(REGION, 2, "lance"))
    assert refused is not None
    world.flushed_up_to(3)
    put(world.open(), 3)
    world.clock.advance(AGE)

    def meanwhile() -> None:
        world.collect()
        store.put_if_absent(entry_key(REGION, 1, "lance"), refused)

    store.meanwhile = meanwhile
    world.collect()
    assert 2 in world.positions()
    sleeper._guard.confirm((world.clock.monotonic(), world.clock.now()))
    with pytest.raises(Fenced):
        put(sleeper, 9)


def test_nor_does_it_where_another_collector_deletes_it_before_the_verdict(world: World) -> None:
    """A collector has read the epoch of the late sentinel, and lists again after the sentinel is deleted: the new
    listing does not show that it was younger."""
    sleeper = world.open()
    put(sleeper, 1)
    put(world.open(), 2)
    refused = world.store.get(entry_key(REGION, 2, "lance"))
    assert refused is not None
    world.flushed_up_to(3)
    put(world.open(), 3)
    slow, quick = (WalCollector(world.store, REGION, CODEC, world.clock, workers=1) for _ in range(2))
    list_again, among = slow._possible_fences, slow._fences.among

    def among_late(positions: Sequence[int]) -> tuple[set[int], set[int]]:
        quick.collect(0)
        world.store.put_if_absent(entry_key(REGION, 1, "lance"), refused)
        return among(positions)

    def list_later(positions: Sequence[int]) -> set[int]:
        quick.collect(0)
        assert world.positions() == [2, 4, 5]
        return list_again(positions)

    with patch.object(slow, "_possible_fences", list_later), patch.object(slow._fences, "among", among_late):
        slow.collect(0)
    assert world.positions() == [2, 4, 5]
    with pytest.raises(Fenced):
        put(sleeper, 9)


class Unanswered(MemoryStore):
    """Accepts the first put of an entry, calls `meanwhile`, and then gives no answer."""

    def __init__(self, world: World) -> None:
        super().__init__(world.clock.now)
        self.meanwhile: Callable[[], None] | None = None

    def put_if_absent(self, key: str, data: bytes) -> PutOutcome:
        outcome = super().put_if_absent(key, data)
        if self.meanwhile is None:
            return outcome
        meanwhile, self.meanwhile = self.meanwhile, None
        meanwhile()
        return PutOutcome.OUTCOME_UNKNOWN


@pytest.mark.parametrize("readable", [True, False], ids=["", "and-the-manifest-cannot-be-read"])
def test_an_append_that_finds_anothers_entry_in_a_collected_slot_may_have_been_written(
    world: World, readable: bool
) -> None:
    """The first attempt of the append got no answer. A newer owner replayed and flushed the row, a collection emptied
    the slot, and a refused sentinel landed in it late. The append must not report a plain fence: a client would send
    the rows again, as rows that were not applied."""
    world.store = store = Unanswered(world)
    older, newer = world.open(), list[Claim]()

    def meanwhile() -> None:
        newer.append(world.take())
        put(world.writer(newer[0]), 2)
        world.flushed_up_to(2)
        assert world.collect(age=0).entries == 1
        refused = store.get(entry_key(REGION, 2, "lance"))
        assert refused is not None
        store.put_if_absent(entry_key(REGION, 1, "lance"), refused)
        if not readable:
            older._manifests = ManifestStore(FailingReads(store), REGION, clock=world.clock, options=WalOptions())

    store.meanwhile = meanwhile
    with pytest.raises(FencedAfterWrite):
        put(older, 1)
    assert found(newer[0]) == [1]
    with pytest.raises(Fenced):
        put(older, 3)


def test_rows_are_collected_though_storage_tells_times_in_another_order(world: World) -> None:
    """The times are in another order in a log that was copied without them, and after a claim by a machine whose clock
    was ahead."""
    log = world.open()
    put(log, *range(1, 9))
    world.clock.advance(1e7)
    log = world.open()
    world.clock.advance(-1e7)
    put(log, *range(11, 19))
    world.flushed_up_to(17)
    put(log, 19)
    world.clock.advance(2 * AGE)
    world.collect()
    assert world.positions() == [9, 18]


@pytest.mark.parametrize("damaged", range(1, 12))
def test_a_damaged_entry_beside_a_fence_takes_none_with_it(world: World, damaged: int) -> None:
    for number in range(4):
        put(world.open(), number, number + 10)
    world.flushed_up_to(11)
    key = entry_key(REGION, damaged, "lance")
    if damaged < 11:
        world.store.put(key, (world.store.get(key) or b"")[:-20])
    world.clock.advance(AGE)
    report = world.collect()
    assert {3, 6, 9, 11} <= set(world.positions())
    assert report.unreadable <= 1
    assert report.entries + len(world.positions()) == 11


def test_fences_are_found_by_few_reads_and_not_read_again(world: World) -> None:
    read: list[str] = []

    class Watched(MemoryStore):
        def get(self, key: str) -> bytes | None:
            read.append(key)
            return super().get(key)

    world.store = Watched(world.clock.now)
    for _ in range(3):
        put(world.open(), *range(200))
    world.flushed_up_to(602)
    world.clock.advance(AGE)
    collector = WalCollector(world.store, REGION, CODEC, world.clock, workers=1)
    read.clear()
    assert (collector.collect(AGE).entries, world.positions()) == (599, [201, 402, 602])
    assert len([key for key in read if "/wal/" in key]) < 40
    read.clear()
    assert collector.collect(AGE).entries == 0
    assert [key for key in read if "/wal/" in key] == [entry_key(REGION, 602, "lance")]


def test_entries_without_the_map_stay_as_far_down_as_the_map(world: World) -> None:
    """Entries of another program carry no applied map. The next claim reads down through them to the newest entry of
    memwal, so the collector must keep them."""

    class Foreign(LanceCodec):
        def header(self, data: bytes) -> EntryHeader:
            header = super().header(data)
            return replace(header, applied=None) if not header.applied else header

    put(world.open(), 1, 2, applied={"query": 7})
    put(world.open(), 3, 4, 5)
    world.flushed_up_to(6)
    world.clock.advance(AGE)
    report = WalCollector(world.store, REGION, Foreign(SCHEMA), world.clock, workers=4).collect(AGE)
    assert world.positions() == [3, 4, 5, 6]  # 3 is the sentinel, which carries {"query": 7}
    assert report.entries == 2


def test_a_region_that_does_not_exist_has_no_garbage(world: World) -> None:
    assert world.collect() == WalGarbage(REGION, 0)


@pytest.mark.parametrize("of", ["wal", "ssts"])
def test_a_collector_asks_for_manifests_as_long_as_the_tables_settings_say(world: World, of: str) -> None:
    put(world.open(), 1)

    class Away(FailingReads):
        def fail(self) -> None:
            raise StoreUnavailable("away")

    options, store, slept = WalOptions(0.5, 2.0), Away(world.clock.now), len(world.clock.slept)
    look = {
        "wal": lambda: WalCollector(store, REGION, CODEC, world.clock, options=options).collect(AGE),
        "ssts": lambda: SstCollector(store, REGION, world.clock, options=options).list_region(),
    }
    with pytest.raises(StoreUnavailable):
        look[of]()
    assert sum(world.clock.slept[slept:]) <= 2.0


def test_a_damaged_manifest_stops_the_collection(world: World) -> None:
    put(world.open(), 1, 2)
    world.flushed_up_to(2)
    world.clock.advance(AGE)
    key = manifest_key(REGION, 2)
    world.store.put(key, (world.store.get(key) or b"")[:-1])
    with raises(Corrupt):
        world.collect()
    assert world.positions() == [1, 2]


def test_a_damaged_newest_entry_stops_the_collection_and_is_named(world: World) -> None:
    put(world.open(), 1, 2)
    world.flushed_up_to(2)
    world.clock.advance(AGE)
    key = entry_key(REGION, 2, "lance")
    world.store.put(key, (world.store.get(key) or b"")[:-1])
    with raises(Corrupt):
        world.collect()
    assert world.positions() == [1, 2]
