"""Replay: the entries that it returns, their order, and the logs that it refuses."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace as changed
from typing import Any

import pyarrow as pa
import pytest

from memwal.wal import (
    BatchPart,
    Corrupt,
    EntryHeader,
    EpochGuard,
    Fenced,
    ManifestStore,
    Overtaken,
    RegionManifest,
    StoreUnavailable,
    bucket_region,
    entry_reader,
    find_tip,
    read_tail,
    replay,
)
from memwal.wal.entry_reader import EntryReader
from memwal.wal.layout import entry_key, parse_entry_key
from memwal.wal.replay import BatchAssembler
from tests.log_rows import CODEC, SCHEMA
from tests.messages import raises
from tests.support.clock import FakeClock
from tests.support.memory_store import MemoryStore
from tests.support.scripted_store import READS, ScriptedStore

REGION = bucket_region(1)


class Log:
    """A log written by hand; the id of each row is its position."""

    def __init__(self, entries: int = 0, store: MemoryStore | None = None) -> None:
        self.store: Any = store or MemoryStore()
        self.tip = 0
        for _ in range(entries):
            self.entry()

    def entry(self, epoch: int = 1, part: BatchPart | None = None, sentinel: bool = False, **applied: int) -> Log:
        self.tip += 1
        header = EntryHeader(epoch, 1, f"{self.tip:032x}", applied, part, sentinel)
        rows = CODEC.no_rows if sentinel else pa.table({"id": [self.tip], "_tombstone": [False]}, schema=SCHEMA)
        self.store.put(entry_key(REGION, self.tip, "lance"), CODEC.encode(header, rows))
        return self

    def part(self, attempt: str, closes: bool = False, epoch: int = 1, sequence: int = 1) -> Log:
        return self.entry(epoch, BatchPart("q", sequence, attempt, closes))

    def replayed(self, after: int = 0, **options: Any) -> list[int]:
        return [entry.position for entry in replay(self.store, REGION, CODEC, after, self.tip, **options)]


def test_all_entries_after_the_cursor() -> None:
    log = Log(3)
    assert log.replayed() == [1, 2, 3]
    assert log.replayed(after=2) == [3]
    assert log.replayed(after=3) == []


@pytest.mark.parametrize(
    ("log", "replayed"),
    [
        (Log().entry().part("a").part("a"), [1]),
        (Log().part("a").part("a").part("a", closes=True), [1, 2, 3]),
        (Log().part("a").entry().part("a", closes=True).entry(), [2, 1, 3, 4]),
        (Log().part("a").part("b").part("a").part("b", closes=True), [2, 4]),
        (Log().part("a").part("a", sequence=2).part("a", closes=True, sequence=2), [2, 3]),
        (Log().part("a").entry(2, sentinel=True).part("a", epoch=2).part("a", closes=True, epoch=2), [3, 4]),
        (Log().entry().entry(2, sentinel=True).entry(2), [1, 3]),
    ],
    ids=["unclosed", "closed", "where it closes", "attempt", "sequence", "epoch", "sentinel"],
)
def test_entries_and_whole_batches_are_replayed(log: Log, replayed: list[int]) -> None:
    assert log.replayed() == replayed


def test_attempts_that_were_given_up_are_not_held_back_for_ever() -> None:
    log = Log().part("a").part("b").part("b", closes=True).part("a", closes=True)
    assembler = BatchAssembler()
    entries = EntryReader(log.store, REGION, CODEC).each(range(1, 5))
    assert [[each.position for each in assembler.add(entry)] for entry in entries if entry] == [[], [], [2, 3], [4]]


def test_a_hole_is_corruption_and_named() -> None:
    log = Log(3)
    collected(log, 2)
    assert find_tip(log.store, REGION, "lance", 0) == 3
    with raises(Corrupt):
        log.replayed()


def test_a_damaged_entry_is_named_by_key_and_position() -> None:
    log = Log().entry()
    log.store.put(entry_key(REGION, 1, "lance"), b"LANC")
    with raises(Corrupt):
        log.replayed()


def test_an_epoch_that_goes_back_is_corruption() -> None:
    with raises(Corrupt):
        Log().entry(1).entry(2).entry(1).replayed()


def test_an_epoch_above_ours_fences() -> None:
    guard = EpochGuard(REGION, 1)
    with raises(Fenced):
        Log().entry(1).entry(2, sentinel=True).replayed(guard=guard)
    assert guard.fenced


def test_progress_is_told() -> None:
    told: list[tuple[int, int]] = []
    Log(3).replayed(after=1, on_progress=lambda read, total: told.append((read, total)))
    assert told == [(1, 2), (2, 2)]


@pytest.mark.parametrize("last_seen", [0, 1, 3])
def test_find_tip(last_seen: int) -> None:
    assert find_tip(Log(3).store, REGION, "lance", last_seen) == 3


def test_find_tip_of_nothing() -> None:
    assert find_tip(MemoryStore(), REGION, "lance", 0) == 0


def test_find_tip_looks_past_a_listing_that_lags() -> None:
    class Lagging(MemoryStore):
        def list(self, prefix: str) -> list[str]:
            return [key for key in super().list(prefix) if key != entry_key(REGION, 3, "lance")]

    assert find_tip(Log(3, Lagging()).store, REGION, "lance", 0) == 3


def test_a_foreign_entry_is_reported_never_skipped() -> None:
    log = Log().entry()
    log.store.put(entry_key(REGION, 2, "arrow"), b"")
    with raises(Corrupt):
        read_tail(log.store, REGION, CODEC, 0)


def test_read_tail_gives_rows_and_map_and_writes_nothing() -> None:
    log = Log().entry(a=1).entry(a=2).entry(2, sentinel=True, a=2)
    log.entry(2, BatchPart("b", 8, "x", closes=False), a=2, b=7)
    before = sorted(log.store.list(""))
    entries, applied = read_tail(log.store, REGION, CODEC, 1)
    assert [entry.rows["id"].to_pylist() for entry in entries] == [[2]]
    assert applied == {"a": 2, "b": 7}
    assert sorted(log.store.list("")) == before
    assert read_tail(MemoryStore(), REGION, CODEC, 0) == ([], {})


# ---- several readers -------------------------------------------------------------------------------------------------


def at_entries(log: Log, act: Callable[[int], object]) -> None:
    """Call `act` with the position ahead of each read of an entry."""

    def before(call: str, key: str) -> None:
        if call == "get" and (parsed := parse_entry_key(key)) is not None:
            act(parsed.position)

    log.store.before = before


@pytest.fixture
def log() -> Iterator[Log]:
    """Yield a log of 40 entries; afterwards assert that no reader thread outlives the test."""
    yield Log(40, ScriptedStore())
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("wal-reader")] == []


def test_readers_read_at_once_and_rows_come_in_order(log: Log) -> None:
    together, threads = threading.Barrier(4), set[str]()  # the barrier breaks unless four readers read at the same time

    def before(position: int) -> None:
        threads.add(threading.current_thread().name)
        together.wait(60)

    at_entries(log, before)
    assert log.replayed(readers=4) == list(range(1, 41))
    assert len(threads) == 4


def test_a_slow_first_entry_delays_its_followers_and_loses_none(log: Log) -> None:
    others = threading.Event()
    at_entries(log, lambda position: others.wait(60) if position == 1 else others.set())
    assert log.replayed(readers=3) == list(range(1, 41))


def test_one_reader_makes_no_thread_and_keeps_the_order_of_calls(log: Log) -> None:
    threads = set[str]()
    at_entries(log, lambda _: threads.add(threading.current_thread().name))
    assert log.replayed() == list(range(1, 41))
    assert threads == {threading.current_thread().name}
    assert log.store.positions() == list(range(1, 41))


def test_what_is_read_ahead_is_bounded_in_entries(log: Log) -> None:
    with closing(EntryReader(log.store, REGION, CODEC, readers=3).each(itertools.count(1))) as entries:
        for taken in range(1, 9):
            next(entries)
            assert max(log.store.positions()) <= taken + 2 * 3


def test_what_is_read_ahead_is_bounded_in_bytes(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows have 9 bytes and the limit is 20: replay holds at most two, including the one that the caller takes."""
    monkeypatch.setattr(entry_reader, "_BYTES_AHEAD", 20)
    with closing(EntryReader(log.store, REGION, CODEC, readers=8).each(itertools.count(1))) as entries:
        for taken in range(1, 30):
            next(entries)
            assert max(log.store.positions()) <= max(
                8, taken + 2
            )  # before any size is known, as many as there are readers


