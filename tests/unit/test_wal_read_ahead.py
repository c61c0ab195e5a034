"""A claim does not read again what was read ahead of it, and never prefers it to the content of the log."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from memwal.wal import (
    BatchPart,
    Claim,
    Known,
    LanceCodec,
    ManifestStore,
    ReadAhead,
    StoreUnavailable,
    SystemIds,
    WalAppender,
    WalOptions,
    bucket_region,
    claim,
    read_ahead,
)
from memwal.wal.layout import parse_entry_key
from tests.log_rows import CODEC, SCHEMA, rows
from tests.support.clock import FakeClock
from tests.support.memory_store import MemoryStore

REGION = bucket_region(0)
CLOCK, IDS = FakeClock(), SystemIds()


class Noting(MemoryStore):
    """Records the positions of the entries that are read; gives no answer for those in `failing`."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[int] = []
        self.failing: set[int] = set()

    def get(self, key: str) -> bytes | None:
        if (entry := parse_entry_key(key)) is not None:
            self.read.append(entry.position)
            if entry.position in self.failing:
                raise StoreUnavailable(key)
        return super().get(key)


class Log:
    """A region with a writer."""

    def __init__(self, store: Noting | None = None) -> None:
        self.store = store or Noting()
        self.claimed = self.claim()
        self.appender = self._writer()
        self.ahead = ReadAhead(self.store, REGION, CODEC, clock=CLOCK)

    def claim(self, ahead: ReadAhead | None = None) -> Claim:
        known = () if ahead is None else ahead.entries(CODEC)
        return claim(self.store, REGION, spec_id=1, codec=CODEC, ids=IDS, clock=CLOCK, known=Known(entries=known))

    def _writer(self) -> WalAppender:
        return WalAppender(self.store, REGION, self.claimed.guard, CODEC, self.claimed.next_position, IDS, CLOCK)

    def put(self, *ids: int, part: BatchPart | None = None) -> None:
        self.appender.append(rows(*ids), generation=1, applied={}, part=part)

    def flushed(self, upto: int) -> None:
        ManifestStore(self.store, REGION).edit(
            self.claimed.guard, lambda now: replace(now, replay_after=upto, current_generation=now.current_generation)
        )

    def taken_over(self) -> None:
        self.claimed = self.claim()
        self.appender = self._writer()


def found(claimed: Claim) -> list[int]:
    return [each for entry in claimed.entries for each in entry.rows["id"].to_pylist()]


def positions(ahead: ReadAhead) -> list[int]:
    return [entry.position for entry in ahead.entries(CODEC)]


def test_a_claim_reads_only_what_came_since() -> None:
    log = Log()
    for number in range(1, 11):
        log.put(number)
    assert log.ahead.look(100) == 10
    log.put(11)
    log.store.read.clear()
    claimed = log.claim(log.ahead)
    assert found(claimed) == list(range(1, 12))
    assert set(log.store.read) == {10, 11}  # 10 is read again, to check that it is still the same log


def test_a_look_reads_at_most_so_many_and_forgets_what_was_flushed() -> None:
    log = Log()
    for number in range(1, 8):
        log.put(number)
    assert [log.ahead.look(3), log.ahead.look(3), log.ahead.look(3), log.ahead.look(3)] == [3, 3, 1, 0]
    assert positions(log.ahead) == list(range(1, 8))
    log.flushed(5)
    assert log.ahead.look(3) == 0
    assert positions(log.ahead) == [6, 7]
    log.flushed(7)
    log.put(8)
    assert log.ahead.look(3) == 1
    assert positions(log.ahead) == [8]
    assert found(log.claim(log.ahead)) == [8]


def test_several_readers_read_in_growing_steps() -> None:
    """An idle region costs one read; a busy region costs at most one read in vain per reader."""
    log = Log()
    ahead = ReadAhead(log.store, REGION, CODEC, clock=CLOCK, options=WalOptions(readers=4))
    for number in range(1, 21):
        log.put(number)
    assert ahead.look(100) == 20
    assert positions(ahead) == list(range(1, 21))
    assert sorted(log.store.read) == list(range(1, 24))  # 1, then 2, then 4 at the same time
    log.store.read.clear()
    assert ahead.look(100) == 0
    assert log.store.read == [21]
    assert ahead.position == 20
    log.put(21)
    log.flushed(21)
    assert (ahead.look(100), ahead.position) == (0, 21)


def test_what_was_read_before_an_error_of_storage_stays() -> None:
    log = Log()
    for number in range(1, 6):
        log.put(number)
    log.store.failing = {4}
    with pytest.raises(StoreUnavailable):
        log.ahead.look(100)
    assert positions(log.ahead) == [1, 2, 3]
    log.store.failing = set()
    assert log.ahead.look(100) == 2
    assert found(log.claim(log.ahead)) == [1, 2, 3, 4, 5]


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log()
    for number in range(20):
        log.put(number)
    monkeypatch.setattr(read_ahead, "BYTES_MAX", 4 * rows(1).nbytes)
    assert log.ahead.look(100) == 4
    assert log.ahead.look(100) == 0
    log.flushed(2)
    assert log.ahead.look(100) == 2
    assert positions(log.ahead) == [3, 4, 5, 6]
    assert found(log.claim(log.ahead)) == list(range(2, 20))


def test_a_table_made_again_at_the_same_place_gets_none_of_the_old_rows() -> None:
    log = Log()
    for number in range(3):
        log.put(number)
    log.ahead.look(100)
    for key in log.store.list(""):
        log.store.delete(key)
    again = Log(log.store)
    for number in range(100, 105):
        again.put(number)
    assert found(again.claim(log.ahead)) == list(range(100, 105))


def test_a_log_that_lost_its_last_entries_gets_none_of_them_back() -> None:
    log = Log()
    log.put(1)
    log.ahead.look(100)
    log.flushed(1)
    assert found(log.claim(log.ahead)) == []


def test_other_columns_are_read_anew() -> None:
    log = Log()
    log.put(1)
    log.ahead.look(100)
    assert log.ahead.entries(LanceCodec(SCHEMA)) == []
    assert positions(log.ahead) == [1]


def test_nothing_is_read_of_a_region_without_a_manifest() -> None:
    ahead = ReadAhead(MemoryStore(), REGION, CODEC, clock=CLOCK)
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
            log.flushed(log.appender.next_position - 1)
        elif step == "take over":
            log.taken_over()
            parts = []
    ours, theirs = found(log.claim(log.ahead)), found(log.claim())
    assert ours == theirs
