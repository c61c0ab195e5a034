"""Nearest neighbours in one vector column: IVF-PQ over the older rows, exact over the rest.

Steps:

 1. A put only records its vectors. index_step() moves them into the quantiser, one block of the oldest rows at a time.
    The quantiser is created from the base table's model or, without one, from a sample of the first rows.
 2. A search takes many more rows than requested from the quantiser, restricted to the caller's mask, and ranks those
    rows and all rows not yet added by their exact distances. Every list is probed, so it returns fewer than k rows only
    if the mask has fewer.
 3. If few rows are candidates, their exact distances are computed at once: that takes no longer than the quantiser.
 4. If the quantiser assigns rows equal codes, because they are far from its training rows, they wait and are searched
    exactly until they are enough to train another quantiser, which takes over when it holds as many rows.
"""

from __future__ import annotations

import threading
from typing import Any, Literal, NamedTuple

import faiss
import numpy as np
import numpy.typing as npt

from memwal.memtable.arrays import GrowableArray, Mask, Positions, Scores, Vectors, best
from memwal.memtable.errors import InvalidRows
from memwal.memtable.index_spec import TRAIN_ROWS, IndexSpec
from memwal.memtable.threads import faiss_single_thread, uninterrupted
from memwal.memtable.vector.column import VectorBatch, query_vector
from memwal.memtable.vector.quantiser import Quantiser, VectorModel

# Up to this many rows are searched exactly: all rows before the quantiser is trained, those of a mask, and those
# outside the quantiser before a search makes a step itself. 8,192 distances of 384 dimensions take 0.6 ms; the
# quantiser needs at least as much.
EXACT_ROWS = 8_192
EXACT_PER_TRAIN_ROW = 8
# Rows that one step moves: 3.6 ms of work at 384 dimensions, while searches wait.
ADD_BLOCK = 512
# Candidates. Of 100,000 x 128 random numbers, the worst case for a quantiser, 400 hold 0.98 of the nearest 10, and
# 1,000 hold 0.995. Ranking 1,000 takes 0.1 to 0.3 ms.
FETCH = 1_000
FETCH_PER_K = 20


Way = Literal["quantiser", "few", "untrained", "filling", "metric", "low", "no index", "text"]
"""How a search finds its rows: by the quantiser, or the reason why it compares every row (too few of them, no trained
quantiser, a quantiser with few of the rows yet, an index of another metric, a lower limit of the distance, no index). A
match: by the text index.
"""


class _Held(NamedTuple):
    """A quantiser that holds the first `added` rows, and the number of rows when it was trained."""

    quantiser: Quantiser | None
    added: int = 0
    trained_on: int = 0


