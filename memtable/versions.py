"""MVCC of the rows by two integers for each row: which row it replaced, and which row replaced it.

    previous[row]       the older row of the same key, -1 where there is none
    superseded_by[row]  the row that replaced it, NEVER where none has yet

A row is the newest of its key in the prefix of n rows exactly when superseded_by[row] >= n. The writer only
ever replaces NEVER by a row position that is >= every n handed out before, so a reader sees the same answer
before, during and after; this is why a snapshot needs no copy and no lock.
"""

from __future__ import annotations

import numpy as np

from memtable.arrays import GrowableArray, Mask, Positions

NEVER = np.iinfo(np.int64).max


class Versions:
    """The links between the rows of one key.

    Thread safety. One writer; readers as told above. Units: row positions, int64.
    """

    def __init__(self) -> None:
        self._previous = GrowableArray(np.int64)
        self._superseded_by = GrowableArray(np.int64)

    def append(self, previous: Positions) -> None:
        """Add len(previous) rows, each replacing previous[i] (-1: none)."""
        first = self._previous.size
        self._previous.extend(previous)
        self._superseded_by.extend(np.full(len(previous), NEVER, dtype=np.int64))
        replacing = np.flatnonzero(previous >= 0)
        self._superseded_by.data[previous[replacing]] = first + replacing

    def link(self, rows: Positions, previous: Positions) -> None:
        """Let `rows`, added as replacing nothing and in no prefix yet, replace the older rows `previous`."""
        self._previous.data[rows] = previous
        self._superseded_by.data[previous] = rows

    def newest(self, n: int) -> Mask:
        """Which of the first n rows are the newest of their key among the first n."""
        return self._superseded_by.data[:n] >= n

    def older_than(self, rows: Positions, n: int) -> Positions:
        """For each row (or -1) the newest version of its key below n; -1 where none is."""
        previous = self._previous.data
        found = rows.copy()
        ahead = found >= n
        while ahead.any():
            found[ahead] = previous[found[ahead]]
            ahead = found >= n
        return found

    def all_versions(self, rows: Positions) -> Positions:
        """The rows and every older version of them, unordered."""
        previous = self._previous.data
        found = [rows[rows >= 0]]
        while len(found[-1]):
            older = previous[found[-1]]
            found.append(older[older >= 0])
        return np.concatenate(found)

    @property
    def bytes(self) -> int:
        """Bytes of both arrays."""
        return self._previous.bytes + self._superseded_by.bytes
