"""Match text in one version of the base table: with Lance, or with in-memory indexes if Lance cannot answer.

Behaviour of pylance 14.0.2, found by experiment:

* A BooleanQuery may contain others, adds the scores of all that match, and finds the best k of the sum. The boost of
  one column is therefore `boost` of a MatchQuery. A PhraseQuery has no boost but scores as its words: a MatchQuery of
  these words, which every row of the phrase satisfies, adds the missing boost.
* A fuzzy MatchQuery is not analysed, only split like the simple tokenizer does; it receives the finished token. Each
  similar term scores as a separate word. Terms come from the index, so Lance would miss rows that the index does not
  cover yet; those rows are read instead.
* Among the words of one place, `operator=AND` requires any, not all. All ngrams of a text have one place, so a word
  whose ngrams are all required becomes a BooleanQuery of them. 500 ngrams take 60 ms on 100,000 rows of 60 letters.
* A BooleanQuery nests its required queries inside each other. If the index covers no rows yet, 400 of them overflow the
  stack, which ends the process; nested in groups, 1,000 do not.
* A scan of some fragments with a text query answers for the rows of these fragments, with the scores of the whole
  table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import lance
import numpy as np
import pyarrow as pa
from lance.query import BooleanQuery, FullTextOperator, FullTextQuery, MatchQuery, Occur, PhraseQuery

from memwal.ingest.engine.api.fusion import SCORE
from memwal.ingest.engine.read.lance_scans import ROW_ID, awaited, filtered, gathered, taken
from memwal.memtable import IndexSpec
from memwal.memtable.text.columns import ColumnsQuery, best_rows
from memwal.memtable.text.index import MAX_SIMILAR, TextIndex
from memwal.memtable.text.query import Clause, occur_of

ROWS_PER_INDEX = 16_384
"""Rows that are indexed in memory at a time if Lance cannot answer: about 25 MB beside their texts."""
MOST_REQUIRED = 16
"""Maximum number of required queries in one BooleanQuery; more are required in groups."""
_OCCUR = {"should": Occur.SHOULD, "must": Occur.MUST, "must_not": Occur.MUST_NOT}
Fragments = Sequence[lance.LanceFragment]


class BaseMatch:
    """Find the best matching rows of one query in one version of the base table.

    Thread safety. Any thread. Invariants. Every answer is from the version of `dataset`.
    """

    def __init__(
        self,
        dataset: lance.LanceDataset,
        specs: Sequence[IndexSpec],
        query: ColumnsQuery,
        k: int,
        filter: str | None,
        columns: Sequence[str],
    ) -> None:
        """`specs`: the table's indexes, including the fts index of every matched column."""
        self._dataset, self._query, self._k, self._filter, self._columns = dataset, query, k, filter, columns
        self._specs = {spec.column: spec for spec in specs if spec.kind == "fts"}

    def best(self) -> pa.Table:
        """Return the `k` rows that match `query` best and pass `filter`, with `columns` and BM25 `_score`, descending.

        Queries that Lance cannot answer (prefixes, fuzzy words with punctuation) read every row that passes `filter`,
        60,000 to 100,000 per second; fuzzy words read in this way only the rows that an index does not cover yet.
        """
        query = self._query
        if all(occur_of(part) == "must_not" for part in query.parts):  # Lance may return rows with empty texts
            return self._by_scan([])
        if not query.in_lance:
            return self._by_scan()
        if not query.is_fuzzy:
            return self._by_lance()
        covered, others = self._covered(query.boosts)
        if not others:
            return self._by_lance()
        read = self._by_scan(others)
        if not covered:
            return read
        found = self._by_lance(covered)
        rows = pa.concat_tables([found, read.cast(found.schema)])
        return rows.take(pa.array(np.argsort(-rows.column(SCORE).to_numpy(), kind="stable")[: self._k]))

    # ---- inside --------------------------------------------------------------------------------------------------

    def _by_lance(self, fragments: Fragments | None = None) -> pa.Table:
        scanner = self._dataset.scanner(
            columns=[*self._columns, SCORE],
            full_text_query=_for_lance(self._query),
            limit=self._k,
            **filtered(self._filter),
            prefilter=True,
            disable_scoring_autoprojection=True,
            fragments=fragments,
        )
        rows = gathered(scanner)
        unit = _unit(self._query)
        if unit == 1:
            return rows
        at = rows.column_names.index(SCORE)
        scores = rows.column(SCORE).to_numpy() * np.float32(unit)
        return rows.set_column(at, rows.schema.field(SCORE), pa.chunked_array([scores]))

    def _by_scan(self, fragments: Fragments | None = None) -> pa.Table:
        """Match with the memtable's text indexes; word scores use the statistics of ROWS_PER_INDEX rows.

        Reads only the texts of every row, and `columns` of the best rows.
        """
        query, k = self._query, self._k
        options = {**filtered(self._filter), "batch_size": ROWS_PER_INDEX, "fragments": fragments}
        scanner = self._dataset.scanner(columns=list(query.boosts), with_row_id=True, **options)
        ids, scores = np.empty(0, np.uint64), np.empty(0, np.float32)
        for batch in awaited(scanner):
            searched = {}
            for column in query.boosts:
                index = TextIndex(self._specs[column])
                index.add(pa.chunked_array([batch.column(column)]), 0)
                index.close_writer()
                searched[column] = index, index.searcher()
            at, found = best_rows(query, searched, k, np.ones(batch.num_rows, dtype=np.bool_))
            ids = np.concatenate([ids, batch.column(ROW_ID).to_numpy()[at]])
            scores = np.concatenate([scores, found])
            order = np.argsort(-scores, kind="stable")[:k]
            ids, scores = ids[order], scores[order]
        rows = taken(self._dataset, ids.tolist(), self._columns)
        return rows.append_column(pa.field(SCORE, pa.float32()), pa.chunked_array([scores]))

    def _covered(self, columns: Mapping[str, float]) -> tuple[Fragments, Fragments]:
        """Return the fragments that the indexes of all `columns` cover, and the other fragments."""
        indexes = {index.name: index for index in self._dataset.describe_indices()}
        fragments = self._dataset.get_fragments()
        numbers = {fragment.fragment_id for fragment in fragments}
        for column in columns:
            index = indexes.get(self._specs[column].name)
            segments = () if index is None else index.segments
            numbers &= {number for segment in segments for number in segment.fragment_ids}
        covered = [fragment for fragment in fragments if fragment.fragment_id in numbers]
        return covered, [fragment for fragment in fragments if fragment.fragment_id not in numbers]


