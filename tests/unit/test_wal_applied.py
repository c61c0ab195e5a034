"""The applied map takes few bytes in each entry however many names it has, and every claim reads the whole map."""

from __future__ import annotations

import json
from collections.abc import Iterator
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memwal.wal import ArrowCodec, Corrupt, Fenced, PutOutcome, StoreRefused, StoreUnavailable, read_tail
from memwal.wal.applied import (
    GONE,
    SEQUENCE_MAX,
    AppliedMap,
    Snapshot,
    decoded_hashes,
    encoded,
    encoded_hashes,
    hashes,
    read_snapshot,
)
from memwal.wal.entry_reader import EntryReader
from memwal.wal.layout import entry_key, parse_snapshot_key, snapshot_key, snapshot_prefix
from memwal.wal.replay import newest_applied
from tests.failure_matrix import FAULTS
from tests.log_rows import CODEC, SCHEMA, rows
from tests.messages import raises
from tests.support.log_world import AGE, REGION, LogWorld, put

CODECS = [CODEC, ArrowCodec(SCHEMA)]
MORE = {f"more {number:04}": 1 for number in range(9)}


@pytest.fixture(params=CODECS, ids=["lance", "arrow"])
def world(request: pytest.FixtureRequest) -> LogWorld:
    return LogWorld(request.param)


@pytest.fixture
def short() -> Iterator[None]:
    """Lower the limits, so that a map with a few names is written as a snapshot."""
    with patch("memwal.wal.applied._INLINE_MAX", 60), patch("memwal.wal.applied._OF_A_NAME", 1):
        yield


def snapshots(world: LogWorld) -> list[str]:
    names = map(parse_snapshot_key, world.store.list(snapshot_prefix(REGION)))
    return sorted(name for name in names if name is not None)


class Loader:
    """Puts under one name after the other, as a region does: each group continues the map of the one before."""

    def __init__(self, world: LogWorld, names: int = 0) -> None:
        claimed = world.claim()
        self.applied, self.log = claimed.applied, world.writer(claimed)
        for number in range(names):
            self.put(f"name {number:04}")

    def after(self, **more: int) -> AppliedMap:
        """Return the map after a put under more names."""
        applied = self.applied.copy()
        applied.update(more)
        return applied

    def put(self, name: str, sequence: int = 1) -> None:
        after = self.applied.copy()
        after[name] = sequence
        self.log.append(rows(sequence), generation=1, applied=after)
        self.applied = after


# ---- the map ---------------------------------------------------------------------------------------------------------

NAMES = st.sampled_from("abcdefgh")
STEPS = st.lists(st.tuples(st.sampled_from(("set", "set", "delete", "copy", "rebase")), NAMES, st.integers(-1, 99)))


@given(STEPS)
def test_it_is_a_dict_whatever_it_is_relative_to(steps: list[tuple[str, str, int]]) -> None:
    found, expected = AppliedMap({"a": 1, "b": 2}), {"a": 1, "b": 2}
    for number, (step, name, value) in enumerate(steps, 1):
        if step == "set":
            found[name] = expected[name] = value
        elif step == "delete":
            assert (name in found) == (name in expected)
            if name in expected:
                del found[name], expected[name]
        elif step == "copy":
            found, before = found.copy(), found
            before["z"] = 1
        else:
            found.rebase(found.rebased(f"{number}-{number:032x}"))
            assert not found.changes
        assert (found, len(found), sorted(found)) == (expected, len(expected), sorted(expected))
        assert GONE not in found.values()


def test_a_copy_is_as_expensive_as_the_changes() -> None:
    many = {f"name {number}": 1 for number in range(50_000)}
    found = AppliedMap({"a": 1}, Snapshot("1-0", many, size=3_000_000)).copy()
    found["b"] = 2
    assert found.changes == {"a": 1, "b": 2}
    assert found.snapshot.applied is many


# ---- in the log ------------------------------------------------------------------------------------------------------


def test_entries_stay_short_and_a_claim_has_the_whole_map(world: LogWorld, short: None) -> None:
    loader = Loader(world)
    for number in range(300):
        loader.put(f"name {number:04}")
        loader.put("often", number)
    sizes = [len(world.entry(position)) for position in (1, 300, 600)]
    assert max(sizes) < sizes[0] + 300
    claimed = world.claim()
    assert claimed.applied == {"often": 299, **{f"name {number:04}": 1 for number in range(300)}}
    assert world.claim().applied == claimed.applied  # by the sentinel
    assert read_tail(world.store, REGION, world.codec, 0)[1] == claimed.applied


