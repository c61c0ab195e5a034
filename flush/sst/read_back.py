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
import pyarrow as pa
import pyarrow.compute as pc

from memwal.flush.errors import SstInvalid
from memwal.wal.errors import first_line
from memwal.wal.panics import RustPanic, panics_as_errors

EVERY = 32
"""Flushes from one full read-back to the next."""
_READ_AHEAD, _READ_BUFFER = 4, 64 << 20
_BITS = {2: pa.int16(), 4: pa.int32(), 8: pa.int64()}


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
    if one.equals(other):
        return True
    kind = one.type
    if isinstance(one, pa.ExtensionArray):
        return same(one.storage, other.storage)
    if pa.types.is_floating(kind):
        bits = _BITS[kind.byte_width]
        return bool(one.view(bits).equals(other.view(bits)))
    if not one.is_valid().equals(other.is_valid()):
        return False
    if pa.types.is_struct(kind):  # flatten() has nulls where the struct is null; the values there are arbitrary
        return all(same(*pair) for pair in zip(one.flatten(), other.flatten(), strict=True))
    if pa.types.is_fixed_size_list(kind):
        return same(one.flatten(), other.flatten())
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        lengths = pc.list_value_length(one), pc.list_value_length(other)
        return bool(lengths[0].equals(lengths[1])) and same(one.flatten(), other.flatten())
    return False


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
