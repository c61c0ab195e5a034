"""The order of rows with equal scores: by key, or without a key by a hash of the columns that are returned. Pure.

Every level of a table and every owner uses it. The order depends on the rows alone, so it stays the same when rows are
flushed or committed, and does not depend on which owner answers first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from memwal.flush.base.row_hash import row_hashes
from memwal.ingest.api.ordering import first_rows

Scores = npt.NDArray[np.float32]


def in_rank(
    scores: Sequence[Scores], ties: Callable[[pa.Array], pa.Table], *, keyed: bool, k: int | None = None
) -> pa.Array:
    """Return the positions of the first `k` rows (None: all) by `scores`, the most significant first; NaN comes last.

    `ties(positions)`: the key of these rows, or without a key their returned columns; called only where rows tie.
    `keyed`: whether it returns the key.
    """
    order = np.lexsort(scores[::-1])
    same = np.ones(max(0, len(order) - 1), dtype=np.bool_)
    for each in scores:
        same &= each[order[1:]] == each[order[:-1]]
    tied = np.append(same, False) | np.insert(same, 0, False) if len(order) else np.zeros(0, np.bool_)
    if k is not None:
        # Rows behind the k-th that tie with it compete with it; others behind it do not matter.
        last = k + int(np.argmin(np.append(same[k - 1 :], False))) if 0 < k < len(order) else k
        order, tied = order[:last], tied[:last]
    if tied.any():
        at = order[tied]
        ranks = np.zeros(len(scores[0]), dtype=np.int64)
        ranks[at] = _ranks(ties(pa.array(at)), keyed=keyed)
        sort_keys: list[npt.NDArray[Any]] = [ranks[order], *(each[order] for each in scores[::-1])]
        order = order[np.lexsort(sort_keys)]
    return pa.array(order[:k])


def _ranks(rows: pa.Table, *, keyed: bool) -> npt.NDArray[np.int64]:
    """Return the place of each row in the order of rows that tie."""
    if keyed:
        order = first_rows(rows, [(name, True) for name in rows.column_names], None).to_numpy()
    else:
        columns = enumerate(column.combine_chunks() for column in rows.columns)
        order = np.argsort(row_hashes(columns, rows.num_rows), kind="stable")
    ranks = np.empty(rows.num_rows, dtype=np.int64)
    ranks[order] = np.arange(rows.num_rows)
    return ranks