@pytest.mark.parametrize("readers", [1, 4])
def test_errors_come_in_the_order_of_positions(log: Log, readers: int) -> None:
    """A reader finds the hole at 7 long before another one finds the damage at 5; replay reports the damage."""
    later = threading.Event()
    at_entries(log, lambda position: position == 5 and later.wait(0.2))
    log.store.put(entry_key(REGION, 5, "lance"), b"LANC")
    collected(log, 7)
    told: list[tuple[int, int]] = []
    with raises(Corrupt):
        log.replayed(readers=readers, on_progress=lambda read, total: told.append((read, total)))
    assert told == [(1, 40), (2, 40), (3, 40), (4, 40)]


@pytest.mark.parametrize("error", [StoreUnavailable("503"), KeyboardInterrupt()])
def test_a_reader_that_fails_ends_the_replay_with_its_error(log: Log, error: BaseException) -> None:

    def fail(position: int) -> None:
        if position == 9:
            raise error

    at_entries(log, fail)
    with pytest.raises(type(error)):
        log.replayed(readers=4)
    assert max(log.store.positions()) < 40


def test_a_consumer_that_stops_early_stops_the_readers(log: Log) -> None:
    with closing(EntryReader(log.store, REGION, CODEC, readers=4).each(itertools.count(1))) as entries:
        assert [entry.position for entry in (next(entries), next(entries)) if entry] == [1, 2]
    assert len(log.store.positions()) < 20