def test_a_hundred_thousand_names_cost_a_put_little(world: LogWorld) -> None:
    names = {f"file-{number:06}": 0 for number in range(99_000)}
    loader = Loader(world)
    loader.log.append(rows(1), generation=1, applied=AppliedMap(names))
    loader = Loader(world)
    for number in range(1000):
        loader.put(f"new-{number:04}")
    sizes = [len(world.entry(position)) for position in range(3, 1003)]
    written = sum(len(world.store.get(key) or b"") for key in world.store.list(snapshot_prefix(REGION)))
    assert max(sizes) < 40_000
    assert (sum(sizes) + written) / len(sizes) < 40_000  # with the map in every entry it would be 3 MB per put
    assert len(world.claim().applied) == 100_000


def test_a_map_of_an_older_release_is_read_and_gets_a_snapshot(world: LogWorld) -> None:
    names = {f"name {number:04}": number for number in range(2000)}
    with patch("memwal.wal.applied._INLINE_MAX", 1 << 30):
        put(world.open(), 1, applied=names)
    assert snapshots(world) == []
    assert world.claim().applied == names
    assert len(snapshots(world)) == 1
    assert len(world.entry(2)) < 2000
    assert world.claim().applied == names


def test_a_part_of_a_batch_does_not_bring_an_older_snapshot_back(world: LogWorld, short: None) -> None:
    """The map of the closing entry was copied before the first part wrote its own snapshot."""
    loader = Loader(world, 20)
    before, after = loader.applied.copy(), loader.applied.copy()
    after["closing"] = 1
    with patch("memwal.wal.applied._INLINE_MAX", 0), patch("memwal.wal.applied.isqrt", lambda _: 0):
        before["rebased"] = 1
        loader.log.append(rows(1), generation=1, applied=before)
    loader.log.append(rows(2), generation=1, applied=after)
    assert before.snapshot.name != after.snapshot.name
    named = [int(name.partition("-")[0]) for name in (before.snapshot.name, after.snapshot.name)]
    assert named == [21, 22]
    world.flushed_up_to(22)
    world.collect(age=0.0)
    assert world.claim().applied["closing"] == 1


# ---- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault", ["409", "lands then 500, 503, reset or timeout", "reset before landing", "permanent failure"]
)
def test_a_snapshot_that_cannot_be_written_leaves_the_log_as_it_was(world: LogWorld, short: None, fault: str) -> None:
    loader = Loader(world, 2)
    tip = loader.log.next_position

    store, original = world.store, world.store.put_if_absent

    def fails(key: str, data: bytes) -> PutOutcome:
        if parse_snapshot_key(key) is None:
            return original(key, data)
        answer = FAULTS[fault].answer
        if FAULTS[fault].lands:
            original(key, data)
        if isinstance(answer, Exception):
            raise answer
        return answer

    with (
        patch.object(store, "put_if_absent", fails),
        patch.object(store, "get", lambda _: None),
        pytest.raises((StoreUnavailable, StoreRefused)),
    ):
        loader.log.append(rows(1), generation=1, applied=loader.after(**MORE))
    assert loader.log.next_position == tip
    assert not loader.log.poisoned
    for name in MORE:
        loader.put(name)
    claimed = world.claim()
    assert len(claimed.applied) == 11
    world.flushed_up_to(claimed.next_position - 1)
    world.collect(age=0.0)
    assert len(snapshots(world)) == 1


def test_a_missing_or_damaged_snapshot_is_named(world: LogWorld, short: None) -> None:
    loader = Loader(world, 20)
    key = snapshot_key(REGION, loader.applied.snapshot.name)
    data = world.store.get(key) or b""
    world.store.put(key, data[:-9] + b"x" + data[-8:])
    with raises(Corrupt):
        world.claim()
    world.store.delete(key)
    with raises(Corrupt):
        world.claim()
    world.store.put(key, data)
    assert len(world.claim().applied) == 20


# ---- garbage ---------------------------------------------------------------------------------------------------------


def test_only_the_snapshot_that_the_newest_entry_names_stays(world: LogWorld, short: None) -> None:
    loader = Loader(world, 60)
    before = snapshots(world)
    assert len(before) > 3
    world.clock.advance(AGE - 1)
    assert world.collect().snapshots == 0  # too young
    world.clock.advance(1)
    assert world.collect(dry_run=True).snapshots == len(before) - 1
    assert snapshots(world) == before
    report = world.collect()
    assert (report.snapshots, report.entries) == (len(before) - 1, 0)
    assert snapshots(world) == [loader.applied.snapshot.name]
    assert len(world.claim().applied) == 60


