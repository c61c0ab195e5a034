"""What was applied, carried over a resize: a model of batches that reach some regions only, resized again and again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flush.carried import carried, left_over, settled, with_exceptions

KEYS = pa.table({"key": list(range(24))})


def route(buckets: int, rows: pa.Table) -> Any:
    return (rows["key"].to_numpy() * 2_654_435_761 % 2**32 * buckets >> 32).astype(np.int32)


class Regions:
    """The maps of a table's regions, and which rows of which batch were applied."""

    def __init__(self, buckets: int) -> None:
        self.maps: list[dict[str, int]] = [{} for _ in range(buckets)]
        self.applied: dict[int, list[int]] = {}

    def send(self, batch: int, rows: pa.Table, reached: set[int]) -> None:
        buckets = route(len(self.maps), rows)
        for bucket, applied in enumerate(self.maps):
            part = rows.filter(pa.array(buckets == bucket))
            if bucket not in reached or not part.num_rows:
                continue
            if applied.get("q", -1) >= batch:
                part = part.filter(pa.array(left_over(applied, "q", batch, part, route)))
                if not part.num_rows:
                    continue
            self.maps[bucket] = settled(applied, "q", batch)
            self.applied.setdefault(batch, []).extend(part["key"].to_pylist())

    def resize(self, buckets: int) -> None:
        self.maps = [carried(self.maps) for _ in range(buckets)]


@given(st.data())
def test_every_row_of_every_batch_once(data: st.DataObject) -> None:
    regions, numbers = Regions(data.draw(st.integers(1, 4))), st.integers(1, 6)
    for batch in range(data.draw(numbers)):
        rows = KEYS.filter(pa.array(data.draw(st.lists(st.booleans(), min_size=24, max_size=24))))
        for _ in range(data.draw(st.integers(0, 3))):  # broken off, and resized meanwhile
            regions.send(batch, rows, data.draw(st.sets(st.integers(0, 5))))
            if data.draw(st.booleans()):
                regions.resize(data.draw(numbers))
        for _ in range(2):
            regions.send(batch, rows, set(range(6)))
        assert sorted(regions.applied.get(batch, [])) == rows["key"].to_pylist()


def test_regions_that_agree_carry_one_number_over() -> None:
    assert carried([{"a": 3, "b": 1}, {"b": 1, "a": 3}]) == {"a": 3, "b": 1}


def test_a_region_that_is_behind_is_an_exception_until_the_next_batch() -> None:
    found = carried([{"a": 3}, {"a": 2, "b": 0}])
    assert found == {
        "a": 3,
        "b": 0,
        "memwal:before:2/1:a": 2,
        "memwal:before:2/0:b": -1,
    }
    assert with_exceptions(found) == {"a", "b"}
    assert settled(found, "a", 4) == {"a": 4, "b": 0, "memwal:before:2/0:b": -1}
    assert carried([found, found, found]) == found


@pytest.mark.parametrize("name", ["plain", "with:colons:in it", "memwal:", "2/1:a"])
def test_names_of_producers_come_through(name: str) -> None:
    assert with_exceptions(carried([{name: 3}, {}])) == {name}
