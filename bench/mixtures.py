"""Any number of 384-d vectors that resemble the 4,000 real ones of the quickstart, and exact search over them.

A generated vector lies between a real one and one of its nearest real neighbours, with noise, at length 1:

    made = unit(w · a + (1 - w) · b + s · |a - b| · n)      w uniform in [0, 1), n a random unit vector, s = NOISE

Generated vectors have the distribution and density of real ones, and no two are equal; searches for random directions,
or among copies, would be too easy. Queries are generated in the same way from a seed of their own, so they are near
existing rows and equal to none.
"""

from __future__ import annotations

from functools import cache

import faiss
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from bench.source_data import SEED, VECTOR_WIDTH, packages

Vectors = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

NOISE = 0.5
NEIGHBOURS = 10
QUERIES = 1 << 20
"""A seed that no rows use."""


@cache
def real() -> Vectors:
    """Return the embeddings of the packages, float32 [4000, 384], of length 1."""
    flat = packages().column("embedding").combine_chunks().flatten().to_numpy()
    return _unit(np.asarray(flat, np.float32).reshape(-1, VECTOR_WIDTH))


def mixed(count: int, seed: int) -> Vectors:
    """Return `count` generated vectors, float32 [count, 384]; equal for equal seeds."""
    rng, vectors, neighbours = np.random.default_rng((SEED, seed)), real(), _neighbours()
    first = rng.integers(0, len(vectors), count)
    second = neighbours[first, rng.integers(0, NEIGHBOURS, count)]
    a, b, weight = vectors[first], vectors[second], rng.random((count, 1), np.float32)
    noise = _unit(rng.standard_normal((count, VECTOR_WIDTH), np.float32))
    apart = np.linalg.norm(a - b, axis=1, keepdims=True)
    return _unit(weight * a + (1 - weight) * b + NOISE * apart * noise)


def queries(count: int) -> Vectors:
    """Return `count` vectors to search for."""
    return mixed(count, QUERIES)


def column(vectors: Vectors) -> pa.FixedSizeListArray:
    """Return vectors as a column of a table."""
    return pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), vectors.shape[1])


def nearest(vectors: Vectors, ids: Ids, query: Vectors, k: int) -> tuple[npt.NDArray[np.float32], Ids]:
    """Return the `k` nearest by exact L2: squared distances and ids, [queries, k], ascending.

    The id is -1 if there are fewer.
    """
    index = faiss.IndexFlatL2(vectors.shape[1])
    index.add(vectors)
    distances, at = index.search(np.ascontiguousarray(query), k)
    return distances, np.where(at >= 0, ids[at], -1)


@cache
def _neighbours() -> Ids:
    """Return the nearest real vectors of each, without itself and its exact copies: int64 [4000, NEIGHBOURS]."""
    distances, at = nearest(real(), np.arange(len(real())), real(), 4 * NEIGHBOURS)
    distances[distances < 1e-6] = np.inf
    order = np.argsort(distances, axis=1, kind="stable")[:, :NEIGHBOURS]
    return np.take_along_axis(at, order, axis=1)


def _unit(vectors: Vectors) -> Vectors:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.asarray(vectors / np.maximum(lengths, 1e-12), np.float32)