class VectorIndex:
    """Vectors of one column by row position.

    Thread safety. add() by one writer; index_step() and search() from any thread, also during add(). The writer takes
    no lock, so no search delays a put. One thread at a time trains and adds; searches compute exact distances of rows
    that are not added, and never wait for another thread's training.
    Invariants. (1) Deterministic: the same calls, one after another, give the same answers. (2) Every vector held is
    finite (`vector.column.read_vectors`), so training cannot be corrupted.
    Units. Distances as Lance's: squared L2; 1 - cosine; 1 - dot product.
    """

    def __init__(self, spec: IndexSpec, width: int, model: VectorModel | None = None) -> None:
        """Create an empty index. Of the spec's parameters, metric and train_rows apply; the others are for the base
        table's.

        Raises InvalidRows for a model of another width, or with NaN or inf.
        """
        self.column, self.width = spec.column, width
        self.metric: str = spec.parameters.get("metric", "l2")
        self._train_rows = int(spec.parameters.get("train_rows", TRAIN_ROWS))
        self._exact_rows = min(EXACT_ROWS, EXACT_PER_TRAIN_ROW * self._train_rows)
        self._train_at = max(self._exact_rows, self._train_rows)
        self._block = min(ADD_BLOCK, self._train_rows)
        self._vectors = GrowableArray(np.float32, width)
        self._indexed = GrowableArray(np.bool_)
        self._stepping = threading.Lock()
        if model is not None and (problem := model.problem(width)):
            raise InvalidRows(
                f"the model for column {self.column!r} {problem}: train one, or open without", column=self.column
            )
        self._model = model
        self._searched = self._growing = _Held(None)

    def add(self, batch: VectorBatch) -> None:
        """Append the vectors of the next rows."""
        self._vectors.extend(batch.vectors)
        self._indexed.extend(batch.indexed)

    def index_step(self) -> bool:
        """Train a quantiser, or move the next block of rows into it. Return False when neither is due.

        Fewer rows than a block keep waiting, and so do all rows while they are too few to train on. Concurrent calls
        wait for each other.
        """
        few = self._indexed.size < self._growing.added + self._block
        return not few and uninterrupted(self._step)

    def search(self, vector: npt.ArrayLike, k: int, mask: Mask) -> tuple[Positions, Scores]:
        """Return the k rows of `mask` nearest to `vector`, ascending; fewer only if the mask has fewer vectors.

        mask: bool [n]; vector: [width] numbers. Returns (int64 [<=k], float32 [<=k]). Raises InvalidRows for a query of
        another width or with NaN or inf. Under cosine a zero query has no neighbours: no rows, as in Lance.
        """
        query = query_vector(vector, self.column, self.width, self.metric)
        if k < 1 or (self.metric == "cosine" and not query.any()):
            return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32)
        wanted = self._indexed.data[: len(mask)] & mask
        rows = self._candidates(query, k, wanted)
        return best(self._distances(query, rows), rows, k)

    def way(self, k: int, mask: Mask) -> tuple[int, Way]:
        """Return how many rows `search` would compare exactly now, and the reason why not fewer."""
        wanted = self._indexed.data[: len(mask)] & mask
        quantiser, added, _ = self._searched
        inside, every = int(np.count_nonzero(wanted[:added])), int(np.count_nonzero(wanted))
        if every <= self._exact_rows:
            return every, "few"
        if quantiser is None or inside <= self._exact_rows:
            return every, "untrained" if quantiser is None else "filling"
        return min(inside, max(FETCH, FETCH_PER_K * k)) + every - inside, "quantiser"

    def _candidates(self, query: Vectors, k: int, wanted: Mask) -> Positions:
        """Return rows of `wanted` that include the k nearest: the quantiser's candidates, and all rows that it does not
        hold.
        """
        if np.count_nonzero(wanted[self._searched.added :]) > self._exact_rows and not self._stepping.locked():
            self.index_step()  # the owner does not call index_step(), or not often enough
        quantiser, added, _ = self._searched
        inside = wanted[:added]
        count = int(np.count_nonzero(inside))
        if quantiser is None or count <= self._exact_rows:
            return np.flatnonzero(wanted)
        asked = min(count, max(FETCH, FETCH_PER_K * k))
        near = np.unique(quantiser.nearest(query, asked, inside))  # repeats: adding failed and was done again
        if len(near) < asked:  # faiss omits distances beyond its scale, perhaps the nearest ones
            return np.flatnonzero(wanted)
        return np.concatenate([near, len(inside) + np.flatnonzero(wanted[added:])])

    def _distances(self, query: Vectors, rows: Positions) -> Scores:
        """Return exact distances, computed in place: gathering the vectors first takes three times as long."""
        inner = self.metric != "l2"
        library: Any = faiss  # faiss' type hints lack these two
        compute = library.fvec_inner_products_by_idx if inner else library.fvec_L2sqr_by_idx
        found: Scores = np.empty(len(rows), dtype=np.float32)
        # faiss gets bare pointers: this name keeps the array alive when the writer replaces it by a larger one.
        vectors = self._vectors.data
        arguments = [faiss.swig_ptr(part) for part in (found, query, vectors, rows)]
        with faiss_single_thread():
            compute(*arguments, self.width, 1, len(rows))
        return np.float32(1) - found if inner else found

    def _step(self) -> bool:
        with self._stepping:
            (quantiser, added, trained_on), rows = self._growing, self._indexed.size
            end = added + self._block
            if rows < end:
                return False
            if quantiser is None and self._model is not None:
                quantiser = Quantiser.modelled(self.metric, self._model)
                self._growing = _Held(quantiser)
            block = added + np.flatnonzero(self._indexed.data[added:end])
            vectors = self._vectors.data[added:end] if len(block) == self._block else self._vectors.data[block]
            # Its training rows are not tested: else two kinds of rows could each have the other's quantiser discarded.
            if quantiser is None or (added >= trained_on and not quantiser.fits(vectors)):
                return rows - added >= self._train_at and self._train(added, rows)
            quantiser.add(vectors, block)
            self._growing = _Held(quantiser, end, trained_on)
            if end >= self._searched.added:
                self._searched = self._growing
            return True

    def _train(self, added: int, rows: int) -> bool:
        """Train a quantiser on evenly spread rows, half of them from all rows, half from those from `added` on.

        Returns False if too many of these are null, or if no quantiser can distinguish them: they are searched exactly
        until they are twice as many.
        """
        present = np.flatnonzero(self._indexed.data[:rows])
        waiting = present[np.searchsorted(present, added) :]
        if len(waiting) < self._train_at:
            return False
        places = np.linspace(0, 1, self._train_rows, endpoint=False)
        spread = [present[(places[::2] * len(present)).astype(np.int64)]]
        spread += [waiting[(places[1::2] * len(waiting)).astype(np.int64)]]
        sample = self._vectors.data[np.concatenate(spread)]
        quantiser = Quantiser.trained(self.metric, sample)
        if not quantiser.useful:
            self._train_at = 2 * len(waiting)
            return False
        self._growing = _Held(quantiser, 0, rows)
        return True

    @property
    def bytes(self) -> int:
        """Bytes of vectors and flags, of the quantiser and of the one that will take over."""
        held = self._vectors.bytes + self._indexed.bytes
        quantisers = {each.quantiser for each in (self._searched, self._growing)}
        return held + sum(each.bytes for each in quantisers if each is not None)
