"""The best k rows over all levels: the best visible ones of each, merged by score.

A level above the base is asked among its visible rows only. Of the base nobody knows the hidden rows; it is asked for
more than k, and the keys that newer levels have are dropped. If fewer than k are left, more are fetched, at most k plus
the number of rows above, which is always enough.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Scores = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Candidates:
    """Rows of one level by score, best first.

    `ids`: int64, of a row within its level. `take(positions)`: the wanted columns of some.
    """

    ids: npt.NDArray[np.int64]
    scores: Scores
    take: Callable[[npt.NDArray[np.int64]], pa.Table]


@dataclass(frozen=True, slots=True)
class Visible:
    """The candidates of one level that no newer level hides: `positions` among `candidates`, best first."""

    candidates: Candidates
    positions: npt.NDArray[np.int64]

    @property
    def scores(self) -> Scores:
        """float32[len(positions)], best first."""
        return self.candidates.scores[self.positions]


def best_visible(
    fetch: Callable[[int], tuple[Candidates, pa.Table]], hides: Callable[[pa.Table], Mask], k: int, rows_above: int
) -> Visible:
    """Return the `k` best visible rows of the base, fewer only if it has no more.

    `fetch(n)`: its `n` best and their keys, fewer only if it has fewer. `hides(keys)`: which of them newer levels hide.
    `rows_above`: an upper bound of hidden rows.
    """
    enough = k + rows_above
    wanted = min(enough, 2 * k)
    while True:
        candidates, keys = fetch(wanted)
        visible = np.flatnonzero(~hides(keys)) if rows_above else np.arange(len(candidates.scores))
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
    parts = [concatenate([], schema.append(pa.field(names[0], pa.float32())).append(pa.field(names[1], pa.float32())))]
    for one, other, at, of_other in zip(near, matching, closest, fittest, strict=True):
        first, second = one.positions[at], other.positions[of_other]
        ids, more = one.candidates.ids[first], other.candidates.ids[second]
        _, common, again = np.intersect1d(ids, more, assume_unique=True, return_indices=True)
        alone = np.setdiff1d(np.arange(len(more)), again)
        rows = concatenate([one.candidates.take(first), other.candidates.take(second[alone])], schema)
        distances = _nullable(one.candidates.scores[first], np.arange(len(ids)), rows.num_rows)
        at_rows = np.concatenate([common, np.arange(len(ids), rows.num_rows)])
        scores = _nullable(other.candidates.scores[second[np.concatenate([again, alone])]], at_rows, rows.num_rows)
        for name, values in zip(names, (distances, scores), strict=True):
            rows = rows.append_column(name, values)
        parts.append(rows)
    return pa.concat_tables(parts)


def _nullable(values: Scores, at: npt.NDArray[np.int64], rows: int) -> pa.Array:
    """Return float32[rows] with `values` at the places `at`, null elsewhere."""
    whole, missing = np.zeros(rows, np.float32), np.ones(rows, np.bool_)
    whole[at], missing[at] = values, False
    return pa.array(whole, mask=missing)


def _ranked(levels: Sequence[Visible], k: int, *, ascending: bool) -> tuple[Scores, npt.NDArray[np.int64]]:
    """Return the scores of all levels in a row, and the places of the best `k` in it, best first."""
    scores = np.concatenate([level.scores for level in levels] or [np.empty(0, np.float32)])
    return scores, np.argsort(scores if ascending else -scores, kind="stable")[:k]


def _by_level(levels: Sequence[Visible], order: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
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


def in_order(rows: pa.Table, places: npt.NDArray[np.int64]) -> pa.Table:
    """Return `rows` sorted by their `places` (each once); sorted already, the usual case, costs nothing."""
    return rows if (places[:-1] < places[1:]).all() else rows.take(pa.array(np.argsort(places)))
