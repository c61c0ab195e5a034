"""Combine the two rankings of a hybrid search, nearest rows and best matches, into one. Pure.

Reciprocal rank fusion (Cormack, Clarke, Büttcher, SIGIR 2009): a row counts weight / (60 + rank) for each ranking that
has it, with ranks from 1 and equal ranks for equal scores. It uses only ranks, because distances and BM25 scores have
no common scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from memwal.ingest.engine.api.arguments import brief, elements
from memwal.ingest.engine.api.ordering import in_rank
from memwal.ingest.errors import Invalid

DISTANCE, SCORE, RELEVANCE = "_distance", "_score", "_relevance_score"
Rerank = Callable[[pa.Table], Any]
_CONSTANT = 60.0
_ROW_ID = "_rowid"
_ARMS = ((DISTANCE, "ascending"), (SCORE, "descending"))


def fused(
    candidates: pa.Table, k: int, weights: tuple[float, float] = (1.0, 1.0), rerank: Rerank | None = None
) -> pa.Table:
    """Return the best `k` of `candidates` with `_relevance_score` (float32, descending) as the last column.

    `candidates`: rows with `_distance` and `_score`, null if a row is not in that ranking. `weights`: of distance and
    score. `rerank`: receives all candidates as fused, best first, and returns a relevance for each, -inf to leave it
    out.
    Raises: Invalid for a rerank that returns something else.
    """
    relevance = np.zeros(candidates.num_rows)
    for (name, order), weight in zip(_ARMS, weights, strict=True):
        values = candidates.column(name)
        ranks = pc.rank(values, sort_keys=order, tiebreaker="min").to_numpy()
        relevance += np.where(values.is_valid().to_numpy(), weight / (_CONSTANT + ranks), 0.0)
    rows = _by_relevance(candidates, relevance)
    if rerank is not None and rows.num_rows:
        answer = rerank(rows)
        try:
            relevance = np.asarray(answer, dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise Invalid(
                f"rerank returned a {type(answer).__name__}: {error}; return a number for each candidate"
            ) from None
        if relevance.shape != (rows.num_rows,) or np.isnan(relevance).any():
            text = f"rerank returned values of shape {relevance.shape} for {rows.num_rows} candidates"
            raise Invalid(f"{text}; return a number for each, none of them NaN")
        rows = _by_relevance(rows, relevance).slice(0, int((relevance > -math.inf).sum()))
    return rows.slice(0, k)


def lancedb_reranker(reranker: Any, text: str) -> Rerank:
    """Return a `rerank` for `hybrid` that uses a reranker of LanceDB (`lancedb.rerankers`).

    `text`: the question that it compares rows with. Rows that it leaves out are left out.
    """

    def rerank(candidates: pa.Table) -> npt.NDArray[np.float64]:
        rows = candidates.drop_columns([RELEVANCE])
        rows = rows.append_column(_ROW_ID, pa.array(np.arange(rows.num_rows), pa.uint64()))
        near, matching = (
            rows.filter(rows.column(name).is_valid()).drop_columns([other]).sort_by([(name, order)])
            for (name, order), (other, _) in zip(_ARMS, reversed(_ARMS), strict=True)
        )
        ranked = reranker.rerank_hybrid(text, near, matching)
        relevance = np.full(rows.num_rows, -math.inf)
        relevance[ranked.column(_ROW_ID).to_numpy()] = ranked.column(RELEVANCE).to_numpy()
        return relevance

    return rerank


def best_of_arms(tables: Sequence[pa.Table], request: Mapping[str, Any], key: Sequence[str]) -> pa.Table:
    """Return the rows among the `n` best (of `request`) by `_distance` or by `_score`, of rows from several owners.

    They have the order of `read.top_k.merge_arms`; equal ones are ordered by `key`.
    """
    candidates = pa.concat_tables(tables)
    ties = candidates.select(list(key)) if key else candidates.drop_columns([DISTANCE, SCORE])
    kept = np.zeros(candidates.num_rows, dtype=np.bool_)
    arms = []
    for name, order in _ARMS:
        values = candidates.column(name)
        signed = values if order == "ascending" else pc.negate(values)
        scores = signed.fill_null(math.nan).to_numpy()
        best = np.zeros(candidates.num_rows, dtype=np.bool_)
        best[in_rank([scores], ties.take, keyed=bool(key), k=request["n"])] = True
        best &= values.is_valid().to_numpy()
        kept |= best
        masked = pc.if_else(pa.array(best), values.combine_chunks(), None)
        candidates = candidates.set_column(candidates.column_names.index(name), candidates.schema.field(name), masked)
        arms.append(np.where(best, scores, np.float32(math.inf)))
    ranked = in_rank(arms, ties.take, keyed=bool(key))
    return candidates.take(ranked[kept[ranked]])


def checked_weights(weights: Any) -> tuple[float, float]:
    """Return the weights of distance and score. Raises: Invalid unless both are at least 0, and one is above 0."""
    try:
        vector, text = (float(each) for each in elements("weights", weights) or ())
    except (TypeError, ValueError, OverflowError):
        vector = text = math.nan
    if not (0 <= vector < math.inf and 0 <= text < math.inf and vector + text > 0):
        raise Invalid(
            f"weights = {brief(weights)}: write two numbers, of the vector and of the text, each 0 or more and not "
            "both 0"
        )
    return vector, text


def _by_relevance(rows: pa.Table, relevance: npt.NDArray[np.float64]) -> pa.Table:
    """Sort by relevance, best first; equal rows by distance, then in the order of the candidates (by key)."""
    rows = rows.drop_columns([RELEVANCE]) if RELEVANCE in rows.column_names else rows
    near = rows.column(DISTANCE).fill_null(math.inf).to_numpy()
    order = np.lexsort((near, -relevance))
    field = pa.field(RELEVANCE, pa.float32(), nullable=False)
    return rows.take(pa.array(order)).append_column(field, pa.array(relevance[order], pa.float32()))
