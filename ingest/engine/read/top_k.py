"""Find the best k rows over all levels: the best visible rows of each level, merged by score.

A level above the base table is searched among its visible rows only. The hidden base rows are not known in advance: the
base table is asked for more than k rows, and rows whose key a newer level has are dropped. If fewer than k remain, more
are fetched, at most k plus the number of rows above, which always suffices.

Rows with equal scores are ordered by their key, or without a key by a hash of the returned columns (`api.ordering`):
both are the same at every level, so neither a commit nor a restart changes the order. For this purpose a level returns,
besides its k best rows, the rows that tie with the last of them, out of the first k + 1,000 that it finds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from memwal.ingest.engine.api.ordering import Places, Scores, in_rank
from memwal.ingest.engine.read.levels import Mask

MOST_HIDDEN = 0.5
"""Largest share of hidden rows that is assumed. If more rows are hidden, a read fetches again."""
WEIGHT = 0.1
"""Weight of the last read in the moving average."""
TIES = (100, 1_000)
"""Rows requested beyond the best k if rows tie with the last of these, and if that many rows tie as well. Only their
keys are read from the base table: the first number takes 1.2 ms, the second 1.8 ms, in a table of 60,000 rows.
"""
_NONE = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class Candidates:
    """Rows of one level by score, best first.

    `ids`: int64, of a row within its level. `take(positions)`: the wanted columns of some rows. `ties(positions)`: the
    columns that order equal scores.
    """

    ids: Places
    scores: Scores
    take: Callable[[Places], pa.Table]
    ties: Callable[[Places], pa.Table]


@dataclass(frozen=True, slots=True)
class Visible:
    """The candidates of one level that no newer level hides: `positions` among `candidates`, best first."""

    candidates: Candidates
    positions: Places

    @property
    def scores(self) -> Scores:
        """float32[len(positions)], best first."""
        return self.candidates.scores[self.positions]


class HiddenShare:
    """The share of the best base rows that newer levels hid in recent reads. It decides how many more rows to fetch.

    Thread safety. Any thread; the updates of two concurrent reads may count once.
    """

    def __init__(self) -> None:
        self._share = MOST_HIDDEN

    def wanted(self, k: int) -> int:
        """Return how many rows to fetch so that `k` visible rows are most likely among them: at most 2 `k`."""
        most_likely = k / (1 - self._share)
        return min(2 * k, math.ceil(most_likely + 2 * math.sqrt(most_likely * self._share)))

    def saw(self, fetched: int, hidden: int) -> None:
        """Record how many of the rows that a read fetched were hidden."""
        if fetched:
            self._share += WEIGHT * (min(MOST_HIDDEN, hidden / fetched) - self._share)


def with_ties(scores: Scores, k: int) -> int:
    """Return how many of `scores`, best first, are among the best `k` or equal the last of them."""
    return min(k, len(scores)) + int(np.count_nonzero(scores[k:] == scores[k - 1])) if len(scores) > k else len(scores)


def best_visible(
    fetch: Callable[[int], tuple[Candidates, pa.Table]],
    hides: Callable[[pa.Table], Mask],
    k: int,
    rows_above: int,
    share: HiddenShare,
    fetch_ties: Callable[[int], tuple[Candidates, pa.Table]] | None = None,
    spare: int = 1,
) -> Visible:
    """Return the `k` best visible base rows, fewer only if no more exist; with `fetch_ties` also those that tie with
    the last.

    `fetch(n)`: its `n` best rows and their keys, fewer only if no more exist. `hides(keys)`: which of them newer levels
    hide. `rows_above`: an upper bound of hidden rows. `share`: the share of hidden rows so far. `fetch_ties`: as
    `fetch`, but cheaper for many rows; None: equal scores keep their order. `spare`: rows beyond the best that are
    fetched at first, to detect rows that tie with the last one.
    """
    spare = 0 if fetch_ties is None else spare
    enough = k + rows_above + spare
    wanted = min(enough, share.wanted(k) + spare)

    def fetched(fetch: Callable[[int], tuple[Candidates, pa.Table]], number: int) -> tuple[Candidates, Places, bool]:
        """Return fetched rows, which of them are visible, and whether no more exist; record how many are hidden."""
        candidates, keys = fetch(number)
        found = len(candidates.scores)
        if not rows_above:
            return candidates, np.arange(found), found < number
        visible = np.flatnonzero(~hides(keys))
        share.saw(found, found - len(visible))
        return candidates, visible, found < number

    while True:
        candidates, visible, whole = fetched(fetch, wanted)
        if len(visible) >= k or whole or wanted == enough:
            break
        wanted = min(enough, 4 * wanted)
    if fetch_ties is None:
        return Visible(candidates, visible[:k])
    for further in TIES:
        if whole or len(visible) < k or candidates.scores[visible[k - 1]] != candidates.scores[-1]:
            break
        candidates, visible, whole = fetched(fetch_ties, wanted + further)
    return Visible(candidates, visible[: with_ties(candidates.scores[visible], k)])


def merge(levels: Sequence[Visible], k: int, *, ascending: bool, name: str, schema: pa.Schema, keyed: bool) -> pa.Table:
    """Return the best `k` rows of all levels with their score in column `name`.

    Equal scores are ordered by key; NaN comes last. `schema`: of the rows without the score. `keyed`: whether the table
    has a key.
    """
    scores, order = _ranked(levels, k, ascending=ascending, keyed=keyed)
    chosen, places = _by_level(levels, order)
    rows = in_order(concatenate([candidates.take(at) for candidates, at in chosen if len(at)], schema), places)
    field = pa.field(name, pa.float32(), nullable=False)
    return rows.append_column(field, pa.array(scores[order], pa.float32()))


def merge_arms(
    near: Sequence[Visible],
    matching: Sequence[Visible],
    n: int,
    names: tuple[str, str],
    schema: pa.Schema,
    *,
    keyed: bool,
) -> pa.Table:
    """Return the `n` nearest and the `n` best matching rows of all levels, without duplicates, nearest first.

    Rows with equal distances, or without one, are ordered by score, then by key. `near`, `matching`: the same levels in
    the same order. `names`: the columns of a row's distance and score, null if the row is not among the `n` best of
    that arm. `schema`: of the rows without them. `keyed`: as in `merge`.
    """
    closest, _ = _by_level(near, _ranked(near, n, ascending=True, keyed=keyed)[1])
    fittest, _ = _by_level(matching, _ranked(matching, n, ascending=False, keyed=keyed)[1])
    rows, parts, by_distance, by_score = 0, list[pa.Table](), [_NONE], [_NONE]
    ties = list[pa.Table]()
    for (one, first), (other, second) in zip(closest, fittest, strict=True):
        here, alone = _places(one.ids[first], other.ids[second])
        taken = [(candidates, some) for candidates, some in ((one, first), (other, second[alone])) if len(some)]
        parts += [candidates.take(some) for candidates, some in taken]
        ties += [candidates.ties(some) for candidates, some in taken]
        by_distance.append(rows + np.arange(len(first)))
        by_score.append(rows + here)
        rows += len(first) + int(np.count_nonzero(alone))
    found = concatenate(parts, schema)
    arms = (closest, by_distance), (fittest, by_score)
    for name, (chosen, places) in zip(names, arms, strict=True):
        scores = [candidates.scores[some] for candidates, some in chosen]
        at, whole, missing = np.concatenate(places), np.zeros(rows, np.float32), np.ones(rows, np.bool_)
        whole[at], missing[at] = np.concatenate([np.empty(0, np.float32), *scores]), False
        found = found.append_column(name, pa.array(whole, mask=missing))
    distance, score = (found.column(name) for name in names)
    ranks = [column.fill_null(np.inf).to_numpy() for column in (distance, pc.negate(score))]
    return found.take(in_rank(ranks, lambda at: pa.concat_tables(ties).take(at), keyed=keyed))


def _places(ids: Places, more: Places) -> tuple[Places, Mask]:
    """Return the places of `more` in the concatenation of `ids` and the new ids of `more`, and which of `more` are new.

    `ids` and `more` are each distinct.
    """
    at = pc.index_in(pa.array(more), value_set=pa.array(ids))
    alone = at.is_null().to_numpy(zero_copy_only=False)
    here = at.fill_null(0).to_numpy().astype(np.int64)
    here[alone] = len(ids) + np.arange(np.count_nonzero(alone))
    return here, alone


def _ranked(levels: Sequence[Visible], k: int, *, ascending: bool, keyed: bool) -> tuple[Scores, Places]:
    """Return the concatenated scores of all levels, and the places of the best `k` in it, best first."""
    scores = np.concatenate([level.scores for level in levels] or [np.empty(0, np.float32)])

    def ties(at: Places) -> pa.Table:
        chosen, places = _by_level(levels, at)
        return in_order(pa.concat_tables([candidates.ties(some) for candidates, some in chosen if len(some)]), places)

    return scores, in_rank([scores if ascending else -scores], ties, keyed=keyed, k=k)


def _by_level(levels: Sequence[Visible], order: Places) -> tuple[list[tuple[Candidates, Places]], Places]:
    """Return, for each level, its candidates and those at the places `order`; and the position of each of these in
    `order`.

    Places count through the concatenated levels; positions are listed level by level.
    """
    if len(levels) == 1:  # a tenth of the time, and the usual case below `latest`
        return [(levels[0].candidates, levels[0].positions[order])], np.arange(len(order))
    ends = np.cumsum([0, *(len(level.positions) for level in levels)])
    level_of = np.searchsorted(ends, order, side="right") - 1
    here = [np.flatnonzero(level_of == number) for number in range(len(levels))]
    chosen = [
        (level.candidates, level.positions[order[some] - first])
        for level, some, first in zip(levels, here, ends[:-1], strict=True)
    ]
    return chosen, np.concatenate([_NONE, *here])


def concatenate(parts: Sequence[pa.Table], schema: pa.Schema) -> pa.Table:
    """Return the rows of all parts with exactly `schema`; only nullability and metadata of the parts may differ."""
    if not parts:
        return schema.empty_table()
    tables = [pa.Table.from_arrays(part.select(schema.names).columns, schema=schema) for part in parts]
    return tables[0] if len(tables) == 1 else pa.concat_tables(tables)


def in_order(rows: pa.Table, places: Places) -> pa.Table:
    """Return `rows` sorted by their distinct `places`; sorted input, the usual case, costs nothing."""
    return rows if (places[:-1] < places[1:]).all() else rows.take(pa.array(np.argsort(places)))
