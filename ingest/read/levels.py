"""The levels above the base table: what they are called, what a reader captures of them, and who hides whom.

From oldest to newest, a region's rows lie in the base table, in SSTs of ascending generation, and in
memtables of ascending generation. A row is visible iff no newer level *of its region* holds its key;
tombstones hold their key too. Keys never move between regions, so one look at the levels of all regions gives
the same answer as one per region. Where the table has no key nothing hides anything.
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
    """The levels of one region above the base, captured before the base is opened.

    `memtables`: snapshots, newest first. `ssts`: what the region manifest lists, ascending generations.
    `unflushed`: the generation as which the oldest of the memtables' rows will be flushed, where the memtables cannot
    say it themselves (they were replayed from storage); a base that has committed it is newer than parts of this view.
    `shapes`: those of the memtables, each once; none where nobody changes columns.
    Thread safety. Immutable.
    """

    region: UUID
    memtables: tuple[Snapshot, ...]
    ssts: tuple[SsTable, ...]
    unflushed: int | None = None
    shapes: tuple[Shape, ...] = ()


class OverTaken(Exception):
    """A commit overtook a view between its capture and the opening of the base: capture again. Stays inside."""


class Reshaped(Unavailable):
    """The base has other columns than a view captured before: follow it, and capture again."""

    def __init__(self) -> None:
        super().__init__("the table's columns were changed at this moment; retry with the same token")


class Stack:
    """The levels of one region as snapshots, newest first, with the rule of who hides whom (`keyed` False: nobody).

    Thread safety. Any thread; holds immutable snapshots.
    """

    def __init__(self, levels: Sequence[Snapshot], *, keyed: bool = True) -> None:
        self.levels, self.keyed = tuple(levels), keyed

    def hides(self, keys: pa.Table, below: int) -> Mask:
        """Which of `keys` (exactly the key columns) the `below` newest levels hold: bool[len(keys)]."""
        return _held(self.levels[:below], keys)

    @property
    def rows(self) -> int:
        """A bound on the rows they hide: those of all levels, superseded ones and tombstones too; 0 without keys."""
        return sum(self.sizes)

    @property
    def sizes(self) -> list[int]:
        """The same level by level."""
        return [level.n if self.keyed else 0 for level in self.levels]


def hidden(stacks: Sequence[Stack], keys: pa.Table) -> Mask:
    """Which base rows with these `keys` are hidden by any level above the base: bool[len(keys)]."""
    return _held([level for stack in stacks for level in stack.levels], keys)


def picked(keys: pa.Table, rows: npt.NDArray[np.int64]) -> pa.Table:
    """`keys` at `rows` (ascending, each once); mostly that is all of them, which costs nothing."""
    return keys if len(rows) == keys.num_rows else keys.take(pa.array(rows))


def _held(levels: Sequence[Snapshot], keys: pa.Table) -> Mask:
    """Keys found in a level are not looked up in the next: most of those of a hot table are in the newest."""
    held = np.zeros(keys.num_rows, dtype=np.bool_)
    for level in levels:
        open_rows = np.flatnonzero(~held)
        if not len(open_rows):
            break
        held[open_rows] = level.lookup(picked(keys, open_rows)) >= 0
    return held
