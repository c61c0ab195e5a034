"""IVF-PQ on faiss: which rows may be near a query, at 40 to 70 bytes per row."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import faiss
import numpy as np

from memwal.memtable.arrays import Mask, Positions, Scores, Vectors
from memwal.memtable.threads import faiss_single_thread


@dataclass(frozen=True)
class VectorModel:
    """The model of an IVF-PQ index with the metric of its column's IndexSpec.

    centroids: float32 [lists, width]. codebook: float32 [sub_vectors, 2 ** bits, width / sub_vectors], of the residuals
    to the nearest centroid if `residual`, of the vectors themselves otherwise. Under cosine both are of vectors of unit
    length.
    """

    centroids: Vectors
    codebook: Vectors
    residual: bool = True

    def problem(self, width: int) -> str | None:
        """Return why it cannot quantise vectors of this width; None if it can."""
        centroids, codebook = self.centroids, self.codebook
        if centroids.ndim != 2 or codebook.ndim != 3 or not len(centroids) or codebook.shape[1] < 2:
            return f"has the shapes {centroids.shape} and {codebook.shape}"
        if centroids.shape[1] != width or codebook.shape[0] * codebook.shape[2] != width:
            return f"has the shapes {centroids.shape} and {codebook.shape}, the column is {width} wide"
        if not (np.isfinite(centroids).all() and np.isfinite(codebook).all()):
            return "holds NaN or inf"
        return None


# Lists divide the work of assigning rows, not that of a search, which reads them all: 64 cost it 0.1 ms, 1,000 cost 2.
LISTS = 16
LISTS_MAX = 64
# Codes of 4 bits: faiss compares 32 rows at once with a table of 16 entries held in a register, which is 8 times as
# fast as with codes of 8 bits, and encodes 3 to 7 times as fast. Shorter sub-vectors compensate for the fewer codes.
BITS = 4
CODES = 1 << BITS
SUB_VECTORS_MAX = 128
TRAIN_ROUNDS = 2
POINTS_PER_CODE = 32
SEED = 20_240_229
# Rows fit if the (squared) error of their codes is at most this many times that of the training rows. Rows of other
# topics had 3 times the error and were found nevertheless; rows after equal ones had a million times the error.
MISFIT = 5
FIT_ROWS = 8
# A quantiser is tested on the rows it was trained on. If lengths differ a thousandfold, codes distinguish long vectors
# but not short ones: faiss has one 8-bit scale for all distances.
TRIED_ROWS = 512
TRIED_QUERIES = 32
TRIED_K = 4
TRIED_RECALL = 0.85


class Quantiser:
    """Vectors by row position, coded: 4-bit codes of short sub-vectors, of the residual to one of a few centroids.

    Thread safety. add() from one thread at a time, nearest() from any: one lock, since faiss cannot be read while it
    grows. Training ends before other threads see the object.
    Invariants. Deterministic: fixed seed, one thread.
    `useful`: whether its codes distinguish its training rows.
    """

    def __init__(self, metric: str, width: int, lists: int, residual: bool) -> None:
        # L2 and cosine order unit vectors alike, and L2 residuals quantise better.
        inner = metric == "dot"
        coarse = faiss.IndexFlatIP(width) if inner else faiss.IndexFlatL2(width)
        kind = faiss.METRIC_INNER_PRODUCT if inner else faiss.METRIC_L2
        # Parts of 2 dimensions; of 4, 8, ... to stay within SUB_VECTORS_MAX; of 1 if the width is odd.
        sizes = (size for size in (2, 4, 8, 16, 32) if width % size == 0 and width // size <= SUB_VECTORS_MAX)
        self._index: Any = faiss.IndexIVFPQFastScan(coarse, width, lists, width // next(sizes, 1), BITS, kind)
        self._index.by_residual = residual
        self._index.pq.cp.max_points_per_centroid = POINTS_PER_CODE
        for clustering in (self._index.cp, self._index.pq.cp):
            clustering.seed, clustering.niter, clustering.min_points_per_centroid = SEED, TRAIN_ROUNDS, 1
        self.useful = True
        self._most_missed = 0.0
        self._lock = threading.Lock()

    @staticmethod
    def trained(metric: str, sample: Vectors) -> Quantiser:
        """Train a quantiser on `sample`: 15 ms for 1,024 vectors of 384 numbers."""
        sample = np.resize(sample, (max(CODES, len(sample)), sample.shape[1]))  # faiss needs a vector for each code
        made = Quantiser(metric, sample.shape[1], LISTS, residual=metric != "dot")
        with faiss_single_thread():
            made._index.train(sample)
        made._most_missed = MISFIT * made._missed(sample[:: -(-len(sample) // (8 * FIT_ROWS))])
        made.useful = len(sample) < TRIED_ROWS or made._tried(sample) >= TRIED_RECALL
        return made

    @staticmethod
    def modelled(metric: str, model: VectorModel) -> Quantiser:
        """Create a quantiser with the model's centroids, and its codes cut into shorter sub-vectors of fewer codes.

        The model's codes are the training sample: 256 codes of 16 numbers become 8 times 16 codes of 2, for example.
        """
        centroids = np.ascontiguousarray(model.centroids)
        kept = np.ascontiguousarray(centroids[:: -(-len(centroids) // LISTS_MAX)])
        made = Quantiser(metric, kept.shape[1], len(kept), model.residual)
        with faiss_single_thread():
            made._index.quantizer.add(kept)
            _, nearest = made._index.quantizer.search(centroids, 1)
            sample = np.hstack(list(model.codebook))
            sample = np.resize(sample, (max(CODES, len(sample), len(centroids)), kept.shape[1]))
            if model.residual:  # a row near a dropped centroid is as far from the kept one as that centroid is
                sample = sample + np.resize(centroids - kept[nearest[:, 0]], sample.shape)
            made._index.pq.train(sample)
            made._index.is_trained = True
            made._index.precompute_table()
        made._most_missed = MISFIT * _most(np.einsum("ij,ij->i", sample, sample))
        return made

    def fits(self, vectors: Vectors) -> bool:
        """Return whether codes can distinguish these vectors, judged by a few of them.

        They cannot, for example, if the vectors differ and all training rows were equal.
        """
        return not len(vectors) or self._missed(vectors[:: -(-len(vectors) // FIT_ROWS)]) <= self._most_missed

    def add(self, vectors: Vectors, rows: Positions) -> None:
        """Add vectors float32 [m, width] of the row positions int64 [m]. Readers wait meanwhile."""
        with self._lock, faiss_single_thread():
            self._index.add_with_ids(vectors, rows)

    def nearest(self, query: Vectors, count: int, wanted: Mask) -> Positions:
        """Return the `count` rows of `wanted` nearest to the query by their codes, in no order.

        Returns fewer if `wanted` has fewer, or if distances are beyond float32.
        """
        bits = np.packbits(wanted, bitorder="little")
        # faiss' type hints lack the keywords that its Python layer adds to this class.
        search_parameters: Any = faiss.SearchParametersIVF
        selector = faiss.IDSelectorBitmap(bits.size, faiss.swig_ptr(bits))
        parameters = search_parameters(sel=selector, nprobe=self._index.nlist)
        with self._lock, faiss_single_thread():
            _, found = self._index.search(query[None, :], count, params=parameters)
        near: Positions = found[0][found[0] >= 0]
        return near

    @property
    def bytes(self) -> int:
        """Per row its code and 8-byte number, times 1.5 for lists that double when full; plus the codebooks."""
        index = self._index
        rows = int(1.5 * index.ntotal) * (int(index.code_size) + 8)
        return rows + 4 * int(index.d) * (int(index.nlist) + CODES)

    def _tried(self, sample: Vectors) -> float:
        """Return, for some rows of the sample, the share of their nearest rows that is in the nearest 16th by the
        codes.
        """
        asked = sample[:: len(sample) // TRIED_QUERIES][:TRIED_QUERIES]
        search_parameters: Any = faiss.SearchParametersIVF
        with faiss_single_thread():
            self._index.add(sample)
            everything = search_parameters(nprobe=self._index.nlist)
            _, found = self._index.search(asked, len(sample) // 16, params=everything)
            self._index.reset()
        inner = asked @ sample.T
        exact = -inner
        if self._index.metric_type == faiss.METRIC_L2:
            exact = np.einsum("ij,ij->i", sample, sample) - 2 * inner
        bound = np.partition(exact, TRIED_K - 1, axis=1)[:, TRIED_K - 1 : TRIED_K]
        hits = (np.take_along_axis(exact, np.maximum(found, 0), axis=1) <= bound) & (found >= 0)
        return float(np.minimum(hits.sum(axis=1), TRIED_K).mean() / TRIED_K)

    def _missed(self, vectors: Vectors) -> float:
        """Return the squared distance of the vectors from their decoded codes, without the worst."""
        with faiss_single_thread(), np.errstate(over="ignore", invalid="ignore"):
            apart = self._index.sa_decode(self._index.sa_encode(np.ascontiguousarray(vectors))) - vectors
            squared: Scores = np.einsum("ij,ij->i", apart, apart)
        return _most(squared)


def _most(squared: Scores) -> float:
    """Return the 80th percentile: one vector unlike all others has no effect, two of eight have."""
    return float(np.quantile(squared, 0.8, method="higher"))
