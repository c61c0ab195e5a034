"""The key index: key -> newest row, and for one-column keys the keys in order.

Keys are held as Python values (int, str, bytes, bool; a tuple for a composite key), because a dict of them is the
fastest exact map within reach and takes a whole batch in one C-level call.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import compress, repeat
from typing import Any

import numpy as np
import pyarrow as pa
from sortedcontainers import SortedList

from memtable.arrays import Mask, Positions
from memtable.versions import Versions

_POINTER = 8
_INT = 32
_TEXT = 49
_TUPLE = 40


@dataclass(frozen=True, slots=True)
class KeyBatch:
    """The keys of some rows, one for each, in row order."""

    values: list[Any]
    repeats: bool
    """Whether any of them is there twice."""
    payload: int
    """Bytes of the key columns."""


def key_values(keys: pa.Table, key: Sequence[str]) -> list[Any]:
    """The keys as hashable Python values, one for each row, in row order, without a Python loop.

    Requires: no nulls, column types as schema.is_key_type allows.
    """
    columns: list[list[Any]] = [keys.column(name).to_numpy().tolist() for name in key]
    return columns[0] if len(columns) == 1 else list(zip(*columns, strict=True))


def key_batch(rows: pa.Table, key: Sequence[str]) -> KeyBatch:
    """The keys of `rows` and what a put wants to know of them. Requires: as key_values."""
    if len(key) == 1 and pa.types.is_integer(rows.schema.field(key[0]).type):
        integers = rows.column(key[0]).to_numpy()
        ordered = np.sort(integers)  # faster than a set
        return KeyBatch(integers.tolist(), bool((ordered[1:] == ordered[:-1]).any()), integers.nbytes)
    values = key_values(rows, key)
    return KeyBatch(values, len(set(values)) < len(values), sum(rows.column(name).nbytes for name in key))


class KeyIndex:
    """key -> newest row over all rows put so far.

    Thread safety. One writer (put); lookup and the ordered reads from any thread. Readers get rows of
    any age and step back to their prefix by Versions.older_than; the writer links versions before it moves
    the dict, so every row found here can be followed.
    Invariants. A key once present is never removed: a tombstone is a row like any other.
    """

    def __init__(self, schema: pa.Schema, key: Sequence[str]) -> None:
        self.key = tuple(key)
        self._newest: dict[Any, int] = {}
        self._ordered: SortedList = SortedList()
        self._unordered: list[Any] = []
        self._ordering = threading.Lock()
        self._payload = 0
        self._overhead = sum(_object_bytes(schema.field(name).type) for name in key)
        if len(key) > 1:
            self._overhead += _TUPLE + _POINTER * len(key)

    def put(self, batch: KeyBatch, first: int, versions: Versions) -> None:
        """Point the keys at the rows first, first+1, ..., which `versions` links to the rows that they replace."""
        previous = (self._put_repeats if batch.repeats else self._put_distinct)(batch.values, first, versions)
        keys, fresh = batch.values, previous < 0
        count = int(np.count_nonzero(fresh))
        self._payload += batch.payload * count // max(1, len(keys))
        if len(self.key) == 1:
            with self._ordering:
                self._unordered.extend(keys if count == len(keys) else compress(keys, fresh.tolist()))

    def _put_distinct(self, keys: list[Any], first: int, versions: Versions) -> Positions:
        """Returns the row that each row replaces, -1 for none.

        One look at the dict finds old keys and adds new ones, since most of the time is spent waiting for this memory.
        The rows are in `versions` before that, as replacing nothing, so a reader that finds one steps back to nothing.
        """
        versions.append(np.full(len(keys), -1, dtype=np.int64))
        rows = range(first, first + len(keys))
        found = np.fromiter(map(self._newest.setdefault, keys, rows), dtype=np.int64, count=len(keys))
        old = found < first
        if old.any():
            versions.link(first + np.flatnonzero(old), found[old])
            self._newest.update(compress(zip(keys, rows, strict=True), old.tolist()))
        return np.where(old, found, -1)

    def _put_repeats(self, keys: list[Any], first: int, versions: Versions) -> Positions:
        """As _put_distinct, where a row may replace one of the same batch."""
        previous = np.fromiter(map(self._newest.get, keys, repeat(-1)), dtype=np.int64, count=len(keys))
        _link_duplicates(previous, keys, first)
        versions.append(previous)
        self._newest.update(zip(keys, range(first, first + len(keys)), strict=True))
        return previous

    def lookup(self, keys: Iterable[Any], count: int, versions: Versions, n: int) -> Positions:
        """Newest row of each key below n, -1 where the key is not there."""
        # The dict is read before the links: see the class's thread-safety note.
        rows = np.fromiter(map(self._newest.get, keys, repeat(-1)), dtype=np.int64, count=count)
        return versions.older_than(rows, n)

    def in_range(self, low: Any, high: Any, inclusive: tuple[bool, bool], limit: int) -> list[int] | None:
        """Newest rows of the keys between low and high (None: open end), None if more than `limit`.

        One-column keys only. The order is brought up to date here and not in add(): a put never pays for it.
        """
        with self._ordering:
            self._ordered.update(self._unordered)
            self._unordered = []
            if self._between(low, high) > limit:
                return None
            keys = list(self._ordered.irange(low, high, inclusive))
        return list(map(self._newest.__getitem__, keys))

    def _between(self, low: Any, high: Any) -> int:
        start = 0 if low is None else self._ordered.bisect_left(low)
        stop = len(self._ordered) if high is None else self._ordered.bisect_right(high)
        return int(stop - start)

    @property
    def bytes(self) -> int:
        """Estimate: dict, key objects, and the pointers of the ordered keys."""
        ordered = _POINTER * len(self._newest) if len(self.key) == 1 else 0
        return sys.getsizeof(self._newest) + len(self._newest) * (self._overhead + _INT) + self._payload + ordered


def _link_duplicates(before: Positions, keys: list[Any], first: int) -> None:
    """Let every repeated key in the batch point at its last occurrence before, not at the older batches."""
    distinct = dict.fromkeys(keys)
    codes = dict(zip(distinct, range(len(distinct)), strict=True))
    code = np.fromiter(map(codes.__getitem__, keys), dtype=np.int64, count=len(keys))
    order = np.argsort(code, kind="stable")
    repeated: Mask = code[order][1:] == code[order][:-1]
    before[order[1:][repeated]] = first + order[:-1][repeated]


def _object_bytes(kind: pa.DataType) -> int:
    """Bytes of one Python key object without its payload (CPython 3.11, 64 bit)."""
    if pa.types.is_boolean(kind):
        return 0
    if pa.types.is_integer(kind):
        return _INT
    return _TEXT
