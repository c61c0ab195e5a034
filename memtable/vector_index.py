"""Nearest neighbours in one vector column: IVF-PQ over the older rows, exact over the rest.

1. A put only notes its vectors. All indexing is done by searches, and only where one would otherwise compute many
   distances: it then moves one block of the oldest rows into the quantiser. The first to do so trains the quantiser on
   an even sample of `train_rows` vectors.
2. A search asks the quantiser for more rows than wanted, restricted to the caller's mask, and ranks those
   rows and all rows not yet added by their exact distances. Where the probed lists hold too few rows it
   probes more, at the end all of them: a search returns fewer than k rows only where the mask has fewer.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import faiss
import numpy as np
import numpy.typing as npt

from memtable.arrays import GrowableArray, Mask, Positions, Scores, Vectors, best
from memtable.index_spec import TRAIN_ROWS, IndexSpec
from memtable.vector_column import VectorBatch, query_vector

# Rows outside the quantiser for each row to train on, above which a search moves a block in. 8 x 1,024 distances of
# 384 dimensions take 0.5 ms; encoding a row costs as much as computing its distance 200 times.
WAITING_PER_TRAIN_ROW = 8
# What one search moves: 8 ms of work at 384 dimensions. Searches share the work, whatever was put since the last one.
ADD_BLOCK = 512
# A mask with fewer rows in the quantiser than this is cheaper to compute exactly than to look up.
EXACT_ROWS = 4_096
# Over-fetch and probes: recall at 10 on 4,000 real 384-d embeddings (1,024 trained, 16 lists, 48 sub-vectors)
# was 0.997 at 100 rows and 0.999 at 200 with all lists, 0.96 with half of them.
FETCH = 200
FETCH_PER_K = 20
PROBES = 16
ROWS_PER_LIST = 64
TRAIN_ROUNDS = 2
SEED = 20_240_229


class VectorIndex:
    """Vectors of one column by row position.

    Thread safety. add() by one writer; search() from any thread, also during add(): one lock guards the
    quantiser, which faiss does not allow to be read while it grows. The writer takes no lock, so no search
    delays a put. One search at a time trains and adds; others meanwhile compute exactly what is not added.
    Invariants. (1) Deterministic: the same adds and searches, one after another, give the same answers (fixed
    seed, one thread). (2) Every vector held is finite (vector_column.read_vectors), so training cannot be
    poisoned.
    Units. Distances as Lance's: squared L2; 1 - cosine; 1 - dot product.
    """

    def __init__(self, spec: IndexSpec, width: int) -> None:
        parameters = spec.parameters
        self.column, self.width = spec.column, width
        self.metric: str = parameters.get("metric", "l2")
        # A codebook of one bit, the smallest there is, needs two vectors.
        self._train_rows = max(2, int(parameters.get("train_rows", TRAIN_ROWS)))
        self._lists: int | None = parameters.get("num_partitions")
        self._sub_vectors: int = parameters.get("num_sub_vectors") or _sub_vectors(width)
        self._vectors = GrowableArray(np.float32, width)
        self._indexed = GrowableArray(np.bool_)
        self._most_waiting = WAITING_PER_TRAIN_ROW * self._train_rows
        self._indexing = threading.Lock()
        self._lock = threading.Lock()
        self._quantiser: Any = None
        self._added = 0

    def add(self, batch: VectorBatch) -> None:
        """Append the vectors of the next rows."""
        self._vectors.extend(batch.vectors)
        self._indexed.extend(batch.indexed)

    def search(self, vector: npt.ArrayLike, k: int, mask: Mask) -> tuple[Positions, Scores]:
        """The k rows of `mask` nearest to `vector`, ascending; fewer only where the mask has fewer vectors.

        mask: bool [n]; vector: [width] numbers. Returns (int64 [<=k], float32 [<=k]). Raises InvalidRows for
        a query of another width or with NaN or inf. Under cosine a zero query is near nothing: no rows, as in
        Lance.
        """
        query = query_vector(vector, self.column, self.width, self.metric)
        rows = np.flatnonzero(self._indexed.data[: len(mask)] & mask)
        if k < 1 or not len(rows) or (self.metric == "cosine" and not query.any()):
            return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32)
        if len(rows) - int(np.searchsorted(rows, self._added)) > self._most_waiting:
            self._index_block(len(mask))
        rows = self._narrowed(query, k, rows, len(mask))
        return best(self._distances(query, rows), rows, k)

    def _index_block(self, n: int) -> None:
        """Move the oldest waiting rows below n into the quantiser, unless another search is at it."""
        if not self._indexing.acquire(blocking=False):
            return
        try:
            end = min(n, self._added + ADD_BLOCK)
            if end <= self._added:  # the search before this one has added them
                return
            quantiser = self._train(n) if self._quantiser is None else self._quantiser
            rows = self._added + np.flatnonzero(self._indexed.data[self._added : end])
            vectors = self._vectors.data[rows]
            with self._lock, _one_thread():
                quantiser.add_with_ids(vectors, rows)
                self._quantiser, self._added = quantiser, end
        finally:
            self._indexing.release()

    def _narrowed(self, query: Vectors, k: int, rows: Positions, n: int) -> Positions:
        """The candidates among `rows`: those the quantiser names, and all it does not hold yet."""
        with self._lock:
            split = int(np.searchsorted(rows, self._added))
            wanted = max(FETCH, FETCH_PER_K * k)
            if self._quantiser is None or split <= max(EXACT_ROWS, wanted):
                return rows
            allowed = np.zeros(n, dtype=bool)
            allowed[rows[:split]] = True
            near = self._probe(query, wanted, min(k, split), allowed)
        return np.concatenate([near, rows[split:]])

    def _probe(self, query: Vectors, wanted: int, least: int, allowed: Mask) -> Positions:
        """Up to `wanted` allowed rows near the query, at least `least` of them. Requires the lock."""
        asked = query[None, :]
        bits = np.packbits(allowed, bitorder="little")
        selector = faiss.IDSelectorBitmap(bits.size, faiss.swig_ptr(bits))
        # The type hints faiss ships do not know the keywords its Python layer adds to this class.
        search_parameters: Any = faiss.SearchParametersIVF
        lists = self._quantiser.nlist
        probes = min(lists, max(PROBES, 3 * lists // 4))
        while True:
            parameters = search_parameters(sel=selector, nprobe=probes)
            with _one_thread():
                _, found = self._quantiser.search(asked, wanted, params=parameters)
            near: Positions = found[0][found[0] >= 0]
            if len(near) >= least or probes >= lists:
                return near
            probes = min(lists, 2 * probes)

    def _distances(self, query: Vectors, rows: Positions) -> Scores:
        """Exact distances, computed where the vectors lie: gathering them first takes three times as long."""
        inner = self.metric != "l2"
        library: Any = faiss  # the type hints faiss ships leave these two out
        compute = library.fvec_inner_products_by_idx if inner else library.fvec_L2sqr_by_idx
        found: Scores = np.empty(len(rows), dtype=np.float32)
        # faiss gets bare pointers: the name keeps this array alive when the writer replaces it by a larger one.
        vectors = self._vectors.data
        arguments = [faiss.swig_ptr(part) for part in (found, query, vectors, rows)]
        with _one_thread():
            compute(*arguments, self.width, 1, len(rows))
        return np.float32(1) - found if inner else found

    def _train(self, size: int) -> Any:
        present = np.flatnonzero(self._indexed.data[:size])
        sample = present[np.linspace(0, len(present) - 1, self._train_rows).astype(np.int64)]
        count = len(sample)
        lists = min(self._lists or max(1, count // ROWS_PER_LIST), count)
        # faiss needs at least as many vectors as codes; 8 bits are the most it packs into a byte.
        bits = max(1, min(8, count.bit_length() - 1))
        # Unit vectors are ordered alike by L2 and by cosine, and L2 residuals quantise better.
        inner = self.metric == "dot"
        coarse = faiss.IndexFlatIP(self.width) if inner else faiss.IndexFlatL2(self.width)
        metric = faiss.METRIC_INNER_PRODUCT if inner else faiss.METRIC_L2
        quantiser = faiss.IndexIVFPQ(coarse, self.width, lists, self._sub_vectors, bits, metric)
        for clustering in (quantiser.cp, quantiser.pq.cp):
            clustering.seed, clustering.niter, clustering.min_points_per_centroid = SEED, TRAIN_ROUNDS, 1
        with _one_thread():
            quantiser.train(self._vectors.data[sample])
        return quantiser

    @property
    def bytes(self) -> int:
        """Vectors, flags, and per row of the quantiser its code and 8-byte id; the codebooks."""
        held = self._vectors.bytes + self._indexed.bytes
        if self._quantiser is not None:
            quantiser = self._quantiser
            held += int(quantiser.ntotal) * (int(quantiser.code_size) + 8)
            held += 4 * self.width * (int(quantiser.nlist) + int(quantiser.pq.ksub))
        return held


def _sub_vectors(width: int) -> int:
    """Sub-vectors of 8 dimensions where the width allows it, else of the next smaller fitting size."""
    return next(width // size for size in range(8, 0, -1) if width % size == 0)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Run faiss on the calling thread only.

    Training then adds in one order, so it is reproducible, and region writers do not fight over the cores.
    OpenMP keeps this number per calling thread, so nothing outside this block, and no other thread, sees it.
    """
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)
