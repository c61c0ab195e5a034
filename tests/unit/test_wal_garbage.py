"""Garbage collection of WAL entries: what it deletes, what it keeps, and that a suspended writer stays safe."""

from __future__ import annotations

from collections.abc import Callable
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
    Poisoned,
    PutOutcome,
    StoreUnavailable,
    WalAppender,
    WalCollector,
    WalGarbage,
    WalOptions,
)
from memwal.wal.layout import entry_key, manifest_key, wal_prefix
from tests.log_rows import CODEC, SCHEMA, rows
from tests.messages import raises
from tests.support.log_world import AGE, REGION, LogWorld, found, put
from tests.support.scripted_store import READS, ScriptedStore


@pytest.fixture
def world() -> LogWorld:
    return LogWorld()


def test_what_is_flushed_and_old_goes_and_the_rest_stays(world: LogWorld) -> None:
    put(world.open(), 1, 2, 3, 4, 5)
    world.flushed_up_to(3)
    world.clock.advance(AGE)
    report = world.collect()
    assert world.positions() == [4, 5]
    assert (report.boundary, report.entries, report.too_young, report.fences) == (3, 3, 0, 0)
    assert report.bytes > 0
    assert found(world.claim()) == [4, 5]


def test_nothing_above_replay_after_goes_however_old(world: LogWorld) -> None:
    put(world.open(), 1, 2, 3)
    world.clock.advance(1000 * AGE)
    assert world.collect().entries == 0
    assert world.positions() == [1, 2, 3]


def test_young_entries_stay(world: LogWorld) -> None:
    log = world.open()
    put(log, 1, 2)
    world.clock.advance(AGE - 1)
    put(log, 3, 4)
    world.flushed_up_to(4)
    world.clock.advance(1)
    report = world.collect()
    assert world.positions() == [3, 4]
    assert (report.entries, report.too_young) == (2, 1)


def test_a_dry_run_says_the_same_and_deletes_nothing(world: LogWorld) -> None:
    put(world.open(), 1, 2, 3)
    world.flushed_up_to(3)
    world.clock.advance(AGE)
    dry = world.collect(dry_run=True)
    assert world.positions() == [1, 2, 3]
    assert replace(dry, dry_run=False) == world.collect()
    assert world.positions() == [3]


def test_the_newest_entry_stays_and_with_it_the_applied_map(world: LogWorld) -> None:
    put(world.open(), 1, 2, applied={"query": 7})
    world.flushed_up_to(2)
    world.clock.advance(AGE)
    world.collect()
    assert world.positions() == [2]
    assert world.claim().applied == {"query": 7}


def test_every_fence_stays(world: LogWorld) -> None:
    for number in range(4):
        put(world.open(), number)
    world.flushed_up_to(7)
    world.clock.advance(AGE)
    report = world.collect()
    assert world.positions() == [2, 4, 6, 7]  # three sentinels and the newest entry
    assert (report.entries, report.fences) == (3, 3)


def test_a_sleeping_writer_wakes_after_the_collection_and_is_fenced(world: LogWorld) -> None:
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
    assert found(world.claim()) == [5]


@pytest.mark.parametrize("settle", [False, True])
def test_a_claimer_that_sleeps_before_its_sentinel_acks_nothing_after_the_collection(
    world: LogWorld, settle: bool
) -> None:
    """While the claimer sleeps, the older writer fills the slot of the claimer's sentinel. A later claim puts its fence
    at a higher position, and the entries below are flushed and collected. The claimer's slots are then empty again, so
    a successful put there proves nothing."""
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

    world.store.run_once("put_if_absent", entry_key(REGION, 2, "lance"), meanwhile)
    with pytest.raises(Fenced if settle else FencedAfterWrite) as caught:
        put(world.open(settle=settle), 9)
    assert (caught.value.ours, caught.value.theirs) == (2, 3)


