"""Hostile Arrow arrays: a sender may build them and a receiver must not trust them.

Arrow's IPC writer accepts each of them. Some are invalid: their offsets point outside of their buffers or decrease, or
their text is not UTF-8. Others are valid and have many more rows, or larger values, than bytes.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Mapping

import pyarrow as pa

Make = Callable[[random.Random, pa.DataType], pa.Array]
MANY = (1, 1000, 10**6, 10**8, 2**31 - 1)


_LATER: list[Callable[[], object]] = []
"""Pending changes of array buffers, applied by `changed` once the arrays are in a table, since pyarrow builds no table
of invalid arrays."""


def _nulls(many: int) -> pa.Array:
    return pa.Array.from_buffers(pa.null(), many, [None])


def _bad_offsets(rng: random.Random, size: int, many: int) -> list[int]:
    inner = [rng.choice([0, 1, size, -1, -(2**31), 2**31 - 1, 10**6, -(10**6)]) for _ in range(many - 1)]
    return [0, *inner, rng.choice([size, size, 2**31 - 1, 10**7, 0, -1])]


def _changed(kind: pa.DataType, offsets: list[int], data: list[pa.Buffer], children: list[pa.Array]) -> pa.Array:
    """Return an array whose offsets are written later, since pyarrow does not build an array with such offsets."""
    form = f"<{len(offsets)}{'q' if kind in (pa.large_string(), pa.large_binary()) else 'i'}"
    memory = bytearray(struct.calcsize(form))
    array = pa.Array.from_buffers(kind, len(offsets) - 1, [None, pa.py_buffer(memory), *data], children=children)
    _LATER.append(lambda: memory.__setitem__(slice(None), struct.pack(form, *offsets)))
    return array


def text_with_bad_offsets(rng: random.Random, _: pa.DataType) -> pa.Array:
    """Return text or bytes with offsets that lie outside of the data, or decrease."""
    data = rng.choice([b"", b"abc" * 10, b"x" * 1000])
    kind = rng.choice([pa.string(), pa.binary(), pa.large_string(), pa.large_binary()])
    return _changed(kind, _bad_offsets(rng, len(data), rng.choice([1, 3, 50])), [pa.py_buffer(data)], [])


def list_with_bad_offsets(rng: random.Random, _: pa.DataType) -> pa.Array:
    """Return lists with offsets that lie outside of their values."""
    values = pa.array(rng.choice([[1, 2, 3], ["a", "b", "c"], [1.5] * 16]))
    return _changed(pa.list_(values.type), _bad_offsets(rng, len(values), rng.choice([1, 3, 50])), [], [values])


def not_utf8(rng: random.Random, _: pa.DataType) -> pa.Array:
    """Return text that is not UTF-8."""
    data = rng.choice([b"\xff\xfe", b"\xc3", b"\xed\xa0\x80", b"a\x80"])
    return _changed(pa.string(), [0, len(data)], [pa.py_buffer(data)], [])


def nulls(rng: random.Random, _: pa.DataType) -> pa.Array:
    """Return nulls, which have no bytes."""
    return _nulls(rng.choice(MANY))


def lists_of_nulls(rng: random.Random, _: pa.DataType) -> pa.Array:
    """Return lists of nulls of any length, without bytes."""
    many = rng.choice((1000, 10**6, 2**31 - 1))
    if rng.random() < 0.5:
        return pa.FixedSizeListArray.from_arrays(_nulls(many), many)
    return pa.ListArray.from_arrays(pa.array([0, many], pa.int32()), _nulls(many))


def dictionary(rng: random.Random, kind: pa.DataType) -> pa.Array:
    """Return many references to one value, or to a missing value."""
    value = rng.choice([pa.array(["x" * 100_000]), pa.array([1]), pa.array([[1.0] * 1000]), pa.nulls(3)])
    many = rng.choice([1, 1000, 50_000])
    indices = pa.array([rng.choice([0, 0, 0, 2, -1, 2**31 - 1])] * many, pa.int32())
    return pa.DictionaryArray.from_arrays(indices, value, safe=False)


def run_ends(rng: random.Random, _: pa.DataType) -> pa.Array:
    """Return one value for many rows."""
    many = rng.choice([1, 1000, 10**6, 2**31 - 1])
    return pa.RunEndEncodedArray.from_arrays(pa.array([many], pa.int32()), pa.array([rng.choice(["x" * 1000, "y"])]))


def views(rng: random.Random, _: pa.DataType) -> pa.Array:
    """Return text views that share their bytes, or point outside of them."""
    many, size = rng.choice([1, 100, 30_000]), rng.choice([13, 100_000])
    length, index, offset = rng.choice([(size, 0, 0), (size, 0, 0), (2**31 - 1, 0, 0), (size, 5, 0), (size, 0, 10**6)])
    view = struct.pack("<i4sii", length, b"xxxx", index, offset)
    data = pa.py_buffer(b"x" * size)
    return pa.Array.from_buffers(pa.string_view(), many, [None, pa.py_buffer(view * many), data])


def no_bytes(rng: random.Random, _: pa.DataType) -> pa.Array:
    """Return rows of types that have no bytes."""
    many = rng.choice((1, 10**6, 2**31 - 1))
    if rng.random() < 0.5:
        return pa.Array.from_buffers(pa.struct([]), many, [None])
    return pa.Array.from_buffers(pa.binary(0), many, [None, pa.py_buffer(b"")])


def nested(rng: random.Random, _: pa.DataType) -> pa.Array:
    """Return deeply nested values."""
    values = pa.array([1])
    for _level in range(rng.choice([2, 20, 60])):
        values = pa.ListArray.from_arrays(pa.array([0, 1], pa.int32()), values)
    return values


def other_types(rng: random.Random, _: pa.DataType) -> pa.Array:
    """Return types that no column has."""
    return rng.choice(
        [
            pa.array([[(1, 2)]], pa.map_(pa.int64(), pa.int64())),
            pa.UnionArray.from_sparse(pa.array([0], pa.int8()), [pa.array([1]), pa.array(["a"])]),
            pa.UnionArray.from_dense(pa.array([0], pa.int8()), pa.array([0], pa.int32()), [pa.array([1])]),
            pa.array([(1, 2, 3)], pa.month_day_nano_interval()),
            pa.array([10**70], pa.decimal256(76)),
            pa.array([2**62], pa.timestamp("s")),
            pa.array([float("nan")], pa.float16()),
            pa.ListViewArray.from_arrays(
                pa.array([0, 0], pa.int32()), pa.array([3, 3], pa.int32()), pa.array([1, 2, 3])
            ),
            pa.array([None, True]),
            pa.array([b"x" * 16], pa.uuid()),
        ]
    )


def bad_validity(rng: random.Random, kind: pa.DataType) -> pa.Array:
    """Return numbers with a wrong null count."""
    return pa.Array.from_buffers(
        pa.int64(), 8, [pa.py_buffer(b"\x00"), pa.py_buffer(bytes(64))], null_count=rng.choice([0, 3, 8])
    )


def plain(rng: random.Random, kind: pa.DataType) -> pa.Array:
    """Return nulls or a few values of the column's own type."""
    if pa.types.is_integer(kind):
        return pa.array([rng.choice([0, -1, 2**63 - 1, -(2**63)]) for _ in range(3)], kind)
    return pa.nulls(rng.choice([1, 1000]), kind)