def _unit(query: ColumnsQuery) -> float:
    """Return the smallest boost. Lance receives multiples of it, so that no phrase needs a boost below 1."""
    return min(query.boosts.values())


def _for_lance(query: ColumnsQuery) -> FullTextQuery:
    """Convert a query to Lance's form, with scores in units of its smallest boost; Lance produces the same tokens."""
    parts: list[tuple[Occur, FullTextQuery]] = []
    required: list[FullTextQuery] = []
    boosts = {column: boost / _unit(query) for column, boost in query.boosts.items()}
    for part in query.parts:
        columns = [_clause_for_lance(clause, column, boosts[column]) for column, clause in part.items()]
        occur = occur_of(part)
        if occur == "must":
            either = [(Occur.SHOULD, column) for column in columns]
            required.append(columns[0] if len(columns) == 1 else BooleanQuery(either))
        else:
            parts.extend((_OCCUR[occur], column) for column in columns)
    parts = [*((Occur.MUST, group) for group in _grouped(required)), *parts]
    if not parts:
        return MatchQuery("", next(iter(query.boosts)))
    return parts[0][1] if len(parts) == 1 else BooleanQuery(parts)


def _grouped(required: list[FullTextQuery]) -> list[FullTextQuery]:
    """Return at most `MOST_REQUIRED` queries that require all of `required`."""
    while len(required) > MOST_REQUIRED:
        groups = [required[at : at + MOST_REQUIRED] for at in range(0, len(required), MOST_REQUIRED)]
        required = [BooleanQuery([(Occur.MUST, query) for query in group]) for group in groups]
    return required


def _clause_for_lance(clause: Clause, column: str, boost: float) -> FullTextQuery:
    """Convert a clause. `boost`: at least 1."""
    if clause.kind == "fuzzy":
        return MatchQuery(clause.text, column, boost=boost, fuzziness=clause.edits, max_expansions=MAX_SIMILAR)
    if clause.kind == "phrase":
        phrase = PhraseQuery(clause.text, column)
        if boost == 1:
            return phrase
        words = MatchQuery(clause.text, column, boost=boost - 1, operator=FullTextOperator.AND)
        return BooleanQuery([(Occur.MUST, phrase), (Occur.MUST, words)])
    if clause.ngrams:
        ngrams: list[FullTextQuery] = [MatchQuery(ngram, column, boost=boost) for ngram in clause.ngrams]
        return ngrams[0] if len(ngrams) == 1 else BooleanQuery([(Occur.MUST, group) for group in _grouped(ngrams)])
    every = FullTextOperator.OR if clause.kind == "any" else FullTextOperator.AND
    return MatchQuery(clause.text, column, boost=boost, operator=every)
