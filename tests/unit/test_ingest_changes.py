"""The pure parts of the change feed: kinds of changes, positions, requests; and the stream made of pieces."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from memwal import wal
from memwal.ingest.engine.api.changes import Changes, ChangesRequest, Piece, Position, opened, packed, unpacked
from memwal.ingest.engine.api.rows import KeyRuns
from memwal.ingest.engine.changes.region import (
    NOWHERE,
    after_images,
    befores,
    both_images,
    change_schema,
    change_table,
)
from memwal.ingest.errors import Invalid
from memwal.wal.manifest import ManifestHistory
from tests.messages import raises
from tests.support.clock import FakeClock
from tests.support.memory_store import MemoryStore

REGION = wal.bucket_region(0)
NAMES = pa.schema([pa.field("id", pa.int64(), nullable=False), ("v", pa.int64())])


def told(keys: list[int], values: list[int | None], stored: dict[int, int]) -> list[tuple[Any, ...]]:
    """Return the changes of one group of rows with both images. A value of None is a delete."""
    rows = pa.table({"id": keys, "v": pa.array(values, pa.int64())}, NAMES)
    deletes = np.array([value is None for value in values], dtype=np.bool_)
    runs = KeyRuns(rows.select(["id"]))
    firsts = [keys[first] for first in runs.first]
    live = [key for key in firsts if key in stored]
    at = np.array([live.index(key) if key in stored else NOWHERE for key in firsts], dtype=np.int64)
    held = pa.table({"id": live, "v": [stored[key] for key in live]}, NAMES)
    row, source, kinds = both_images(befores(runs, deletes, at), deletes)
    values_of = pa.concat_tables([rows, held]).take(pa.array(source))
    changes = change_table(change_schema(NAMES), values_of, "r", np.full(len(row), 7), row, kinds)
    after = after_images(befores(runs, deletes, at), deletes)
    assert after[0].tolist() == sorted(set(row.tolist()))
    return [(each["_change"], each["_row"], each["id"], each["v"]) for each in changes.to_pylist()]


def by_hand(keys: list[int], values: list[int | None], stored: dict[int, int]) -> list[tuple[Any, ...]]:
    held, changes = dict(stored), list[tuple[Any, ...]]()
    for number, (key, value) in enumerate(zip(keys, values, strict=True)):
        before = held.pop(key, None)
        if value is not None:
            held[key] = value
        if before is None and value is not None:
            changes.append(("insert", number, key, value))
        elif before is not None and value is None:
            changes.append(("delete", number, key, before))
        elif before is not None:
            changes.append(("update_preimage", number, key, before))
            changes.append(("update_postimage", number, key, value))
    return changes


@pytest.mark.parametrize("seed", range(40))
def test_kinds_are_as_if_rows_came_one_after_the_other(seed: int) -> None:
    dice = random.Random(seed)
    count = dice.choice((0, 1, 2, 30))
    keys = [dice.randrange(8) for _ in range(count)]
    values = [None if dice.random() < 0.4 else number for number in range(count)]
    stored = {key: -key for key in range(8) if dice.random() < 0.5}
    assert told(keys, values, stored) == by_hand(keys, values, stored)


def test_a_position_is_a_value_for_json_and_back() -> None:
    position = Position("t", 2, {REGION: 5})
    value = position.to_json()
    assert value == {"table": "t", "routing": 2, "regions": {str(REGION): 5}}
    assert Position.of_json(value) == position
    request = ChangesRequest(position, None, "both", ("id",))
    assert ChangesRequest.of_json(request.to_json()) == request


@pytest.mark.parametrize(
    "value",
    [
        3,
        {},
        {"table": "t", "routing": 1},
        {"table": "t", "routing": 0, "regions": {}},
        {"table": "t", "routing": 1, "regions": {"x": 1}},
        {"table": "t", "routing": 1, "regions": {str(REGION): -1}},
    ],
)
def test_what_is_no_position_is_refused(value: Any) -> None:
    with raises(Invalid):
        Position.of_json(value)


class Numbers:
    """A source of numbered changes up to `top`, three per request."""

    def __init__(self, top: int) -> None:
        self.top, self.asked = top, list[int]()

    def piece(self, request: ChangesRequest) -> Piece:
        at = request.since.regions.get(REGION, 0)
        top = self.top if request.until is None else request.until.regions[REGION]
        self.asked.append(at)
        to = min(at + 3, top)
        rows = pa.table({"n": pa.array(range(at, to), pa.int64())})
        return unpacked(packed(Piece(rows, Position("t", 1, {REGION: to}), more=to > at)))

    def position(self, at: str) -> Position:
        return Position("t", 1, {REGION: 0 if at == "earliest" else self.top})


def test_the_position_is_that_after_the_last_batch_returned() -> None:
    source = Numbers(8)
    changes = opened(source, None, None, "after", None, follow=False)
    assert changes.schema.names == ["n"]
    seen = list[int]()
    for batch in changes:
        seen += batch.column(0).to_pylist()
        assert Position.of_json(changes.position).regions[REGION] == len(seen)
        if len(seen) == 6:
            break
    source.top = 9
    rest = opened(source, changes.position, None, "after", None, follow=False)
    assert seen + rest.read_all().column(0).to_pylist() == list(range(9))


def test_a_feed_without_follow_ends_where_the_log_did_when_it_was_opened() -> None:
    source = Numbers(4)
    changes = opened(source, "earliest", None, "after", None, follow=False)
    source.top = 100
    assert changes.read_all().num_rows == 4


def test_a_feed_that_follows_waits_longer_and_longer_and_goes_on() -> None:
    source, pauses = Numbers(2), list[float]()

    class Clock(FakeClock):
        def sleep(self, seconds: float) -> None:
            pauses.append(seconds)
            if len(pauses) == 7:
                source.top = 3

    start = ChangesRequest(source.position("earliest"))
    changes = Changes(source, start, follow=True, clock=Clock())
    batches = iter(changes)
    assert next(batches).num_rows == 2
    assert next(batches).num_rows == 1
    assert pauses[0] < 0.1
    assert pauses == sorted(pauses)
    assert max(pauses) == 1.0


@pytest.mark.parametrize(
    "arguments",
    [
        {"since": "latst"},
        {"images": "before"},
        {"follow": True, "until": "latest"},
        {"since": 3},
    ],
)
def test_wrong_arguments_are_refused_in_one_line(arguments: dict[str, Any]) -> None:
    asked = {"since": None, "until": None, "images": "after", "columns": None, "follow": False} | arguments
    with raises(Invalid):
        opened(Numbers(1), **asked)


def test_a_feed_that_follows_is_not_read_as_a_whole() -> None:
    with raises(Invalid):
        opened(Numbers(1), None, None, "after", None, follow=True).read_all()


def test_manifests_are_found_by_what_they_reached() -> None:
    store = MemoryStore()
    assert ManifestHistory(store, REGION).newest is None
    assert ManifestHistory(store, REGION).first(lambda manifest: True) is None
    codec, ids, clock = (
        wal.LanceCodec(pa.schema([*NAMES, pa.field("_tombstone", pa.bool_(), nullable=False)])),
        wal.SystemIds(),
        FakeClock(),
    )
    for _ in range(9):
        wal.claim(store, REGION, spec_id=1, codec=codec, ids=ids, clock=clock)
    history = ManifestHistory(store, REGION)
    assert history.newest is not None
    assert history.is_whole()
    for epoch in range(1, 10):
        first = history.first(lambda manifest, epoch=epoch: manifest.writer_epoch >= epoch)
        before = history.last_before(lambda manifest, epoch=epoch: manifest.writer_epoch >= epoch)
        assert first is not None
        assert first.writer_epoch == epoch
        assert (before.writer_epoch if before else 0) == epoch - 1
        assert before is None or before.version == first.version - 1
    assert history.first(lambda manifest: manifest.writer_epoch > 9) is None
    assert history.last_before(lambda manifest: manifest.writer_epoch > 9) == history.newest
