"""A table is deleted and created again at the same place while a writer of the deleted table still runs.

On object storage the writer does not notice at once: the new table has the same keys, and its epochs begin at 1 again.
The entries that it writes carry the id of the old log. Readers refuse each of them and name its key: they do not replay
the entry, its epoch fences no writer, and they do not adopt the tokens of its producers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from memwal.wal import (
    Corrupt,
    LogTail,
    Overtaken,
    WalCollector,
    read_tail,
)
from memwal.wal.errors import AnotherLog
from memwal.wal.layout import entry_key, manifest_key
from memwal.wal.records import Entry
from tests.log_rows import CODEC, rows
from tests.messages import raises
from tests.support.log_world import REGION, LogWorld, put

REPLACED = "deleted and made anew"


class Place:
    """Storage on which one table is deleted and a new one is created; both have a writer."""

    def __init__(self, claims: int, appends: int) -> None:
        """The old table was claimed `claims` times, and its last writer has appended `appends` entries."""
        world = LogWorld()
        self.store, self.clock, self.claimed, self.writer = world.store, world.clock, world.claim, world.writer
        for _ in range(claims):
            claimed = self.claimed()
        self.former, self.old = claimed.manifest, self.writer(claimed)
        for number in range(appends):
            put(self.old, number, applied={"old": number})
        self.former_tail = LogTail(self.store, REGION, CODEC, clock=self.clock)
        self.former_tail.begin()
        for key in self.store.list(""):
            self.store.delete(key)
        self.manifests = world.manifests
        claimed = self.claimed()
        self.guard, self.new = claimed.guard, self.writer(claimed)
        self.put(100)

    def put(self, key: int) -> None:
        put(self.new, key, applied={"new": key})

    def flush(self) -> None:
        upto = self.new.next_position - 1
        self.manifests.edit(self.guard, lambda current: replace(current, replay_after=upto, last_seen=upto))

    def late(self) -> str:
        """Append with the old writer before it reads the manifest again; return the key of the entry."""
        self.clock.advance(1.0)
        position = self.old.append(rows(999), generation=1, applied={"old": 999})
        return entry_key(REGION, position, "lance")

    def fill_up_to(self, key: str) -> None:
        """Append with the new writer until its next slot is `key`."""
        while entry_key(REGION, self.new.next_position, "lance") != key:
            self.put(100 + self.new.next_position)


def found(entries: list[Entry]) -> list[int]:
    return [each for entry in entries for each in entry.rows["id"].to_pylist()]


@pytest.mark.parametrize(("claims", "appends"), [(1, 1), (1, 3), (3, 0), (3, 4)])
def test_an_entry_of_the_deleted_table_is_refused_by_name_until_it_is_deleted(claims: int, appends: int) -> None:
    place = Place(claims, appends)
    late = place.late()
    place.fill_up_to(late)
    with raises(Corrupt):
        place.put(5)
    for _ in range(4):  # an epoch equal to that of the entry changes nothing
        with raises(Corrupt):
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
    with raises(Corrupt):
        place.claimed()
    place.store.delete(late)
    assert found(place.claimed().entries) == [100, 101]


@pytest.mark.parametrize("claims", [1, 2])
def test_the_writer_of_the_deleted_table_is_told_so(claims: int) -> None:
    place = Place(claims, 3)
    place.late()
    place.clock.advance(10.0)
    with raises(Corrupt):
        place.old.append(rows(1000), generation=1, applied={})


def _tail(place: Place) -> object:
    tail = LogTail(place.store, REGION, CODEC, clock=place.clock)
    return tail.begin()


def _read(place: Place) -> object:
    manifest = place.manifests.latest()
    assert manifest is not None
    return read_tail(place.store, REGION, CODEC, manifest.replay_after)


def _collected(place: Place) -> object:
    return WalCollector(place.store, REGION, CODEC, place.clock, workers=1).collect(0)


@pytest.mark.parametrize("appends", [2, 20], ids=["in the next slot", "far behind"])
@pytest.mark.parametrize("flushed", [False, True])
@pytest.mark.parametrize("read", [_tail, _read, _collected])
def test_who_reads_it_refuses_it_and_nothing_is_lost(
    read: Callable[[Place], object], flushed: bool, appends: int
) -> None:
    """The collector refuses the entry too: the newest applied map is in the new writer's newest entry."""
    place = Place(1, appends)
    place.put(101)
    late = place.late()
    if flushed:
        place.flush()
    with raises(AnotherLog):
        read(place)
    place.store.delete(late)
    claimed = place.claimed()
    assert found(claimed.entries) == ([] if flushed else [100, 101])
    assert dict(claimed.applied) == {"new": 101}


def test_a_tail_that_reads_on_refuses_it_too() -> None:
    place = Place(1, 1)
    tail = LogTail(place.store, REGION, CODEC, clock=place.clock)
    tail.begin()
    place.late()
    with raises(AnotherLog):
        tail.look()


def test_a_tail_of_the_deleted_table_begins_anew_and_condemns_nothing() -> None:
    """An entry of the new table does not belong to the log of the tail, but to the log of the newest manifest."""
    place = Place(1, 2)
    for _ in range(4):
        place.put(101)
    tail = place.former_tail
    with pytest.raises(Overtaken):
        tail.look()
    assert found(tail.begin()) == [100, 101, 101, 101, 101]


def test_a_manifest_of_the_deleted_table_is_refused_by_name() -> None:
    place = Place(1, 0)
    flushed = replace(place.former, version=place.former.version + 1, replay_after=1, last_seen=1)
    assert place.manifests.create(place.former, flushed) is None, "the version before it is another one"
    late = manifest_key(REGION, flushed.version)
    for look in (place.manifests.latest, place.claimed):
        with raises(Corrupt):
            look()
    place.store.delete(late)
    assert found(place.claimed().entries) == [100]
