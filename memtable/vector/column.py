"""An Arrow vector column as the matrix of a vector index; refuses vectors that would damage the index.

`nearest_exactly` searches rows as they are stored, for columns and metrics without an index. It costs one pass over the
vectors of all rows, about 1 ms per 10,000 of 384 dimensions, and keeps nothing. float32 vectors are read in place.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import faiss
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from memwal.memtable.arrays import Mask, Positions, Scores, Vectors, best
from memwal.memtable.errors import InvalidRows
from memwal.memtable.index_spec import vector_width
from memwal.memtable.threads import faiss_single_thread

# Largest squared length accepted: the squared distance of two such vectors is at most four times as large and still
# fits float32 (3.4e38). Beyond it every distance would be inf and training would put inf into the centroids.
MAX_SQUARED_LENGTH = 8e37
# Below this a squared length has lost digits to underflow: float32 numbers end at 1e-38, less precise ones at 1e-45.
PRECISE_SQUARED_LENGTH = 1e-30


@dataclass(frozen=True)
class VectorBatch:
    """Vectors of a batch, and which of them are indexed.

    vectors: float32 [rows, width], zeros in rows without a vector to index; indexed: bool [rows], the rows that a
    search may return.
    """

    vectors: Vectors
    indexed: Mask


def read_vectors(column: pa.ChunkedArray, name: str, metric: str) -> VectorBatch:
    """Return the vectors of a batch in the form that the index stores (unit length under cosine).

    Null vectors are not indexed; nor are, under cosine, zero vectors, which have no direction, and those of numbers
    below 1e-23, whose squares are zero in float32. Raises InvalidRows naming the column and the row of the first vector
    that holds a null, NaN or infinite number, or is too long for float32 distances.
    """
    width = vector_width(column.type)
    assert width is not None, "check_indexes lets only vector columns through"
    present = column.is_valid().to_numpy()
    numbers = _numbers(column)
    if numbers.null_count:
        place = int(np.flatnonzero(numbers.is_null().to_numpy(zero_copy_only=False))[0]) // width
        row = int(np.flatnonzero(present)[place])
        raise InvalidRows(
            f"column {name!r}: the vector in row {row} holds a null: fill it or make the vector null",
            column=name,
            row=row,
        )
    vectors = _matrix(numbers, width, present)
    squared = _squared_lengths(vectors)
    refused = ~(squared <= MAX_SQUARED_LENGTH)  # not "squared > ...": NaN must count as refused
    if refused.any():
        row = int(np.flatnonzero(refused)[0])
        raise _refusal(name, row, bool(np.isfinite(vectors[row]).all()))
    return _batch(vectors, present, squared, metric)


def usable_vectors(column: pa.ChunkedArray | pa.Array, metric: str) -> VectorBatch:
    """Do as read_vectors, for rows that are stored already: a vector that it would refuse is not indexed.

    Rows were put without the check while their column had no index of this metric.
    """
    width = vector_width(column.type)
    assert width is not None, "check_indexes lets only vector columns through"
    present = column.is_valid().to_numpy() if isinstance(column, pa.ChunkedArray) else np.asarray(column.is_valid())
    numbers = _numbers(column)
    vectors = _matrix(numbers.fill_null(float("nan")) if numbers.null_count else numbers, width, present)
    squared = _squared_lengths(vectors)
    usable = squared <= MAX_SQUARED_LENGTH
    if not usable.all():
        vectors = np.where(usable[:, None], vectors, np.float32(0))
    return _batch(vectors, present & usable, np.where(usable, squared, np.float32(0)), metric)


def unit_length(vectors: Vectors) -> Vectors:
    """Scale each row to length 1; zero rows stay zero."""
    squared = _squared_lengths(vectors)
    length: Scores = np.sqrt(np.maximum(squared, np.float32(PRECISE_SQUARED_LENGTH)))
    unit: Vectors = vectors * (np.float32(1) / length)[:, None]
    tiny = squared < PRECISE_SQUARED_LENGTH
    if tiny.any():
        unit[tiny] = _unit_length_of_tiny(vectors[tiny])
    return unit


def _unit_length_of_tiny(vectors: Vectors) -> Vectors:
    """Do as unit_length, dividing by the largest number first: the square of a tiny number underflows."""
    largest = np.abs(vectors).max(axis=1, keepdims=True, initial=0.0)
    scaled = vectors / np.where(largest > 0, largest, 1)
    length = np.linalg.norm(scaled, axis=1, keepdims=True)
    return (scaled / np.where(length > 0, length, 1)).astype(np.float32, copy=False)


def _squared_lengths(vectors: Vectors) -> Scores:
    with np.errstate(over="ignore", invalid="ignore"):
        found: Scores = np.einsum("ij,ij->i", vectors, vectors)
    return found


def query_vector(vector: npt.ArrayLike, name: str, width: int, metric: str) -> Vectors:
    """Return a caller's query as float32 [width], of unit length (or zero) under cosine.

    Raises InvalidRows if the width differs or a number is not finite.
    """
    try:
        with np.errstate(over="ignore"):
            query: Vectors = np.asarray(vector, dtype=np.float32, order="C")
    except (TypeError, ValueError):
        raise InvalidRows(f"search of column {name!r}: the query must be {width} numbers", column=name) from None
    if query.shape != (width,):
        raise InvalidRows(
            f"search of column {name!r}: the query has the shape {query.shape}, the column wants ({width},)",
            column=name,
        )
    if not float(np.dot(query.astype(np.float64), query)) <= MAX_SQUARED_LENGTH:
        raise InvalidRows(
            f"search of column {name!r}: the query holds NaN, inf or a number beyond float32: correct it",
            column=name,
        )
    return unit_length(query[None, :])[0] if metric == "cosine" else query


def _numbers(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    """Return all numbers of the vectors that are not null, flat."""
    parts = [chunk.flatten() for chunk in (column.chunks if isinstance(column, pa.ChunkedArray) else [column])]
    return pa.concat_arrays(parts) if parts else pa.array([], column.type.value_type)


def _matrix(numbers: pa.Array, width: int, present: Mask) -> Vectors:
    """Return the vectors as float32 [rows, width], zeros where `present` is false; no copy if they have that form."""
    with np.errstate(over="ignore"):  # a float64 beyond float32 becomes inf, which is never indexed
        vectors: Vectors = numbers.to_numpy(zero_copy_only=False).reshape(-1, width).astype(np.float32, copy=False)
    if len(vectors) == len(present):
        return vectors
    every: Vectors = np.zeros((len(present), width), dtype=np.float32)
    every[present] = vectors
    return every


def _batch(vectors: Vectors, present: Mask, squared: Scores, metric: str) -> VectorBatch:
    if metric != "cosine":
        return VectorBatch(vectors, present)
    return VectorBatch(unit_length(vectors), present & (squared > 0))


def _refusal(name: str, row: int, finite: bool) -> InvalidRows:
    what = "is too long for float32 distances" if finite else "holds NaN, inf or a number too large for float32"
    return InvalidRows(
        f"column {name!r}: the vector in row {row} {what}: correct it or make it null", column=name, row=row
    )


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
