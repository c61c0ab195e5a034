"""One column by value: sorted runs that are merged as they grow, and the newest rows, not sorted yet.

The index names the rows that may pass; the predicate itself is always evaluated on them (see snapshot.Snapshot.where).
Therefore it may name too many rows but must never miss one.

    rows      0 ................................. end ........ n
              [ run ][ run ][run][.]               waiting       a run: its values ascending, and the row of each

A put does nothing here. Reads extend the runs from the rows themselves, once they have visited the waiting rows so
often that sorting them would have cost less.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from memwal.memtable.arrays import Positions
from memwal.memtable.threads import uninterrupted

# Sorting a row costs about as much as evaluating a predicate on it this many times.
LOOKS = 8
# A run of this many rows is no longer merged: that would delay one read to save a microsecond of each.
LONGEST_RUN = 131_072

Column = Callable[[], pa.ChunkedArray]
"""Returns the first n values of the column, for the n passed beside it; called only if they are needed."""


@dataclass(frozen=True, eq=False)
class Asked:
    """Wanted values: those between low[i] and high[i] for any i, or the nulls.

    `low`, `high`: in the form of sort_form(); None: open on that side. `nulls`: only the nulls.
    """

    low: pa.Array | None = None
    high: pa.Array | None = None
    low_inclusive: bool = True
    high_inclusive: bool = True
    nulls: bool = False


def sort_form(values: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Return the values as one array, text and bytes with offsets wide enough for any number of rows."""
    kind = values.type
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        values = values.cast(pa.large_string() if pa.types.is_string(kind) else pa.large_binary())
    return values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values


@dataclass(frozen=True, eq=False)
class _Run:
    """Some rows by value: `values` ascending, `rows` the row of each; `nans` and `nulls` hold the rows without an
    order.
    """

    values: pa.Array
    rows: Positions
    nans: Positions
    nulls: Positions

    def __len__(self) -> int:
        return len(self.rows) + len(self.nans) + len(self.nulls)

    def named(self, asked: Asked) -> tuple[Positions, Positions]:
        """Return the places [start, stop) in `rows` of each wanted range."""
        every = np.array([0]), np.array([len(self.rows)])
        starts = every[0] if asked.low is None else self._places(asked.low, right=not asked.low_inclusive)
        stops = every[1] if asked.high is None else self._places(asked.high, right=asked.high_inclusive)
        return starts, np.maximum(starts, stops)

    def _places(self, values: pa.Array, *, right: bool) -> Positions:
        found = pc.search_sorted(self.values, values, side="right" if right else "left")
        return found.to_numpy().astype(np.int64)  # type: ignore[no-any-return]


@dataclass(frozen=True, eq=False)
class _Sorted:
    """The rows below `end`, in runs of decreasing length."""

    runs: tuple[_Run, ...] = ()
    end: int = 0

    def extended(self, column: pa.ChunkedArray) -> _Sorted:
        """Return these runs, with the rows from `end` to the end of `column` added."""
        runs, run = list(self.runs), _sorted_run(sort_form(column.slice(self.end)), self.end)
        while runs and len(runs[-1]) <= 2 * len(run) and len(runs[-1]) + len(run) <= LONGEST_RUN:
            run = _merged([runs.pop(), run])
        return _Sorted((*runs, run), len(column))


