"""B-tree stand-in of one column: a sorted run with a short unsorted tail, enough to narrow a filter.

It answers "which rows may lie between these bounds", never "which do": the predicate itself is always
evaluated on the rows it names (see snapshot.Snapshot.where). So it may name too many rows and must never miss
one.
"""

from __future__ import annotations

import bisect
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from memtable.arrays import Positions

TAIL_ROWS = 4_096


@dataclass(frozen=True)
class Bounds:
    """A range of values of one column; None is an open end. Values are in the form sort_form() gives."""

    low: Any = None
    high: Any = None
    low_inclusive: bool = True
    high_inclusive: bool = True


@dataclass(frozen=True)
class _Run:
    """Values ascending (nulls left out; NaN last) with their rows, covering every row below `end`."""

    values: Any
    rows: Positions
    end: int


def sort_form(values: pa.Array | pa.ChunkedArray) -> Any:
    """Values without nulls as the index compares them: NumPy for fixed widths, Arrow for text and bytes."""
    kind = values.type
    if pa.types.is_date32(kind):
        values = values.cast(pa.int32())
    elif pa.types.is_date64(kind) or pa.types.is_timestamp(kind):
        values = values.cast(pa.int64())
    if pa.types.is_float32(kind):
        values = values.cast(pa.float64())
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    if pa.types.is_primitive(values.type):
        return values.to_numpy(zero_copy_only=False)
    return values


class ScalarIndex:
    """Rows of one column by value.

    Thread safety. add() by one writer; candidates() from any thread.
    Invariants. Sorting happens in candidates(), when the tail has outgrown TAIL_ROWS and an eighth of the
    run, so a put only notes its column.
    """

    def __init__(self, kind: pa.DataType) -> None:
        self.kind = kind
        self._lock = threading.Lock()
        self._columns: list[pa.ChunkedArray] = []
        self._size = 0
        self._merged_bytes = 0
        self._run = _Run(sort_form(pa.array([], kind)), np.empty(0, dtype=np.int64), 0)

    def add(self, column: pa.ChunkedArray) -> None:
        """Note the values of the next rows."""
        with self._lock:
            self._columns.append(column)
            self._size += len(column)

    def candidates(self, bounds: Bounds, n: int, limit: int) -> Positions | None:
        """Rows below n that may lie in `bounds`, in any order; None if they are more than `limit`."""
        with self._lock:
            if self._size - self._run.end > max(TAIL_ROWS, self._run.end // 8):
                self._sort()
            run, size = self._run, self._size
        start, stop = _slice(run, bounds)
        tail = max(0, min(n, size) - run.end)
        if stop - start + tail > limit:
            return None
        rows = np.concatenate([run.rows[start:stop], run.rows[_first_nan(run.values) :]])
        return np.concatenate([rows[rows < n], np.arange(run.end, run.end + tail, dtype=np.int64)])

    def _sort(self) -> None:
        column = pa.chunked_array([c for column in self._columns for c in column.chunks], type=self.kind)
        if column.num_chunks > 1:
            column = pa.chunked_array([column.combine_chunks()])
            self._columns, self._merged_bytes = [column], int(column.nbytes)
        # Arrow sorts NaN after every number and nulls at the very end.
        order = pc.sort_indices(column)
        order = order.slice(0, len(column) - column.null_count)
        rows = order.to_numpy(zero_copy_only=False).astype(np.int64)
        self._run = _Run(sort_form(column.take(order)), rows, len(column))

    @property
    def bytes(self) -> int:
        """Bytes of the sorted copy and of the merged column; others share the buffers of the rows."""
        run = self._run
        return int(run.values.nbytes) + int(run.rows.nbytes) + self._merged_bytes


def _slice(run: _Run, bounds: Bounds) -> tuple[int, int]:
    """Half-open range of the run inside the bounds."""
    start, stop = 0, len(run.rows)
    if bounds.low is not None:
        start = _bisect(run.values, bounds.low, right=not bounds.low_inclusive)
    if bounds.high is not None:
        stop = _bisect(run.values, bounds.high, right=bounds.high_inclusive)
    return start, max(start, stop)


def _bisect(values: Any, probe: Any, *, right: bool) -> int:
    if isinstance(values, np.ndarray):
        return int(np.searchsorted(values, probe, side="right" if right else "left"))
    find = bisect.bisect_right if right else bisect.bisect_left
    return find(range(len(values)), probe, key=lambda place: values[place].as_py())


def _first_nan(values: Any) -> int:
    """Where the NaNs of a sorted float array begin (its length where there are none).

    NaNs are named by every range: DataFusion orders them above and below the numbers by their sign bit.
    """
    if isinstance(values, np.ndarray) and values.dtype.kind == "f":
        return int(np.searchsorted(values, np.nan, side="left"))
    return len(values)
