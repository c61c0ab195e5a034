"""NumPy array types of the package, and the growable array for structures that are indexed by row."""

from __future__ import annotations

import math
import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

Mask = npt.NDArray[np.bool_]
Positions = npt.NDArray[np.int64]
Scores = npt.NDArray[np.float32]
Vectors = npt.NDArray[np.float32]

FIRST_ROWS = 256
PAGED = 256 << 10
"""Minimum bytes of an array that has its own memory pages."""


def uninitialised(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return an uninitialised array.

    A large one gets its own pages, which are returned to the system with it. Memory from malloc's heap, where NumPy
    puts arrays of up to 32 MiB, would not be. Unwritten parts are address space, not memory.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if size < PAGED:
        return np.empty(shape, dtype)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(pages, dtype).reshape(shape)


class GrowableArray:
    """An append-only array of fixed row shape. Its capacity doubles, or grows fourfold if spare capacity costs no
    memory.

    Thread safety. One writer; readers take `data` once and read rows below a count they know to be complete.
    Invariants. Rows below `size` keep their place. Growth leaves the old array unchanged, so a reader that holds it
    still reads valid rows.
    """

    def __init__(self, dtype: npt.DTypeLike, width: int | None = None) -> None:
        self._shape = () if width is None else (width,)
        self.data: npt.NDArray[Any] = np.empty((0, *self._shape), dtype=dtype)
        self.size = 0

    def extend(self, values: npt.NDArray[Any]) -> None:
        """Append the rows of `values` (shape [m] or [m, width])."""
        self.write(self.size, values)

    def write(self, first: int, values: npt.NDArray[Any]) -> None:
        """Write `values` to the rows first, first + 1, ..., which end at `size` or beyond. Requires: first <= size."""
        self.fill(first, first + len(values), values)

    def fill(self, first: int, end: int, values: Any) -> None:
        """Do as write(); `values` has one value for each row before `end`, or one for all of them."""
        if end > len(self.data):
            growth = 2 if self.data.nbytes < PAGED else 4
            larger = uninitialised((max(end, growth * len(self.data), FIRST_ROWS), *self._shape), self.data.dtype)
            larger[: self.size] = self.data[: self.size]
            self.data = larger
        self.data[first:end] = values
        self.size = end  # last: readers treat the rows below it as written

    @property
    def bytes(self) -> int:
        """Bytes of the rows held: spare capacity is address space until it is written, not memory."""
        return self.size * self.data.itemsize * (self._shape[0] if self._shape else 1)


def best(distances: Scores, rows: Positions, k: int) -> tuple[Positions, Scores]:
    """Return the k nearest of `rows`, ascending by distance, ties by row position.

    Every row tied with the k-th is ranked, so the answer does not depend on the order of the input.
    """
    if len(rows) > k > 0:
        bound = np.partition(distances, k - 1)[k - 1]
        keep = distances <= bound
        distances, rows = distances[keep], rows[keep]
    order = np.lexsort((rows, distances))[: max(k, 0)]
    return rows[order], distances[order]
