"""The write rules on whole groups, compared with an oracle that handles one row at a time."""

from __future__ import annotations

import decimal
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memwal.ingest.engine.api.rows import first_of_each_key, key_codes
from memwal.ingest.engine.region.write_rules import NOWHERE, Group, inserted, merged, merged_from, timely
from memwal.ingest.errors import Invalid
from tests.conftest import extent

SCHEMA = pa.schema(
    [
        pa.field("a", pa.int64(), nullable=False),
        pa.field("b", pa.string(), nullable=False),
        pa.field("n", pa.int32()),
        pa.field("text", pa.string()),
        pa.field("vector", pa.list_(pa.float32(), 2)),
    ]
)
KEY, VALUES = ["a", "b"], ["n", "text", "vector"]
Key = tuple[int, str]
Row = dict[str, Any]

KEYS = st.tuples(st.integers(-1, 1), st.sampled_from(["", "x", "xy"]))
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "n": st.one_of(st.none(), st.integers(0, 99)),
    "text": st.one_of(st.none(), st.sampled_from(["", "one", "two"])),
    "vector": st.one_of(st.none(), st.just([1.0, 2.0]), st.just([3.0, 4.0])),
}


@dataclass
class OneWrite:
    """One write: its keys, its rows (values of the columns that the write has), and which rows are deletes."""

    keys: list[Key]
    rows: list[Row]
    columns: list[str]
    deletes: list[bool]


@st.composite
def a_write(draw: st.DrawFn) -> OneWrite:
    keys = draw(st.lists(KEYS, max_size=4))
    deletes = [draw(st.sampled_from([False, False, True])) for _ in keys]
    columns = draw(st.lists(st.sampled_from(VALUES), unique=True))
    rows = [{} if delete else {name: draw(FIELDS[name]) for name in columns} for delete in deletes]
    return OneWrite(keys, rows, columns, deletes)


GROUPS = st.lists(a_write(), max_size=6)
STORED = st.dictionaries(KEYS, st.fixed_dictionaries(FIELDS), max_size=6)


def table(writes: list[OneWrite]) -> pa.Table:
    """Return all rows of a group; columns that a write lacks are null."""
    rows = [
        {"a": key[0], "b": key[1], **dict.fromkeys(VALUES), **row}
        for write in writes
        for key, row in zip(write.keys, write.rows, strict=True)
    ]
    return pa.Table.from_pylist(rows, schema=SCHEMA)


def group_of(writes: list[OneWrite]) -> Group:
    rows = table(writes).select(KEY)
    deletes = np.array([each for write in writes for each in write.deletes], dtype=np.bool_)
    return Group(rows, [len(write.keys) for write in writes], deletes)


def stored_table(stored: dict[Key, Row]) -> pa.Table:
    return pa.Table.from_pylist([{"a": key[0], "b": key[1], **row} for key, row in stored.items()], schema=SCHEMA)


def keys_of(group: Group, rows: pa.Table) -> list[Key]:
    """Return the key for each key number."""
    return [(row["a"], row["b"]) for row in rows.select(KEY).take(pa.array(group.first)).to_pylist()]


@settings(max_examples=extent(100, 300))
@given(GROUPS, STORED)
def test_inserts_take_what_one_put_after_the_other_would_take(writes: list[OneWrite], stored: dict[Key, Row]) -> None:
    there, expected = set(stored), []
    for write in writes:
        runs: dict[Key, bool] = {}  # in this write: whether the puts of a key since its last delete are accepted
        for key, delete in zip(write.keys, write.deletes, strict=True):
            if delete:
                runs.pop(key, None)
            expected.append(delete or runs.setdefault(key, key not in there))
            there = there - {key} if delete else there | {key}
    group = group_of(writes)
    found = inserted(group, np.array([key in stored for key in keys_of(group, table(writes))], dtype=bool))
    assert found.tolist() == expected


@settings(max_examples=extent(100, 300))
@given(GROUPS, STORED)
def test_merges_give_the_rows_that_one_put_after_the_other_would_give(
    writes: list[OneWrite], stored: dict[Key, Row]
) -> None:
    state, expected = {key: dict(row) for key, row in stored.items()}, []
    for write in writes:
        for key, row, delete in zip(write.keys, write.rows, write.deletes, strict=True):
            if delete:
                state.pop(key, None)
                expected.append(dict.fromkeys(VALUES))
            else:
                state[key] = {**dict.fromkeys(VALUES), **state.get(key, {}), **row}
                expected.append(state[key])
    group, rows, order = group_of(writes), table(writes), list(stored)
    at = np.array([order.index(key) if key in stored else NOWHERE for key in keys_of(group, rows)], dtype=np.int64)
    sources = {
        name: merged_from(group, np.array([name in write.columns for write in writes], dtype=bool), at)
        for name in VALUES
    }
    found = merged(rows, stored_table(stored), sources)
    assert found.schema == SCHEMA
    assert found.select(VALUES).to_pylist() == expected
    assert found.select(KEY) == rows.select(KEY)