def test_a_snapshot_stays_while_its_entry_may_still_come(world: LogWorld, short: None) -> None:
    """A writer sleeps between the put of the snapshot and the put of the entry; another one is fenced there."""
    sleeper = Loader(world, 3)
    after, position = sleeper.after(**MORE), sleeper.log.next_position

    def collected() -> None:
        assert len(snapshots(world)) == 2
        world.collect(age=0.0)
        assert f"{position}-" in " ".join(snapshots(world))

    world.store.run_once("put_if_absent", entry_key(REGION, position, world.codec.suffix), collected)
    sleeper.log.append(rows(1), generation=1, applied=after)
    assert world.claim().applied == after
    fenced = after.copy()
    fenced.update({f"most {number:04}": 1 for number in range(9)})
    with pytest.raises(Fenced):
        sleeper.log.append(rows(1), generation=1, applied=fenced)
    world.collect(age=0.0)
    assert snapshots(world) == [world.claim().applied.snapshot.name]


def test_who_reads_an_entry_and_finds_its_snapshot_collected_takes_the_newer_one(world: LogWorld, short: None) -> None:
    loader = Loader(world, 20)
    reader, tip = EntryReader(world.store, REGION, world.codec), loader.log.next_position - 1
    for number in range(20, 60):
        loader.put(f"name {number:04}")
    world.collect(age=0.0)
    assert len(newest_applied(reader, tip, 0)) == 60


# ---- retired names ---------------------------------------------------------------------------------------------------


def test_the_oldest_names_are_retired_and_known_as_such(world: LogWorld, short: None) -> None:
    with patch("memwal.wal.applied.NAMES_MAX", 50):
        loader = Loader(world)
        for number in range(200):
            if half_applied := {0: "half applied long ago", 190: "half applied lately"}.get(number):
                loader.put(half_applied)
                loader.applied[f"memwal:before:2/1:{half_applied}"] = 0
            loader.put(f"name {number:04}")
            loader.put("often", number)
    applied = world.claim().applied
    assert len(applied) <= 60
    assert {"often", "half applied lately", "memwal:before:2/1:half applied lately", "name 0199"} <= applied.keys()
    assert "memwal:before:2/1:half applied long ago" not in applied
    assert applied.is_retired("half applied long ago")
    retired = [f"name {number:04}" for number in range(200) if f"name {number:04}" not in applied]
    assert len(retired) > 140
    assert all(map(applied.is_retired, retired))
    assert not any(map(applied.is_retired, [*applied, "name 0200", "another"]))


def test_a_name_with_a_lone_surrogate_is_retired_like_any_other() -> None:
    """Older releases accepted such tokens. The hash of a valid name must not change between releases."""
    with patch("memwal.wal.applied.NAMES_MAX", 2):
        applied = AppliedMap({"file \udcff": 1, "a": 1, "b": 1})
        applied.rebase(applied.rebased("5-x"))
    assert [applied.is_retired(name) for name in ("file \udcff", "a", "file", "b")] == [True, True, False, False]
    assert hashes(["a", "ż:b"]).tolist() == [3405396810240292928, 3420820342555892348]


def test_exceptions_do_not_count_as_names() -> None:
    """Otherwise a resize would retire names long before the limit on names is reached."""
    with patch("memwal.wal.applied.NAMES_MAX", 50):
        names = {f"name {number}": 1 for number in range(50)}
        applied = AppliedMap(names | {f"memwal:before:2/1:{name}": 0 for name in names})
        assert dict(applied.rebased("5-x").applied) == dict(applied)
        applied["one more"] = 1
        kept = applied.rebased("6-x").applied
    assert list(kept) == [*list(names)[6:], *(f"memwal:before:2/1:{name}" for name in list(names)[6:]), "one more"]


def test_a_snapshot_is_read_as_it_was_written() -> None:
    snapshot = Snapshot("7-" + "0123456789abcdef" * 2, {"a": 1, "ż:b": 2}, hashes(sorted(["x", "y"])))
    assert decoded_hashes(encoded_hashes(snapshot.retired)).tolist() == snapshot.retired.tolist()
    assert json.loads(encoded(snapshot)[9:])["applied"] == {"a": 1, "ż:b": 2}
    world = LogWorld()
    world.store.put(snapshot_key(REGION, snapshot.name), encoded(snapshot))
    read = read_snapshot(world.store, REGION, snapshot.name)
    assert read is not None
    assert (read.name, read.applied) == (snapshot.name, snapshot.applied)
    assert read.retired.tolist() == snapshot.retired.tolist()


def test_a_map_takes_no_number_that_an_entry_cannot_hold_and_keeps_those_of_older_releases() -> None:
    applied = AppliedMap({"old": 2**63})
    applied["new"] = SEQUENCE_MAX
    with raises(ValueError):
        applied["new"] = SEQUENCE_MAX + 1
    assert dict(applied.copy()) == {"old": 2**63, "new": SEQUENCE_MAX}
