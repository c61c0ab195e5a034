"""Define the captured levels above the base table, and which older rows the newer levels hide.

From oldest to newest, a region's rows are in the base table, in SSTs of ascending generation, and in memtables of
ascending generation. A row is visible if no newer level *of its region* has its key; tombstones count as having their
key. Keys never move between regions, so a lookup in the levels of all regions gives the same answer as one per region.
In a table without a key no row is hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from memwal.flush.base.shape import Shape
from memwal.ingest.errors import Unavailable
from memwal.memtable import Snapshot
from memwal.wal import SsTable

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class RegionView:
    """The levels of one region above the base table, captured before the base table is opened. (model: Commit!Capture)

    `memtables`: snapshots, newest first. `ssts`: the SSTs in the region manifest, ascending generations.
    `unflushed`: set only for memtables replayed from storage, whose generation is unknown: the generation in which the
    oldest of their rows will be flushed. A base version that has committed it is newer than parts of this view.
    `shapes`: the shapes of the memtables; empty if their columns cannot change.
    `active`: the generation that accepts writes. `tail`: the first and last WAL position replayed. Both are for
    explanations.
    `routing`: the version of the routing at the claim of the region, or of the regions that the capture read. A base
    version of another routing may have rows in other regions.
    Thread safety. Immutable.
    """

    region: UUID
    memtables: tuple[Snapshot, ...]
    ssts: tuple[SsTable, ...]
    unflushed: int | None = None
    shapes: tuple[Shape, ...] = ()
    active: int | None = None
    tail: tuple[int, int] | None = None
    routing: int | None = None


class CaptureOvertaken(Exception):
    """A commit or resize overtook a view before the base table was opened: capture again. Callers never see it."""


class BaseChanged(Exception):
    """The base version is not the expected one, so its rows must be read too. Callers of tables never see it."""


class Reshaped(Unavailable):
    """The base table has other columns than a view: adopt the base table's columns, and capture again."""

    def __init__(self) -> None:
        super().__init__("the table's columns were changed during this call; retry with the same token")


class Stack:
    """The levels of one region as snapshots, newest first. `keyed` False: levels hide no rows of one another.

    Thread safety. Any thread; holds immutable snapshots.
    """

    def __init__(self, levels: Sequence[Snapshot], *, keyed: bool = True) -> None:
        self.levels, self.keyed = tuple(levels), keyed

    def visible(self, place: int) -> Mask:
        """Return which rows of the level at `place` are live and not hidden by a newer level: bool[n]."""
        return self._uncovered(place, self.levels[place].live())

    def keys(self, place: int) -> pa.Table:
        """Return the distinct keys of the level at `place` that no newer level has, including tombstones."""
        level = self.levels[place]
        return level.keys(self._uncovered(place, level.newest()))

    @property
    def rows(self) -> int:
        """An upper bound of the base rows that these levels hide: their rows with tombstones; 0 without keys."""
        return sum(level.n for level in self.levels) if self.keyed else 0

    def _uncovered(self, place: int, mask: Mask) -> Mask:
        return self.levels[place].uncovered(mask, self.levels[:place]) if self.keyed else mask


def hidden(stacks: Sequence[Stack], keys: pa.Table) -> Mask:
    """Return which base rows with these `keys` are hidden by levels above the base table: bool[len(keys)].

    A key that was found is not looked up in older levels, which saves time: in a table with many updates most keys are
    in the newest level.
    """
    held = np.zeros(keys.num_rows, dtype=np.bool_)
    for level in (level for stack in stacks for level in stack.levels):
        open_rows = np.flatnonzero(~held)
        if not len(open_rows):
            break
        held[open_rows] = level.lookup(picked(keys, open_rows)) >= 0
    return held


def picked(keys: pa.Table, rows: npt.NDArray[np.int64]) -> pa.Table:
    """Return `keys` at `rows` (ascending, distinct); selecting all rows, the usual case, costs nothing."""
    return keys if len(rows) == keys.num_rows else keys.take(pa.array(rows))
