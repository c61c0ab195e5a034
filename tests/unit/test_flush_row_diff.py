"""`flush.history.diff` finds the rows that differ between two tables, by key and for every column type."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memwal.flush.history.diff import compare_rows, repeated

NAN = float("nan")
VECTOR = pa.list_(pa.float32(), 2)
PAIR = pa.struct([("a", pa.int64()), ("b", pa.list_(pa.string()))])
DIFFERENT: list[tuple[pa.DataType, list[Any]]] = [
    (pa.int32(), [1, 2, None]),
    (pa.float64(), [0.5, NAN, None, -0.0, 0.0]),
    (pa.float16(), [np.float16(0.5), np.float16(1.5), None]),
    (pa.bool_(), [True, False, None]),
    (pa.string(), ["a", "", None, "ab"]),
    (pa.large_binary(), [b"a", b"", None]),
    (pa.date32(), [1, 2, None]),
    (pa.timestamp("us", "UTC"), [1, 2, None]),
    (pa.decimal128(9, 2), [1, 2, None]),
    (VECTOR, [[1, 2], [1, 3], None, [NAN, 2], [1, None]]),
    (pa.list_(pa.int64()), [[1], [], None, [1, 2], [1, None], [2]]),
    (pa.large_list(VECTOR), [[[1, 2]], [], None, [[1, 3]], [None]]),
    (PAIR, [{"a": 1, "b": ["x"]}, {"a": None, "b": ["x"]}, None, {"a": 1, "b": None}, {"a": 1, "b": ["y"]}]),
    (pa.map_(pa.string(), pa.int64()), [[("a", 1)], [], None, [("a", 2)], [("b", 1)]]),
    (pa.dictionary(pa.int32(), pa.string()), ["a", "b", None]),
    (pa.null(), [None]),
]
"""Per type, values that are pairwise different."""


def table(ids: list[int], **columns: Any) -> pa.Table:
    return pa.table({"id": pa.array(ids, pa.int64()), **columns})


@pytest.mark.parametrize(("kind", "values"), DIFFERENT, ids=[str(kind) for kind, _ in DIFFERENT])
def test_every_value_equals_only_itself(kind: pa.DataType, values: list[Any]) -> None:
    pairs = [(a, b) for a in range(len(values)) for b in range(len(values))]
    before = table(list(range(len(pairs))), x=pa.array([values[a] for a, _ in pairs], kind))
    after = table(list(range(len(pairs))), x=pa.array([values[b] for _, b in pairs], kind))
    found = compare_rows(before, after, ["id"])
    assert found.changed.tolist() == [at for at, (a, b) in enumerate(pairs) if a != b]
    assert found.same == len(values)
    # In another order, and in several chunks.
    order = np.random.default_rng(1).permutation(len(pairs))
    shuffled = after.take(pa.array(order))
    chunked = pa.concat_tables([shuffled.slice(0, 2), shuffled.slice(2)])
    again = compare_rows(before, chunked, ["id"])
    assert sorted(order[again.changed].tolist()) == found.changed.tolist()


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(st.tuples(st.integers(0, 8), st.sampled_from("ab")), st.sampled_from([None, 1, 2])),
    st.dictionaries(st.tuples(st.integers(0, 8), st.sampled_from("ab")), st.sampled_from([None, 1, 2])),
)
def test_keys_added_removed_and_changed(one: dict[Any, Any], two: dict[Any, Any]) -> None:
    def of(rows: dict[Any, Any]) -> pa.Table:
        schema = pa.schema([("n", pa.int64()), ("s", pa.string()), ("x", pa.int64())])
        return pa.Table.from_pylist([{"n": n, "s": s, "x": x} for (n, s), x in rows.items()], schema=schema)

    before, after = of(one), of(two)
    found = compare_rows(before, after, ["n", "s"])
    keys_before, keys_after = list(one), list(two)
    assert {keys_before[at] for at in found.removed} == one.keys() - two.keys()
    assert {keys_after[at] for at in found.added} == two.keys() - one.keys()
    assert {keys_after[at] for at in found.changed} == {key for key in one.keys() & two.keys() if one[key] != two[key]}
    assert found.same == sum(one[key] == two[key] for key in one.keys() & two.keys())
    assert bool(found) == (one != two)


def test_changes_are_counted_by_column_and_other_columns_are_left_out() -> None:
    before = table([1, 2, 3], a=[1, 2, 3], b=["x", "y", "z"], gone=[1, 1, 1])
    after = table([1, 2, 3], a=[1, 5, 6], b=["x", "y", "q"], new=[1, 1, 1])
    found = compare_rows(before, after, ["id"])
    assert found.columns == {"a": 2, "b": 1}
    assert found.changed.tolist() == [1, 2]


def test_types_that_can_be_cast_are_compared_by_value() -> None:
    assert not compare_rows(table([1], a=pa.array([7], pa.int32())), table([1], a=pa.array([7], pa.int64())), ["id"])
    assert not compare_rows(table([1], a=pa.nulls(1)), table([1], a=pa.array([None], pa.string())), ["id"])


def test_a_key_that_repeats_is_found_from_its_second_row_on() -> None:
    keys = pa.table({"a": [1, 2, 1, 1, 3], "b": ["x", "x", "x", "y", "x"]})
    assert repeated(keys).tolist() == [2]
    assert repeated(keys.select(["a"])).tolist() == [2, 3]
    assert repeated(keys.slice(0, 0)).tolist() == []
