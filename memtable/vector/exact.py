"""Exact nearest neighbours over rows as they are stored, for columns and metrics without an index.

Costs one pass over the vectors of all rows, about 1 ms per 10,000 of 384 dimensions, and keeps nothing. float32 vectors
are read in place.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import faiss
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from memwal.memtable.arrays import Mask, Positions, Scores, Vectors, best
from memwal.memtable.threads import faiss_single_thread
from memwal.memtable.vector.column import query_vector, usable_vectors


def nearest_exactly(
    chunks: Iterable[pa.FixedSizeListArray],
    column: str,
    vector: npt.ArrayLike,
    metric: str,
    k: int,
    mask: Mask,
    low: float | None = None,
) -> tuple[Positions, Scores]:
    """Return the k rows of `mask` nearest to `vector`, ascending by distance as Lance defines it, ties by row position.

    chunks: the column's rows in order; mask: bool [rows]; low: nearer rows are omitted. Rows without a vector that an
    index could take (null, with NaN or inf, zero under cosine) are not found. Returns (int64 [<=k], float32 [<=k]).
    Raises InvalidRows for a query of another width or with NaN or inf.
    """
    found = [(np.empty(0, np.int64), np.empty(0, np.float32))]
    first, query = 0, None
    for chunk in chunks:
        query = query_vector(vector, column, chunk.type.list_size, metric) if query is None else query
        wanted = mask[first : first + len(chunk)]
        if wanted.any() and k > 0 and (metric != "cosine" or query.any()):
            batch = usable_vectors(chunk, metric)
            rows = np.flatnonzero(wanted & batch.indexed)
            distances = _distances(query, batch.vectors, metric)
            rows = rows if low is None else rows[distances[rows] >= np.float32(low)]
            found.append((first + rows, distances[rows]))
        first += len(chunk)
    rows, scores = (np.concatenate(part) for part in zip(*found, strict=True))
    return best(scores, rows, k)


def _distances(query: Vectors, vectors: Vectors, metric: str) -> Scores:
    """Return the distances of all `vectors` (of unit length under cosine) to `query`: float32 [rows]."""
    rows, width = vectors.shape
    found: Scores = np.empty(rows, dtype=np.float32)
    inner = metric != "l2"
    library: Any = faiss  # faiss' type hints lack these two
    compute = library.fvec_inner_products_ny if inner else library.fvec_L2sqr_ny
    arguments = [faiss.swig_ptr(part) for part in (found, query, np.ascontiguousarray(vectors))]
    with faiss_single_thread():
        compute(*arguments, width, rows)
    return np.float32(1) - found if inner else found
