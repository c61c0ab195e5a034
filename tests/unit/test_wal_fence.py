"""Claims: the owner of a region, what a claim replays, and that a race of any number of claims has one winner."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
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
    ManifestStore,
    ObjectStore,
    OutcomeUnknown,
    PutOutcome,
    RegionStatus,
    Resized,
    Sealed,
    StoreRefused,
    StoreUnavailable,
    SystemIds,
    WalAppender,
    WalOptions,
    bucket_region,
    claim,
)
from memwal.wal.layout import (
    entry_key,
    manifest_key,
    manifest_prefix,
    parse_entry_key,
    parse_manifest_key,
    wal_prefix,
)
from tests.log_rows import CODEC, SCHEMA, FailingReads, rows
from tests.messages import raises
from tests.support.clock import FakeClock, SeededIds
from tests.support.memory_store import MemoryStore

GOLDEN = Path(__file__).parents[1] / "golden" / "wal" / "claim_and_append.txt"
REGION = bucket_region(0)
CLOCK = FakeClock()
IDS = SystemIds()


def take(store: ObjectStore) -> Claim:
    return claim(store, REGION, spec_id=1, codec=CODEC, ids=IDS, clock=CLOCK)


def writer(store: ObjectStore, claimed: Claim) -> WalAppender:
    return WalAppender(store, REGION, claimed.guard, CODEC, claimed.next_position, IDS, CLOCK)


def found(claimed: Claim) -> list[int]:
    return [each for entry in claimed.entries for each in entry.rows["id"].to_pylist()]


class Recording(MemoryStore):
    """Records every call, with positions and versions as numbers instead of reversed binary."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def note(self, call: str, key: str) -> None:
        parsed = parse_entry_key(key) or parse_manifest_key(key)
        name = key.removeprefix(f"_mem_wal/{REGION}/")
        self.calls.append(f"{call} {name.partition('/')[0] + f'/{parsed[1]}' if parsed else name}")

    def put_if_absent(self, key: str, data: bytes) -> PutOutcome:
        self.note("put_if_absent", key)
        return super().put_if_absent(key, data)

    def put(self, key: str, data: bytes) -> None:
        self.note("put", key)
        super().put(key, data)

    def get(self, key: str) -> bytes | None:
        self.note("get", key)
        return super().get(key)

    def exists(self, key: str) -> bool:
        self.note("exists", key)
        return super().exists(key)

    def list(self, prefix: str) -> list[str]:
        self.note("list", prefix)
        return super().list(prefix)


def test_a_new_region_begins_with_everything_at_one() -> None:
    store = MemoryStore()
    claimed = take(store)
    assert (claimed.guard.epoch, claimed.next_position, claimed.applied, claimed.entries) == (1, 1, {}, [])
    assert (claimed.manifest.version, claimed.manifest.current_generation) == (1, 1)
    assert sorted(store.list("")) == sorted([manifest_key(REGION, 1), f"{manifest_prefix(REGION)}version_hint.json"])


def test_the_next_claim_finds_rows_map_and_position() -> None:
    store = MemoryStore()
    first = writer(store, take(store))
    first.append(rows(1, 2), generation=1, applied={"q": 4})
    first.append(rows(3), generation=1, applied={"q": 5})
    claimed = take(store)
    assert found(claimed) == [1, 2, 3]
    assert [entry.position for entry in claimed.entries] == [1, 2]
    assert claimed.applied == {"q": 5}
    assert (claimed.guard.epoch, claimed.next_position, claimed.manifest.last_seen) == (2, 4, 3)


def test_the_map_outlives_everything_that_was_flushed() -> None:
    store = MemoryStore()
    writer(store, take(store)).append(rows(1), generation=1, applied={"q": 4})
    for _ in range(3):
        claimed = take(store)
        manifests = ManifestStore(store, REGION, ids=IDS, clock=CLOCK)
        tip = claimed.next_position - 1
        manifests.edit(claimed.guard, lambda current, tip=tip: replace(current, replay_after=tip, last_seen=tip))
        assert claimed.applied == {"q": 4}
    last = take(store)
    assert (found(last), last.applied) == ([], {"q": 4})


