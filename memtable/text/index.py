"""Full-text search of one text column: tantivy in memory.

A put only records its texts. index_step() passes them to tantivy, whose own thread analyses them, and commits after
many texts. A match passes and commits the rest, so that it sees every row put before it.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import tantivy
from tantivy import Query

from memwal.memtable.arrays import Mask, Positions, Scores
from memwal.memtable.index_spec import IndexSpec
from memwal.memtable.text.analysis import analyzer
from memwal.memtable.text.query import Clause, Occur, TextParser, TextQuery
from memwal.memtable.threads import uninterrupted

MAX_SIMILAR = 1024
"""Terms that one fuzzy word stands for, in one index; if there are more, the first in byte order, as in Lance. Lance's
default of 50 would often omit the closest ones: several hundred English words are within two edits of four letters.
"""


class Terms:
    """The distinct terms of an index.

    Thread safety. Immutable; any thread. Cost: 0.1 µs per term of about the word's length, for one edit or two.
    """

    def __init__(self, terms: Sequence[str]) -> None:
        self._terms = pa.array(terms, pa.large_string())
        self._lengths: npt.NDArray[np.int32] = pc.utf8_length(self._terms).to_numpy().astype(np.int32)

    @property
    def bytes(self) -> int:
        """Bytes of the terms and their lengths."""
        return int(self._terms.nbytes + self._lengths.nbytes)

    def similar(self, word: str, edits: int) -> list[str]:
        """Return the terms within `edits` of `word`, in byte order, at most MAX_SIMILAR."""
        near = np.flatnonzero(np.abs(self._lengths - len(word)) <= edits)
        candidates: list[str] = self._terms.take(pa.array(near)).to_pylist()
        if not candidates:
            return []
        within = distances(word, candidates, self._lengths[near], edits) <= edits
        # Python orders strings by code points, which is the order of their UTF-8 bytes.
        return sorted(candidates[at] for at in np.flatnonzero(within))[:MAX_SIMILAR]


def distances(word: str, terms: Sequence[str], lengths: npt.NDArray[np.int32], edits: int) -> npt.NDArray[np.int32]:
    """Return Levenshtein distances (int32 [terms]) up to `edits`, a larger number for terms further away.

    An edit inserts, deletes or replaces one code point; two swapped neighbours are two edits, as in Lance. `lengths`:
    of the terms, in code points, each within `edits` of the word's.

    Computes the rows of the dynamic programme (Wagner and Fischer 1974) for all terms at once, and of each row only the
    diagonals that `edits` allows (Ukkonen 1985).
    """
    wide = len(word) + edits
    letters = np.array(terms, dtype=f"U{wide}").view(np.uint32).reshape(len(terms), wide).T
    far = np.full(len(terms), edits + 1, np.int32)
    # At `edits + shift`: the distance of the first i letters of the word from the first i + shift of each term.
    row = [far if shift < 0 else np.full(len(terms), shift, np.int32) for shift in range(-edits, edits + 1)]
    for i, letter in enumerate(word, 1):
        above, row = [*row, far], []
        for at in range(2 * edits + 1):
            j = i + at - edits
            if j < 1:
                row.append(far if j < 0 else np.full(len(terms), i, np.int32))
                continue
            best = np.minimum(above[at] + (letters[j - 1] != ord(letter)), above[at + 1] + 1)
            row.append(np.minimum(best, row[-1] + 1) if row else best)
    return np.choose(lengths - len(word) + edits, row)


_TEXT, _ROW, _TOKENIZER = "text", "row", "memtable"
_OCCUR = {"should": tantivy.Occur.Should, "must": tantivy.Occur.Must, "must_not": tantivy.Occur.MustNot}
HEAP_BYTES = 15_000_000  # tantivy's minimum for one thread; it starts a segment when it is used up
BLOCK_ROWS = 256
"""Texts passed in one step, which holds the GIL for 1 ms."""
COMMIT_DOCUMENTS = 16_384
"""Texts between two commits of index_step(). A commit takes 3 ms and 2 us per document, and a match waits for the last
one. Texts per second with commits after 1,024, 4,096, 16,384: 40,000, 95,000, 120,000.
"""
# The process grows far more than the finished index, since tantivy frees most of its memory and malloc retains that,
# whatever happens to the writer. The share of each cause was fitted to the resident size of processes with two
# memtables of short, long, repetitive and very varied texts (tests/unit/test_memtable_accounting.py).
WRITER_BYTES = 2_400_000
"""The writer's queue and the stacks of its threads, freed when it ends."""
INDEX_BYTES = 5_000_000
"""Bytes that every index keeps, however small it is."""
SEGMENT_BYTES = 3_800_000
"""Bytes per segment that was begun: the pages and the hash table to build it, in a malloc arena new to its thread."""
MOST_ARENAS = 5
"""Segments after this number reuse the memory of earlier ones."""
COMMIT_BYTES = 14_000
MOST_COMMITS = 1_000
"""Fragments that a commit leaves, from its few documents and from concurrent merges; later commits fill the gaps."""
SEGMENT_TEXT = 2_000_000
SEGMENT_WORDS = 22_000
"""Bytes of text, and distinct words, that use up HEAP_BYTES and therefore begin a segment without a commit."""
BYTES_PER_TEXT_BYTE = {"freq": 1.5, "position": 2.0}
"""Postings while they are built, written and merged."""
BYTES_PER_WORD = 48
"""Bytes per distinct word of a segment: its dictionary entry while it is built, written and merged."""
SAMPLE = 32
"""One text in this many is read for the number of distinct words."""
FETCH_SLACK = 64
SPARSE = 100
MAX_RUNS = 32
"""A mask of one row in SPARSE or fewer, in at most this many runs, becomes part of the query: 0.1 ms a run per 100,000
rows.
"""


