"""The best k rows over all levels: the best visible ones of each, merged by score.

A level above the base is asked among its visible rows only. Of the base nobody knows the hidden rows; it is asked for
more than k, and the keys that newer levels have are dropped. If fewer than k are left, more are fetched, at most k plus
the number of rows above, which is always enough.

Rows with equal scores are ordered by their key, or without a key by a hash of the columns that are returned
(`ingest.api.ties`): both are the same at every level, so neither a commit nor a restart changes the order. For that a
level returns with its k best rows those that tie with the last of them, of the first k + 1,000 that it finds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from memwal.ingest.api.ties import in_rank

Scores = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]
Ids = npt.NDArray[np.int64]
MOST_HIDDEN = 0.5
"""Largest share of hidden rows that is expected. Where more are hidden, a read fetches again."""
WEIGHT = 0.1
"""Of a read in the share."""
TIES = (100, 1_000)
"""Rows beyond the best k that a level is asked for where they tie with the last of these, and where as many tie. Their
keys alone are read of the base, so the first takes 1.2 ms, the second 1.8, of a table of 60,000 rows."""
_NONE = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class Candidates:
    """Rows of one level by score, best first.

    `ids`: int64, of a row within its level. `take(positions)`: the wanted columns of some. `ties(positions)`: the
    columns that order equal scores.
    """

    ids: Ids
    scores: Scores
    take: Callable[[Ids], pa.Table]
    ties: Callable[[Ids], pa.Table]


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
    """Return the `k` best visible rows of the base, fewer only if it has no more; with `fetch_ties` those too that tie
    with the last of them.

    `fetch(n)`: its `n` best and their keys, fewer only if it has fewer. `hides(keys)`: which of them newer levels hide.
    `rows_above`: an upper bound of hidden rows. `share`: of hidden rows, so far. `fetch_ties`: as `fetch`; takes less
    for many rows. None: equal scores stand in order. `spare`: rows beyond the best that are fetched at first, to see
    whether rows tie with the last.
    """
    spare = 0 if fetch_ties is None else spare
    enough = k + rows_above + spare
    wanted = min(enough, share.wanted(k) + spare)
    while True:
        candidates, keys = fetch(wanted)
        visible = _visible(keys, hides, len(candidates.scores), rows_above, share)
        whole = len(candidates.scores) < wanted
        if len(visible) >= k or whole or wanted == enough:
            break
        wanted = min(enough, 4 * wanted)
    if fetch_ties is None:
        return Visible(candidates, visible[:k])
    for further in TIES:
        if whole or len(visible) < k or candidates.scores[visible[k - 1]] != candidates.scores[-1]:
            break
        candidates, keys = fetch_ties(wanted + further)
        visible = _visible(keys, hides, len(candidates.scores), rows_above, share)
        whole = len(candidates.scores) < wanted + further
    return Visible(candidates, visible[: with_ties(candidates.scores[visible], k)])


def _visible(keys: pa.Table, hides: Callable[[pa.Table], Mask], found: int, rows_above: int, share: HiddenShare) -> Ids:
    """Return which of the rows with `keys` are visible, and note how many are not."""
    if not rows_above:
        return np.arange(found)
    visible = np.flatnonzero(~hides(keys))
    share.saw(found, found - len(visible))
    return visible


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
    """Return the `n` nearest and the `n` best matching rows of all levels, each row once, the nearest first; of equal
    distances, or without one, the best matching first; then by key.

    `near`, `matching`: the same levels in the same order. `names`: of the columns with a row's distance and its score,
    null where the row is not among the `n` best of that arm. `schema`: of the rows without them. `keyed`: as in
    `merge`.
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
        values = np.concatenate([np.empty(0, np.float32), *scores])
        found = found.append_column(name, _nullable(values, np.concatenate(places), rows))
    return found.take(in_rank(_of_arms(found, names), lambda at: pa.concat_tables(ties).take(at), keyed=keyed))


def _of_arms(found: pa.Table, names: tuple[str, str]) -> list[Scores]:
    """Return the distances and the negated scores of `found`, infinite where they are null."""
    distance, score = (found.column(name) for name in names)
    return [column.fill_null(np.inf).to_numpy() for column in (distance, pc.negate(score))]


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


def _ranked(levels: Sequence[Visible], k: int, *, ascending: bool, keyed: bool) -> tuple[Scores, Ids]:
    """Return the scores of all levels in a row, and the places of the best `k` in it, best first."""
    scores = np.concatenate([level.scores for level in levels] or [np.empty(0, np.float32)])

    def ties(at: Ids) -> pa.Table:
        chosen, places = _by_level(levels, at)
        return in_order(pa.concat_tables([candidates.ties(some) for candidates, some in chosen if len(some)]), places)

    return scores, in_rank([scores if ascending else -scores], ties, keyed=keyed, k=k)


def _by_level(levels: Sequence[Visible], order: Ids) -> tuple[list[tuple[Candidates, Ids]], Ids]:
    """Return for each level its candidates and which of them are at the places `order`; and where each of these, level
    by level, stands in `order`.
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


def in_order(rows: pa.Table, places: Ids) -> pa.Table:
    """Return `rows` sorted by their `places` (each once); sorted already, the usual case, costs nothing."""
    return rows if (places[:-1] < places[1:]).all() else rows.take(pa.array(np.argsort(places)))