def test_a_claim_proves_itself_once(world: LogWorld) -> None:
    """The note of the sentinel's position is the proof; without the note, the first append is."""
    world.open()
    for settle, looks in ((True, 0), (False, 1)):
        log = world.open(settle=settle)
        with patch.object(ManifestStore, "owned", autospec=True, side_effect=ManifestStore.owned) as owned:
            put(log, 1, 2)
        assert owned.call_count == looks


def test_even_with_the_fences_deleted_by_hand_nothing_is_acked_into_nothing(world: LogWorld) -> None:
    """An operator or a lifecycle rule deletes every entry below the boundary, including the fence in the slot of the
    suspended writer."""
    sleeper = world.open()
    put(sleeper, 1)
    put(world.open(), 2, 3)
    world.flushed_up_to(4)
    world.clock.advance(AGE)
    world.delete(1, 2, 3)
    with pytest.raises(FencedAfterWrite) as caught:
        put(sleeper, 9)
    assert (caught.value.ours, caught.value.theirs) == (1, 2)
    with pytest.raises(Fenced):
        put(sleeper, 9)


def test_a_table_made_anew_in_the_same_place_ends_the_older_ones_writer(world: LogWorld) -> None:
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


def test_a_busy_writer_reads_no_manifest_and_an_idle_one_reads_it_once(world: LogWorld) -> None:
    def reads() -> int:
        return sum(call in READS for call, _ in world.store.calls)

    log = world.open()
    before = reads()
    for number in range(10):
        put(log, number)
        world.clock.advance(0.4)
    assert reads() == before
    world.clock.advance(3600)
    put(log, 11)
    once = reads()
    assert once > before
    put(log, 12)
    assert reads() == once


def test_a_fence_cut_short_or_damaged_is_kept_and_reported(world: LogWorld) -> None:
    put(world.open(), 1, 2, 3)
    world.rewrite(2, world.entry(2)[:-20])
    world.flushed_up_to(3)
    world.clock.advance(AGE)
    report = world.collect()
    assert (report.entries, report.unreadable) == (1, 1)
    assert world.positions() == [2, 3]


def test_objects_of_others_are_left_alone(world: LogWorld) -> None:
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
    world = LogWorld(codec)
    names = {f"memwal:before:2/1:{number:040}": 1 for number in range(3000)}
    with patch("memwal.wal.applied._INLINE_MAX", 1 << 20):  # as in releases without snapshots of the map
        put(world.open(), 1, applied=names)
        sleeper = world.open()
        put(world.open(), 2, applied={"query": 1})
    world.flushed_up_to(4)
    world.clock.advance(AGE)
    assert len(world.entry(3)) > 100_000
    assert world.collect().fences == 2
    assert world.positions() == [2, 3, 4]
    sleeper_is_fenced(world, sleeper)


def sleeper_is_fenced(world: LogWorld, sleeper: WalAppender) -> None:
    """Assert that the slot alone fences the suspended writer: it reads no manifest."""
    with patch.object(WalAppender, "_prove_ownership", lambda *_: None), pytest.raises(Fenced):
        put(sleeper, 9)


def test_a_fence_is_the_first_entry_of_its_epoch_whatever_its_form(world: LogWorld) -> None:
    """A writer without a sentinel fences by its first rows. An entry without rows that a writer appends later is not a
    fence."""
    first = world.open()
    put(first, 1)
    first.append(None, generation=1, applied={"query": 1})
    second = world.open()
    second.append(None, generation=1, applied={"query": 2})
    world.rewrite(3, CODEC.encode(EntryHeader(2, 1, world.ids.entry_id(), {}), rows(7)))
    put(second, 3)
    world.flushed_up_to(5)
    world.clock.advance(AGE)
    assert world.collect().fences == 1
    assert world.positions() == [3, 5]


def woken_is_fenced(world: LogWorld, claimed: Claim, sleeper: WalAppender) -> None:
    """Assert that the suspended writer is fenced. Its clocks stood still, so it reads no manifest."""
    claimed.guard.confirm((world.clock.monotonic(), world.clock.now()))
    with pytest.raises(Fenced):
        put(sleeper, 9)


