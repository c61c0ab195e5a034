"""The trained model of a vector index: coarse centroids and the product quantiser's codebook."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memwal.memtable.arrays import Vectors
from memwal.memtable.errors import InvalidRows


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

    def checked(self, column: str, width: int) -> VectorModel:
        """Return this model. Raises InvalidRows if it is not for vectors of this width, or not finite."""
        problem = self.problem(width)
        if problem:
            raise InvalidRows(f"the model for column {column!r} {problem}: train one, or open without", column=column)
        return self

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
