"""What a tailer gives, when, at what cost in store calls, and what it says when it cannot go on."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

import pyarrow as pa
import pytest

from memwal.wal import (
    BatchPart,
    Claim,
    Corrupt,
    Entry,
    FakeClock,
    ManifestStore,
    MemoryStore,
    Overtaken,
    SeededIds,
    StoreUnavailable,
    WalAppender,
    WalOptions,
    WalTailer,
    bucket_region,
    claim,
)
from memwal.wal.layout import entry_key, parse_manifest_key
from tests.log_rows import CODEC, SCHEMA

REGION = bucket_region(0)
IDS = SeededIds(7)


class Counting(MemoryStore):
    """Counts its calls by name; its reads fail as `chance` and `rng` have it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.chance, self.rng = 0.0, random.Random(0)
        self.before_manifest: Callable[[], object] = lambda: None

    def get(self, key: str) -> bytes | None:
        self._called("get")
        if parse_manifest_key(key) is not None:
            self.before_manifest()
        return super().get(key)

    def exists(self, key: str) -> bool:
        self._called("exists")
        return super().exists(key)

    def list(self, prefix: str) -> list[str]:
        self._called("list")
        return super().list(prefix)

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if self.rng.random() < self.chance:
            raise StoreUnavailable("slow down")


class Scene:
    """A region with a writer, a tailer beside it, and a clock that only the test moves."""

    def __init__(self, readers: int = 1, after: int = 0) -> None:
        self.store, self.clock = Counting(), FakeClock()
        self.readers = readers
        self.claimed: Claim
        self.take_over()
        self.tailer = self.another(after)

    def another(self, after: int) -> WalTailer:
        options = WalOptions(readers=self.readers)
        return WalTailer(self.store, REGION, CODEC, after, clock=self.clock, options=options)

    def take_over(self) -> None:
        self.claimed = claim(self.store, REGION, spec_id=1, codec=CODEC, ids=IDS, clock=self.clock)
        self.log = WalAppender(
            self.store, REGION, self.claimed.guard, CODEC, self.claimed.next_position, IDS, self.clock
        )

    def append(self, *ids: int, part: BatchPart | None = None) -> int:
        rows = pa.table({"id": ids, "_tombstone": [False] * len(ids)}, schema=SCHEMA)
        return self.log.append(rows, generation=1, applied={}, part=part)

    def part(self, id: int, attempt: str, *, closes: bool = False) -> int:
        return self.append(id, part=BatchPart("q", 1, attempt, closes))

    def flushed(self, replay_after: int, *collected: int) -> None:
        manifests = ManifestStore(self.store, REGION, ids=IDS, clock=self.clock)
        manifests.edit_unowned(
            lambda current: replace(current, replay_after=replay_after, last_seen=max(current.last_seen, replay_after))
        )
        for position in collected:
            self.store.delete(entry_key(REGION, position, "lance"))

    def seen(self) -> list[int]:
        return ids_of(self.tailer.poll())


def ids_of(entries: Sequence[Entry]) -> list[int]:
    return [id for entry in entries for id in entry.rows["id"].to_pylist()]


@pytest.fixture(params=[1, 4], ids=["one reader", "four readers"])
def scene(request: pytest.FixtureRequest) -> Scene:
    return Scene(request.param)


def test_each_row_once_as_it_comes(scene: Scene) -> None:
    assert scene.seen() == []
    scene.append(1, 2)
    assert scene.seen() == [1, 2]
    assert scene.seen() == []
    for id in range(3, 20):
        scene.append(id)
    assert scene.seen() == list(range(3, 20))
    assert (scene.tailer.position, scene.tailer.restart_after) == (18, 18)


def test_a_tailer_may_begin_anywhere(scene: Scene) -> None:
    for id in range(5):
        scene.append(id)
    assert ids_of(scene.another(after=3).poll()) == [3, 4]
    assert ids_of(scene.another(after=5).poll()) == []


def test_a_poll_takes_a_bounded_piece() -> None:
    scene = Scene()
    for id in range(300):
        scene.append(id)
    assert scene.seen() == list(range(256))
    assert scene.seen() == list(range(256, 300))