def test_the_map_of_an_unclosed_batch_is_the_one_without_it() -> None:
    store = MemoryStore()
    open_batch = writer(store, take(store))
    open_batch.append(rows(1), generation=1, applied={"q": 4})
    open_batch.append(rows(2), generation=1, applied={"q": 4}, part=BatchPart("q", 5, "a", closes=False))
    claimed = take(store)
    assert (found(claimed), claimed.applied, claimed.next_position) == ([1], {"q": 4}, 4)


def test_the_older_writer_is_fenced_with_both_epochs_and_loses_nothing() -> None:
    store = MemoryStore()
    older = writer(store, take(store))
    older.append(rows(1), generation=1, applied={})
    newer = take(store)
    for _ in range(2):
        with raises(Fenced) as caught:
            older.append(rows(2), generation=1, applied={})
    assert (caught.value.ours, caught.value.theirs) == (1, 2)
    assert found(newer) == [1]
    assert writer(store, newer).append(rows(3), generation=1, applied={}) == 3
    assert found(take(store)) == [1, 3]


def test_a_fenced_guard_stays_fenced_by_the_highest_seen() -> None:
    guard = EpochGuard(REGION, 3)
    guard.check()
    for theirs in (5, 4):
        with raises(Fenced):
            guard.fenced_by(theirs)
    with raises(Fenced):
        guard.check()


def test_a_sealed_region_is_refused() -> None:
    store = MemoryStore()
    take(store)
    ManifestStore(store, REGION).edit_unowned(lambda current: replace(current, status=RegionStatus.SEALED))
    before = sorted(store.list(""))
    with raises(Sealed):
        take(store)
    assert sorted(store.list("")) == before


def test_a_region_of_another_sharding_spec_is_refused() -> None:
    store = MemoryStore()
    take(store)
    with raises(Corrupt):
        claim(store, REGION, spec_id=2, codec=CODEC, ids=IDS, clock=CLOCK)


def test_a_sealed_region_is_opened_by_a_newer_routing_with_its_map_and_closed_to_the_older() -> None:
    store = MemoryStore()
    writer(store, take(store)).append(rows(1), generation=1, applied={"a": 1})
    sealed = claim(store, REGION, spec_id=1, codec=CODEC, ids=IDS, clock=CLOCK, seal=True)
    assert (sealed.manifest.status, sealed.applied, len(sealed.entries)) == (RegionStatus.SEALED, {"a": 1}, 1)
    with pytest.raises(Sealed):
        take(store)
    again = claim(store, REGION, spec_id=1, codec=CODEC, ids=IDS, clock=CLOCK, seal=True)
    assert (again.manifest.status, again.guard.epoch) == (RegionStatus.SEALED, 3)
    opened = claim(store, REGION, spec_id=2, codec=CODEC, ids=IDS, clock=CLOCK, opening={"a": 5})
    assert (opened.manifest.status, opened.manifest.spec_id, opened.applied) == (RegionStatus.ACTIVE, 2, {"a": 5})
    for more in ({}, {"seal": True}):
        with raises(Resized):
            claim(store, REGION, spec_id=1, codec=CODEC, ids=IDS, clock=CLOCK, **more)
    assert claim(store, REGION, spec_id=2, codec=CODEC, ids=IDS, clock=CLOCK).applied == {"a": 5}


def test_a_region_that_was_never_there_is_created_sealed() -> None:
    store = MemoryStore()
    claim(store, REGION, spec_id=1, codec=CODEC, ids=IDS, clock=CLOCK, seal=True)
    with pytest.raises(Sealed):
        take(store)
    claim(store, REGION, spec_id=2, codec=CODEC, ids=IDS, clock=CLOCK, opening={"a": 5})
    assert claim(store, REGION, spec_id=2, codec=CODEC, ids=IDS, clock=CLOCK).applied == {"a": 5}