@dataclass
class ScalarIndex:
    """Rows of one column of type `kind` by value.

    Thread safety. Any thread. A read continues without sorting if another read is sorting.
    Invariants. The sorted runs are replaced as a whole, by one assignment.
    """

    kind: pa.DataType
    _sorted: _Sorted = field(default_factory=_Sorted)
    _looks: int = 0
    _sorting: threading.Lock = field(default_factory=threading.Lock)

    def candidates(self, asked: Asked, column: Column, n: int, limit: int) -> Positions | None:
        """Return rows below n that may hold a wanted value, in any order, maybe repeated; None if more than `limit`."""
        held = self._up_to_date(column, n, limit)
        waiting = np.arange(held.end, max(n, held.end), dtype=np.int64)
        spans = [((run.nulls, *_NOTHING) if asked.nulls else (run.nans, *run.named(asked))) for run in held.runs]
        count = len(waiting) + sum(len(others) + int((stops - starts).sum()) for others, starts, stops in spans)
        if count > limit:
            return None
        parts = [waiting]
        for run, (others, starts, stops) in zip(held.runs, spans, strict=True):
            parts += [others, run.rows[_expanded(starts, stops)]]
        rows = np.concatenate(parts)
        return rows[rows < n] if held.end > n else rows

    def _up_to_date(self, column: Column, n: int, limit: int) -> _Sorted:
        """Return the sorted runs, after sorting the waiting rows below n if that is worth its cost by now."""
        waiting = max(0, n - self._sorted.end)
        # If more rows than `limit` wait, all n are visited. Two threads may lose a count, which costs only time.
        self._looks += waiting if waiting <= limit else n
        if waiting > 0 and self._looks >= LOOKS * waiting and not self._sorting.locked():
            uninterrupted(partial(self._sort, column, n))
        return self._sorted

    def _sort(self, column: Column, n: int) -> None:
        with self._sorting:
            if self._sorted.end < n:
                self._sorted = self._sorted.extended(column())
            self._looks = 0

    @property
    def bytes(self) -> int:
        """Bytes of the sorted copy."""
        parts = (part for run in self._sorted.runs for part in (run.values, run.rows, run.nans, run.nulls))
        return sum(int(part.nbytes) for part in parts)


_NOTHING: tuple[Positions, Positions] = (np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))


def _expanded(starts: Positions, stops: Positions) -> Positions:
    """Return all integers of the ranges [starts[i], stops[i]), one range after the other."""
    counts = stops - starts
    before = np.cumsum(counts) - counts
    return np.repeat(starts - before, counts) + np.arange(int(counts.sum()), dtype=np.int64)


def _sorted_run(values: pa.Array, first: int) -> _Run:
    """Return the run of new rows first, first + 1, ..."""
    rows = np.arange(first, first + len(values), dtype=np.int64)
    nans = nulls = _NOTHING[0]
    if values.null_count:
        valid = values.is_valid().to_numpy(zero_copy_only=False)
        values, rows, nulls = values.drop_null(), rows[valid], rows[~valid]
    if pa.types.is_floating(values.type):
        number = ~np.isnan(values.to_numpy())
        values, rows, nans = values.filter(pa.array(number)), rows[number], rows[~number]
    return _by_value(values, rows, nans, nulls)


def _merged(runs: list[_Run]) -> _Run:
    """Merge several runs into one. Both sorting methods recognise runs and merge them."""
    values = pa.concat_arrays([run.values for run in runs])
    parts = zip(*((run.rows, run.nans, run.nulls) for run in runs), strict=True)
    return _by_value(values, *(np.concatenate(part) for part in parts))


def _by_value(values: pa.Array, rows: Positions, nans: Positions, nulls: Positions) -> _Run:
    order = _order(values)
    return _Run(values.take(pa.array(order)), rows[order], nans, nulls)


def _order(values: pa.Array) -> Positions:
    """Return the places of the values in ascending order. NumPy merges runs of fixed width three times as fast as
    Arrow.
    """
    kind = values.type
    if pa.types.is_large_string(kind) or pa.types.is_large_binary(kind):
        return pc.sort_indices(values).to_numpy().astype(np.int64)  # type: ignore[no-any-return]
    if pa.types.is_temporal(kind):  # as integers: NumPy treats the smallest as "not a time" and sorts it last
        values = values.view(pa.int32() if kind.bit_width == 32 else pa.int64())
    return np.argsort(values.to_numpy(zero_copy_only=False), kind="stable")
