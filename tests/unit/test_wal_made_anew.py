"""A table that is deleted and made anew at the same place, while a writer of the deleted one still runs.

On object storage nothing tells that writer at once: the new table has the same keys, and its epochs begin at 1 again.
Whatever it writes meanwhile is known by the id of its log, and refused by name: it is neither replayed, nor does its
epoch fence anybody, nor are its producers' tokens taken over.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from memwal.wal import Claim, Corrupt, LogTail, ManifestStore, WalAppender, bucket_region, claim, read_tail
from memwal.wal.layout import entry_key, manifest_key
from memwal.wal.records import Entry
from tests.log_rows import CODEC, rows
from tests.support.clock import FakeClock, SeededIds
from tests.support.memory_store import MemoryStore

REGION = bucket_region(0)
REPLACED = "deleted and made anew"


class Place:
    """Storage on which one table is deleted, and another made, each of which has a writer."""

    def __init__(self, claims: int, appends: int) -> None:
        """The old table was claimed `claims` times, and its last writer has appended `appends` entries."""
        self.store, self.clock, self._ids = MemoryStore(), FakeClock(), SeededIds(7)
        for _ in range(claims):
            claimed = self.claimed()
        self.former, self.old = claimed.manifest, self.writer(claimed)
        for number in range(appends):
            self.old.append(rows(number), generation=1, applied={"old": number})
        for key in self.store.list(""):
            self.store.delete(key)
        self.new = self.writer(self.claimed())
        self.put(100)

    def claimed(self) -> Claim:
        return claim(self.store, REGION, spec_id=1, codec=CODEC, ids=self._ids, clock=self.clock)

    def writer(self, claimed: Claim) -> WalAppender:
        return WalAppender(self.store, REGION, claimed.guard, CODEC, claimed.next_position, self._ids, self.clock)

    def put(self, key: int) -> None:
        self.new.append(rows(key), generation=1, applied={"new": key})

    def late(self) -> str:
        """The old writer appends before it has looked at the manifest again. Returns the key of its entry."""
        self.clock.advance(1.0)
        position = self.old.append(rows(999), generation=1, applied={"old": 999})
        return entry_key(REGION, position, "lance")

    def fill_up_to(self, key: str) -> None:
        """The new writer appends until its next slot is `key`."""
        while entry_key(REGION, self.new.next_position, "lance") != key:
            self.put(100 + self.new.next_position)


def found(entries: list[Entry]) -> list[int]:
    return [each for entry in entries for each in entry.rows["id"].to_pylist()]


@pytest.mark.parametrize(("claims", "appends"), [(1, 1), (1, 3), (3, 0), (3, 4)])
def test_an_entry_of_the_deleted_table_is_refused_by_name_until_it_is_deleted(claims: int, appends: int) -> None:
    place = Place(claims, appends)
    late = place.late()
    place.fill_up_to(late)
    with pytest.raises(Corrupt, match=REPLACED) as refused:
        place.put(5)
    assert late in str(refused.value)
    for _ in range(4):  # an epoch that has caught up with the entry's makes no difference
        with pytest.raises(Corrupt, match=f"{late}.*{REPLACED}"):
            place.claimed()
    acked = found(read_tail(place.store, REGION, CODEC, 0, upto=place.new.next_position - 1)[0])
    place.store.delete(late)
    claimed = place.claimed()
    assert found(claimed.entries) == acked
    assert 999 not in acked
    assert dict(claimed.applied) == {"new": acked[-1]}


@pytest.mark.parametrize("claims", [1, 3])
def test_one_far_behind_the_new_tables_entries_is_no_hole_of_its_log(claims: int) -> None:
    place = Place(claims, 40)
    late = place.late()
    place.put(101)
    with pytest.raises(Corrupt, match=f"{late}.*{REPLACED}"):
        place.claimed()
    place.store.delete(late)
    assert found(place.claimed().entries) == [100, 101]


@pytest.mark.parametrize("claims", [1, 2])
def test_the_writer_of_the_deleted_table_is_told_so(claims: int) -> None:
    place = Place(claims, 3)
    place.late()
    place.clock.advance(10.0)
    with pytest.raises(Corrupt, match=r"removed, or replaced|was a backup put over the table\?"):
        place.old.append(rows(1000), generation=1, applied={})


def _tail(place: Place) -> object:
    tail = LogTail(place.store, REGION, CODEC, clock=place.clock)
    return tail.begin()


@pytest.mark.parametrize("read", [_tail, lambda place: read_tail(place.store, REGION, CODEC, 0)])
def test_readers_refuse_it(read: Callable[[Place], object]) -> None:
    place = Place(1, 1)
    place.late()
    with pytest.raises(Corrupt, match=REPLACED):
        read(place)


def test_a_tail_that_reads_on_refuses_it_too() -> None:
    place = Place(1, 1)
    tail = LogTail(place.store, REGION, CODEC, clock=place.clock)
    tail.begin()
    place.late()
    with pytest.raises(Corrupt, match=REPLACED):
        tail.look()


def test_a_manifest_of_the_deleted_table_is_refused_by_name() -> None:
    place = Place(1, 0)
    manifests = ManifestStore(place.store, REGION, clock=place.clock)
    flushed = replace(place.former, version=place.former.version + 1, replay_after=1, last_seen=1)
    assert manifests.create(place.former, flushed) is None, "the version before it is another one"
    late = manifest_key(REGION, flushed.version)
    for look in (manifests.latest, place.claimed):
        with pytest.raises(Corrupt, match=f"{late}.*{REPLACED}"):
            look()
    place.store.delete(late)
    assert found(place.claimed().entries) == [100]