def test_a_region_without_writer_has_nothing_yet() -> None:
    store, clock = MemoryStore(), FakeClock()
    assert WalTailer(store, REGION, CODEC, 0, clock=clock).poll() == []
    assert store.list("") == []


def test_an_idle_poll_is_one_read_and_the_manifest_is_looked_at_now_and_then(scene: Scene) -> None:
    scene.append(1)
    scene.seen()
    for _ in range(49):
        scene.clock.advance(0.1)
        scene.store.calls.clear()
        assert scene.seen() == []
        assert scene.store.calls == ["get"]
    scene.clock.advance(0.2)
    assert scene.seen() == []
    assert len(scene.store.calls) > 1
    scene.clock.advance(0.1)
    scene.store.calls.clear()
    assert scene.seen() == []
    assert scene.store.calls == ["get"]


def test_nobody_is_fenced_and_nothing_written(scene: Scene) -> None:
    scene.append(1)
    before = sorted(scene.store.list(""))
    for _ in range(3):
        scene.clock.advance(60)
        scene.seen()
    assert sorted(scene.store.list("")) == before
    assert scene.append(2) == 2


# ---- batches and takeovers -------------------------------------------------------------------------------------------


def test_parts_are_held_back_until_their_batch_is_closed(scene: Scene) -> None:
    scene.append(1)
    scene.part(2, "a")
    scene.append(3)
    assert scene.seen() == [1, 3]
    assert (scene.tailer.position, scene.tailer.restart_after) == (3, 1)
    scene.part(4, "a", closes=True)
    assert scene.seen() == [2, 4]
    assert scene.tailer.restart_after == 4


def test_who_restarts_where_it_was_told_to_misses_nothing(scene: Scene) -> None:
    scene.part(1, "a")
    scene.append(2)
    scene.seen()
    again = scene.another(scene.tailer.restart_after)
    scene.part(3, "a", closes=True)
    assert ids_of(again.poll()) == [2, 1, 3]


def test_a_takeover_drops_what_the_older_writer_left_open(scene: Scene) -> None:
    scene.append(1)
    scene.part(2, "a")
    assert scene.seen() == [1]
    scene.take_over()
    scene.append(3)
    scene.part(4, "a")
    scene.part(5, "a", closes=True)
    assert scene.seen() == [3, 4, 5]


def test_what_a_tailer_gives_is_what_a_claim_replays(scene: Scene) -> None:
    rng, given = random.Random(3), list[int]()
    for id in range(200):
        match rng.randrange(8):
            case 0:
                scene.take_over()
            case 1 | 2 | 3:
                scene.part(id, rng.choice("ab"), closes=rng.random() < 0.3)
            case _:
                scene.append(id)
        if rng.random() < 0.3:
            given += scene.seen()
    given += scene.seen()
    scene.take_over()
    assert given == ids_of(scene.claimed.entries)
    assert len(given) > 100


# ---- when it cannot go on --------------------------------------------------------------------------------------------


def test_one_who_was_overtaken_is_told_where_to_go_on(scene: Scene) -> None:
    for id in range(5):
        scene.append(id)
    scene.flushed(4, 1, 2, 3)
    with pytest.raises(Overtaken, match="position 1 was flushed and collected") as caught:
        scene.seen()
    assert (caught.value.position, caught.value.replay_after, caught.value.generation) == (1, 4, 1)
    assert ids_of(scene.another(caught.value.replay_after).poll()) == [4]


def test_one_who_sleeps_is_overtaken_in_the_middle(scene: Scene) -> None:
    scene.append(0)
    assert scene.seen() == [0]
    for id in range(1, 5):
        scene.append(id)
    scene.flushed(5, 2, 3)
    scene.clock.advance(600)
    with pytest.raises(Overtaken, match="position 2 was flushed"):
        scene.seen()


def test_entries_that_were_flushed_and_are_still_there_are_given(scene: Scene) -> None:
    for id in range(3):
        scene.append(id)
    scene.flushed(2)
    assert scene.seen() == [0, 1, 2]


