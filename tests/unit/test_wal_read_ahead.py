"""A claim does not read again what was read ahead of it, and never prefers it to the content of the log."""

from __future__ import annotations

import random
import threading
from dataclasses import replace

import pytest

from memwal.wal import (
    BatchPart,
    Claim,
    Known,
    LanceCodec,
    ReadAhead,
    StoreUnavailable,
    SystemIds,
    WalOptions,
    read_ahead,
)
from memwal.wal.layout import entry_key, parse_entry_key
from tests.log_rows import CODEC, SCHEMA, rows
from tests.support.clock import FakeClock
from tests.support.log_world import REGION, LogWorld, found, put
from tests.support.scripted_store import ScriptedStore

CLOCK = FakeClock()


class Log:
    """A region with a writer."""

    def __init__(self, store: ScriptedStore | None = None) -> None:
        self.world = LogWorld(store=store)
        self.world.ids = SystemIds()
        self.store: ScriptedStore = self.world.store
        self.taken_over()
        self.ahead = ReadAhead(self.store, REGION, CODEC, clock=CLOCK)

    def claim(self, ahead: ReadAhead | None = None) -> Claim:
        return self.world.claim(known=Known(entries=() if ahead is None else ahead.entries(CODEC)))

    def put(self, *ids: int, part: BatchPart | None = None) -> None:
        self.appender.append(rows(*ids), generation=1, applied={}, part=part)

    def taken_over(self) -> None:
        self.appender = self.world.writer(self.claim())


def positions(ahead: ReadAhead) -> list[int]:
    return [entry.position for entry in ahead.entries(CODEC)]


def test_a_claim_reads_only_what_came_since() -> None:
    log = Log()
    put(log.appender, *range(1, 11))
    assert log.ahead.look(100) == 10
    log.put(11)
    log.store.calls.clear()
    claimed = log.claim(log.ahead)
    assert found(claimed) == list(range(1, 12))
    assert set(log.store.positions()) == {10, 11}  # 10 is read again, to check that it is still the same log


def test_a_look_reads_at_most_so_many_and_forgets_what_was_flushed() -> None:
    log = Log()
    put(log.appender, *range(1, 8))
    assert [log.ahead.look(3), log.ahead.look(3), log.ahead.look(3), log.ahead.look(3)] == [3, 3, 1, 0]
    assert positions(log.ahead) == list(range(1, 8))
    log.world.flushed_up_to(5)
    assert log.ahead.look(3) == 0
    assert positions(log.ahead) == [6, 7]
    log.world.flushed_up_to(7)
    log.put(8)
    assert log.ahead.look(3) == 1
    assert positions(log.ahead) == [8]
    assert found(log.claim(log.ahead)) == [8]


def test_several_readers_read_in_growing_steps() -> None:
    """An idle region costs one read; a busy region costs at most one read in vain per reader."""
    log = Log()
    log.store.remote = True
    ahead = ReadAhead(log.store, REGION, CODEC, clock=CLOCK, options=WalOptions(readers=4))
    put(log.appender, *range(1, 21))
    assert ahead.look(100) == 20
    assert positions(ahead) == list(range(1, 21))
    assert sorted(log.store.positions()) == list(range(1, 24))  # 1, then 2, then 4 at the same time
    log.store.calls.clear()
    assert ahead.look(100) == 0
    assert log.store.positions() == [21]
    assert ahead.position == 20
    log.put(21)
    log.world.flushed_up_to(21)
    assert (ahead.look(100), ahead.position) == (0, 21)


@pytest.mark.parametrize(("remote", "entries", "threads"), [(True, 20, True), (False, 20, False), (False, 60, True)])
def test_a_few_local_entries_are_read_by_the_thread_of_the_claim(remote: bool, entries: int, threads: bool) -> None:
    readers = set[str]()

    def reading(call: str, key: str) -> None:
        if parse_entry_key(key) is not None and call == "get":
            readers.add(threading.current_thread().name)

    log = Log()
    put(log.appender, *range(1, entries + 1))
    log.store.remote, log.store.before = remote, reading
    options = WalOptions(readers=4)
    ahead = ReadAhead(log.store, REGION, CODEC, clock=CLOCK, options=options)
    assert ahead.look(10) == 10
    claim = log.world.claim(known=Known(entries=ahead.entries(CODEC)), options=options)
    assert found(claim) == list(range(1, entries + 1))
    assert (readers == {threading.current_thread().name}) is not threads


def test_what_was_read_before_an_error_of_storage_stays() -> None:
    log = Log()
    put(log.appender, *range(1, 6))

    def failing(call: str, key: str) -> None:
        if key == entry_key(REGION, 4, "lance"):
            raise StoreUnavailable(key)

    log.store.before = failing
    with pytest.raises(StoreUnavailable):
        log.ahead.look(100)
    assert positions(log.ahead) == [1, 2, 3]
    log.store.before = lambda call, key: None
    assert log.ahead.look(100) == 2
    assert found(log.claim(log.ahead)) == [1, 2, 3, 4, 5]


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log()
    put(log.appender, *range(20))
    monkeypatch.setattr(read_ahead, "BYTES_MAX", 4 * rows(1).nbytes)
    assert log.ahead.look(100) == 4
    assert log.ahead.look(100) == 0
    log.world.flushed_up_to(2)
    assert log.ahead.look(100) == 2
    assert positions(log.ahead) == [3, 4, 5, 6]
    assert found(log.claim(log.ahead)) == list(range(2, 20))


def test_a_table_made_again_at_the_same_place_gets_none_of_the_old_rows() -> None:
    log = Log()
    put(log.appender, *range(3))
    log.ahead.look(100)
    for key in log.store.list(""):
        log.store.delete(key)
    again = Log(log.store)
    put(again.appender, *range(100, 105))
    assert found(again.claim(log.ahead)) == list(range(100, 105))


def test_a_log_that_lost_its_last_entries_gets_none_of_them_back() -> None:
    log = Log()
    log.put(1)
    log.ahead.look(100)
    log.world.flushed_up_to(1)
    assert found(log.claim(log.ahead)) == []


def test_other_columns_are_read_anew() -> None:
    log = Log()
    log.put(1)
    log.ahead.look(100)
    assert log.ahead.entries(LanceCodec(SCHEMA)) == []
    assert positions(log.ahead) == [1]


def test_nothing_is_read_of_a_region_without_a_manifest() -> None:
    ahead = ReadAhead(ScriptedStore(), REGION, CODEC, clock=CLOCK)
    assert ahead.look(10) == 0
    assert ahead.entries(CODEC) == []


@pytest.mark.parametrize("seed", range(30))
def test_a_claim_finds_the_same_with_and_without(seed: int) -> None:
    """The steps are random: batches in parts that take-overs break off, flushes, and reads ahead of any size."""
    rng, log = random.Random(seed), Log()
    parts: list[BatchPart] = []
    for number in range(1, 61):
        step = rng.choice(["put", "put", "part", "close", "look", "look", "flush", "take over"])
        if step == "put" and not parts:
            log.put(number)
        elif step == "part":
            parts = parts or [BatchPart("p", number, f"{number:x}", closes=False)]
            log.put(number, part=parts[0])
        elif step == "close" and parts:
            log.put(number, part=replace(parts.pop(), closes=True))
        elif step == "look":
            log.ahead.look(rng.randrange(1, 8))
        elif step == "flush" and not parts:
            log.world.flushed_up_to(log.appender.next_position - 1)
        elif step == "take over":
            log.taken_over()
            parts = []
    ours, theirs = found(log.claim(log.ahead)), found(log.claim())
    assert ours == theirs
