"""Repeated reads of a growing log return what a replay of the whole log returns, each entry once, with few requests."""

from __future__ import annotations

import random
from dataclasses import replace

import pyarrow as pa
import pytest

from memwal.wal import BatchPart, Corrupt, EntryHeader, LogTail, ManifestStore, Overtaken, RegionManifest, bucket_region
from memwal.wal.layout import entry_key, manifest_key
from memwal.wal.replay import replay
from tests.log_rows import CODEC, SCHEMA
from tests.messages import raises
from tests.support.memory_store import MemoryStore
from tests.support.scripted_store import READS, ScriptedStore

REGION = bucket_region(1)


class Log:
    """The log and the manifests of a region, written by hand; the id of each row is its position."""

    def __init__(self) -> None:
        self.store = ScriptedStore()
        self.manifests = ManifestStore(self.store, REGION)
        first = self.manifests.create(None, RegionManifest(1, 1, REGION, 1))
        assert first is not None
        self.manifest, self.tip = first, 0
        self.tail = LogTail(self.store, REGION, CODEC)

    def entry(self, part: BatchPart | None = None, *, sentinel: bool = False) -> Log:
        self.tip += 1
        header = EntryHeader(self.manifest.writer_epoch, 1, f"{self.tip:032x}", {}, part, sentinel)
        rows = CODEC.no_rows if sentinel else pa.table({"id": [self.tip], "_tombstone": [False]}, schema=SCHEMA)
        self.store.put(entry_key(REGION, self.tip, "lance"), CODEC.encode(header, rows))
        return self

    def edit(self, **changes: int) -> None:
        proposed = replace(self.manifest, version=self.manifest.version + 1, **changes)
        written = self.manifests.create(self.manifest, proposed)
        assert written is not None
        self.manifest = written

    def claim(self) -> None:
        self.edit(writer_epoch=self.manifest.writer_epoch + 1)
        self.entry(sentinel=True)

    def collect(self) -> None:
        """Delete all entries at or below `replay_after` except the newest one."""
        for position in range(1, min(self.manifest.replay_after, self.tip - 1) + 1):
            self.store.delete(entry_key(REGION, position, "lance"))

    def looked(self) -> list[int]:
        return [entry.position for entry in self.tail.look()]

    def begun(self) -> list[int]:
        return [entry.position for entry in self.tail.begin()]


@pytest.mark.parametrize("seed", range(20))
def test_looks_together_return_what_one_replay_does(seed: int) -> None:
    draw, log, seen = random.Random(seed), Log(), list[int]()
    seen += log.begun()
    for _ in range(40):
        step = draw.random()
        if step < 0.5:
            log.entry()
        elif step < 0.8:
            batch = BatchPart("q", draw.randrange(3), draw.choice("ab"), draw.random() < 0.4)
            log.entry(batch)
        elif step < 0.87:
            log.claim()
        elif step < 0.9:
            log.edit()  # a prune
        else:
            seen += log.looked()
    seen += log.looked()
    assert seen == [entry.position for entry in replay(log.store, REGION, CODEC, 0, log.tip)]
    assert log.looked() == []


def reads(log: Log) -> list[str]:
    return [call for call, _ in log.store.calls if call in READS]


def test_an_unchanged_look_is_three_requests_and_a_changed_one_a_read_of_each_new_entry_more() -> None:
    log = Log().entry().entry()
    assert log.begun() == [1, 2]
    log.store.calls.clear()
    assert log.looked() == []
    assert reads(log) == ["get", "exists", "get"]
    log.entry()
    log.store.calls.clear()
    assert log.looked() == [3]
    assert reads(log) == ["get", "get", "exists", "get"]
    for _ in range(100):
        log.entry()
    log.store.calls.clear()
    assert log.looked() == list(range(4, 104))
    assert reads(log).count("get") == 101
    assert reads(log).count("exists") < 16
    assert "list" not in reads(log)


def test_entries_that_were_flushed_and_collected_before_the_look_are_not_taken_for_never_written() -> None:
    log = Log().entry()
    assert log.begun() == [1]
    log.entry().entry().edit(replay_after=2, current_generation=2)
    log.collect()
    with pytest.raises(Overtaken):
        log.looked()
    assert log.begun() == [3]
    assert log.looked() == []


def test_the_same_between_the_two_requests_of_one_look() -> None:
    """The slot is empty when it is read; then it is filled, flushed and collected."""
    log = Log().entry()
    assert log.begun() == [1]

    def meanwhile() -> None:
        log.entry().entry().edit(replay_after=2, current_generation=2)
        log.collect()

    log.store.run_once("exists", "/manifest/", meanwhile)
    with pytest.raises(Overtaken):
        log.looked()
    assert log.begun() == [3]


def test_a_flush_of_what_was_read_begins_anew_above_it() -> None:
    log = Log().entry().entry()
    assert log.begun() == [1, 2]
    log.edit(replay_after=2, current_generation=2)
    with pytest.raises(Overtaken):
        log.looked()
    assert log.begun() == []
    log.entry()
    assert log.looked() == [3]
    assert log.tail.manifest == log.manifest


def test_manifests_pruned_under_a_reader_that_slept_are_found_again() -> None:
    log = Log().entry()
    assert log.begun() == [1]
    first = log.manifest.version
    for _ in range(100):
        log.edit()
    log.entry().edit(replay_after=2, current_generation=2)
    log.entry()
    log.collect()
    for version in range(first, first + 40):
        log.store.delete(manifest_key(REGION, version))
    with pytest.raises(Overtaken):
        log.looked()
    assert log.begun() == [3]


def test_a_damaged_entry_is_named_and_a_look_before_begin_is_a_mistake() -> None:
    log = Log()
    with raises(ValueError):
        log.tail.look()
    assert log.begun() == []
    log.entry()
    log.store.put(entry_key(REGION, 1, "lance"), b"rubbish")
    with raises(Corrupt):
        log.looked()


def test_a_region_that_was_never_claimed_has_no_manifest() -> None:
    tail = LogTail(MemoryStore(), REGION, CODEC)
    assert tail.begin() == []
    assert tail.manifest is None