def test_entries_without_any_manifest_are_corruption() -> None:
    store = MemoryStore()
    writer(store, take(store)).append(rows(1), generation=1, applied={})
    for key in store.list(manifest_prefix(REGION)):
        store.delete(key)
    with raises(Corrupt):
        take(store)


def test_lost_manifests_are_refused_before_anything_is_written() -> None:
    store = MemoryStore()
    writer(store, take(store)).append(rows(1), generation=1, applied={})
    for key in store.list(manifest_prefix(REGION)):
        store.delete(key)
    with raises(Corrupt):
        take(store)
    assert store.list("") == [entry_key(REGION, 1, "lance")]


@pytest.mark.parametrize("region", ["new", "known"])
def test_entries_of_the_other_format_are_refused_before_the_epoch_is_raised(region: str) -> None:
    store = MemoryStore()
    if region == "known":
        writer(store, take(store)).append(rows(1), generation=1, applied={})
    store.put(entry_key(REGION, 2, "arrow"), b"")
    before = sorted(store.list(""))
    with raises(Corrupt):
        take(store)
    assert sorted(store.list("")) == before


def snapshot(store: MemoryStore) -> dict[str, bytes]:
    return {key: store.get(key) or b"" for key in store.list("")}


@pytest.mark.parametrize("readers", [1, 4])
@pytest.mark.parametrize("damage", ["cut short", "one bit", "empty"])
def test_a_damaged_entry_in_the_middle_is_named_and_everything_left_as_it_is(damage: str, readers: int) -> None:
    store, clock = Recording(), FakeClock()
    first = writer(store, take(store))
    for number in range(5):
        first.append(rows(number), generation=1, applied={})
    key = entry_key(REGION, 3, "lance")
    whole = store.get(key) or b""
    bad = {"cut short": whole[:-20], "one bit": bytes([whole[0] ^ 1]) + whole[1:], "empty": b""}[damage]
    store.put(key, bad)
    before = snapshot(store)
    told: list[int] = []
    store.calls.clear()
    with raises(Corrupt):
        claim(
            store,
            REGION,
            spec_id=1,
            codec=CODEC,
            ids=IDS,
            clock=clock,
            options=WalOptions(readers=readers),
            on_progress=lambda read, _: told.append(read),
        )
    assert store.calls.count("get wal/3") == 2  # read once beside the steps before replay, and once in the replay
    assert clock.slept == []  # damage is permanent, so no read was retried
    assert told == [1, 2]
    left, hint = snapshot(store), f"{manifest_prefix(REGION)}version_hint.json"
    assert {**left, hint: before[hint]}.items() >= before.items()
    store.put(key, whole)
    assert found(take(store)) == [0, 1, 2, 3, 4]


def test_a_hole_in_the_log_stops_the_claim() -> None:
    store = MemoryStore()
    first = writer(store, take(store))
    for number in range(3):
        first.append(rows(number), generation=1, applied={})
    store.delete(entry_key(REGION, 2, "lance"))
    with raises(Corrupt):
        take(store)


# ---- the applied map -------------------------------------------------------------------------------------------------


class Forgetful(LanceCodec):
    """Reads no applied map from the entries in `foreign`, as if another program had written them."""

    def __init__(self, *foreign: int) -> None:
        super().__init__(SCHEMA)
        self.foreign = {f"{number:032x}" for number in foreign}

    def header(self, data: bytes) -> EntryHeader:
        header = super().header(data)
        return replace(header, applied=None) if header.entry_id in self.foreign else header