class Vocabulary:
    """An estimate of the number of distinct words in each segment, from the words of one text in SAMPLE."""

    def __init__(self) -> None:
        self._before = 0.0
        self._texts_with: dict[str, int] = {}
        self._in_one = self._in_two = 0

    def sample(self, texts: list[str | None]) -> None:
        """Count the words of some texts of the segment."""
        for text in texts:
            for word in set(text.split()) if text else ():
                seen = self._texts_with.get(word, 0)
                self._texts_with[word] = seen + 1
                self._in_one += (seen == 0) - (seen == 1)
                self._in_two += (seen == 1) - (seen == 2)

    def end_segment(self) -> None:
        """Begin another segment, which has a separate dictionary."""
        self._before = self.size
        self._texts_with = {}
        self._in_one = self._in_two = 0

    @property
    def size(self) -> float:
        """Distinct words of all segments.

        The number of words in exactly one sampled text gives the number of new words in the next text (Good-Turing).
        The number of words in exactly two gives how fast that number falls (Chao's estimate of the unseen): the
        extrapolation of species sampling (Chao et al. 2014).
        """
        unseen = (SAMPLE - 1.0) * self._in_one
        if self._in_two:
            drying_up = 2 * self._in_two / self._in_one if self._in_one else math.inf
            unseen = -math.expm1(-(SAMPLE - 1) * drying_up) * self._in_one / drying_up
        return self._before + len(self._texts_with) + unseen


