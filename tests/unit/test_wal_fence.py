"""Claims: the owner of a region, what a claim replays, and that a race of any number of claims has one winner."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from memwal.wal import (
    BatchPart,
    Claim,
    Corrupt,
    EntryHeader,
    EpochGuard,
    Fenced,
    LanceCodec,
    LocalStore,
    ObjectStore,
    OutcomeUnknown,
    RegionStatus,
    Resized,
    Sealed,
    StoreRefused,
    StoreUnavailable,
    WalOptions,
)
from memwal.wal.layout import (
    entry_key,
    manifest_key,
    manifest_prefix,
    parse_entry_key,
    wal_prefix,
)
from tests.log_rows import CODEC, SCHEMA, rows
from tests.messages import raises
from tests.support.golden import golden
from tests.support.log_world import REGION, LogWorld, found, put
from tests.support.scripted_store import READS, ScriptedStore
from tests.support.together import together


@pytest.fixture
def world() -> LogWorld:
    return LogWorld()


def test_a_new_region_begins_with_everything_at_one(world: LogWorld) -> None:
    claimed = world.claim()
    assert (claimed.guard.epoch, claimed.next_position, claimed.applied, claimed.entries) == (1, 1, {}, [])
    assert (claimed.manifest.version, claimed.manifest.current_generation) == (1, 1)
    assert sorted(world.contents()) == sorted([manifest_key(REGION, 1), f"{manifest_prefix(REGION)}version_hint.json"])


def test_the_next_claim_finds_rows_map_and_position(world: LogWorld) -> None:
    first = world.open()
    first.append(rows(1, 2), generation=1, applied={"q": 4})
    put(first, 3, applied={"q": 5})
    claimed = world.claim()
    assert found(claimed) == [1, 2, 3]
    assert [entry.position for entry in claimed.entries] == [1, 2]
    assert claimed.applied == {"q": 5}
    assert (claimed.guard.epoch, claimed.next_position, claimed.manifest.last_seen) == (2, 4, 3)


def test_the_map_outlives_everything_that_was_flushed(world: LogWorld) -> None:
    world.open().append(rows(1), generation=1, applied={"q": 4})
    for _ in range(3):
        claimed = world.claim()
        tip = claimed.next_position - 1
        world.manifests.edit(claimed.guard, lambda current, tip=tip: replace(current, replay_after=tip, last_seen=tip))
        assert claimed.applied == {"q": 4}
    last = world.claim()
    assert (found(last), last.applied) == ([], {"q": 4})


def test_the_map_of_an_unclosed_batch_is_the_one_without_it(world: LogWorld) -> None:
    open_batch = world.open()
    put(open_batch, 1, applied={"q": 4})
    open_batch.append(rows(2), generation=1, applied={"q": 4}, part=BatchPart("q", 5, "a", closes=False))
    claimed = world.claim()
    assert (found(claimed), claimed.applied, claimed.next_position) == ([1], {"q": 4}, 4)


def test_the_older_writer_is_fenced_with_both_epochs_and_loses_nothing(world: LogWorld) -> None:
    older = world.open()
    put(older, 1)
    newer = world.claim()
    for _ in range(2):
        with raises(Fenced) as caught:
            put(older, 2)
    assert (caught.value.ours, caught.value.theirs) == (1, 2)
    assert found(newer) == [1]
    assert world.writer(newer).append(rows(3), generation=1, applied={}) == 3
    assert found(world.claim()) == [1, 3]


def test_a_fenced_guard_stays_fenced_by_the_highest_seen() -> None:
    guard = EpochGuard(REGION, 3)
    guard.check()
    for theirs in (5, 4):
        with raises(Fenced):
            guard.fenced_by(theirs)
    with raises(Fenced):
        guard.check()


def test_a_sealed_region_is_refused(world: LogWorld) -> None:
    world.claim()
    world.manifests.edit_unowned(lambda current: replace(current, status=RegionStatus.SEALED))
    before = world.contents()
    with raises(Sealed):
        world.claim()
    assert world.contents() == before


def test_a_region_of_another_sharding_spec_is_refused(world: LogWorld) -> None:
    world.claim()
    with raises(Corrupt):
        world.claim(spec_id=2)


def test_a_sealed_region_is_opened_by_a_newer_routing_with_its_map_and_closed_to_the_older(world: LogWorld) -> None:
    world.open().append(rows(1), generation=1, applied={"a": 1})
    sealed = world.claim(seal=True)
    assert (sealed.manifest.status, sealed.applied, len(sealed.entries)) == (RegionStatus.SEALED, {"a": 1}, 1)
    with pytest.raises(Sealed):
        world.claim()
    again = world.claim(seal=True)
    assert (again.manifest.status, again.guard.epoch) == (RegionStatus.SEALED, 3)
    opened = world.claim(spec_id=2, opening={"a": 5})
    assert (opened.manifest.status, opened.manifest.spec_id, opened.applied) == (RegionStatus.ACTIVE, 2, {"a": 5})
    for more in ({}, {"seal": True}):
        with raises(Resized):
            world.claim(**more)
    assert world.claim(spec_id=2).applied == {"a": 5}


def test_a_region_that_was_never_there_is_created_sealed(world: LogWorld) -> None:
    world.claim(seal=True)
    with pytest.raises(Sealed):
        world.claim()
    world.claim(spec_id=2, opening={"a": 5})
    assert world.claim(spec_id=2).applied == {"a": 5}


def test_lost_manifests_are_refused_before_anything_is_written(world: LogWorld) -> None:
    world.open().append(rows(1), generation=1, applied={})
    for key in world.store.list(manifest_prefix(REGION)):
        world.store.delete(key)
    with raises(Corrupt):
        world.claim()
    assert list(world.contents()) == [entry_key(REGION, 1, "lance")]


@pytest.mark.parametrize("region", ["new", "known"])
def test_entries_of_the_other_format_are_refused_before_the_epoch_is_raised(world: LogWorld, region: str) -> None:
    if region == "known":
        world.open().append(rows(1), generation=1, applied={})
    world.store.put(entry_key(REGION, 2, "arrow"), b"")
    before = world.contents()
    with raises(Corrupt):
        world.claim()
    assert world.contents() == before


@pytest.mark.parametrize("readers", [1, 4])
@pytest.mark.parametrize("damage", ["cut short", "one bit", "empty"])
def test_a_damaged_entry_in_the_middle_is_named_and_everything_left_as_it_is(
    world: LogWorld, damage: str, readers: int
) -> None:
    put(world.open(), *range(5))
    whole = world.entry(3)
    world.rewrite(3, {"cut short": whole[:-20], "one bit": bytes([whole[0] ^ 1]) + whole[1:], "empty": b""}[damage])
    before = world.contents()
    told: list[int] = []
    world.store.calls.clear()
    with raises(Corrupt):
        world.claim(options=WalOptions(readers=readers), on_progress=lambda read, _: told.append(read))
    assert world.store.positions().count(3) == 2  # read once beside the steps before replay, and once in the replay
    assert world.clock.slept == []  # damage is permanent, so no read was retried
    assert told == [1, 2]
    left, hint = world.contents(), f"{manifest_prefix(REGION)}version_hint.json"
    assert {**left, hint: before[hint]}.items() >= before.items()
    world.rewrite(3, whole)
    assert found(world.claim()) == [0, 1, 2, 3, 4]


# ---- the applied map -------------------------------------------------------------------------------------------------


class Forgetful(LanceCodec):
    """Reads no applied map from the entries in `foreign`, as if another program had written them."""

    def __init__(self, *foreign: int) -> None:
        super().__init__(SCHEMA)
        self.foreign = {f"{number:032x}" for number in foreign}

    def header(self, data: bytes) -> EntryHeader:
        header = super().header(data)
        return replace(header, applied=None) if header.entry_id in self.foreign else header


def with_foreign(world: LogWorld, foreign: set[int], missing: set[int], replay_after: int) -> Claim:
    """Claim a region with four entries; each entry carries the applied map {"q": position}.

    The claim sees no map in the entries in `foreign`; the entries in `missing` are deleted.
    """
    first = world.claim()
    for position in range(1, 5):
        header = EntryHeader(1, 1, f"{position:032x}", {"q": position})
        world.rewrite(position, CODEC.encode(header, rows(position)))
    world.manifests.edit(first.guard, lambda current: replace(current, replay_after=replay_after, last_seen=4))
    world.delete(*missing)
    claimed = world.claim(codec=Forgetful(*foreign))
    assert CODEC.header(world.entry(5)).applied == claimed.applied, "the sentinel carries the map"
    return claimed


@pytest.mark.parametrize(
    ("foreign", "missing", "replay_after", "applied"),
    [
        (set(), set(), 0, {"q": 4}),
        ({3, 4}, set(), 0, {"q": 2}),
        ({3, 4}, set(), 4, {"q": 2}),  # below the cursor, but it was not collected
        ({3, 4}, {1}, 2, {"q": 2}),
        ({3, 4}, {1, 2}, 2, {}),
        ({1, 2, 3, 4}, set(), 0, {}),
    ],
)
def test_the_map_is_that_of_the_newest_entry_that_carries_one(
    world: LogWorld, foreign: set[int], missing: set[int], replay_after: int, applied: dict[str, int]
) -> None:
    claimed = with_foreign(world, foreign, missing, replay_after)
    assert claimed.applied == applied
    assert found(claimed) == list(range(replay_after + 1, 5))


def test_a_hole_above_the_cursor_does_not_end_the_search_for_the_map(world: LogWorld) -> None:
    with raises(Corrupt):
        with_foreign(world, {4}, {3}, 2)
    assert 5 not in world.positions()  # a sentinel without the map would hide it for ever


class Unlisted(ScriptedStore):
    """A store whose listings lag: they show no entry."""

    def list(self, prefix: str) -> list[str]:
        return [key for key in super().list(prefix) if parse_entry_key(key) is None]


@pytest.mark.parametrize("make", [ScriptedStore, Unlisted])
def test_collected_entries_are_not_asked_for_nor_their_positions_used_again(make: Callable[[], ScriptedStore]) -> None:
    claimed = with_foreign(LogWorld(store=make()), set(), {1, 2, 3}, 3)
    assert (found(claimed), claimed.applied, claimed.next_position) == ([4], {"q": 4}, 6)


# ---- storage that is not there at times ------------------------------------------------------------------------------


@pytest.mark.parametrize("failures", [1, 5])
@pytest.mark.parametrize("readers", [1, 4])
def test_a_read_that_fails_for_a_moment_does_not_fail_the_claim(failures: int, readers: int) -> None:
    """The failure happens at each read of the claim in turn."""
    for at in itertools.count():
        world = LogWorld()
        first = world.open()
        for number in range(3):
            put(first, number, applied={"q": number})
        world.store.fail_reads(StoreUnavailable("storage answered 503"), failures, after=at)
        claimed = world.claim(options=WalOptions(readers=readers))
        assert (found(claimed), claimed.applied, claimed.next_position) == ([0, 1, 2], {"q": 2}, 5)
        if not world.clock.slept:
            break
    assert at >= 10  # reads of a claim of three entries


def test_reads_that_keep_failing_end_within_the_budget(world: LogWorld) -> None:
    world.store.fail_reads(StoreUnavailable("storage answered 503"))
    with raises(StoreUnavailable):
        world.claim()
    assert 15 < world.clock.monotonic() <= 30
    assert len(world.store.calls) < 50  # no spinning
    assert {call for call, _ in world.store.calls} <= READS


def test_a_refusal_is_not_tried_again(world: LogWorld) -> None:
    world.store.fail_reads(StoreRefused("no permission to list"))
    with raises(StoreRefused):
        world.claim()
    assert (world.clock.slept, len(world.store.calls)) == ([], 1)


# ---- races -----------------------------------------------------------------------------------------------------------


def test_an_append_that_beats_the_sentinel_is_replayed(world: LogWorld) -> None:
    older = world.open()
    world.store.run_once("put_if_absent", "/wal/", lambda: put(older, 1, applied={"q": 1}))
    claimed = world.claim()
    assert (found(claimed), claimed.applied, claimed.next_position) == ([1], {"q": 1}, 3)
    with pytest.raises(Fenced):
        put(older, 2)


def test_an_append_that_learns_of_the_fence_after_it_wrote_has_an_unknown_outcome(world: LogWorld) -> None:
    """The newer writer replays the entry if its sentinel lands behind the entry, so the older writer must not report
    `Fenced`: on a fence a client sends the rows again, as rows that were not applied."""
    older, told = world.open(), list[BaseException]()

    def append() -> None:
        world.clock.advance(60.0)  # so that the manifest is read again before the ack
        with raises(OutcomeUnknown) as caught:
            put(older, 1, applied={"q": 1})
        told.append(caught.value)

    world.store.run_once("put_if_absent", "/wal/", append)
    assert found(world.claim()) == [1]
    assert len(told) == 1
    with pytest.raises(Fenced):
        put(older, 2)


def test_a_claim_overtaken_before_its_sentinel_is_fenced(world: LogWorld) -> None:
    world.claim()
    newer: list[Claim] = []
    world.store.run_once("put_if_absent", "/wal/", lambda: newer.append(world.claim()))
    with raises(Fenced):
        world.claim()
    put(world.writer(newer[0]), 1)
    assert world.positions()[-1] == newer[0].next_position
    assert found(world.claim()) == [1]


def test_a_first_claim_that_finds_the_sentinel_of_the_next_one_is_fenced(world: LogWorld) -> None:
    world.store.run_once("exists", "/wal/", world.claim)
    with raises(Fenced):
        world.claim()


def test_a_claim_that_loses_the_manifest_takes_the_next_epoch(world: LogWorld) -> None:
    world.claim()
    newer: list[Claim] = []
    world.store.run_once("put_if_absent", "/manifest/", lambda: newer.append(world.claim()))
    assert world.claim().guard.epoch == 3
    with raises(Fenced):
        put(world.writer(newer[0]), 1)


@pytest.mark.parametrize("make", [lambda path: ScriptedStore(), LocalStore], ids=["memory", "local"])
def test_of_many_racing_claims_one_owns_the_region(make: Callable[[Path], ObjectStore], tmp_path: Path) -> None:
    world, claims, fenced = LogWorld(store=make(tmp_path)), list[Claim](), list[Fenced]()

    def race() -> None:
        try:
            claims.append(world.claim())
        except Fenced as error:
            fenced.append(error)

    together(*[race] * 6)
    epochs = [each.guard.epoch for each in claims] + [each.ours for each in fenced]
    assert len(set(epochs)) == 6  # a claim that does not know whether its manifest was written takes another epoch
    won = []
    for claimed in claims:
        with suppress(Fenced):
            put(world.writer(claimed), claimed.guard.epoch)
            won.append(claimed.guard.epoch)
    assert won == [max(epochs)]
    assert found(world.claim()) == won


def test_the_order_of_store_calls(world: LogWorld) -> None:
    transcript = []
    for title in ("new region: claim, append", "next claim: claim, append"):
        put(world.open(), 1)
        transcript += [f"# {title}", *world.store.transcript(), ""]
        world.store.calls.clear()
    text = "\n".join(transcript)
    assert text == golden("wal/claim_and_append.txt", text).decode()


def test_a_claim_asks_at_once_what_need_not_wait(world: LogWorld) -> None:
    """On object storage the time of a claim is the time of its longest chain of dependent requests. Each of two calls
    is answered only after the other one has begun."""
    manifests, sentinel = manifest_prefix(REGION), 81
    pairs = [
        (f"list {wal_prefix(REGION)}", f"get {manifests}version_hint.json"),
        (f"put_if_absent {manifest_key(REGION, 2)}", f"get {entry_key(REGION, 20, 'lance')}"),
        (f"put_if_absent {manifest_key(REGION, 3)}", f"get {entry_key(REGION, sentinel - 2, 'lance')}"),
    ]
    begun = {call: threading.Event() for pair in pairs for call in pair}
    other = {call: begun[second] for pair in pairs for call, second in (pair, pair[::-1])}
    alone: list[str] = []

    def meet(name: str, key: str) -> None:
        if (call := f"{name} {key}") in begun:
            begun[call].set()
            if not other[call].wait(10):
                alone.append(call)

    put(world.open(), *range(sentinel - 1))
    world.store.before, world.store.remote = meet, True
    claimed = world.claim(options=WalOptions(readers=8))
    assert claimed.next_position == sentinel + 1
    assert found(claimed) == list(range(sentinel - 1))
    assert alone == []
    assert all(event.is_set() for event in begun.values())


def test_claims_with_one_seed_write_the_same_keys() -> None:
    def run() -> list[str]:
        world = LogWorld()
        for _ in range(3):
            world.claim()
        return [*world.contents(), world.latest().edit_id]

    assert run() == run()
