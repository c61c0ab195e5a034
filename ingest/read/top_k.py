"""The best k rows over all levels: ask each for more than k, drop rows that newer levels hide, merge by score.

Hidden rows are not masked first: that would look up every key of every newer level in each query, while looking up the
candidates costs k. If newer levels hide so many candidates that fewer than k are left, more are fetched, at most k plus
the number of rows above, which is always enough.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Scores = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Candidates:
    """Rows of one level by score, best first.

    `keys()`: exactly the key columns of all candidates. `take(positions)`: the wanted columns of some.
    """

    scores: Scores
    keys: Callable[[], pa.Table]
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
    fetch: Callable[[int], Candidates], hides: Callable[[pa.Table], Mask], k: int, rows_above: int
) -> Visible:
    """Return the `k` best visible candidates of one level, fewer only if the level has no more.

    `fetch(n)`: the level's `n` best, fewer only if it has fewer. `hides(keys)`: which of them newer levels hide.
    `rows_above`: an upper bound of hidden rows.
    """
    enough = k + rows_above
    wanted = min(enough, 2 * k)
    while True:
        candidates = fetch(wanted)
        # Without rows above, nothing is hidden, and keys need not be fetched.
        visible = np.flatnonzero(~hides(candidates.keys())) if rows_above else np.arange(len(candidates.scores))
        if len(visible) >= k or len(candidates.scores) < wanted or wanted == enough:
            return Visible(candidates, visible[:k])
        wanted = min(enough, 4 * wanted)


def merge(levels: Sequence[Visible], k: int, *, ascending: bool, name: str, schema: pa.Schema) -> pa.Table:
    """Return the best `k` rows of all levels with their score in column `name`.

    Of equal scores the earlier level comes first; NaN comes last. `schema`: of the rows without the score.
    """
    scores = np.concatenate([level.scores for level in levels] or [np.empty(0, np.float32)])
    order = np.argsort(scores if ascending else -scores, kind="stable")[:k]
    arrival, parts, first = np.sort(order), [], 0
    for level in levels:
        chosen = arrival[slice(*np.searchsorted(arrival, (first, first + len(level.positions))))] - first
        first += len(level.positions)
        if len(chosen):
            parts.append(level.candidates.take(level.positions[chosen]))
    rows = in_order(concatenate(parts, schema), np.argsort(order))
    field = pa.field(name, pa.float32(), nullable=False)
    return rows.append_column(field, pa.array(scores[order], pa.float32()))


def concatenate(parts: Sequence[pa.Table], schema: pa.Schema) -> pa.Table:
    """Return the rows of all parts with exactly `schema`; only nullability and metadata of the parts may differ."""
    if not parts:
        return schema.empty_table()
    tables = [pa.Table.from_arrays(part.select(schema.names).columns, schema=schema) for part in parts]
    return tables[0] if len(tables) == 1 else pa.concat_tables(tables)


def in_order(rows: pa.Table, places: npt.NDArray[np.int64]) -> pa.Table:
    """Return `rows` sorted by their `places` (each once); sorted already, the usual case, costs nothing."""
    return rows if (places[:-1] < places[1:]).all() else rows.take(pa.array(np.argsort(places)))