class TextIndex:
    """Texts of one column by row position.

    Thread safety. add() and close_writer() by one writer; neither ever waits. Everything else from any thread: one lock
    guards tantivy's writer.
    Invariants. (1) Null and empty texts are not documents, as in Lance. (2) A document's row never changes. (3) Every
    row added is either in `_waiting` or passed to tantivy, in order.
    Units. Scores are BM25 (k1 = 1.2, b = 0.75), higher is better, statistics over all rows of the index; a prefix
    scores 1.
    """

    def __init__(self, spec: IndexSpec) -> None:
        self.column = spec.column
        self.parser = TextParser(spec)
        self._option = "position" if spec.parameters.get("with_position", False) else "freq"
        builder = tantivy.SchemaBuilder()
        builder.add_text_field(_TEXT, tokenizer_name=_TOKENIZER, index_option=self._option)
        builder.add_integer_field(_ROW, fast=True)
        self._schema = builder.build()
        self._index = tantivy.Index(self._schema)
        self._index.register_tokenizer(_TOKENIZER, analyzer(spec))
        # By default tantivy reloads in another thread after each commit; the committing thread then waits 100 ms for a
        # lock.
        self._index.config_reader("manual")
        self._writer: Any = None
        self._lock = threading.Lock()
        self._waiting: deque[tuple[pa.ChunkedArray, int]] = deque()
        self._uncommitted = 0
        self._closed = self._finished = False
        self._documents = 0
        self._text_bytes = 0
        self._commits = 0
        self._vocabulary = Vocabulary()
        self._terms: tuple[int, Terms] | None = None

    def add(self, texts: pa.ChunkedArray, first: int) -> None:
        """Record the texts of the rows first, first+1, ..."""
        present = len(texts) - texts.null_count
        if not present:
            return
        self._documents += present
        self._text_bytes += texts.nbytes  # with offsets; counting only the characters takes longer than all the rest
        self._waiting.append((texts, first))

    def index_step(self) -> bool:
        """Pass the next block of waiting rows to tantivy, and commit if due. Return False when none waits."""
        return not self._is_idle() and uninterrupted(self._step)

    def _step(self) -> bool:
        with self._lock:
            self._hand_over()
            if self._uncommitted >= COMMIT_DOCUMENTS:
                self._commit()
            self._finish()
            return bool(self._waiting)

    def close_writer(self) -> None:
        """Declare that no add() follows. The index_step() or match that commits the last row ends tantivy's threads."""
        self._closed = True

    def searcher(self) -> Any:
        """Return a fixed view of all documents added so far; later adds do not change its answers."""
        return self._index.searcher() if self._is_idle() else uninterrupted(self._up_to_date)

    def _is_idle(self) -> bool:
        """Return whether every row added so far is committed and all memory of the writer is freed."""
        # In this order: a document counts as uncommitted before it stops waiting.
        return not self._waiting and not self._uncommitted and self._finished == self._closed

    def _up_to_date(self) -> Any:
        with self._lock:
            while self._waiting:
                self._hand_over()
            self._commit()
            self._finish()
            return self._index.searcher()

    def match(self, searcher: Any, query: TextQuery, k: int, mask: Mask) -> tuple[Positions, Scores]:
        """Return the k rows of `mask` that match `query` best, descending by score, ties by row.

        mask: bool [n]. Returns (int64 [<=k], float32 [<=k]); fewer than k only if fewer rows of the mask match. If
        several rows have the k-th score, any of them may be returned.
        """
        documents, allowed = searcher.num_docs, int(np.count_nonzero(mask))
        if not query.clauses or k < 1 or not documents or not allowed:
            return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32)
        built = self._built(searcher, [(clause.occur, clause) for clause in query.clauses], mask)
        limit = k * documents // allowed + FETCH_SLACK
        while True:
            hits = searcher.search(built, limit=min(limit, documents), count=False).hits
            rows, scores = _allowed(searcher, hits, mask)
            if len(rows) >= k or len(hits) < limit:
                order = np.lexsort((rows, -scores))[:k]
                return rows[order], scores[order]
            limit *= 8

    def every(self, searcher: Any, clauses: Sequence[Clause], mask: Mask) -> tuple[Positions, Scores]:
        """Return all rows of `mask` that match any of `clauses` (at least one), in no order, and their scores.

        mask: bool [n]. Returns (int64 [m], float32 [m]).
        """
        if not searcher.num_docs or not mask.any():
            return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32)
        built = self._built(searcher, [("should", clause) for clause in clauses], mask)
        return _allowed(searcher, searcher.search(built, limit=searcher.num_docs, count=False).hits, mask)

    def _built(self, searcher: Any, clauses: Sequence[tuple[Occur, Clause]], mask: Mask) -> Query:
        """Return tantivy's query of some clauses, restricted to the rows of the mask if that is faster."""
        built = self._boolean([(occur, self._clause(searcher, clause)) for occur, clause in clauses])
        few = int(np.count_nonzero(mask)) * SPARSE < searcher.num_docs
        return self._within(built, mask) if few else built

    def _within(self, query: Query, mask: Mask) -> Query:
        """Return `query` restricted to the rows of the mask, if these are few runs."""
        runs = np.flatnonzero(np.diff(mask, prepend=False, append=False)).reshape(-1, 2).tolist()
        if len(runs) > MAX_RUNS:
            return query
        kind = tantivy.FieldType.Integer
        spans = [("should", Query.range_query(self._schema, _ROW, kind, low, end - 1)) for low, end in runs]
        return self._boolean([("must", query), ("must", Query.const_score_query(self._boolean(spans), 0.0))])

    def _clause(self, searcher: Any, clause: Clause) -> Query:
        if clause.kind == "phrase":
            # Lance scores a phrase as its words, wherever in the text they are.
            phrase = Query.phrase_query(self._schema, _TEXT, list(clause.tokens))
            words = [("must", self._term(token)) for _, token in clause.tokens]
            return self._boolean([("must", Query.const_score_query(phrase, 0.0)), *words])
        if clause.kind == "prefix":
            (_, begin), *whole = clause.tokens
            beginning = Query.fuzzy_term_query(self._schema, _TEXT, begin, distance=0, prefix=True)
            parts = [("should", beginning), *(("should", self._term(token)) for _, token in whole)]
            return Query.const_score_query(self._boolean(parts), 1.0)
        if clause.kind == "fuzzy":
            # tantivy's own fuzzy query scores 1; Lance scores each similar term as a word.
            terms = self._terms_of(searcher).similar(clause.text, clause.edits)
            return self._boolean([("should", self._term(term)) for term in terms])
        occur = "should" if clause.kind == "any" else "must"
        return self._boolean([(occur, self._term(token)) for _, token in clause.tokens])

    def _terms_of(self, searcher: Any) -> Terms:
        """Return the terms of a searcher's documents. tantivy lists 1,000 in 1 ms, so the last list is kept."""
        documents, kept = searcher.num_docs, self._terms
        if kept is None or kept[0] != documents:  # documents are only added, so their number identifies the list
            kept = self._terms = documents, Terms([term for term, _ in searcher.terms_with_prefix(_TEXT, "")])
        return kept[1]

    def _term(self, token: str) -> Query:
        return Query.term_query(self._schema, _TEXT, token, self._option)

    def _boolean(self, parts: list[tuple[str, Query]]) -> Query:
        if len(parts) == 1 and parts[0][0] != "must_not":
            return parts[0][1]
        return Query.boolean_query([(_OCCUR[occur], part) for occur, part in parts])

    def _hand_over(self) -> None:
        """Pass the next block of waiting rows to tantivy, if any."""
        if not self._waiting:
            return
        texts, first = self._waiting[0]
        if self._writer is None:
            self._writer = self._index.writer(HEAP_BYTES, 1)
        add, make, schema = self._writer.add_document, tantivy.Document.from_dict, self._schema
        block = _as_strings(texts.slice(0, BLOCK_ROWS))
        self._vocabulary.sample(block[-first % SAMPLE :: SAMPLE])
        done = 0
        try:
            for text in block:  # tantivy takes documents one by one
                if text:
                    add(make({_TEXT: text, _ROW: first + done}, schema))
                    self._uncommitted += 1
                done += 1
        finally:  # even out of memory: a document added twice would be found twice
            if done < len(texts):
                self._waiting[0] = (texts.slice(done), first + done)
            else:
                self._waiting.popleft()

    def _commit(self) -> None:
        if self._uncommitted:
            self._writer.commit()
            self._index.reload()
            self._uncommitted = 0
            self._commits += 1
            self._vocabulary.end_segment()

    def _finish(self) -> None:
        """Commit, once no row waits and none follows, and free what only the writer needs."""
        if not self._finished and self._closed and not self._waiting:
            self._commit()
            writer, self._writer = self._writer, None
            if writer is not None:
                writer.wait_merging_threads()
                self._index.reload()
            self._finished = True

    @property
    def bytes(self) -> int:
        """An estimate from the added texts; tantivy does not report its memory."""
        if not self._documents:
            return 0
        words = self._vocabulary.size
        begun = self._commits + bool(self._waiting or self._uncommitted)
        segments = begun + self._text_bytes / SEGMENT_TEXT + words / SEGMENT_WORDS
        kept = INDEX_BYTES + SEGMENT_BYTES * min(segments, MOST_ARENAS)
        kept += COMMIT_BYTES * min(self._commits, MOST_COMMITS)
        kept += BYTES_PER_TEXT_BYTE[self._option] * self._text_bytes + BYTES_PER_WORD * words
        listed = self._terms
        kept += 0 if listed is None else listed[1].bytes
        return int(kept) + (0 if self._finished else WRITER_BYTES)


def _as_strings(texts: pa.ChunkedArray) -> list[str | None]:
    """Return the texts, with bytes that are not UTF-8 replaced; the ingest side refuses such texts."""
    try:
        found: list[str | None] = texts.to_numpy().tolist()
    except (pa.ArrowException, UnicodeDecodeError):
        raw = texts.cast(pa.large_binary()).to_pylist()
        found = [None if text is None else text.decode(errors="replace") for text in raw]
    return found


def _allowed(searcher: Any, hits: list[tuple[float, Any]], mask: Mask) -> tuple[Positions, Scores]:
    """Return rows and scores of the hits in the mask; rows beyond the mask were put after the snapshot."""
    if not hits:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32)
    scores, addresses = zip(*hits, strict=True)
    rows = np.asarray(searcher.fast_field_values(_ROW, list(addresses)), dtype=np.int64)
    allowed = rows < len(mask)
    allowed[allowed] = mask[rows[allowed]]
    return rows[allowed], np.asarray(scores, dtype=np.float32)[allowed]
