"""The levels above the base table, as a read captures them, and the rule by which newer levels hide older rows.

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
    """The levels of one region above the base, captured before the base is opened. (model: Commit!Capture)

    `memtables`: snapshots, newest first. `ssts`: those that the region manifest lists, ascending generations.
    `unflushed`: only for memtables that were replayed from storage, which do not know their generation: the generation
    in which the oldest of their rows will be flushed. A base that has committed it is newer than parts of this view.
    `shapes`: the shapes of the memtables, each once; empty if their columns cannot change.
    `active`: the generation that takes writes, `tail`: the first and last WAL position replayed; both for explanations.
    `routing`: only if no regions but those of a known routing were looked at: that routing. A base of another one may
    have rows in other regions.
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
    """A commit or resize overtook a view before the base was opened: capture again. Callers never see it."""


class BaseChanged(Exception):
    """The base has another version than the caller knows: look at its rows too. Callers of tables never see it."""


class Reshaped(Unavailable):
    """The base has other columns than a view: take over the base's columns, and capture again."""

    def __init__(self) -> None:
        super().__init__("the table's columns were changed during this call; retry with the same token")


class Stack:
    """The levels of one region as snapshots, newest first. `keyed` False: no level hides rows of another.

    Thread safety. Any thread; holds immutable snapshots.
    """

    def __init__(self, levels: Sequence[Snapshot], *, keyed: bool = True) -> None:
        self.levels, self.keyed = tuple(levels), keyed

    def visible(self, place: int) -> Mask:
        """Return which rows of the level at `place` are live and hidden by no newer level: bool[n]."""
        return self._uncovered(place, self.levels[place].live())

    def keys(self, place: int) -> pa.Table:
        """Return the keys of the level at `place` that no newer level has, tombstones included, each once."""
        level = self.levels[place]
        return level.keys(self._uncovered(place, level.newest()))

    @property
    def rows(self) -> int:
        """An upper bound of the base rows that they hide: all their rows, tombstones included; 0 without keys."""
        return sum(level.n for level in self.levels) if self.keyed else 0

    def _uncovered(self, place: int, mask: Mask) -> Mask:
        return self.levels[place].uncovered(mask, self.levels[:place]) if self.keyed else mask


def hidden(stacks: Sequence[Stack], keys: pa.Table) -> Mask:
    """Return which base rows with these `keys` are hidden by levels above the base: bool[len(keys)].

    A key that was found is not looked up in older levels. That pays: in a table with many updates most keys are in the
    newest level.
    """
    held = np.zeros(keys.num_rows, dtype=np.bool_)
    for level in (level for stack in stacks for level in stack.levels):
        open_rows = np.flatnonzero(~held)
        if not len(open_rows):
            break
        held[open_rows] = level.lookup(picked(keys, open_rows)) >= 0
    return held


def picked(keys: pa.Table, rows: npt.NDArray[np.int64]) -> pa.Table:
    """Return `keys` at `rows` (ascending, each once); all of them, the usual case, costs nothing."""
    return keys if len(rows) == keys.num_rows else keys.take(pa.array(rows))