ARRAYS: tuple[Make, ...] = (
    text_with_bad_offsets, list_with_bad_offsets, not_utf8, nulls, lists_of_nulls, dictionary, run_ends, views,
    no_bytes, nested, other_types, bad_validity, plain,
)  # fmt: skip


def hostile_array(rng: random.Random, kind: pa.DataType | None = None) -> pa.Array:
    """Return an array of one of the kinds above. `kind`: type of the column that the array is sent for."""
    return rng.choice(ARRAYS)(rng, kind or pa.int64())


def hostile_table(rng: random.Random, columns: Mapping[str, pa.DataType]) -> pa.Table:
    """Return a table with a hostile array in one of `columns`; other columns are valid or missing."""
    name = rng.choice(list(columns))
    array = hostile_array(rng, columns[name])
    rows = len(array)
    arrays, names = [array], [name]
    if rows <= 10**6 and rng.random() < 0.7:
        for other, kind in columns.items():
            if other != name and rng.random() < 0.7:
                is_key = other == "id"
                small = pa.nulls(rows, kind) if rows < 1000 else _nulls(rows)
                arrays.append(pa.array(range(5000, 5000 + rows), kind) if is_key else small)
                names.append(other)
    if rng.random() < 0.05:
        arrays, names = [*arrays, array], [*names, name]
    return changed(pa.Table.from_arrays(arrays, names=names))


def changed(table: pa.Table) -> pa.Table:
    """Apply the pending changes of buffers and return `table`, whose arrays may now be invalid."""
    while _LATER:
        _LATER.pop()()
    return table
