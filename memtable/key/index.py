"""The key index: key -> newest row, and which row replaced which.

A key becomes a 64-bit code (key_column): the value itself for one column of integers, a hash otherwise. A hash table
maps codes to rows, a batch at a time (code_table). If the code is a hash, the row found is compared with the key. Keys
that share a code with another key, and the one code that the table cannot hold, are in a dict, which is exact.

A put only records its rows. Their keys enter the table in blocks: by `step`, which runs concurrently with puts, by the
first read that needs them, or by a put when too many wait. A block of eight batches costs half as much as the batches
one by one, and most of it without the GIL.

MVCC of the rows (`Versions`) by two integers per row:

    previous[row]       the older row of the same key, -1 without one
    superseded_by[row]  the row that replaced it, NEVER without one

A row is the newest of its key in the prefix of n rows exactly when superseded_by[row] >= n. The writer only replaces
NEVER, by a row position that is >= every n handed out before. A reader therefore gets the same answer before, during
and after the write, and a snapshot needs no copy and no lock.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np
import pyarrow as pa

from memwal.memtable.arrays import GrowableArray, Mask, Positions
from memwal.memtable.errors import InvalidRows
from memwal.memtable.key.code_table import EMPTY, Codes, CodeTable
from memwal.memtable.key.column import FixedColumn, KeyColumn, key_column, mixed

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


class NoKeys:
    """The interface of KeyIndex, for rows without a key.

    Thread safety. Any thread: it has no state.
    """

    bytes = 0

    def add(self, rows: pa.Table) -> None:
        """Do nothing."""

    def step(self) -> bool:
        """Return False: nothing waits."""
        return False

    def index(self, n: int) -> None:
        """Do nothing."""

    def newest(self, n: int) -> Mask:
        """Return all of the first n rows: bool [n]."""
        return np.ones(n, dtype=bool)

    def lookup(self, columns: Sequence[pa.ChunkedArray], n: int) -> Positions:  # noqa: ARG002 - as in KeyIndex
        """Raise InvalidRows."""
        raise no_key()


def no_key() -> InvalidRows:
    """Return the error for a call that needs keys."""
    return InvalidRows("the table has no key: its rows cannot be looked up by one")


BLOCK_ROWS = 16_384
"""Rows indexed at once, unless one batch has more: 1 to 2 ms."""
MOST_WAITING = 131_072
"""Maximum number of rows whose keys wait when a put returns; the next read then has 10 ms of work."""
MOST_BATCHES = 1_024
"""Maximum number of puts whose keys wait: the columns of a single-row put take far more memory than the key."""
_MARKS = 0xFFFF
"""The bits of a code that select its mark among the codes that repeat in a block."""
LINK_BYTES = 16
EXACT_BYTES = 150
"""Bytes of a key's objects in the dict."""


@dataclass(frozen=True, slots=True)
class _Put:
    """The key columns of the rows from `first` to before `end`."""

    columns: list[pa.ChunkedArray]
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class _Keys:
    """Keys of some rows: their codes (int64 [m]) and, by key column, their values (KeyColumn.values)."""

    codes: Codes
    values: list[Any]


