"""Applied maps over resizes: in the model, batches reach some regions only and the table is resized repeatedly."""

from __future__ import annotations

import json
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memwal.flush.resizing.applied_maps import exceptions_by_producer, initial_map, left_over, merged_map, settle
from memwal.wal.applied import PREFIX, AppliedMap

KEYS = pa.table({"key": list(range(24))})


def route(buckets: int, rows: pa.Table) -> Any:
    return (rows["key"].to_numpy() * 2_654_435_761 % 2**32 * buckets >> 32).astype(np.int32)


class Regions:
    """The applied maps of a table's regions, and the applied keys of each batch."""

    def __init__(self, buckets: int) -> None:
        self.maps: list[dict[str, int]] = [{} for _ in range(buckets)]
        self.began: dict[str, tuple[str, ...]] = {}
        self.applied: dict[int, list[int]] = {}

    def send(self, batch: int, rows: pa.Table, reached: set[int]) -> None:
        buckets = route(len(self.maps), rows)
        for bucket, applied in enumerate(self.maps):
            part = rows.filter(pa.array(buckets == bucket))
            if bucket not in reached or not part.num_rows:
                continue
            if applied.get("q", -1) >= batch:
                part = part.filter(pa.array(left_over(applied, self.began, "q", batch, part, route)))
                if not part.num_rows:
                    continue
            self.maps[bucket] = dict(applied)
            settle(self.maps[bucket], self.began, "q", batch)
            self.applied.setdefault(batch, []).extend(part["key"].to_pylist())

    def resize(self, buckets: int) -> None:
        self.maps = [merged_map(self.maps) for _ in range(buckets)]
        self.began = exceptions_by_producer(self.maps[0])


@given(st.data())
def test_every_row_of_every_batch_once(data: st.DataObject) -> None:
    regions, numbers = Regions(data.draw(st.integers(1, 4))), st.integers(1, 6)
    for batch in range(data.draw(numbers)):
        rows = KEYS.filter(pa.array(data.draw(st.lists(st.booleans(), min_size=24, max_size=24))))
        for _ in range(data.draw(st.integers(0, 3))):  # attempts that are cut short, with resizes in between
            regions.send(batch, rows, data.draw(st.sets(st.integers(0, 5))))
            if data.draw(st.booleans()):
                regions.resize(data.draw(numbers))
        for _ in range(2):
            regions.send(batch, rows, set(range(6)))
        assert sorted(regions.applied.get(batch, [])) == rows["key"].to_pylist()


def test_regions_that_agree_carry_one_number_over() -> None:
    assert merged_map([{"a": 3, "b": 1}, {"b": 1, "a": 3}]) == {"a": 3, "b": 1}


def test_a_region_that_is_behind_is_an_exception_until_the_next_batch() -> None:
    found = merged_map([{"a": 3}, {"a": 2, "b": 0}])
    assert found == {
        "a": 3,
        "b": 0,
        "memwal:before:2/1:a": 2,
        "memwal:before:2/0:b": -1,
    }
    began = exceptions_by_producer(found)
    assert began == {"a": ("memwal:before:2/1:a",), "b": ("memwal:before:2/0:b",)}
    assert merged_map([found, found, found]) == found
    settle(found, began, "a", 4)
    assert found == {"a": 4, "b": 0, "memwal:before:2/0:b": -1}


@pytest.mark.parametrize("name", ["plain", "with:colons:in it", "memwal:", "2/1:a"])
def test_names_of_producers_come_through(name: str) -> None:
    assert exceptions_by_producer(merged_map([{name: 3}, {}])).keys() == {name}
    assert exceptions_by_producer(merged_map([{name: 3}, {}, {}])).keys() == {name}


@pytest.mark.parametrize("between", [0, 1])
def test_resizes_leave_one_exception_of_a_producer_however_many_there_were(between: int) -> None:
    """One producer puts one row, or none, between two resizes. With one exception per resize and bucket the map would
    have 4.4 MB after the fifth resize."""
    regions, batch = Regions(8), 0
    for number in range(16):
        if number * between % 2 == 0:
            batch += between
            regions.send(batch, KEYS.slice(batch, 1), set(range(16)))
        regions.resize(16 if number % 2 == 0 else 8)
        assert len(regions.maps[0]) <= 2
        assert len(json.dumps(regions.maps[0])) < 100


def test_a_batch_that_stays_half_applied_over_many_resizes_has_one_set_per_number_of_buckets() -> None:
    regions = Regions(64)
    regions.send(1, KEYS, {0, 1, 2})
    for number in range(24):
        regions.resize((96, 15, 64)[number % 3])
        regions.send(1, KEYS, {number % 15})
        keys = [each for each in regions.maps[0] if each != "q"]
        assert len(keys) <= 1
        assert all(key.count("/") <= 3 for key in keys)
    regions.send(1, KEYS, set(range(64)))
    assert sorted(regions.applied[1]) == KEYS["key"].to_pylist()


def test_exceptions_of_older_releases_are_read_and_joined() -> None:
    """Older releases wrote one key per bucket, each with its own sequence."""
    old = {"q": 7, **{f"memwal:before:4/2+8/{n}:q": 6 for n in (5, 6)}, "memwal:before:8/1:q": 3, "a": 1}
    found = merged_map([old, {**old, "a": 2}])
    assert found == {
        "a": 2,
        "q": 7,
        "memwal:before:2/0:a": 1,
        "memwal:before:4/2+8/x60:q": 6,
        "memwal:before:8/1:q": 6,
    }
    rows, began = pa.table({"key": list(range(64))}), exceptions_by_producer(found)
    in_both = (route(4, rows) == 2) & np.isin(route(8, rows), (5, 6))
    open_then = (in_both | (route(8, rows) == 1)).tolist()
    assert left_over(found, began, "q", 7, rows, route).tolist() == open_then
    assert left_over(old, exceptions_by_producer(old), "q", 7, rows, route).tolist() == open_then
    assert not left_over(found, began, "q", 6, rows, route).any()


def test_a_resize_keeps_the_order_of_the_last_changes() -> None:
    """A name keeps the position that it has in the region that changed it most recently, not the alphabetical one."""
    found = merged_map([{"z": 1, "m": 1, "a": 2}, {"a": 1, "z": 1, "k": 1, "m": 1}])
    assert [key for key in found if not key.startswith(PREFIX)] == ["z", "k", "a", "m"]


def test_after_a_resize_the_names_that_were_changed_last_are_kept() -> None:
    """Each region has its own names, none of them retired, and the name of a query that wrote to all regions last."""
    names = [[f"{region} file {number:03}" for number in range(600)] for region in "ab"]
    maps = [AppliedMap({"0 query of old": 7, **dict.fromkeys(own, 1), "0 query": 7}) for own in names]
    with patch("memwal.wal.applied.NAMES_MAX", 1_000):
        begun = initial_map(maps)
        begun.rebase(begun.rebased("5-x"))
    assert begun["0 query"] == 7
    kept = {key for key in begun if not key.startswith(PREFIX)}
    assert (len(kept), begun["memwal:before:2/1:a file 599"]) == (900, 0)
    assert {name for own in names for name in own[151:]} <= kept
    assert all(begun.is_retired(name) for name in ["0 query of old", *names[0][:150], *names[1][:150]])
    assert exceptions_by_producer(begun).keys() == kept - {"0 query"}, "exceptions go with their name"