# ---- missing, and why ------------------------------------------------------------------------------------------------


def flushed(log: Log, replay_after: int, epoch: int = 1) -> None:
    """Write manifests up to this epoch and cursor as the region's writers do: claims raise the epoch, flushes move the
    cursor."""
    manifests = ManifestStore(log.store, REGION)
    assert manifests.create(None, RegionManifest(1, 1, REGION))
    for _ in range(epoch - 1):
        current = manifests.latest()
        assert current is not None
        assert manifests.create(current, changed(current, version=current.version + 1, writer_epoch=epoch))
    manifests.edit_unowned(lambda current: changed(current, replay_after=replay_after, last_seen=replay_after))


def collected(log: Log, *positions: int) -> None:
    for position in positions:
        log.store.delete(entry_key(REGION, position, "lance"))


def test_a_reader_whose_entries_were_collected_is_told_where_to_go_on() -> None:
    log = Log(4)
    flushed(log, 3)
    collected(log, 1, 2)
    with raises(Overtaken) as caught:
        read_tail(log.store, REGION, CODEC, 0)
    assert (caught.value.position, caught.value.replay_after, caught.value.generation) == (1, 3, 1)
    entries, _ = read_tail(log.store, REGION, CODEC, caught.value.replay_after)
    assert [entry.position for entry in entries] == [4]


def test_a_listing_in_two_looks_hides_no_row_that_was_acknowledged() -> None:
    """Between two pages of a listing an entry is appended whose key sorts before the keys of the first page. Then all
    entries are flushed, and all except the new one are collected. The listing shows neither the deleted entries nor the
    new one."""

    class TwoLooks(MemoryStore):
        between: Callable[[], None] | None = None

        def list(self, prefix: str) -> list[str]:
            keys = sorted(super().list(prefix))
            first = keys[: len(keys) // 2]
            if self.between is not None and prefix.endswith("/wal/"):
                between, self.between = self.between, None
                between()
            return first + [key for key in sorted(super().list(prefix)) if key > first[-1]] if first else keys

    log = Log(3, store := TwoLooks())  # the third is acknowledged; a reader's manifest says that two are flushed
    flushed(log, 2)

    def appended_flushed_and_collected() -> None:
        log.entry()
        ManifestStore(store, REGION).edit_unowned(lambda current: changed(current, replay_after=4, last_seen=4))
        collected(log, 1, 2, 3)

    store.between = appended_flushed_and_collected
    with pytest.raises(Overtaken) as caught:
        read_tail(store, REGION, CODEC, 2)
    assert caught.value.replay_after == 4


def test_a_missing_entry_above_the_cursor_is_corruption_whatever_was_flushed() -> None:
    log = Log(4)
    flushed(log, 1)
    collected(log, 3)
    with raises(Corrupt):
        read_tail(log.store, REGION, CODEC, 1)


def test_a_claim_whose_entries_a_newer_owner_collected_is_fenced() -> None:
    log = Log().entry().entry()
    flushed(log, 1, epoch=2)
    collected(log, 1)
    with raises(Fenced):
        log.replayed(guard=EpochGuard(REGION, 1))


def test_read_tail_is_patient() -> None:
    log, clock, reads = Log(2, ScriptedStore()), FakeClock(), itertools.count()

    def every_other_read_fails(call: str, key: str) -> None:
        if call in READS and next(reads) % 2 == 0:
            raise StoreUnavailable("slow down")

    log.store.before = every_other_read_fails
    entries, _ = read_tail(log.store, REGION, CODEC, 0, clock=clock)
    assert [entry.position for entry in entries] == [1, 2]
    assert set(clock.slept) == {0.02}
