"""Two byte forms of a key: one for Lance's hash, one for Lance's sort order.

Hash form (bloom filter), the key columns one after the other:
    00 | int32 or int64, little-endian          00 | utf8 bytes | FF          00 | u64 LE length | bytes
    any other type (smaller integers, unsigned, bool, large_string, large_binary, date32): 00 alone, as in Lance's
    reader. The filter then passes every key; one that distinguished these keys would hide rows from that reader.

Sort form (key sidecar of a composite key), the key columns one after the other:
    01 | signed integer or date: 8 bytes big-endian, sign bit flipped
    01 | unsigned integer: 8 bytes big-endian
    01 | bool: 1 byte
    01 | utf8 or binary: the bytes with 00 -> 00 FF, then 00 00

Key columns are never null here, so the null forms (01 and 00 for the flag) do not occur. Everything is vectorised and
pure. Source: checked byte by byte against Lance's `ShardWriter`; see tests/unit/test_flush_upstream_bytes.py.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

_SIGN = np.uint64(1 << 63)


def hash_form(keys: pa.Table) -> pa.BinaryArray:
    """Return the bytes that Lance's bloom filter hashes, one binary value per row. `keys`: columns in key order."""
    return _joined([_hashed(one_array(column)) for column in keys.columns])


def sort_form(keys: pa.Table) -> pa.BinaryArray:
    """Return the bytes that sort like a composite key, one binary value per row. `keys`: columns in key order."""
    return _joined([_sorted(_short(one_array(column))) for column in keys.columns])


def one_array(column: pa.ChunkedArray) -> pa.Array:
    """Return the column as one array."""
    array = column.combine_chunks()
    return pa.concat_arrays(array.chunks) if isinstance(array, pa.ChunkedArray) else array


def _short(array: pa.Array) -> pa.Array:
    """Return text and bytes with 32-bit offsets, any other array unchanged."""
    if pa.types.is_large_string(array.type):
        return array.cast(pa.string())
    return array.cast(pa.binary()) if pa.types.is_large_binary(array.type) else array


def _joined(parts: list[pa.Array]) -> pa.BinaryArray:
    return parts[0] if len(parts) == 1 else pc.binary_join_element_wise(*parts, b"")


def _hashed(column: pa.Array) -> pa.BinaryArray:
    kind = column.type
    if pa.types.is_int32(kind) or pa.types.is_int64(kind):
        values = column.to_numpy(zero_copy_only=False)
        return _fixed(b"\x00", values.astype(values.dtype.newbyteorder("<")))
    if pa.types.is_string(kind):
        return pc.binary_join_element_wise(b"\x00", column.cast(pa.binary()), b"\xff", b"")
    if pa.types.is_binary(kind):
        lengths = _fixed(b"\x00", pc.binary_length(column).to_numpy(zero_copy_only=False).astype("<u8"))
        return pc.binary_join_element_wise(lengths, column, b"")
    return _fixed(b"\x00", np.empty((len(column), 0), dtype=np.uint8))


def _sorted(column: pa.Array) -> pa.BinaryArray:
    kind = column.type
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        escaped = pc.replace_substring(column.cast(pa.binary()), pattern=b"\x00", replacement=b"\x00\xff")
        return pc.binary_join_element_wise(b"\x01", escaped, b"\x00\x00", b"")
    if pa.types.is_boolean(kind):
        return _fixed(b"\x01", column.to_numpy(zero_copy_only=False).astype(np.uint8))
    if pa.types.is_unsigned_integer(kind):
        return _fixed(b"\x01", column.to_numpy(zero_copy_only=False).astype(">u8"))
    signed = column.cast(pa.int32()) if pa.types.is_date32(kind) else column
    flipped = signed.to_numpy(zero_copy_only=False).astype(np.int64).view(np.uint64) ^ _SIGN
    return _fixed(b"\x01", flipped.astype(">u8"))


def _fixed(flag: bytes, values: npt.NDArray[np.generic]) -> pa.BinaryArray:
    """Return `flag` and the bytes of each value as a binary array with equal lengths."""
    raw = np.ascontiguousarray(values).view(np.uint8).reshape(len(values), -1)
    rows = np.empty((len(values), 1 + raw.shape[1]), dtype=np.uint8)
    rows[:, 0] = flag[0]
    rows[:, 1:] = raw
    offsets = np.arange(len(values) + 1, dtype=np.int32) * np.int32(rows.shape[1])
    return pa.Array.from_buffers(pa.binary(), len(values), [None, pa.py_buffer(offsets), pa.py_buffer(rows.tobytes())])