def test_a_hole_is_corruption_once_something_lies_behind_it(scene: Scene) -> None:
    for id in range(3):
        scene.append(id)
    scene.store.delete(entry_key(REGION, 2, "lance"))
    assert scene.seen() == [0]
    scene.clock.advance(5)
    with pytest.raises(Corrupt, match=r"wal/010.*position 2 is missing.*restore this object from a backup"):
        scene.seen()


def test_a_lost_tip_is_corruption_once_the_manifest_knows_of_it(scene: Scene) -> None:
    scene.append(0)
    scene.take_over()
    scene.store.delete(entry_key(REGION, 2, "lance"))
    assert scene.seen() == [0]
    scene.clock.advance(5)
    with pytest.raises(Corrupt, match="position 2 is missing"):
        scene.seen()


def test_what_is_appended_between_the_two_looks_is_not_taken_for_lost(scene: Scene) -> None:
    scene.append(0)
    scene.seen()
    scene.clock.advance(5)

    def meanwhile() -> None:
        scene.store.before_manifest = lambda: None
        scene.append(1)
        scene.append(2)

    scene.store.before_manifest = meanwhile
    assert scene.seen() == [1, 2]


def test_an_epoch_that_goes_back_is_corruption(scene: Scene) -> None:
    older = scene.log
    scene.take_over()
    scene.append(1)
    older.next_position = 3
    older.append(CODEC.no_rows, generation=1, applied={})
    assert scene.seen() == [1]
    with pytest.raises(Corrupt, match=r"wal/110.*: writer epoch 1 at position 3 follows epoch 2"):
        scene.seen()


def test_what_stands_before_damage_is_given_first_and_the_damage_for_ever(scene: Scene) -> None:
    for id in range(4):
        scene.append(id)
    key = entry_key(REGION, 3, "lance")
    whole = scene.store.get(key) or b""
    scene.store.put(key, whole[:-9])
    assert scene.seen() == [0, 1]
    for _ in range(2):
        with pytest.raises(Corrupt, match=rf"{key}: WAL entry at position 3"):
            scene.seen()
    scene.store.put(key, whole)
    assert scene.seen() == [2, 3]


# ---- storage that is not there at times ------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_under_failing_reads_every_row_is_given_once_in_order(seed: int) -> None:
    scene = Scene(readers=1 + seed % 2 * 3)
    scene.tailer = WalTailer(
        scene.store, REGION, CODEC, 0, clock=scene.clock, options=WalOptions(0.01, 0.05, readers=scene.readers)
    )
    rng, given, failed = random.Random(seed), list[int](), 0
    for id in range(120):
        scene.append(id)
        if id % 40 == 39:
            scene.take_over()
        if rng.random() < 0.3:
            scene.store.rng, scene.store.chance = random.Random(seed * 1000 + id), 0.5
            try:
                given += scene.seen()
            except StoreUnavailable:
                failed += 1
            scene.store.chance = 0.0
    given += scene.seen()
    assert given == list(range(120))
    assert failed


def test_a_moments_failure_is_not_noticed(scene: Scene) -> None:
    scene.append(1)
    scene.store.chance = 0.3
    assert scene.seen() == [1]


# ---- following -------------------------------------------------------------------------------------------------------


def test_following_waits_only_while_there_is_nothing(scene: Scene) -> None:
    scene.append(1)
    scene.append(2)
    entries = scene.tailer.follow(0.5, stop=lambda: len(scene.clock.slept) > 3)
    assert [ids_of([next(entries)]), ids_of([next(entries)])] == [[1], [2]]
    assert scene.clock.slept == []
    with suppress(StopIteration):
        next(entries)
    assert scene.clock.slept == [0.5] * 4


def test_following_sees_what_comes_while_it_waits() -> None:
    scene = Scene()

    class Busy(FakeClock):
        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)
            scene.append(len(self.slept))

    scene.clock = Busy()
    scene.tailer = scene.another(0)
    entries = scene.tailer.follow(1.0)
    assert [ids_of([next(entries)]) for _ in range(5)] == [[1], [2], [3], [4], [5]]
