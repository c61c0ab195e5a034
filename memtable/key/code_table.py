"""A growing hash table from 64-bit codes to row positions, filled and read a batch at a time.

The probing is faiss' (`hashtable_int64_to_int64_*`: open addressing in one array, no deletion). This module owns the
array, its growth and the rules for reading it during writes. A dict is slower because it creates an object for every
key, and waits for memory one key at a time (bench/micro/key_index.py measures it and other structures).
"""

from __future__ import annotations

from typing import Any

import faiss
import numpy as np
import numpy.typing as npt

from memwal.memtable.arrays import Positions, uninitialised
from memwal.memtable.threads import faiss_single_thread

Codes = npt.NDArray[np.int64]

EMPTY = -1
"""The code that marks a free slot; it cannot be put."""
FIRST_SLOTS = 13
FULLEST = 3 / 4
"""Largest share of taken slots. A fuller table answers a little more slowly, an emptier one costs more memory, and
growing spends most of its time on new memory.
"""
GROWTH = 2
"""Doublings at once: growing by one would write each code twice as often, for half of the memory in the worst case."""


class CodeTable:
    """code -> row, the last one put.

    Thread safety. One writer (put); find from any thread, also during put. Codes are never removed and a slot keeps its
    code, so a reader finds each code in its slot or not at all; a row is one aligned 8-byte store. A reader that finds
    a code before its row was written reads -1, as if it had read earlier. Growing creates a new array; readers of the
    old one see it unchanged.
    """

    def __init__(self) -> None:
        self._slots = _free(FIRST_SLOTS)
        self._most = _most(FIRST_SLOTS)
        self.size = 0

    def find(self, codes: Codes) -> Positions:
        """Return the row of each code (int64 [m]), -1 if it was not put."""
        slots = self._slots
        rows = np.empty(len(codes), dtype=np.int64)
        with faiss_single_thread():
            _faiss.hashtable_int64_to_int64_lookup(_log2(slots), *_pointers(slots), len(codes), *_pointers(codes, rows))
        return rows

    def put(self, codes: Codes, rows: Positions, fresh: int) -> None:
        """Point each code at its row; `fresh` of the codes are new. Requires: codes distinct, none EMPTY."""
        if self.size + fresh > self._most:
            self._grow(self.size + fresh)
        self.size += fresh  # counted before they are written: repeated after a failure, they are not fresh any more
        _put(self._slots, codes, rows)

    def _grow(self, size: int) -> None:
        log2 = _log2(self._slots)
        while _most(log2) < size:
            log2 += GROWTH
        larger = _free(log2)
        taken = np.flatnonzero(self._slots[:, 0] != EMPTY)
        _put(larger, self._slots[taken, 0], self._slots[taken, 1])
        self._slots, self._most = larger, _most(log2)

    @property
    def bytes(self) -> int:
        """Bytes of the slots, free ones included: they are written when the table is created."""
        return int(self._slots.nbytes)


_faiss: Any = faiss  # faiss' type hints lack these functions


def _free(log2: int) -> Codes:
    """Return an empty table. Written without faiss, which would start OpenMP's threads for each calling thread."""
    slots: Codes = uninitialised((1 << log2, 2), np.int64)
    slots.fill(EMPTY)
    return slots


def _put(slots: Codes, codes: Codes, rows: Positions) -> None:
    with faiss_single_thread():
        _faiss.hashtable_int64_to_int64_add(_log2(slots), *_pointers(slots), len(codes), *_pointers(codes, rows))


def _log2(slots: Codes) -> int:
    return len(slots).bit_length() - 1


def _most(log2: int) -> int:
    return int(FULLEST * (1 << log2))


def _pointers(*arrays: Codes) -> list[Any]:
    return [faiss.swig_ptr(array) for array in arrays]
