"""One column of a key: its values as 64-bit codes, and the values kept for comparison.

The code of an integer or boolean is its value. For text and bytes it is a hash, equal for equal values; `equal`
distinguishes two values with one code.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from memwal.memtable.arrays import GrowableArray, Mask, Positions
from memwal.memtable.key.code_table import Codes

Words = npt.NDArray[np.uint64]

# The hash of bytes b0 b1 ... is the polynomial b0 B + b1 B^2 + ... modulo 2^64, then mixed. It is computed for many
# texts at once: every byte times the power of its place in the whole buffer, summed per text, times the inverse power
# of the place where the text begins. B is odd, so it has an inverse.
_BASE = 0x9E3779B97F4A7C15
_PLACES = 1 << 16
_LONG = 1 << 12
"""Longer texts are hashed one by one, so that a slice of texts always fits the precomputed powers."""

_FEW = 8
"""Up to this many texts are compared one by one, which takes less time than all at once."""


def _powers(base: int, count: int) -> Words:
    powers: Words = np.cumprod(np.full(count, base, dtype=np.uint64), dtype=np.uint64)
    return powers


_UP = _powers(_BASE, _PLACES)
_DOWN = np.concatenate([np.ones(1, np.uint64), _powers(pow(_BASE, -1, 1 << 64), _PLACES)])


class FixedColumn:
    """A key column of integers of any width, or booleans.

    Thread safety. One thread at a time (keep); the rest from any thread. `equal` is called only for rows that were kept
    before the caller knew their positions.
    """

    def __init__(self) -> None:
        self._kept = GrowableArray(np.int64)

    def values(self, column: pa.ChunkedArray) -> Codes:
        """Return the column in the form that the other methods take: int64; uint64 bit by bit. Requires: no nulls."""
        values: Codes = column.to_numpy().astype(np.int64, copy=False)
        return values

    def codes(self, values: Codes) -> Codes:
        """Return the codes, int64 [m], read-only: the values themselves."""
        return values

    def keep(self, values: Codes, first: int) -> None:
        """Keep the values of the rows first, first + 1, ..., 8 bytes each: the next rows, or rows kept before."""
        self._kept.write(first, values)

    def equal(self, rows: Positions, values: Codes, places: Positions) -> Mask:
        """Return whether the value kept for rows[i] is values[places[i]]: bool [i]. Requires: `places` ascending."""
        same: Mask = self._kept.data[rows] == values[places]
        return same

    def kept(self, row: int) -> int:
        """Return the value kept for a row."""
        return int(self._kept.data[row])

    def given(self, values: Codes, place: int) -> int:
        """Return one of the values, as kept() would return it."""
        return int(values[place])

    @property
    def bytes(self) -> int:
        """Bytes kept."""
        return self._kept.bytes


class VariableColumn:
    """A key column of text or bytes; thread safety and requirements as for FixedColumn."""

    def __init__(self) -> None:
        self._kept = GrowableArray(np.uint8)
        self._ends = GrowableArray(np.int64)
        self._ends.extend(np.zeros(1, dtype=np.int64))

    def values(self, column: pa.ChunkedArray) -> pa.Array:
        """Return the column as one array."""
        if column.num_chunks == 1:
            return column.chunk(0)
        whole = column.combine_chunks()
        if isinstance(whole, pa.ChunkedArray):  # more than 32-bit offsets can address
            whole = column.cast(pa.large_binary()).combine_chunks()
        return whole

    def codes(self, values: pa.Array) -> Codes:
        """Return the hashes of the values."""
        return hashes(*_buffers(values))

    def keep(self, values: pa.Array, first: int) -> None:
        """Keep the bytes, and 8 more a row."""
        ends, data = _buffers(values)
        start = int(self._ends.data[first])
        self._kept.write(start, data[ends[0] : ends[-1]])
        self._ends.write(first + 1, ends[1:] + (start - ends[0]))

    def equal(self, rows: Positions, values: pa.Array, places: Positions) -> Mask:
        """See FixedColumn."""
        if len(rows) <= _FEW:
            pairs = zip(rows.tolist(), places.tolist(), strict=True)
            return np.fromiter((self.kept(row) == self.given(values, place) for row, place in pairs), dtype=bool)
        count = int(rows.max()) + 1  # values beyond may still be in the process of being written
        buffers = [None, pa.py_buffer(self._ends.data[: count + 1]), pa.py_buffer(self._kept.data)]
        kept = pa.LargeBinaryArray.from_buffers(pa.large_binary(), count, buffers).take(pa.array(rows))
        given = values if len(places) == len(values) else values.take(pa.array(places))
        same: Mask = pc.equal(kept, given.cast(pa.large_binary())).to_numpy(zero_copy_only=False)
        return same

    def kept(self, row: int) -> bytes:
        """See FixedColumn."""
        return self._kept.data[self._ends.data[row] : self._ends.data[row + 1]].tobytes()

    def given(self, values: pa.Array, place: int) -> bytes:
        """See FixedColumn."""
        found: bytes = values[place].as_buffer().to_pybytes()
        return found

    @property
    def bytes(self) -> int:
        """Bytes kept."""
        return self._kept.bytes + self._ends.bytes


KeyColumn = FixedColumn | VariableColumn


def key_column(kind: pa.DataType) -> KeyColumn:
    """Return the KeyColumn for a column type that index_spec.is_key_type accepts."""
    return FixedColumn() if pa.types.is_integer(kind) or pa.types.is_boolean(kind) else VariableColumn()


def hashes(ends: npt.NDArray[np.int64], data: npt.NDArray[np.uint8]) -> Codes:
    """Return the hash of each text data[ends[i] : ends[i + 1]]: int64 [len(ends) - 1].

    Equal texts have equal hashes in every batch and process.
    """
    lengths = np.diff(ends)
    if ends[-1] - ends[0] <= _PLACES:
        found = _polynomials(ends - ends[0], data[ends[0] : ends[-1]])
    else:
        found = np.empty(len(lengths), dtype=np.uint64)
        for first, last in _slices(ends):
            found[first:last] = _polynomials(ends[first : last + 1] - ends[first], data[ends[first] : ends[last]])
    if lengths.max(initial=0) > _LONG:
        for place in np.flatnonzero(lengths > _LONG):
            text = data[ends[place] : ends[place + 1]]
            found[place] = int.from_bytes(hashlib.blake2b(text.tobytes(), digest_size=8).digest(), "little")
    return mixed(found + lengths.view(np.uint64))


def _slices(ends: npt.NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Yield runs of texts of at most _PLACES bytes together; a single longer text is in no run."""
    first = 0
    while first < len(ends) - 1:
        last = int(np.searchsorted(ends, ends[first] + _PLACES, side="right")) - 1
        if last > first:
            yield first, last
        first = max(last, first + 1)


