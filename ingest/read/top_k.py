"""The best k rows over all levels: the best visible ones of each, merged by score.

A level above the base is asked among its visible rows only. Of the base nobody knows the hidden rows; it is asked for
more than k, and the keys that newer levels have are dropped. If fewer than k are left, more are fetched, at most k plus
the number of rows above, which is always enough.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Scores = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]
Ids = npt.NDArray[np.int64]
MOST_HIDDEN = 0.5
"""Largest share of hidden rows that is expected. Where more are hidden, a read fetches again."""
WEIGHT = 0.1
"""Of a read in the share."""
_NONE = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class Candidates:
    """Rows of one level by score, best first.

    `ids`: int64, of a row within its level. `take(positions)`: the wanted columns of some.
    """

    ids: Ids
    scores: Scores
    take: Callable[[Ids], pa.Table]


@dataclass(frozen=True, slots=True)
class Visible:
    """The candidates of one level that no newer level hides: `positions` among `candidates`, best first."""

    candidates: Candidates
    positions: Ids

    @property
    def scores(self) -> Scores:
        """float32[len(positions)], best first."""
        return self.candidates.scores[self.positions]


class HiddenShare:
    """The share of the best rows of the base that newer levels hid in the last reads: how many more to fetch.

    Thread safety. Any thread; what two reads see at once may count once.
    """

    def __init__(self) -> None:
        self._share = MOST_HIDDEN

    def wanted(self, k: int) -> int:
        """How many rows to fetch so that `k` visible ones are most likely among them: at most 2 `k`."""
        most_likely = k / (1 - self._share)
        return min(2 * k, math.ceil(most_likely + 2 * math.sqrt(most_likely * self._share)))

    def saw(self, fetched: int, hidden: int) -> None:
        """Note how many of the rows that a read fetched were hidden."""
        if fetched:
            self._share += WEIGHT * (min(MOST_HIDDEN, hidden / fetched) - self._share)


def best_visible(
    fetch: Callable[[int], tuple[Candidates, pa.Table]],
    hides: Callable[[pa.Table], Mask],
    k: int,
    rows_above: int,
    share: HiddenShare,
) -> Visible:
    """Return the `k` best visible rows of the base, fewer only if it has no more.

    `fetch(n)`: its `n` best and their keys, fewer only if it has fewer. `hides(keys)`: which of them newer levels hide.
    `rows_above`: an upper bound of hidden rows. `share`: of hidden rows, so far.
    """
    enough = k + rows_above
    wanted = min(enough, share.wanted(k))
    while True:
        candidates, keys = fetch(wanted)
        visible = np.flatnonzero(~hides(keys)) if rows_above else np.arange(len(candidates.scores))
        if rows_above:
            share.saw(len(candidates.scores), len(candidates.scores) - len(visible))
        if len(visible) >= k or len(candidates.scores) < wanted or wanted == enough:
            return Visible(candidates, visible[:k])
        wanted = min(enough, 4 * wanted)


def merge(levels: Sequence[Visible], k: int, *, ascending: bool, name: str, schema: pa.Schema) -> pa.Table:
    """Return the best `k` rows of all levels with their score in column `name`.

    Of equal scores the earlier level comes first; NaN comes last. `schema`: of the rows without the score.
    """
    scores, order = _ranked(levels, k, ascending=ascending)
    chosen = zip(levels, _by_level(levels, order), strict=True)
    parts = [level.candidates.take(level.positions[at]) for level, at in chosen if len(at)]
    rows = in_order(concatenate(parts, schema), np.argsort(order))
    field = pa.field(name, pa.float32(), nullable=False)
    return rows.append_column(field, pa.array(scores[order], pa.float32()))


def merge_arms(
    near: Sequence[Visible], matching: Sequence[Visible], n: int, names: tuple[str, str], schema: pa.Schema
) -> pa.Table:
    """Return the `n` nearest and the `n` best matching rows of all levels, each row once, in no order that counts.

    `near`, `matching`: the same levels in the same order. `names`: of the columns with a row's distance and its score,
    null where the row is not among the `n` best of that arm. `schema`: of the rows without them.
    """
    closest = _by_level(near, _ranked(near, n, ascending=True)[1])
    fittest = _by_level(matching, _ranked(matching, n, ascending=False)[1])
    rows, parts, by_distance, by_score = 0, list[pa.Table](), [_NONE], [_NONE]
    for one, other, at, of_other in zip(near, matching, closest, fittest, strict=True):
        first, second = one.positions[at], other.positions[of_other]
        here, alone = _places(one.candidates.ids[first], other.candidates.ids[second])
        parts += [level.candidates.take(some) for level, some in ((one, first), (other, second[alone])) if len(some)]
        by_distance.append(rows + np.arange(len(first)))
        by_score.append(rows + here)
        rows += len(first) + int(np.count_nonzero(alone))
    found = concatenate(parts, schema)
    arms = (near, closest, by_distance), (matching, fittest, by_score)
    for name, (levels, chosen, places) in zip(names, arms, strict=True):
        scores = [level.scores[some] for level, some in zip(levels, chosen, strict=True)]
        values = np.concatenate([np.empty(0, np.float32), *scores])
        found = found.append_column(name, _nullable(values, np.concatenate(places), rows))
    return found


def _places(ids: Ids, more: Ids) -> tuple[Ids, Mask]:
    """Return where each of `more` stands in a row of `ids` and then those of `more` that are not among them, and which
    these are. Both have each id once.
    """
    at = pc.index_in(pa.array(more), value_set=pa.array(ids))
    alone = at.is_null().to_numpy(zero_copy_only=False)
    here = at.fill_null(0).to_numpy().astype(np.int64)
    here[alone] = len(ids) + np.arange(np.count_nonzero(alone))
    return here, alone


def _nullable(values: Scores, at: Ids, rows: int) -> pa.Array:
    """Return float32[rows] with `values` at the places `at`, null elsewhere."""
    whole, missing = np.zeros(rows, np.float32), np.ones(rows, np.bool_)
    whole[at], missing[at] = values, False
    return pa.array(whole, mask=missing)


def _ranked(levels: Sequence[Visible], k: int, *, ascending: bool) -> tuple[Scores, Ids]:
    """Return the scores of all levels in a row, and the places of the best `k` in it, best first."""
    scores = np.concatenate([level.scores for level in levels] or [np.empty(0, np.float32)])
    return scores, np.argsort(scores if ascending else -scores, kind="stable")[:k]


def _by_level(levels: Sequence[Visible], order: Ids) -> list[Ids]:
    """Return for each level which of its positions are among the places `order`, ascending."""
    ends = np.cumsum([0, *(len(level.positions) for level in levels)])
    places = np.sort(order)
    return [places[slice(*np.searchsorted(places, (a, b)))] - a for a, b in pairwise(ends)]


def concatenate(parts: Sequence[pa.Table], schema: pa.Schema) -> pa.Table:
    """Return the rows of all parts with exactly `schema`; only nullability and metadata of the parts may differ."""
    if not parts:
        return schema.empty_table()
    tables = [pa.Table.from_arrays(part.select(schema.names).columns, schema=schema) for part in parts]
    return tables[0] if len(tables) == 1 else pa.concat_tables(tables)


def in_order(rows: pa.Table, places: Ids) -> pa.Table:
    """Return `rows` sorted by their `places` (each once); sorted already, the usual case, costs nothing."""
    return rows if (places[:-1] < places[1:]).all() else rows.take(pa.array(np.argsort(places)))
