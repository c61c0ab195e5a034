"""Read an SST back before it is published, and compare every column with the rows that were written.

Lance has no checksum for values, and it cannot always read a file that it wrote without an error. Therefore:

1. Every flush reads one column, which shows that the file opens and has all rows (`flush.sst.files.verify`).
2. Every flush decodes every column and compares it bit by bit with the memtable, until one has passed in this process
   with these columns and file settings; after that, every EVERY-th flush. After a difference, every flush does so
   again.

Reading every column takes 12 to 22 % of the processor time of a flush, and 88 % with vectors, which are cheap to write.
With rule 2 it is at most 3 % on average. An error fails the flush: nothing is published, `replay_after` does not move,
and the rows stay in the log.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count

import lance
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from memwal.flush.errors import SstInvalid
from memwal.memtable.arrays import Mask
from memwal.wal.errors import first_line
from memwal.wal.panics import RustPanic, panics_as_errors

EVERY = 32
"""Flushes from one full read-back to the next."""
_READ_AHEAD, _READ_BUFFER = 4, 64 << 20


class ReadBacks:
    """Selects the flushes that read everything back. One object per set of columns and file settings.

    Thread safety. Any thread.
    """

    def __init__(self) -> None:
        self._flushes, self._passed = count(), False

    @property
    def due(self) -> bool:
        """Whether the calling flush reads everything back. Each flush must read this once: it counts the flushes."""
        return next(self._flushes) % EVERY == 0 or not self._passed

    def done(self, *, passed: bool) -> None:
        """Record the result of a full read-back."""
        self._passed = passed


def expect_same(dataset: lance.LanceDataset, written: Iterable[pa.RecordBatch], batch_rows: int) -> None:
    """Raise SstInvalid if the rows of `dataset` are not those of `written`, in order and bit by bit.

    `batch_rows`: rows to decode at once. Memory holds a few batches of both. Raises OSError of storage.
    """
    try:
        with panics_as_errors:
            for one, other in _aligned(written, _decoded(dataset, None, batch_rows)):
                for name, before, after in zip(one.schema.names, one.columns, other.columns, strict=True):
                    if not same(before, after):
                        raise SstInvalid(f"column {name!r} does not read back as it was written")
    except (ValueError, RustPanic) as error:
        column = _unreadable_column(dataset, batch_rows)
        raise SstInvalid(f"{column} cannot be read back ({first_line(error)})") from error


def same(one: pa.Array, other: pa.Array) -> bool:
    """Return whether two arrays have the same type and values; NaN equals a NaN of the same bits."""
    if one.type != other.type or len(one) != len(other):
        return False
    return bool(one.equals(other)) or not bitwise_differs(one, other).any()


def bitwise_differs(one: pa.Array, two: pa.Array) -> Mask:
    """Return True for the positions where the two values differ.

    A null equals only a null, NaN equals a NaN of the same bits, and nested values are compared number by number.
    """
    if pa.types.is_null(one.type):
        one = one.cast(two.type)
    elif one.type != two.type:
        two = two.cast(one.type)
    nulls_one, nulls_two = _mask(pc.is_null(one)), _mask(pc.is_null(two))
    both = ~nulls_one & ~nulls_two
    different: Mask = nulls_one != nulls_two
    if both.any():
        at = np.flatnonzero(both)
        chosen = pa.array(at)
        different[at] = _values_differ(one.take(chosen), two.take(chosen))
    return different


def _values_differ(one: pa.Array, two: pa.Array) -> Mask:
    """Return `bitwise_differs` of arrays of one type without top-level nulls, with at least one value."""
    kind = one.type
    if isinstance(one, pa.ExtensionArray):
        return bitwise_differs(one.storage, two.storage)
    if pa.types.is_dictionary(kind):
        return bitwise_differs(one.dictionary_decode(), two.dictionary_decode())
    if pa.types.is_floating(kind):
        return np.asarray(_bits(one) != _bits(two), dtype=bool)
    if pa.types.is_struct(kind):
        children = zip(one.flatten(), two.flatten(), strict=True)
        fields = np.stack([np.zeros(len(one), dtype=bool), *(bitwise_differs(a, b) for a, b in children)])
        return np.asarray(fields.any(axis=0), dtype=bool)
    if pa.types.is_fixed_size_list(kind):
        numbers: Mask = bitwise_differs(one.flatten(), two.flatten()).reshape(len(one), -1)
        return np.asarray(numbers.any(axis=1), dtype=bool)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_map(kind):
        return _lists_differ(one, two)
    return _mask(pc.not_equal(one, two))


def _lists_differ(one: pa.Array, two: pa.Array) -> Mask:
    if pa.types.is_map(one.type):
        plain = pa.list_(pa.struct([one.type.key_field, one.type.item_field]))
        one, two = one.cast(plain), two.cast(plain)
    lengths = pc.list_value_length(one).to_numpy().astype(np.int64)
    different: Mask = lengths != pc.list_value_length(two).to_numpy()
    at = np.flatnonzero(~different & (lengths > 0))
    if len(at):
        chosen = pa.array(at)
        elements = bitwise_differs(one.take(chosen).flatten(), two.take(chosen).flatten())
        starts = np.concatenate([[0], np.cumsum(lengths[at])[:-1]])
        different[at] = np.logical_or.reduceat(elements, starts)
    return different


def _bits(array: pa.Array) -> npt.NDArray[np.generic]:
    values = array.to_numpy(zero_copy_only=False)
    return np.ascontiguousarray(values).view(f"u{values.dtype.itemsize}")


def _mask(array: pa.Array) -> Mask:
    return np.asarray(array.to_numpy(zero_copy_only=False), dtype=bool)


def _decoded(dataset: lance.LanceDataset, columns: list[str] | None, rows: int) -> Iterator[pa.RecordBatch]:
    scanner = dataset.scanner(
        columns=columns, scan_in_order=True, batch_size=rows, batch_readahead=_READ_AHEAD, io_buffer_size=_READ_BUFFER
    )
    yield from scanner.to_batches()


def _unreadable_column(dataset: lance.LanceDataset, rows: int) -> str:
    for name in dataset.schema.names:
        try:
            with panics_as_errors:
                for _ in _decoded(dataset, [name], rows):
                    pass
        except (ValueError, RustPanic):
            return f"column {name!r} of type {dataset.schema.field(name).type}"
    return "a column"


def _aligned(
    one: Iterable[pa.RecordBatch], other: Iterable[pa.RecordBatch]
) -> Iterator[tuple[pa.RecordBatch, pa.RecordBatch]]:
    """Yield the rows of both in pairs of slices of equal length. Raises SstInvalid if one has fewer rows."""
    left, right = iter(one), iter(other)
    a = b = None
    while True:
        a = next(left, None) if a is None or not len(a) else a
        b = next(right, None) if b is None or not len(b) else b
        if a is None or b is None:
            if (a is None or not len(a)) and (b is None or not len(b)):
                return
            raise SstInvalid("rows are missing or too many")
        rows = min(len(a), len(b))
        if rows:
            yield a.slice(0, rows), b.slice(0, rows)
        a, b = a.slice(rows), b.slice(rows)