def mixed(codes: Words) -> Codes:
    """Apply a bijection that spreads every bit of a code over all of it."""
    codes = (codes ^ (codes >> np.uint64(32))) * np.uint64(_BASE)
    return (codes ^ (codes >> np.uint64(29))).view(np.int64)


def _polynomials(ends: npt.NDArray[np.int64], data: npt.NDArray[np.uint8]) -> Words:
    starts = ends[:-1]
    terms = np.zeros(len(data) + 1, dtype=np.uint64)  # one more, for empty texts at the end
    np.multiply(data, _UP[: len(data)], out=terms[:-1])
    sums: Words = np.add.reduceat(terms, starts)
    sums[ends[1:] == starts] = 0  # for an empty text reduceat returns the following term
    sums *= _DOWN[starts]
    return sums


def _buffers(values: pa.Array) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
    """Return offsets and bytes of an array of text or bytes."""
    _, ends, data = values.buffers()
    width = np.int64 if pa.types.is_large_string(values.type) or pa.types.is_large_binary(values.type) else np.int32
    offsets = np.frombuffer(ends, dtype=width)[values.offset : values.offset + len(values) + 1]
    bytes_ = np.empty(0, np.uint8) if data is None else np.frombuffer(data, dtype=np.uint8)
    return offsets.astype(np.int64, copy=False), bytes_