def with_foreign(foreign: set[int], missing: set[int], replay_after: int, store: MemoryStore | None = None) -> Claim:
    """Claim a region with four entries; each entry carries the applied map {"q": position}.

    The claim sees no map in the entries in `foreign`; the entries in `missing` are deleted.
    """
    store = store or MemoryStore()
    first = take(store)
    for position in range(1, 5):
        header = EntryHeader(1, 1, f"{position:032x}", {"q": position})
        store.put(entry_key(REGION, position, "lance"), CODEC.encode(header, rows(position)))
    ManifestStore(store, REGION).edit(
        first.guard, lambda current: replace(current, replay_after=replay_after, last_seen=4)
    )
    for position in missing:
        store.delete(entry_key(REGION, position, "lance"))
    claimed = claim(store, REGION, spec_id=1, codec=Forgetful(*foreign), ids=IDS, clock=CLOCK)
    sentinel = CODEC.header(store.get(entry_key(REGION, 5, "lance")) or b"")
    assert sentinel.applied == claimed.applied
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
    foreign: set[int], missing: set[int], replay_after: int, applied: dict[str, int]
) -> None:
    claimed = with_foreign(foreign, missing, replay_after)
    assert claimed.applied == applied
    assert found(claimed) == list(range(replay_after + 1, 5))


def test_a_hole_above_the_cursor_does_not_end_the_search_for_the_map() -> None:
    store = MemoryStore()
    with raises(Corrupt):
        with_foreign({4}, {3}, 2, store)
    assert not store.exists(entry_key(REGION, 5, "lance"))  # a sentinel without the map would hide it for ever


class Unlisted(MemoryStore):
    """A store whose listings lag: they show no entry."""

    def list(self, prefix: str) -> list[str]:
        return [key for key in super().list(prefix) if parse_entry_key(key) is None]


@pytest.mark.parametrize("make", [MemoryStore, Unlisted])
def test_collected_entries_are_not_asked_for_nor_their_positions_used_again(make: Callable[[], MemoryStore]) -> None:
    claimed = with_foreign(set(), {1, 2, 3}, 3, make())
    assert (found(claimed), claimed.applied, claimed.next_position) == ([4], {"q": 4}, 6)


# ---- storage that is not there at times ------------------------------------------------------------------------------


class Unavailable(FailingReads):
    """A store whose next `failures` reads fail."""

    def __init__(self) -> None:
        super().__init__()
        self.failures, self.calls = 0, 0
        self.error: Exception = StoreUnavailable("storage answered 503")

    def fail(self) -> None:
        self.calls += 1
        if self.failures:
            self.failures -= 1
            raise self.error


@pytest.mark.parametrize("failures", [1, 5])
@pytest.mark.parametrize("readers", [1, 4])
def test_a_read_that_fails_for_a_moment_does_not_fail_the_claim(failures: int, readers: int) -> None:
    """The failure happens at each read of the claim in turn."""
    options, at = WalOptions(readers=readers), 0
    while True:
        store, clock = Unavailable(), FakeClock()
        first = writer(store, take(store))
        for number in range(3):
            first.append(rows(number), generation=1, applied={"q": number})
        armed = store.calls + at

        def fail(store: Unavailable = store, armed: int = armed) -> None:
            store.calls += 1
            if armed < store.calls <= armed + failures:
                raise store.error

        store.fail = fail  # type: ignore[method-assign]
        claimed = claim(store, REGION, spec_id=1, codec=CODEC, ids=IDS, clock=clock, options=options)
        assert (found(claimed), claimed.applied, claimed.next_position) == ([0, 1, 2], {"q": 2}, 5)
        if not clock.slept:
            break
        at += 1
    assert at >= 10  # reads of a claim of three entries


def test_reads_that_keep_failing_end_within_the_budget() -> None:
    store, clock = Unavailable(), FakeClock()
    store.failures = 10**9
    with raises(StoreUnavailable):
        claim(store, REGION, spec_id=1, codec=CODEC, ids=IDS, clock=clock)
    assert 15 < clock.monotonic() <= 30
    assert store.calls < 50  # no spinning
    assert MemoryStore.list(store, "") == []


