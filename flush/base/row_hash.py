"""A 64-bit hash of whole rows, which routes the rows of a table without a key.

    row     = sum over the columns of mix(value's hash + mix(the column's field id + 1)), modulo 2**64
    value   null: the column adds nothing
            number, date, time   mix(its bits); -0.0 as 0.0, every NaN as one
            text, bytes, wider   SipHash-1-3
            list                 sum over its elements of mix(element's hash + mix(its place + 1)), + mix(its length)
            vector               the same sum, without the length, which is part of the type
            struct               as a row, fields numbered from 0
    mix     the finaliser of SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014)

The hash is a pure function of the values: it is the same in every process and version, and independent of earlier rows
and of batch boundaries. A null adds nothing and columns count by their ids. Neither a new column, which is null in old
rows, nor a renamed column therefore moves a row to another region, and a row replayed later goes to the same region.

Golden values in the tests pin the hash; a change here would send replayed rows to other regions and double them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from memwal.flush.base.siphash import Hashes, siphash13

_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_GOLDEN = 0x9E3779B97F4A7C15
_BLOCK = 1 << 16
"""Numbers of a vector column hashed at a time: they fit into the processor's cache."""


def mixed(values: Hashes) -> Hashes:
    """Return SplitMix64's finaliser of each value; distinct values stay distinct. Pure."""
    values = values + np.uint64(_GOLDEN)
    values = (values ^ (values >> np.uint64(30))) * _FIRST
    values = (values ^ (values >> np.uint64(27))) * _SECOND
    return values ^ (values >> np.uint64(31))


def row_hashes(columns: Iterable[tuple[int, pa.Array]], rows: int) -> Hashes:
    """Return the hash of each row: uint64 [rows]. `columns`: field id and `rows` values of each column. Pure."""
    total = np.zeros(rows, dtype=np.uint64)
    for number, values in columns:
        total += _without_nulls(values, mixed(value_hashes(values) + _places(1, number)[0]))
    return total


def is_hashed(kind: pa.DataType) -> bool:
    """Return whether `regions.by` may name a column of this type: a number, text, bytes, a date or a time."""
    nested = pa.types.is_nested(kind) or isinstance(kind, pa.BaseExtensionType) or pa.types.is_null(kind)
    return not nested


def value_hashes(values: pa.Array) -> Hashes:
    """Return the hash of each value, undefined for nulls: uint64 [len(values)]."""
    kind = values.type
    if isinstance(values, pa.ExtensionArray):
        return value_hashes(values.storage)
    if not len(values) or pa.types.is_null(kind):
        return np.zeros(len(values), dtype=np.uint64)
    for kinds, hashes in _KINDS:
        if any(is_kind(kind) for is_kind in kinds):
            return hashes(values)
    raise TypeError(f"rows with a column of type {kind} have no hash")


def _without_nulls(values: pa.Array, hashes: Hashes) -> Hashes:
    if values.null_count:
        hashes[~np.asarray(values.is_valid().to_numpy(zero_copy_only=False), dtype=bool)] = 0
    return hashes


def _places(count: int, first: int = 0) -> Hashes:
    """Return the salts of places first, first + 1, ..."""
    return mixed(np.arange(first + 1, first + 1 + count, dtype=np.uint64))


# ---- by type -------------------------------------------------------------------------------------------------------


def _bits(values: pa.Array) -> Hashes:
    """Return the bits of values up to 64 bits wide as numbers; 0 for a null."""
    kind = values.type
    if pa.types.is_boolean(kind):
        numbers: Hashes = pc.fill_null(values, False).cast(pa.uint8()).to_numpy().astype(np.uint64)
        return numbers
    width = kind.bit_width
    # Read from the buffer, because Arrow cannot cast each of these types to a number.
    start, size = values.offset, len(values)
    stored = np.frombuffer(values.buffers()[1], dtype=f"<u{width // 8}")[start : start + size]
    numbers = stored.astype(np.uint64)
    if pa.types.is_floating(kind):
        floats = stored.view(f"<f{width // 8}")
        numbers[floats == 0] = 0
        numbers[np.isnan(floats)] = np.uint64(2**64 - 1)
    return _without_nulls(values, numbers)


def _fixed(values: pa.Array) -> Hashes:
    return mixed(_bits(values))


def _bytes(values: pa.Array) -> Hashes:
    filled = values if not values.null_count else pc.fill_null(values, pa.scalar(b"", values.type))
    return siphash13(filled.cast(pa.binary()))


def _text(values: pa.Array) -> Hashes:
    large = pa.types.is_large_string(values.type)
    return _bytes(values.view(pa.large_binary() if large else pa.binary()))


def _wide(values: pa.Array) -> Hashes:
    """Hash decimals and binary of a fixed size by their bytes."""
    width = values.type.byte_width if pa.types.is_fixed_size_binary(values.type) else values.type.bit_width // 8
    stored = values.buffers()[1].slice(values.offset * width, len(values) * width)
    offsets = pa.array(np.arange(len(values) + 1, dtype=np.int32) * width)
    strings = pa.Array.from_buffers(pa.binary(), len(values), [None, offsets.buffers()[1], stored])
    return siphash13(strings)


def _vectors(values: pa.Array) -> Hashes:
    """Sum over the elements. Elements of a null vector are arbitrary; the caller's `_without_nulls` drops them."""
    width = values.type.list_size
    elements, salts = values.values.slice(values.offset * width, len(values) * width), _places(width)
    step, sums = max(1, _BLOCK // width), np.empty(len(values), dtype=np.uint64)
    for at in range(0, len(values), step):
        part = elements.slice(at * width, min(step, len(values) - at) * width)
        hashes = _without_nulls(part, mixed(value_hashes(part) + np.tile(salts, len(part) // width)))
        sums[at : at + step] = hashes.reshape(-1, width).sum(axis=1, dtype=np.uint64)
    return sums


def _lists(values: pa.Array) -> Hashes:
    offsets = values.offsets.to_numpy().astype(np.int64)
    lengths = np.diff(offsets)
    elements = values.values.slice(int(offsets[0]), int(offsets[-1] - offsets[0]))
    starts = offsets[:-1] - offsets[0]
    places = np.arange(len(elements), dtype=np.int64) - np.repeat(starts, lengths)
    salts = mixed(places.astype(np.uint64) + np.uint64(1))
    hashes = _without_nulls(elements, mixed(value_hashes(elements) + salts))
    running = np.concatenate([np.zeros(1, dtype=np.uint64), np.cumsum(hashes, dtype=np.uint64)])
    sums: Hashes = running[starts + lengths] - running[starts]
    return sums + mixed(lengths.astype(np.uint64))


def _structs(values: pa.StructArray) -> Hashes:
    return row_hashes(enumerate(values.flatten()), len(values))


_types = pa.types


_KINDS: Sequence[tuple[Sequence[Callable[[pa.DataType], bool]], Callable[[pa.Array], Hashes]]] = (
    ((_types.is_decimal, _types.is_fixed_size_binary), _wide),
    ((_types.is_binary, _types.is_large_binary), _bytes),
    ((_types.is_string, _types.is_large_string), _text),
    ((_types.is_list, _types.is_large_list), _lists),
    ((_types.is_fixed_size_list,), _vectors),
    ((_types.is_struct,), _structs),
    ((_types.is_primitive,), _fixed),
)
