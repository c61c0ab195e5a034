"""Which entries replay returns, in which order, and what it refuses."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from wal import (
    BatchPart,
    Corrupt,
    EntryHeader,
    EpochGuard,
    Fenced,
    LanceCodec,
    MemoryStore,
    bucket_region,
    find_tip,
    read_tail,
    replay,
)
from wal.layout import entry_key

REGION = bucket_region(1)
SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("_tombstone", pa.bool_(), nullable=False)])
CODEC = LanceCodec(SCHEMA)


class Log:
    """Writes entries by hand; the row's id is the position."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.tip = 0

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
    log = Log().entry().entry().entry()
    assert log.replayed() == [1, 2, 3]
    assert log.replayed(after=2) == [3]
    assert log.replayed(after=3) == []


def test_an_unclosed_batch_is_dropped() -> None:
    assert Log().entry().part("a").part("a").replayed() == [1]


def test_a_closed_batch_is_whole() -> None:
    assert Log().part("a").part("a").part("a", closes=True).replayed() == [1, 2, 3]


def test_a_batch_becomes_visible_where_it_closes() -> None:
    assert Log().part("a").entry().part("a", closes=True).entry().replayed() == [2, 1, 3, 4]


def test_only_the_attempt_that_closed_counts() -> None:
    log = Log().part("a").part("b").part("a").part("b", closes=True)
    assert log.replayed() == [2, 4]


def test_batches_of_one_attempt_name_are_told_apart_by_sequence() -> None:
    assert Log().part("a", sequence=1).part("a", sequence=2).part("a", closes=True, sequence=2).replayed() == [2, 3]


def test_a_newer_epoch_ends_open_batches() -> None:
    log = Log().part("a").entry(2, sentinel=True).part("a", epoch=2).part("a", closes=True, epoch=2)
    assert log.replayed() == [3, 4]


def test_sentinels_are_not_returned() -> None:
    assert Log().entry().entry(2, sentinel=True).entry(2).replayed() == [1, 3]


def test_a_hole_is_corruption_and_named() -> None:
    log = Log().entry().entry().entry()
    log.store.delete(entry_key(REGION, 2, "lance"))
    assert find_tip(log.store, REGION, "lance", 0) == 3
    with pytest.raises(Corrupt, match=r"wal/010.*position 2 is missing"):
        log.replayed()


def test_a_damaged_entry_is_named_by_key_and_position() -> None:
    log = Log().entry()
    log.store.put(entry_key(REGION, 1, "lance"), b"LANC")
    with pytest.raises(Corrupt, match=r"wal/100.*\.lance: WAL entry at position 1"):
        log.replayed()


def test_an_epoch_that_goes_back_is_corruption() -> None:
    with pytest.raises(Corrupt, match="epoch 1 at position 3 follows epoch 2"):
        Log().entry(1).entry(2).entry(1).replayed()


def test_an_epoch_above_ours_fences() -> None:
    guard = EpochGuard(REGION, 1)
    with pytest.raises(Fenced, match="epoch 1 was fenced by epoch 2"):
        Log().entry(1).entry(2, sentinel=True).replayed(guard=guard)
    assert guard.fenced


def test_progress_is_told() -> None:
    told: list[tuple[int, int]] = []
    Log().entry().entry().entry().replayed(after=1, on_progress=lambda read, total: told.append((read, total)))
    assert told == [(1, 2), (2, 2)]


@pytest.mark.parametrize("last_seen", [0, 1, 3])
def test_find_tip(last_seen: int) -> None:
    assert find_tip(Log().entry().entry().entry().store, REGION, "lance", last_seen) == 3


def test_find_tip_of_nothing() -> None:
    assert find_tip(MemoryStore(), REGION, "lance", 0) == 0


def test_find_tip_looks_past_a_listing_that_lags() -> None:
    class Lagging(MemoryStore):
        def list(self, prefix: str) -> list[str]:
            return [key for key in super().list(prefix) if key != entry_key(REGION, 3, "lance")]

    log = Log()
    log.store = Lagging()
    assert find_tip(log.entry().entry().entry().store, REGION, "lance", 0) == 3


def test_a_foreign_entry_is_reported_never_skipped() -> None:
    log = Log().entry()
    log.store.put(entry_key(REGION, 2, "arrow"), b"")
    with pytest.raises(Corrupt, match=r"\.arrow format in a region whose entries are \.lance; another program"):
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