def test_a_refused_sentinel_that_lands_once_its_slot_is_collected_does_not_pass_for_the_fence(world: LogWorld) -> None:
    """The put of a sentinel got no answer, and the next attempt found the older writer's entry in the slot. The first
    attempt lands after that entry is collected: below the fence, with the epoch of the fence."""
    sleeping = world.claim()
    put(sleeper := world.writer(sleeping), 1)
    put(world.open(), 2)
    world.flushed_up_to(3)
    world.clock.advance(AGE)
    world.collect()
    assert world.positions() == [2, 3]
    world.rewrite(1, world.entry(2))
    put(world.open(), 3, 4)
    world.flushed_up_to(6)
    world.clock.advance(AGE)
    report = world.collect()
    assert world.positions() == [1, 2, 4, 6]
    assert (report.entries, report.fences) == (2, 2)
    woken_is_fenced(world, sleeping, sleeper)


def test_nor_does_it_where_the_collection_was_cut_short(world: LogWorld) -> None:
    """Older entries remain between the late sentinel and the fence, so the epochs at both ends of this range are
    equal."""
    sleeping = world.claim()
    put(sleeper := world.writer(sleeping), 1, 2, 3)
    put(world.open(), 4)
    world.flushed_up_to(5)
    world.clock.advance(AGE)
    world.delete(1)  # and here the collector was killed
    world.rewrite(1, world.entry(4))
    for _ in range(2):
        world.collect()
        assert world.positions() == [1, 4, 5]
        world.clock.advance(AGE)
    woken_is_fenced(world, sleeping, sleeper)


class Overtaken(ScriptedStore):
    """Calls `meanwhile` once, after the first listing of the log."""

    def __init__(self, world: LogWorld) -> None:
        super().__init__(world.clock.now)
        self.meanwhile: Callable[[], None] | None = None

    def describe(self, prefix: str) -> list[ObjectInfo]:
        listed = list(super().describe(prefix))
        if self.meanwhile is not None and prefix == wal_prefix(REGION):
            meanwhile, self.meanwhile = self.meanwhile, None
            meanwhile()
        return listed


def test_nor_does_it_where_it_lands_behind_the_listing_of_a_collector(world: LogWorld) -> None:
    """Another collector empties the slot meanwhile. The first collector listed the times before that, and reads the
    epochs after it."""
    world.store = store = Overtaken(world)
    sleeping = world.claim()
    put(sleeper := world.writer(sleeping), 1)
    put(world.open(), 2)
    world.flushed_up_to(3)
    put(world.open(), 3)
    world.clock.advance(AGE)

    def meanwhile() -> None:
        refused = world.entry(2)
        world.collect()
        world.rewrite(1, refused)

    store.meanwhile = meanwhile
    world.collect()
    assert 2 in world.positions()
    woken_is_fenced(world, sleeping, sleeper)


def test_nor_does_it_where_another_collector_deletes_it_before_the_verdict(world: LogWorld) -> None:
    """A collector has read the epoch of the late sentinel, and lists again after the sentinel is deleted: the new
    listing does not show that it was younger."""
    sleeper = world.open()
    put(sleeper, 1)
    put(world.open(), 2)
    world.flushed_up_to(3)
    put(world.open(), 3)
    slow, quick = (WalCollector(world.store, REGION, CODEC, world.clock, workers=1) for _ in range(2))
    refused = world.entry(2)

    def before_the_epoch_is_read() -> None:
        quick.collect(0)
        world.rewrite(1, refused)
        world.store.run_once("describe", wal_prefix(REGION), before_the_second_listing)

    def before_the_second_listing() -> None:
        quick.collect(0)
        assert world.positions() == [2, 4, 5]
        listed.append(2)

    listed: list[int] = []
    world.store.run_once("get", entry_key(REGION, 1, "lance"), before_the_epoch_is_read)
    slow.collect(0)
    assert listed
    assert world.positions() == [2, 4, 5]
    with pytest.raises(Fenced):
        put(sleeper, 9)


