"""MVCC of the rows by two integers per row: the row that it replaced, and the row that replaced it.

    previous[row]       the older row of the same key, -1 without one
    superseded_by[row]  the row that replaced it, NEVER without one

A row is the newest of its key in the prefix of n rows exactly when superseded_by[row] >= n. The writer only replaces
NEVER, by a row position that is >= every n handed out before. A reader therefore gets the same answer before, during
and after the write, and a snapshot needs no copy and no lock.
"""

from __future__ import annotations

import numpy as np

from memwal.memtable.arrays import GrowableArray, Mask, Positions

NEVER = np.iinfo(np.int64).max
STEPS = 64
"""Newer versions that are skipped for all keys at once; the rest key by key, which takes a hundredth of the time."""


class Versions:
    """The links between the rows of one key.

    Thread safety. One writer; readers as in the module docstring. Units: row positions, int64.
    """

    def __init__(self) -> None:
        self._previous = GrowableArray(np.int64)
        self._superseded_by = GrowableArray(np.int64)

    def link(self, first: int, previous: Positions) -> None:
        """Let the rows first, first + 1, ... replace the rows `previous` (-1: none).

        `first`: the number of rows, or the start of a call that was interrupted.
        """
        self._previous.write(first, previous)
        self._superseded_by.fill(first, first + len(previous), NEVER)
        replacing = np.flatnonzero(previous >= 0)
        self._superseded_by.data[previous[replacing]] = first + replacing

    def previous(self, rows: Positions) -> Positions:
        """Return the row that each of the rows replaced, -1 for none."""
        found: Positions = self._previous.data[rows]
        return found

    def newest(self, n: int) -> Mask:
        """Return which of the first n rows are the newest of their key among the first n."""
        return self._superseded_by.data[:n] >= n

    def older_than(self, rows: Positions, n: int) -> Positions:
        """Return, for each row (or -1), the newest version of its key below n; -1 without one."""
        previous = self._previous.data
        ahead = np.flatnonzero(rows >= n)
        if not len(ahead):
            return rows
        found = rows.copy()
        for _ in range(STEPS):
            if not len(ahead):
                return found
            found[ahead] = previous[found[ahead]]
            ahead = ahead[found[ahead] >= n]
        links = previous.data  # single integers are read faster from a memoryview
        for place in ahead.tolist():  # few keys with many newer versions
            row = int(found[place])
            while row >= n:
                row = links[row]
            found[place] = row
        return found

    @property
    def bytes(self) -> int:
        """Bytes of both arrays."""
        return self._previous.bytes + self._superseded_by.bytes
