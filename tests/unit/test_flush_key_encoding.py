"""The two byte forms of a key: the sort form keeps the order of the keys, the hash form distinguishes them."""

from __future__ import annotations

import datetime as dt

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from memwal.flush.sst.key_encoding import hash_form, sort_form

KEYS = st.tuples(
    st.integers(-(2**63), 2**63 - 1),
    st.text(alphabet="ab\0\x01é", max_size=4),
    st.booleans(),
    st.integers(0, 2**64 - 1),
    st.binary(max_size=3),
    st.dates(min_value=dt.date(1900, 1, 1)),
)
TYPES = [pa.int64(), pa.string(), pa.bool_(), pa.uint64(), pa.binary(), pa.date32()]


def table(keys: list[tuple[object, ...]]) -> pa.Table:
    columns = list(zip(*keys, strict=True))
    return pa.table({str(i): pa.array(column, TYPES[i]) for i, column in enumerate(columns)})


@given(st.lists(KEYS, min_size=2, max_size=20))
def test_sort_form_orders_as_the_keys(keys: list[tuple[object, ...]]) -> None:
    forms = sort_form(table(keys)).to_pylist()
    in_order = sorted(range(len(keys)), key=lambda i: (keys[i][0], str(keys[i][1]).encode(), *keys[i][2:]))
    assert [forms[i] for i in in_order] == sorted(forms)
    assert len(set(forms)) == len(set(keys))


def test_large_text_sorts_as_text() -> None:
    large = pa.table({"k": pa.array(["b\0", "a"], pa.large_string()), "n": pa.array([1, 2])})
    small = large.set_column(0, "k", large.column(0).cast(pa.string()))
    assert sort_form(large).equals(sort_form(small))


def test_hash_form_marks_where_one_column_ends() -> None:
    keys = pa.table({"a": ["x", "xy"], "b": ["yz", "z"]})
    assert hash_form(keys).to_pylist() == [b"\0x\xff\0yz\xff", b"\0xy\xff\0z\xff"]


def test_types_that_lance_does_not_hash_all_hash_alike() -> None:
    keys = pa.table({"a": pa.array([1, 2], pa.uint64()), "b": pa.array(["p", "q"], pa.large_string())})
    assert hash_form(keys).to_pylist() == [b"\0\0", b"\0\0"]
