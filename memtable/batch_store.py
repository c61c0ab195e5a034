"""The rows of a memtable: Arrow record batches in arrival order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
import pyarrow as pa

from memwal.memtable.arrays import Positions

# Small batches are merged, so that reads visit few; copying large ones would cost more than visiting them.
SMALL_ROWS = 4_096
SMALL_BYTES = 1 << 18
MERGE_AT = 64
# A record batch of one row costs far more than its data: Arrow's C++ objects and buffer headers, per column. Measured
# at about 200 bytes a column; counted, so that a stream of single-row puts freezes the memtable in time.
BATCH_OVERHEAD = 200


@dataclass(frozen=True)
class Batches:
    """An immutable prefix of the rows: the content of a snapshot."""

    schema: pa.Schema
    batches: tuple[pa.RecordBatch, ...]
    rows: int

    def table(self) -> pa.Table:
        """Return all rows of the prefix as one table, without a copy."""
        return pa.Table.from_batches(self.batches, schema=self.schema)

    def between(self, first: int, end: int, names: Sequence[str]) -> pa.Table:
        """Return the columns `names` of the rows from `first` to before `end` (first < end <= rows), without a copy."""
        low, high = np.searchsorted(self._starts, (first, end - 1), side="right").tolist()
        parts = [batch.select(names) for batch in self.batches[low - 1 : high]]
        return pa.Table.from_batches(parts).slice(first - int(self._starts[low - 1]), end - first)

    def take(self, positions: Positions, names: Sequence[str]) -> pa.Table:
        """Return the columns `names` of the rows at `positions` (0 <= position < rows), in that order, in one chunk.

        Works batch by batch, since Arrow's take from a table first makes one array of all its rows.
        """
        if len(positions) == 1:  # a get of one key
            at = int(np.searchsorted(self._starts, positions[0], side="right")) - 1
            row = self.batches[at].select(names).slice(positions[0] - self._starts[at], 1)
            # A copy, which keeps no batch alive. concat_batches returns a single batch uncopied, so it gets two. Takes
            # a third of the time of take.
            return pa.Table.from_batches([pa.concat_batches([row, row.slice(1)])])
        ascending = len(positions) < 2 or bool((positions[1:] > positions[:-1]).all())
        order = None if ascending else np.argsort(positions, kind="stable")
        wanted = positions if order is None else positions[order]
        ends = np.searchsorted(wanted, self._starts)
        local = pa.array(wanted - np.repeat(self._starts[:-1], np.diff(ends)))
        parts = [
            self.batches[at].select(names).take(local.slice(ends[at], ends[at + 1] - ends[at]))
            for at in np.flatnonzero(ends[1:] > ends[:-1]).tolist()
        ]
        if not parts:
            return self.schema.empty_table().select(names)
        rows = pa.Table.from_batches(parts)
        if len(parts) > 1:  # one chunk, which Lance writes as one fragment
            rows = rows.combine_chunks()
        if order is None:
            return rows
        places = np.empty_like(order)
        places[order] = np.arange(len(order))
        return rows.take(pa.array(places))

    @cached_property
    def _starts(self) -> Positions:
        """First row of each batch, and the number of rows."""
        return np.fromiter(accumulate((batch.num_rows for batch in self.batches), initial=0), dtype=np.int64)


class BatchStore:
    """Appends record batches and returns prefixes.

    `bytes`: size of the current batches, their fixed costs included.

    Thread safety. One writer; `prefix` may be read by any thread at any time.
    Invariants. (1) A row never changes its position. (2) A returned prefix never changes. (3) Runs of small batches are
    merged, so the number of batches stays below rows / SMALL_ROWS + bytes / SMALL_BYTES + MERGE_AT, whatever the sizes
    of puts.
    """

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema
        self.prefix = Batches(schema, (), 0)
        # (number of batches in the trailing run of small ones, their bytes, all bytes): after append(), and as
        # published.
        self._next = (0, 0, 0)
        self._small, self._small_bytes, self.bytes = self._next

    def append(self, rows: pa.Table, size: int) -> Batches:
        """Return the prefix with `rows`, of `size` bytes, at its end; publish() makes it visible."""
        batches = self.prefix.batches
        self._next = (self._small, self._small_bytes, self.bytes)
        added = rows.combine_chunks().to_batches()
        for batch in added:
            owned, size = _owned(batch, size + _overhead(batch) if len(added) == 1 else _size(batch))
            batches = (*batches, owned)
            self._count(owned, size)
        small, small_bytes, held = self._next
        if small >= MERGE_AT:
            tail = pa.Table.from_batches(batches[-small:], schema=self._schema).combine_chunks().to_batches()
            batches = (*batches[:-small], *tail)
            self._next = (0, 0, held - small_bytes)
            for batch in tail:
                self._count(batch, _size(batch))
        return Batches(self._schema, batches, self.prefix.rows + rows.num_rows)

    def _count(self, batch: pa.RecordBatch, size: int) -> None:
        small, small_bytes, held = self._next
        if batch.num_rows < SMALL_ROWS and size < SMALL_BYTES:
            self._next = (small + 1, small_bytes + size, held + size)
        else:
            self._next = (0, 0, held + size)

    def publish(self, prefix: Batches) -> None:
        """Make the prefix from the last append() the current one."""
        self._small, self._small_bytes, self.bytes = self._next
        self.prefix = prefix


def _size(batch: pa.RecordBatch) -> int:
    return int(batch.nbytes) + _overhead(batch)


def _overhead(batch: pa.RecordBatch) -> int:
    return int(batch.num_columns) * BATCH_OVERHEAD


def _owned(batch: pa.RecordBatch, size: int) -> tuple[pa.RecordBatch, int]:
    """Return the batch and its bytes. A small slice is copied, since it would keep larger buffers alive uncounted."""
    if batch.get_total_buffer_size() <= 2 * size + 65_536:
        return batch, size
    batch = batch.take(pa.array(np.arange(batch.num_rows, dtype=np.int64)))
    return batch, _size(batch)
