"""A match of several text columns with a boost for each: the query, and the rows of a memtable that match it best.

A part of the query counts if any column satisfies it. The score of a row is the sum, over parts and columns, of the
column's boost times the BM25 score of the part in that column. With one column and boost 1 it is `TextIndex`'s.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from memwal.memtable.arrays import Mask, Positions, Scores, best
from memwal.memtable.text.index import TextIndex
from memwal.memtable.text.query import Clause, TextParser, TextQuery, occur_of, parse


@dataclass(frozen=True, slots=True)
class ColumnsQuery:
    """A text to match in some columns.

    `boosts`: the boost of each column, above 0. `parts`: for each part of the text its clause per column (see
    `query.parse`). Invariants. Immutable. Without parts no row matches.
    """

    boosts: Mapping[str, float]
    parts: tuple[Mapping[str, Clause], ...]

    @staticmethod
    def of(text: Any, boosts: Mapping[str, float], parsers: Mapping[str, TextParser]) -> ColumnsQuery:
        """Parse `text` for the columns of `boosts` (at least one). Raises InvalidRows as `TextParser.parse`."""
        return ColumnsQuery(boosts, tuple(parse([parsers[column] for column in boosts], text)))

    @property
    def clauses(self) -> Iterator[Clause]:
        """The clauses of all parts and columns."""
        return (clause for part in self.parts for clause in part.values())

    @property
    def in_lance(self) -> bool:
        """Whether Lance can answer every clause; it has no prefix query, for example."""
        return all(clause.in_lance for clause in self.clauses)

    @property
    def is_fuzzy(self) -> bool:
        """Whether any clause is a fuzzy word."""
        return any(clause.kind == "fuzzy" for clause in self.clauses)


def best_rows(
    query: ColumnsQuery, searched: Mapping[str, tuple[TextIndex, Any]], k: int, mask: Mask
) -> tuple[Positions, Scores]:
    """Return the k rows of `mask` that match `query` best, descending by score, ties by row.

    `searched`: the index of each column and its searcher. mask: bool [n]. Returns (int64 [<=k], float32 [<=k]); fewer
    than k only if fewer rows of the mask match.
    """
    if len(query.boosts) == 1:
        ((column, boost),) = query.boosts.items()
        index, searcher = searched[column]
        own = TextQuery(tuple(part[column] for part in query.parts))
        rows, scores = index.match(searcher, own, k, mask)
        return rows, scores if boost == 1 else scores * np.float32(boost)
    if not query.parts:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32)
    rows, scores = _matching(query, searched, mask)
    rows, nearness = best(-scores, rows, k)
    return rows, -nearness


def _matching(
    query: ColumnsQuery, searched: Mapping[str, tuple[TextIndex, Any]], mask: Mask
) -> tuple[Positions, Scores]:
    """Return every row of `mask` that matches, ascending, and its score.

    Each part is evaluated over all rows of each index: no column alone determines which rows are the best, as another
    one may add to their scores.
    """
    scores = np.zeros(len(mask), np.float32)
    matching, required = np.zeros(len(mask), np.bool_), False
    excluded = np.zeros(len(mask), np.bool_)
    optional: dict[str, list[Clause]] = {}

    def add(part: Mapping[str, list[Clause]], hit: Mask) -> None:
        for column, clauses in part.items():
            index, searcher = searched[column]
            rows, own = index.every(searcher, clauses, mask)
            hit[rows] = True
            scores[rows] += own * np.float32(query.boosts[column])

    for part in query.parts:
        occur = occur_of(part)
        if occur == "should":
            for column, clause in part.items():
                optional.setdefault(column, []).append(clause)
            continue
        hit = excluded if occur == "must_not" else np.zeros(len(mask), np.bool_)
        add({column: [clause] for column, clause in part.items()}, hit)
        if occur == "must":
            matching, required = matching & hit if required else hit, True
    # All optional parts of a column in one search: it does not matter which of them a row satisfies.
    add(optional, np.zeros(len(mask), np.bool_) if required else matching)
    rows = np.flatnonzero(matching & ~excluded)
    return rows, scores[rows]
