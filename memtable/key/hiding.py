"""Which rows of a memtable newer memtables hide: those whose key a newer one has too.

    first[row]   the first row of the newer memtable with the key of `row`, NEVER without one

A reader that uses the first n rows of a newer memtable must treat a row as hidden exactly when `first[row] < n`, as in
`versions`. Therefore each row of the newer one is looked up once, by the first reader that includes it, and older
snapshots stay correct.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from weakref import WeakKeyDictionary

import numpy as np

from memwal.memtable.arrays import Mask, Positions

NEVER = np.iinfo(np.uint32).max
"""More rows than a memtable can hold: each takes 25 bytes or more."""

Lookup = Callable[[int, int], Positions]
"""Returns the row, in the older memtable, of each key in a range of rows of the newer one (first, end); -1 for none."""


class HiddenRows:
    """The rows of one memtable that others hide, by the other memtable. Entries of deleted memtables are dropped.

    Thread safety. Any thread; two concurrent calls for the same pair wait for each other.
    """

    def __init__(self) -> None:
        self._by: WeakKeyDictionary[object, _ByOne] = WeakKeyDictionary()
        self._lock = threading.Lock()
        self._asked = False

    def by(self, newer: object, rows: int, n: int, lookup: Lookup) -> Mask:
        """Return which of the first `rows` rows the first `n` of `newer` hide: bool [rows], read-only."""
        with self._lock:
            self._asked = True
            known = self._by.get(newer)
            if known is None or len(known.first) != rows:  # differs only while the older one still takes rows
                known = self._by[newer] = _ByOne(rows)
        return known.mask(n, lookup)

    @property
    def bytes(self) -> int:
        """Bytes of all arrays."""
        if not self._asked:  # true of every memtable that takes rows: each put reads its bytes
            return 0
        with self._lock:
            return sum(5 * len(each.first) for each in self._by.values())


class _ByOne:
    """The rows that one newer memtable hides, as far as it was read. Thread safety. Any thread."""

    def __init__(self, rows: int) -> None:
        self.first = np.full(rows, NEVER, np.uint32)
        self._looked_at = 0
        self._lock = threading.Lock()
        self._last = 0, self._hidden(0)

    def mask(self, n: int, lookup: Lookup) -> Mask:
        """Return the mask as in HiddenRows. After an interrupt, the next call completes the work."""
        with self._lock:
            if n > self._looked_at:
                at = lookup(self._looked_at, n)
                # Backwards: of several rows with one key the first one counts, and the last one written stays.
                found = np.flatnonzero(at >= 0)[::-1]
                found = found[self.first[at[found]] == NEVER]
                self.first[at[found]] = self._looked_at + found
                self._looked_at = n
            if self._last[0] != n:
                self._last = n, self._hidden(n)
            return self._last[1]

    def _hidden(self, n: int) -> Mask:
        hidden: Mask = self.first < n
        hidden.flags.writeable = False
        return hidden