def test_a_refusal_is_not_tried_again() -> None:
    store, clock = Unavailable(), FakeClock()
    store.failures, store.error = 10**9, StoreRefused("no permission to list")
    with raises(StoreRefused):
        claim(store, REGION, spec_id=1, codec=CODEC, ids=IDS, clock=clock)
    assert (clock.slept, store.calls) == ([], 1)


# ---- races -----------------------------------------------------------------------------------------------------------


class At(MemoryStore):
    """Runs `then` just before the first put-if-absent of a key that `when` accepts."""

    def __init__(self, when: Callable[[str], bool], then: Callable[[ObjectStore], object]) -> None:
        super().__init__()
        self.when, self.then, self.armed = when, then, False

    def put_if_absent(self, key: str, data: bytes) -> PutOutcome:
        if self.armed and self.when(key):
            self.armed = False
            self.then(self)
        return super().put_if_absent(key, data)


def is_entry(key: str) -> bool:
    return parse_entry_key(key) is not None


def is_manifest(key: str) -> bool:
    return parse_manifest_key(key) is not None


def test_an_append_that_beats_the_sentinel_is_replayed() -> None:
    store = At(is_entry, lambda _: older.append(rows(1), generation=1, applied={"q": 1}))
    older = writer(store, take(store))
    store.armed = True
    claimed = take(store)
    assert (found(claimed), claimed.applied, claimed.next_position) == ([1], {"q": 1}, 3)
    with pytest.raises(Fenced):
        older.append(rows(2), generation=1, applied={})


def test_an_append_that_learns_of_the_fence_after_it_wrote_has_an_unknown_outcome() -> None:
    """The newer writer replays the entry if its sentinel lands behind the entry, so the older writer must not report
    `Fenced`: on a fence a client sends the rows again, as rows that were not applied."""
    told: list[BaseException] = []

    def append(_: ObjectStore) -> None:
        clock.advance(60.0)  # so that the manifest is read again before the ack
        with raises(OutcomeUnknown) as caught:
            older.append(rows(1), generation=1, applied={"q": 1})
        told.append(caught.value)

    store, clock = At(is_entry, append), FakeClock()
    older = WalAppender(store, REGION, (first := take(store)).guard, CODEC, first.next_position, IDS, clock)
    store.armed = True
    assert found(take(store)) == [1]
    assert len(told) == 1
    with pytest.raises(Fenced):
        older.append(rows(2), generation=1, applied={})


def test_a_claim_overtaken_before_its_sentinel_is_fenced() -> None:
    newer: list[Claim] = []
    store = At(is_entry, lambda inner: newer.append(take(inner)))
    take(store)
    store.armed = True
    with raises(Fenced):
        take(store)
    assert writer(store, newer[0]).append(rows(1), generation=1, applied={}) == newer[0].next_position
    assert found(take(store)) == [1]


def test_a_first_claim_that_finds_the_sentinel_of_the_next_one_is_fenced() -> None:
    class Overtaken(MemoryStore):
        armed = True

        def exists(self, key: str) -> bool:
            if self.armed and is_entry(key):
                self.armed = False
                take(self)
            return super().exists(key)

    with raises(Fenced):
        take(Overtaken())


def test_a_claim_that_loses_the_manifest_takes_the_next_epoch() -> None:
    newer: list[Claim] = []
    store = At(is_manifest, lambda inner: newer.append(take(inner)))
    take(store)
    store.armed = True
    assert take(store).guard.epoch == 3
    with raises(Fenced):
        writer(store, newer[0]).append(rows(1), generation=1, applied={})


