"""Merge one version of the base table with the uncommitted levels above it; newer versions of a row hide older ones.

A row is dropped if a newer level of its region has its key, even as a tombstone, expired, or with values that do not
pass the filter. Each level is filtered and searched separately among its visible rows, so an old version never replaces
a new one that has expired, does not pass or is farther away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pyarrow as pa

from memwal.flush.base.ttl import Expiry
from memwal.ingest.caller import expect_waiting, hold
from memwal.ingest.engine.api.ordering import Order, Places, Scores, first_rows
from memwal.ingest.engine.read.base import BaseReads, picked_rows
from memwal.ingest.engine.read.lance_scans import ROW_ID
from memwal.ingest.engine.read.levels import Mask, Stack, hidden, picked
from memwal.ingest.engine.read.request import at_most
from memwal.ingest.engine.read.top_k import (
    TIES,
    Candidates,
    HiddenShare,
    Visible,
    best_visible,
    concatenate,
    with_ties,
)
from memwal.ingest.threads import SideTask
from memwal.memtable import TOMBSTONE, Snapshot
from memwal.memtable.vector.index import Way

ROWS_PER_STEP = 16_384
Fetch = Callable[[BaseReads, int, Sequence[str]], pa.Table]
"""`fetch(base, n, columns)`: the first `n` rows of the base table in some order."""


@dataclass(frozen=True, slots=True)
class Ranking:
    """The functions that find the best rows of a level.

    `level(snapshot, n, mask)`: positions and scores. `base(n, columns)`: rows with those columns and `score`.
    The other fields are for explanations. `columns`: the searched columns. `way(snapshot, n, mask)`: how many rows
    `level` examines, None if unknown, and how it finds them. `exact`: why every row of the base table is compared.
    """

    level: Callable[[Snapshot, int, Mask], tuple[Places, Scores]]
    base: Fetch
    score: str
    columns: tuple[str, ...]
    way: Callable[[Snapshot, int, Mask], tuple[int | None, Way]]
    exact: Way | None = None
    spare: int = 1
    """Rows beyond the best that are requested from a level at first, to detect rows that tie with the last one."""


@dataclass(frozen=True, slots=True)
class MergedView:
    """The base table and the levels above it, merged.

    `key`: the key columns; without any, all rows are visible. `share`: the share of base rows that were hidden in
    earlier reads. `expiry`: identifies expired rows, also those of `base`.
    Thread safety. Immutable; any thread.
    """

    base: BaseReads
    stacks: tuple[Stack, ...]
    key: list[str]
    share: HiddenShare = field(default_factory=HiddenShare)
    expiry: Expiry | None = None

    @property
    def rows_above(self) -> int:
        """An upper bound of the hidden base rows."""
        return sum(stack.rows for stack in self.stacks)

    def levels(self) -> Iterator[Snapshot]:
        """Yield every level above the base table, newest first in each region."""
        for stack in self.stacks:
            yield from stack.levels

    def rows_of(
        self, keys: pa.Table, columns: list[str], *, tombstones: bool = False, base: bool = True
    ) -> Iterator[tuple[pa.Table, Places]]:
        """Yield the live rows of `keys` (distinct) per level, and for each row the position of its key.

        A level is searched only for keys that no newer level has. `tombstones`: also yield tombstones, and `_tombstone`
        as the last column. `base`: whether to search the base table too.
        """
        wanted = np.arange(keys.num_rows)
        for level in self.levels():
            if not len(wanted):
                return
            # Tombstones are fetched with the rows: a mask over all rows of the level would cost time in proportion to
            # its size.
            held, rows = self._held_rows(level, picked(keys, wanted), [*columns, TOMBSTONE])
            if rows is not None:
                live = ~rows.column(TOMBSTONE).to_numpy() | tombstones
                yield picked_rows(rows if tombstones else rows.select(columns), live), wanted[held][live]
                wanted = wanted[~held]
        if len(wanted) and base:
            rows, at = self._base_rows_of(picked(keys, wanted), columns)
            none = pa.array(np.zeros(rows.num_rows, dtype=np.bool_))
            yield rows.append_column(TOMBSTONE, none) if tombstones else rows, wanted[at]

    def count(self, filter: str | None) -> int:
        """Return the number of visible rows that pass `filter`."""
        return self._count_above(filter) + self._count_base(filter)

    def visible_rows(self, columns: list[str], filter: str | None, limit: int | None) -> Iterator[pa.Table]:
        """Yield visible rows that pass `filter`, newest levels first, read as they are consumed.

        With a `limit`, yields at least that many if they exist, and not many more.
        """
        yield from self.level_rows(columns, filter, limit)
        # At most `rows_above` base rows are hidden, so this number of rows always suffices.
        most = None if limit is None else limit + self.rows_above
        yield from self.base_rows(columns, filter, most)

    def level_rows(self, columns: list[str], filter: str | None, limit: int | None = None) -> Iterator[pa.Table]:
        """Yield the visible rows above the base table that pass `filter`, at most `limit` of each step."""
        for level, positions in self._visible_above(filter):
            yield self._taken(level, positions if limit is None else positions[:limit], columns)

    def base_rows(self, columns: list[str], filter: str | None, most: int | None = None) -> Iterator[pa.Table]:
        """Yield the visible rows among the first `most` base rows that pass `filter`."""
        hiding = self.key if self.rows_above else []
        for rows in self.base.batches(list(dict.fromkeys([*columns, *hiding])), filter, most):
            mask = self._hidden(rows.select(hiding)) if hiding else None
            yield rows.select(columns) if mask is None else picked_rows(rows.select(columns), ~mask)

    def first_rows(self, columns: list[str], filter: str | None, limit: int | None, order: Order) -> pa.Table:
        """Return the first `limit` visible rows (None: all) in `order` that pass `filter`, read into memory.

        `columns` includes the columns of `order`.
        """
        by = [name for name, _ in order]
        limit = limit if limit is None else self._at_most(limit)
        parts = []
        for level, positions in self._visible_above(filter):
            first = first_rows(level.take(positions, by), order, limit)
            parts.append(self._taken(level, positions[first.to_numpy()], columns))
            hold(parts[-1].nbytes)
        most = max(1, self.base.count(None)) if limit is None else limit  # Lance fails to sort zero rows

        def ordered(base: BaseReads, n: int, with_key: Sequence[str]) -> pa.Table:
            return base.ordered(order, n, filter, with_key)

        found = self._best_of_base(most, columns, ordered, None)
        parts.append(found.candidates.take(found.positions))
        return self._in_order(parts, order, limit)

    def keys_above(self) -> pa.Table | None:
        """Return every distinct key in the levels above the base table; None without levels or without a key."""
        keyed = self.stacks if self.key else ()
        parts = [stack.keys(place) for stack in keyed for place in range(len(stack.levels))]
        return concatenate(parts, parts[0].schema) if parts else None

    def best(self, k: int, filter: str | None, columns: list[str], *rankings: Ranking) -> list[list[Visible]]:
        """Return, by ranking, the `k` best visible rows of each level, newest levels first, the base table last."""
        k = self._at_most(k)
        searches = [
            partial(self._best_of_base, k, columns, ranking.base, ranking.score, ranking.spare) for ranking in rankings
        ]
        bases = [self._beside(search) for search in searches]
        try:
            above = [list(self._best_above(k, filter, columns, ranking)) for ranking in rankings]
            return [[*levels, base.result()] for levels, base in zip(above, bases, strict=True)]
        finally:
            for base in bases:
                base.end()

    # ---- steps of one level: `read.traced` measures them ----------------------------------------------------

    def _held_rows(self, level: Snapshot, keys: pa.Table, columns: list[str]) -> tuple[Mask, pa.Table | None]:
        """Return which of `keys` the level has, and their newest rows (None: no rows), expired ones as tombstones."""
        at = level.lookup(keys)
        held: Mask = at >= 0
        if not held.any():
            return held, None
        if self.expiry is None:
            return held, level.take(at[held], columns)
        rows = level.take(at[held], list(dict.fromkeys([*columns, self.expiry.column])))
        return held, self.expiry.as_deleted(rows, self.key).select(columns)

    def _base_rows_of(self, keys: pa.Table, columns: list[str]) -> tuple[pa.Table, Places]:
        return self.base.get(keys, columns)

    def _count_above(self, filter: str | None) -> int:
        return sum(len(positions) for _, positions in self._visible_above(filter))

    def _count_base(self, filter: str | None) -> int:
        """Return the number of visible base rows: Lance counts all; rows whose key a newer level has are read."""
        above = self.keys_above()
        return self.base.count(filter) - (0 if above is None else self._held_in_base(above, filter))

    def _held_in_base(self, keys: pa.Table, filter: str | None) -> int:
        return self.base.held(keys, filter)

    def _passing(self, stack: Stack, place: int, filter: str | None) -> Mask:
        """Return which rows of the level at `place` are visible and pass: bool[n]."""
        expect_waiting()
        visible, level = stack.visible(place), stack.levels[place]
        if self.expiry is not None:
            visible = visible & ~self.expiry.mask(level.column(self.expiry.column))
        return visible if filter is None else level.where(filter, visible)

    def _rows_passing(self, stack: Stack, place: int, filter: str | None) -> Places:
        return np.flatnonzero(self._passing(stack, place, filter))

    def _taken(self, level: Snapshot, positions: Places, columns: list[str]) -> pa.Table:
        return level.take(positions, columns)

    def _hidden(self, keys: pa.Table) -> Mask:
        """Return which base rows with these `keys` are hidden."""
        return hidden(self.stacks, keys)

    def _ranked(self, level: Snapshot, k: int, mask: Mask, columns: list[str], ranking: Ranking) -> Candidates:
        """Return the `k` best rows of `mask` in a level, and those that tie with the last of them."""
        for further in (ranking.spare, TIES[-1]):
            n = k + further
            positions, scores = ranking.level(level, n, mask)
            if len(scores) < n or scores[k - 1] != scores[-1]:
                break
        most = with_ties(scores, k)
        positions, scores = positions[:most], scores[:most]

        def take(at: Places, names: list[str]) -> pa.Table:
            return level.take(positions[at], names)

        return Candidates(positions, scores, partial(take, names=columns), partial(take, names=self.key or columns))

    def _in_order(self, parts: Sequence[pa.Table], order: Order, limit: int | None) -> pa.Table:
        """Return the first `limit` rows of all parts in `order`."""
        rows = concatenate(parts, parts[-1].schema)
        return rows.take(first_rows(rows, order, limit))

    def _beside(self, search: Callable[[], Visible]) -> SideTask[Visible]:
        """Search the base table in another thread while this one searches the levels above it."""
        return SideTask(search, alone=not self.stacks)

    # ---- inside --------------------------------------------------------------------------------------------------

    def _at_most(self, wanted: int) -> int:
        """Return how many rows to request: at most as many as exist, visible or not."""
        return at_most(wanted, lambda: self.base.rows + self.rows_above)

    def _best_above(self, k: int, filter: str | None, columns: list[str], ranking: Ranking) -> Iterator[Visible]:
        for stack in self.stacks:
            for place, level in enumerate(stack.levels):
                best = self._ranked(level, k, self._passing(stack, place, filter), columns, ranking)
                yield Visible(best, np.arange(len(best.ids)))

    def _best_of_base(self, k: int, columns: list[str], ranked: Fetch, score: str | None, spare: int = 1) -> Visible:
        """Return the `k` best visible rows of the base table, and those that tie with the last of them.

        `score`: column of the scores; None: rows are in order, and at most `k` are returned. `spare`: see
        `best_visible`.
        """
        hiding = self.key if self.rows_above or score else []
        wanted = list(dict.fromkeys([*columns, *hiding, *([ROW_ID] if score else [])]))

        def fetch(
            n: int, names: list[str], take: Callable[[pa.Table, Places], pa.Table]
        ) -> tuple[Candidates, pa.Table]:
            expect_waiting()
            rows = ranked(self.base, n, names)
            ids = rows.column(ROW_ID).to_numpy().astype(np.int64, copy=False)
            scores = np.zeros(len(ids), np.float32) if score is None else rows.column(score).to_numpy()

            def ties(at: Places) -> pa.Table:
                return rows.select(self.key).take(pa.array(at)) if self.key else take(rows, at)

            found = Candidates(ids, scores.astype(np.float32, copy=False), partial(take, rows), ties)
            return found, rows.select(hiding)

        def taken(rows: pa.Table, at: Places) -> pa.Table:
            return rows.select(columns).take(pa.array(at))

        def by_id(rows: pa.Table, at: Places) -> pa.Table:
            if set(columns) <= set(hiding):
                return taken(rows, at)
            return self.base.rows_by_id(rows.column(ROW_ID).take(pa.array(at)), columns)

        return best_visible(
            partial(fetch, names=wanted, take=taken),
            self._hidden,
            k,
            self.rows_above,
            self.share,
            None if score is None else partial(fetch, names=[*hiding, ROW_ID], take=by_id),
            spare,
        )

    def _visible_above(self, filter: str | None) -> Iterator[tuple[Snapshot, Places]]:
        """Yield a level and the positions of its visible rows that pass, in steps of at most ROWS_PER_STEP rows."""
        for stack in self.stacks:
            for place, level in enumerate(stack.levels):
                passing = self._rows_passing(stack, place, filter)
                for at in range(0, len(passing), ROWS_PER_STEP):
                    expect_waiting()
                    yield level, passing[at : at + ROWS_PER_STEP]