class Unanswered(ScriptedStore):
    """Accepts the first put of an entry, calls `meanwhile`, and then gives no answer."""

    def __init__(self, world: LogWorld) -> None:
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
    world: LogWorld, readable: bool
) -> None:
    """The first attempt of the append got no answer. A newer owner replayed and flushed the row, a collection emptied
    the slot, and a refused sentinel landed in it late. The append must not report a plain fence: a client would send
    the rows again, as rows that were not applied."""
    world.store = store = Unanswered(world)
    older, newer = world.open(), list[Claim]()

    def meanwhile() -> None:
        newer.append(world.claim())
        put(world.writer(newer[0]), 2)
        world.flushed_up_to(2)
        assert world.collect(age=0).entries == 1
        world.rewrite(1, world.entry(2))
        if not readable:
            store.before = without_manifests

    def without_manifests(call: str, key: str) -> None:
        if call in READS and "/manifest/" in key:
            raise StoreUnavailable("storage answered 503")

    store.meanwhile = meanwhile
    with pytest.raises(FencedAfterWrite):
        put(older, 1)
    assert found(newer[0]) == [1]
    with pytest.raises(Fenced):
        put(older, 3)


def test_rows_are_collected_though_storage_tells_times_in_another_order(world: LogWorld) -> None:
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
def test_a_damaged_entry_beside_a_fence_takes_none_with_it(world: LogWorld, damaged: int) -> None:
    for number in range(4):
        put(world.open(), number, number + 10)
    world.flushed_up_to(11)
    if damaged < 11:
        world.rewrite(damaged, world.entry(damaged)[:-20])
    world.clock.advance(AGE)
    report = world.collect()
    assert {3, 6, 9, 11} <= set(world.positions())
    assert report.unreadable <= 1
    assert report.entries + len(world.positions()) == 11


def test_fences_are_found_by_few_reads_and_not_read_again(world: LogWorld) -> None:
    for _ in range(3):
        put(world.open(), *range(200))
    world.flushed_up_to(602)
    world.clock.advance(AGE)
    collector = WalCollector(world.store, REGION, CODEC, world.clock, workers=1)
    world.store.calls.clear()
    assert (collector.collect(AGE).entries, world.positions()) == (599, [201, 402, 602])
    assert len(world.store.positions()) < 40
    world.store.calls.clear()
    assert collector.collect(AGE).entries == 0
    assert world.store.positions() == [602]


def test_entries_without_the_map_stay_as_far_down_as_the_map(world: LogWorld) -> None:
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


def test_a_region_that_does_not_exist_has_no_garbage(world: LogWorld) -> None:
    assert world.collect() == WalGarbage(REGION, 0)


@pytest.mark.parametrize("of", ["wal", "ssts"])
def test_a_collector_asks_for_manifests_as_long_as_the_tables_settings_say(world: LogWorld, of: str) -> None:
    put(world.open(), 1)

    options, slept = WalOptions(0.5, 2.0), len(world.clock.slept)
    store = ScriptedStore(world.clock.now)
    store.fail_reads(StoreUnavailable("away"))
    look = {
        "wal": lambda: WalCollector(store, REGION, CODEC, world.clock, options=options).collect(AGE),
        "ssts": lambda: SstCollector(store, REGION, world.clock, options=options).list_region(),
    }
    with pytest.raises(StoreUnavailable):
        look[of]()
    assert sum(world.clock.slept[slept:]) <= 2.0


@pytest.mark.parametrize("key", [manifest_key(REGION, 2), entry_key(REGION, 2, "lance")], ids=["manifest", "entry"])
def test_a_damaged_manifest_or_newest_entry_stops_the_collection_and_is_named(world: LogWorld, key: str) -> None:
    put(world.open(), 1, 2)
    world.flushed_up_to(2)
    world.clock.advance(AGE)
    world.store.put(key, (world.store.get(key) or b"")[:-1])
    with raises(Corrupt):
        world.collect()
    assert world.positions() == [1, 2]