@pytest.mark.parametrize("make", [lambda path: MemoryStore(), LocalStore], ids=["memory", "local"])
def test_of_many_racing_claims_one_owns_the_region(make: Callable[[Path], ObjectStore], tmp_path: Path) -> None:
    store = make(tmp_path)
    start = threading.Barrier(6)
    claims: list[Claim] = []
    fenced: list[Fenced] = []

    def race() -> None:
        start.wait()
        try:
            claims.append(take(store))
        except Fenced as error:
            fenced.append(error)

    threads = [threading.Thread(target=race) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    epochs = [each.guard.epoch for each in claims] + [each.ours for each in fenced]
    assert len(set(epochs)) == 6  # a claim that does not know whether its manifest was written takes another epoch
    won = []
    for claimed in claims:
        try:
            writer(store, claimed).append(rows(claimed.guard.epoch), generation=1, applied={})
            won.append(claimed.guard.epoch)
        except Fenced:
            continue
    assert won == [max(epochs)]
    assert found(take(store)) == won


def test_the_order_of_store_calls() -> None:
    """Rewrite the golden transcript with MEMWAL_REWRITE_GOLDEN=1, and read the difference before you commit it."""
    store = Recording()
    transcript = []
    for title in ("new region: claim, append", "next claim: claim, append"):
        claimed = take(store)
        writer(store, claimed).append(rows(1), generation=1, applied={})
        transcript += [f"# {title}", *store.calls, ""]
        store.calls.clear()
    text = "\n".join(transcript)
    if os.environ.get("MEMWAL_REWRITE_GOLDEN"):
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()


class Together(MemoryStore):
    """Answers each call of `pairs` only after the other call of its pair has begun: the two must run concurrently."""

    def __init__(self, pairs: Sequence[tuple[str, str]]) -> None:
        super().__init__()
        self.begun: dict[str, threading.Event] = {call: threading.Event() for pair in pairs for call in pair}
        self.other = {call: self.begun[other] for pair in pairs for call, other in (pair, pair[::-1])}
        self.alone: list[str] = []

    def meet(self, call: str) -> None:
        if call in self.begun:
            self.begun[call].set()
            if not self.other[call].wait(10):
                self.alone.append(call)

    def list_some(self, prefix: str, most: int) -> list[str]:
        self.meet(f"list {prefix}")
        return super().list_some(prefix, most)

    def get(self, key: str) -> bytes | None:
        self.meet(f"get {key}")
        return super().get(key)

    def put_if_absent(self, key: str, data: bytes) -> PutOutcome:
        self.meet(f"put {key}")
        return super().put_if_absent(key, data)


def test_a_claim_asks_at_once_what_need_not_wait() -> None:
    """On object storage the time of a claim is the time of its longest chain of dependent requests."""
    manifests, sentinel = manifest_prefix(REGION), 81
    pairs = [
        (f"list {wal_prefix(REGION)}", f"get {manifests}version_hint.json"),
        (f"put {manifest_key(REGION, 2)}", f"get {entry_key(REGION, 20, 'lance')}"),
        (f"put {manifest_key(REGION, 3)}", f"get {entry_key(REGION, sentinel - 2, 'lance')}"),
    ]
    store = Together([])
    first = writer(store, take(store))
    for number in range(sentinel - 1):
        first.append(rows(number), generation=1, applied={})
    together = Together(pairs)
    for key in store.list(""):
        together.put(key, store.get(key) or b"")
    options = WalOptions(readers=8)
    claimed = claim(together, REGION, spec_id=1, codec=CODEC, ids=IDS, clock=FakeClock(), options=options)
    assert claimed.next_position == sentinel + 1
    assert found(claimed) == list(range(sentinel - 1))
    assert together.alone == []


def test_claims_with_one_seed_write_the_same_keys() -> None:
    def run() -> list[str]:
        store, ids = MemoryStore(), SeededIds(3)
        for _ in range(3):
            claim(store, REGION, spec_id=1, codec=CODEC, ids=ids, clock=FakeClock())
        manifest = ManifestStore(store, REGION).latest()
        assert manifest is not None
        return [*store.list(""), manifest.edit_id]

    assert run() == run()
