"""A growable array for large rows, whose memory is what is counted of it."""

from __future__ import annotations

import math
import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

from memtable.arrays import GrowableArray

FIRST_ROWS = 1_024
GROWTH = 4


class PagedArray(GrowableArray):
    """A GrowableArray in pages of its own.

    Room beyond `size` is address space, no memory, so it can grow fourfold and copy less. The array it outgrew goes
    back to the system at once: from malloc's heap, where NumPy puts arrays of up to 32 MiB, it would not.
    """

    def extend(self, values: npt.NDArray[Any]) -> None:
        """Append the rows of `values`."""
        end = self.size + len(values)
        if end > len(self.data):
            shape = (max(end, GROWTH * len(self.data), FIRST_ROWS), *self._shape)
            size = math.prod(shape) * self.data.dtype.itemsize
            pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            larger = np.frombuffer(pages, self.data.dtype).reshape(shape)
            larger[: self.size] = self.data[: self.size]
            self.data = larger
        super().extend(values)