class KeyIndex:
    """key -> newest row over all rows put so far.

    Thread safety. One writer (add); the rest from any thread. A read of the first n rows first indexes them, one thread
    at a time; after that no lock is held. The row found may be newer than n; Versions.older_than steps back from it,
    since a key is kept and its version linked before the table or the dict points to the row.
    Invariants. (1) A key once present is never removed: a tombstone is a row like any other. (2) A code in `_shared`
    stays there; all keys with that code are in `_exact`, and the row that the table may still have for it is a version
    of one of these keys. (3) Repeating a block that was interrupted (out of memory, or an interrupt in a reader's
    thread) has the same result as an uninterrupted one.
    """

    def __init__(self, schema: pa.Schema, key: Sequence[str]) -> None:
        self.key = tuple(key)
        self._columns: list[KeyColumn] = [key_column(schema.field(name).type) for name in key]
        self._is_exact = len(key) == 1 and isinstance(self._columns[0], FixedColumn)
        self._versions = Versions()
        self._table = CodeTable()
        self._shared = np.array([EMPTY], dtype=np.int64)  # ascending
        self._exact: dict[tuple[Any, ...], int] = {}
        self._indexing = threading.Lock()
        self._waiting: deque[_Put] = deque()
        self._indexed = 0
        self._rows = 0

    def add(self, rows: pa.Table) -> None:
        """Record the keys of the next rows. Requires: at least one row, all key columns, no nulls."""
        put = _Put([rows.column(name) for name in self.key], self._rows, self._rows + rows.num_rows)
        self._waiting.append(put)
        self._rows = put.end
        while self._rows - self._indexed > MOST_WAITING or len(self._waiting) > MOST_BATCHES:
            self.step()

    def step(self) -> bool:
        """Index the next block of waiting rows. Return False when none waits."""
        with self._indexing:
            while self._waiting and self._waiting[0].first < self._indexed:
                self._waiting.popleft()
            block = list(takewhile(lambda put: put.first < self._indexed + BLOCK_ROWS, list(self._waiting)))
            if block:
                columns = [_joined([put.columns[at] for put in block]) for at in range(len(self.key))]
                self._index_block(self._keys(columns), block[0].first)
                self._indexed = block[-1].end
            return self._indexed < self._rows

    def index(self, n: int) -> None:
        """Index at least the first n rows."""
        while self._indexed < n:
            self.step()

    def newest(self, n: int) -> Mask:
        """Return which of the first n rows are the newest of their key among them: bool [n]."""
        return self._of(n).newest(n)

    def lookup(self, columns: Sequence[pa.ChunkedArray], n: int) -> Positions:
        """Return the newest row of each key below n, -1 for an unknown key. Requires: the key's columns, no nulls."""
        versions = self._of(n)
        if not len(columns[0]):
            return np.empty(0, dtype=np.int64)
        wanted = self._keys(columns)
        rows = self._table.find(wanted.codes)
        if not self._is_exact:
            found = np.flatnonzero(rows >= 0)
            rows[found[~self._equal(rows[found], wanted, found)]] = -1
        # After the table: a code that becomes shared meanwhile keeps its row in the table.
        odd = self._is_shared(wanted.codes)
        for place in np.flatnonzero(odd).tolist() if odd.any() else ():
            rows[place] = self._exact.get(self._key_at(wanted, place), -1)
        return versions.older_than(rows, n)

    @property
    def bytes(self) -> int:
        """Bytes of the table, of the links (waiting rows included), and of the keys kept for comparison."""
        kept = sum(column.bytes for column in self._columns) + LINK_BYTES * (self._rows - self._indexed)
        exact = sys.getsizeof(self._exact) + EXACT_BYTES * len(self._exact)
        return self._table.bytes + self._versions.bytes + kept + exact

    # ---- inside

    def _of(self, n: int) -> Versions:
        """Return the links of at least the first n rows."""
        self.index(n)
        return self._versions

    def _index_block(self, keys: _Keys, first: int) -> None:
        """Link the rows first, first + 1, ... to the rows that they replace, and point their keys at them."""
        if not self._is_exact:
            for column, values in zip(self._columns, keys.values, strict=True):
                column.keep(values, first)
        previous = self._table.find(keys.codes)
        fresh = previous < 0
        again = np.flatnonzero(previous >= first)  # an earlier call was interrupted after linking
        previous[again] = self._versions.previous(first + again)
        last = _link_repeats(keys.codes, previous, first)
        if not self._is_exact:
            self._set_clashes_aside(keys, previous)
        odd = self._is_shared(keys.codes)
        newest = self._link_exactly(keys, np.flatnonzero(odd), previous, first)
        self._versions.link(first, previous)
        if newest:
            self._exact.update(newest)
            last &= ~odd
        rows = np.arange(first, first + len(previous), dtype=np.int64)
        if last.all():
            self._table.put(keys.codes, rows, int(np.count_nonzero(fresh)))
        else:
            self._table.put(keys.codes[last], rows[last], int(np.count_nonzero(fresh & last)))

    def _keys(self, given: Sequence[pa.ChunkedArray]) -> _Keys:
        values = [column.values(each) for column, each in zip(self._columns, given, strict=True)]
        codes = self._columns[0].codes(values[0])
        for column, more in zip(self._columns[1:], values[1:], strict=True):
            codes = mixed(mixed(codes.view(np.uint64)).view(np.uint64) + column.codes(more).view(np.uint64))
        return _Keys(codes, values)

    def _equal(self, rows: Positions, keys: _Keys, places: Positions) -> Mask:
        """Return whether the key of row rows[i] is keys[places[i]]."""
        same = np.ones(len(rows), dtype=bool)
        for column, values in zip(self._columns, keys.values, strict=True):
            same &= column.equal(rows, values, places)
        return same

    def _set_clashes_aside(self, keys: _Keys, previous: Positions) -> None:
        """Move codes to `_shared` whose row here and the row before it have different keys."""
        found = np.flatnonzero(previous >= 0)
        clashing = found[~self._equal(previous[found], keys, found)]
        codes = np.unique(keys.codes[clashing])
        codes = codes[~self._is_shared(codes)]
        for row in self._table.find(codes).tolist():
            if row >= 0:
                self._exact[tuple(column.kept(row) for column in self._columns)] = row
        if len(codes):
            self._shared = np.union1d(self._shared, codes)

    def _is_shared(self, codes: Codes) -> Mask:
        shared = self._shared
        if len(shared) == 1:
            same: Mask = codes == EMPTY
        else:
            same = shared[np.minimum(np.searchsorted(shared, codes), len(shared) - 1)] == codes
        return same

    def _key_at(self, keys: _Keys, place: int) -> tuple[Any, ...]:
        return tuple(column.given(values, place) for column, values in zip(self._columns, keys.values, strict=True))

    def _link_exactly(
        self, keys: _Keys, places: Positions, previous: Positions, first: int
    ) -> dict[tuple[Any, ...], int]:
        """Point the keys at `places` at their last row, key by key. Return the updates for the dict."""
        newest: dict[tuple[Any, ...], int] = {}
        for place in places.tolist():
            key, row = self._key_at(keys, place), first + place
            before = newest.get(key, self._exact.get(key, -1))
            again = before >= row  # see _index_block
            previous[place] = self._versions.previous(np.array([row]))[0] if again else before
            newest[key] = row
        return newest


def _link_repeats(codes: Codes, previous: Positions, first: int) -> Mask:
    """Link every repeated code to its previous occurrence. Return which places are the last of their code."""
    last = np.ones(len(codes), dtype=bool)
    ordered = np.sort(codes)  # an eighth of the time of argsort, which only the repeated codes need
    repeats = ordered[1:][ordered[1:] == ordered[:-1]]
    if len(repeats):
        marked = np.zeros(_MARKS + 1, dtype=bool)
        marked[repeats & _MARKS] = True
        places = np.flatnonzero(marked[codes & _MARKS])  # also a few places whose code has the mark of another
        order = places[np.argsort(codes[places], kind="stable")]
        repeated = codes[order][1:] == codes[order][:-1]
        earlier, later = order[:-1][repeated], order[1:][repeated]
        previous[later] = first + earlier
        last[earlier] = False
    return last


def _joined(columns: list[pa.ChunkedArray]) -> pa.ChunkedArray:
    return pa.chunked_array([chunk for column in columns for chunk in column.chunks], columns[0].type)
