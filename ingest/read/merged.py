"""What one read sees, and who hides whom in it: a version of the base and the uncommitted levels above.

A row is dropped when a newer level of its region holds its key, in whatever version, tombstones included.
Each level is filtered and asked by itself first, so an old version never answers for a new one that does not
pass or is farther away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from memwal.ingest.read.base import BaseReads
from memwal.ingest.read.levels import Mask, Stack, hidden, picked
from memwal.ingest.read.top_k import Candidates, Visible, best_visible, concatenate
from memwal.memtable import TOMBSTONE, Snapshot

ROWS_PER_STEP = 16_384
Positions = npt.NDArray[np.int64]
Scores = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Ranking:
    """How to ask a level for its best rows.

    `level(snapshot, n, mask)`: positions and scores; `base(n, columns)`: rows with those columns and `score`.
    """

    level: Callable[[Snapshot, int, Mask], tuple[Positions, Scores]]
    base: Callable[[BaseReads, int, Sequence[str]], pa.Table]
    score: str


@dataclass(frozen=True, slots=True)
class MergedView:
    """One captured state of the table, whose key columns are `key`; without any, every row of every level is visible.

    Thread safety. Immutable; any thread.
    """

    base: BaseReads
    stacks: tuple[Stack, ...]
    key: list[str]

    @property
    def rows_above(self) -> int:
        """A bound on the base rows that are hidden."""
        return sum(stack.rows for stack in self.stacks)

    def levels(self) -> Iterator[Snapshot]:
        """Every level above the base, newest first in each region."""
        for stack in self.stacks:
            yield from stack.levels

    def rows_of(
        self, keys: pa.Table, columns: list[str], *, tombstones: bool = False
    ) -> Iterator[tuple[pa.Table, Positions]]:
        """The live rows of `keys` (distinct), from one level after the other, and for each the position of its key.

        A level is asked for the keys that no newer one holds, and not at all when none are left. `tombstones`: rows
        that delete too, and `_tombstone` as the last column.
        """
        wanted = np.arange(keys.num_rows)
        for level in self.levels():
            if not len(wanted):
                return
            at = level.lookup(picked(keys, wanted))
            held = at >= 0
            if held.any():
                # Tombstones are fetched with the rows: the mask of all of the level's takes time with its size.
                rows = level.take(at[held], [*columns, TOMBSTONE])
                live = ~rows.column(TOMBSTONE).to_numpy() | tombstones
                yield filtered(rows if tombstones else rows.select(columns), live), wanted[held][live]
                wanted = wanted[~held]
        if len(wanted):
            rows, at = self.base.get(picked(keys, wanted), columns)
            none = pa.array(np.zeros(rows.num_rows, dtype=np.bool_))
            yield rows.append_column(TOMBSTONE, none) if tombstones else rows, wanted[at]

    def count_above(self, filter: str | None) -> int:
        """Number of visible rows above the base that pass `filter`."""
        return sum(len(positions) for _, positions in self._visible_above(filter))

    def visible_rows(self, columns: list[str], filter: str | None, limit: int | None) -> Iterator[pa.Table]:
        """Visible rows that pass `filter`, fresh ones first, read as they are consumed.

        With a `limit` at least so many if there are, and not many more.
        """
        for level, positions in self._visible_above(filter):
            yield level.take(positions if limit is None else positions[:limit], columns)
        # At most `rows_above` base rows are hidden, so this many are enough whichever those are.
        most = None if limit is None else limit + self.rows_above
        for rows in self.base.batches(self._with_key(columns), filter, most):
            if not self.key:
                yield rows.select(columns)
                continue
            seen = ~hidden(self.stacks, rows.select(self.key))
            yield filtered(rows.select(columns), seen)

    def keys_above(self) -> pa.Table | None:
        """Every key that any level above the base holds, once; None when there are no levels, or no keys."""
        parts = []
        for stack in self.stacks if self.key else ():
            for below, level in enumerate(stack.levels):
                keys = level.keys(level.newest())
                parts.append(filtered(keys, ~stack.hides(keys, below)))
        return concatenate(parts, parts[0].schema) if parts else None

    def best(self, k: int, filter: str | None, columns: list[str], ranking: Ranking) -> list[Visible]:
        """The `k` best visible rows of every level, newest levels first, the base last."""
        found = [visible for stack in self.stacks for visible in self._best_of(stack, k, filter, columns, ranking)]

        def fetch(n: int) -> Candidates:
            rows = ranking.base(self.base, n, self._with_key(columns))
            scores = rows.column(ranking.score).to_numpy().astype(np.float32, copy=False)
            return Candidates(scores, lambda: rows.select(self.key), lambda at: rows.select(columns).take(pa.array(at)))

        return [*found, best_visible(fetch, lambda keys: hidden(self.stacks, keys), k, self.rows_above)]

    # ---- inside
    # --------------------------------------------------------------------------------------------------

    def _best_of(
        self, stack: Stack, k: int, filter: str | None, columns: list[str], ranking: Ranking
    ) -> Iterator[Visible]:
        above = accumulate(stack.sizes, initial=0)
        for below, (level, rows_above) in enumerate(zip(stack.levels, above, strict=False)):
            fetch = self._fetch(level, self._passing(level, filter), columns, ranking)
            yield best_visible(fetch, partial(stack.hides, below=below), k, rows_above)

    def _fetch(self, level: Snapshot, mask: Mask, columns: list[str], ranking: Ranking) -> Callable[[int], Candidates]:
        def fetch(n: int) -> Candidates:
            positions, scores = ranking.level(level, n, mask)
            return Candidates(
                scores,
                lambda: level.take(positions, self.key),
                lambda at: level.take(positions[at], columns),
            )

        return fetch

    def _passing(self, level: Snapshot, filter: str | None) -> Mask:
        """Rows of one level that are its newest for their key, no tombstone, and pass: bool[level.n]."""
        live = level.live()
        return live if filter is None else level.where(filter, live)

    def _visible_above(self, filter: str | None) -> Iterator[tuple[Snapshot, Positions]]:
        """Per step of at most ROWS_PER_STEP rows: a level and the positions of its visible rows that pass."""
        for stack in self.stacks:
            for below, level in enumerate(stack.levels):
                passing = np.flatnonzero(self._passing(level, filter))
                for at in range(0, len(passing), ROWS_PER_STEP):
                    step = passing[at : at + ROWS_PER_STEP]
                    covered = below and stack.keyed
                    yield level, step[~stack.hides(level.take(step, self.key), below)] if covered else step

    def _with_key(self, columns: Sequence[str]) -> list[str]:
        return list(dict.fromkeys([*columns, *self.key]))


def filtered(rows: pa.Table, mask: Mask) -> pa.Table:
    """The rows of `mask`; mostly that is all of them, which costs nothing."""
    return rows if mask.all() else rows.filter(pa.array(mask))