@settings(max_examples=extent(100, 300))
@given(
    st.lists(st.lists(st.tuples(KEYS, st.one_of(st.none(), st.integers(0, 4))), max_size=5), max_size=4),
    st.dictionaries(KEYS, st.one_of(st.none(), st.integers(0, 4)), max_size=5),
    st.sampled_from([pa.int8(), pa.int64(), pa.uint64(), pa.timestamp("us", "UTC"), pa.date32()]),
)
def test_a_row_that_is_older_than_what_is_there_is_not_taken(
    writes: list[list[tuple[Key, int | None]]], stored: dict[Key, int | None], kind: pa.DataType
) -> None:
    rows = [row for write in writes for row in write]
    newest, expected = {key: -1 if version is None else version for key, version in stored.items()}, []
    for key, version in rows:
        expected.append(version is None or version >= newest.get(key, -1))
        if expected[-1]:
            newest[key] = -1 if version is None else version
    keys = pa.table(
        {
            "a": pa.array([key[0] for key, _ in rows], pa.int64()),
            "b": pa.array([key[1] for key, _ in rows], pa.string()),
        }
    )
    group = Group(
        keys, [len(write) for write in writes], np.array([version is None for _, version in rows], dtype=bool)
    )
    order = list(stored)
    at = np.array([order.index(key) if key in stored else NOWHERE for key in keys_of(group, keys)], dtype=np.int64)

    def typed(versions: list[int | None]) -> pa.ChunkedArray:
        top = 2**64 - 9 if pa.types.is_uint64(kind) else 0
        shifted = [None if each is None else each + top * (each > 2) for each in versions]
        numbers = pa.int32() if pa.types.is_date(kind) else pa.uint64() if top else pa.int64()
        return pa.chunked_array([pa.array(shifted, numbers).cast(kind)])

    found = timely(group, typed([version for _, version in rows]), typed([stored[key] for key in order]), at)
    assert found.tolist() == expected


VALUES_BY_TYPE: dict[str, pa.Array] = {
    "bool": pa.array([True, False, None]),
    "decimal": pa.array([decimal.Decimal("1.5"), None, decimal.Decimal("2.5")]),
    "timestamp": pa.array([1, 2, None], pa.timestamp("us", "UTC")),
    "date": pa.array([1, 2, 3], pa.date32()),
    "large_string": pa.array(["a", None, "b"], pa.large_string()),
    "binary": pa.array([b"a", None, b""]),
    "fixed_binary": pa.array([b"xx", b"yy", None], pa.binary(2)),
    "list": pa.array([[1, 2], [], None]),
    "struct": pa.array([{"a": 1, "b": ["x"]}, None, {"a": 2, "b": []}]),
    "float16_vector": pa.array([[1.0, 2.0], None, [3.0, 4.0]], pa.list_(pa.float16(), 2)),
    "uuid": pa.ExtensionArray.from_storage(pa.uuid(), pa.array([b"0" * 16, None, b"1" * 16], pa.binary(16))),
    "null": pa.nulls(3),
}


@pytest.mark.parametrize("kind", VALUES_BY_TYPE)
def test_a_value_of_every_type_is_taken_from_rows_and_from_what_is_stored(kind: str) -> None:
    column = VALUES_BY_TYPE[kind]
    rows = pa.table({"k": [5, 6, 7], "c": pa.chunked_array([column.slice(0, 1), column.slice(1)])})
    stored = pa.table({"k": [8, 9, 10], "c": pa.concat_arrays([column.slice(2), column.slice(0, 2)])})
    found = merged(rows, stored, {"c": np.array([2, 3, NOWHERE])})
    assert found.schema == rows.schema
    assert found.column("c").to_pylist() == [column[2].as_py(), column[2].as_py(), None]
    assert found.column("k").to_pylist() == [5, 6, 7]


@pytest.mark.parametrize(
    "kind",
    [pa.int8(), pa.uint64(), pa.bool_(), pa.string(), pa.large_string(), pa.binary(), pa.large_binary()],
    ids=str,
)
def test_codes_are_equal_for_equal_keys_only(kind: pa.DataType) -> None:
    values: list[Any] = [0, 1, 127] if pa.types.is_integer(kind) else [b"", b"a", b"a\0"]
    if pa.types.is_boolean(kind):
        values = [True, False]
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        values = ["", "a", "é"]
    if kind == pa.uint64():
        values.append(2**64 - 1)
    column = pa.chunked_array([pa.array(values * 2, kind), pa.array(values[::-1], kind), pa.array([], kind)])
    for keys in (
        pa.table({"k": column}),
        pa.table({"k": column, "l": column}),
        pa.table({"l": [7] * len(column), "k": column}),
    ):
        by_code: dict[int, set[Any]] = {}
        for code, value in zip(key_codes(keys).tolist(), column.to_pylist(), strict=True):
            by_code.setdefault(code, set()).add(value)
        assert sorted(map(len, by_code.values())) == [1] * len(values)


@settings(max_examples=extent(100, 300))
@given(st.lists(st.tuples(KEYS, st.sampled_from([False, False, True])), max_size=8))
def test_the_first_put_of_a_key_since_its_delete_counts_or_the_write_is_refused(ops: list[tuple[Key, bool]]) -> None:
    keys, deletes = [key for key, _ in ops], np.array([delete for _, delete in ops], dtype=np.bool_)
    rows = pa.table(
        {
            "a": pa.array([a for a, _ in keys], pa.int64()),
            "b": pa.array([b for _, b in keys], pa.string()),
            "at": pa.array(range(len(keys)), pa.int64()),
        }
    )
    put: dict[Key, int] = {}
    repeats: list[tuple[int, int]] = []
    for at, (key, delete) in enumerate(ops):
        if delete:
            put.pop(key, None)
        elif put.setdefault(key, at) != at:
            repeats.append((put[key], at))
    once = first_of_each_key(rows, KEY, deletes, refuse=False)
    assert np.flatnonzero(~once).tolist() == [second for _, second in repeats]
    if not repeats:
        assert first_of_each_key(rows, KEY, deletes, refuse=True).all()
        return
    first, second = repeats[0]
    with pytest.raises(Invalid) as refused:
        first_of_each_key(rows, KEY, deletes, refuse=True)
    a, b = keys[second]
    assert str(refused.value).startswith(f"the key a = {a}, b = {b!r} is in row {first} and in row {second} of one put")
