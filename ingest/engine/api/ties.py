"""Order rows with equal scores: by key, or without a key by a hash of the returned columns. Pure.

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
from memwal.ingest.engine.api.ordering import first_rows

Scores = npt.NDArray[np.float32]
Places = npt.NDArray[np.int64]


def in_rank(
    scores: Sequence[Scores], ties: Callable[[Places], pa.Table], *, keyed: bool, k: int | None = None
) -> Places:
    """Return the places of the first `k` rows (None: all) by `scores`, the most significant first; NaN comes last.

    `ties(places)`: the key of these rows, or without a key their returned columns; called only if rows tie. `keyed`:
    whether it returns the key.
    """
    order = np.lexsort(scores[::-1]) if len(scores) > 1 else np.argsort(scores[0], kind="stable")
    most = len(order) if k is None else min(k, len(order))
    # tied[n]: whether the row at n equals the previous one. NaN ties with nothing.
    tied = np.zeros(len(order) + 1, dtype=np.bool_)
    tied[1:-1] = True
    for each in scores:
        sorted_scores = each[order]
        tied[1:-1] &= sorted_scores[1:] == sorted_scores[:-1]
    if not tied[: most + 1].any():
        return order[:most]
    # Rows after the k-th that tie with it compete with it; other later rows do not matter.
    last = most + int(np.argmin(tied[most:]))
    at = np.flatnonzero(tied[:last] | tied[1 : last + 1])
    ranks = np.zeros(last, dtype=np.int64)
    ranks[at] = _ranks(ties(order[at]), keyed=keyed)
    order = order[:last]
    by: list[npt.NDArray[Any]] = [ranks, *(each[order] for each in scores[::-1])]
    return order[np.lexsort(by)][:most]


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
