"""Full-text search of one text column: tantivy in memory.

Documents are handed over at put and committed by the first match that follows: a commit costs tens of
milliseconds, a document microseconds, so puts stay cheap and a match still sees every row put before it.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import tantivy

from memtable.arrays import Mask, Positions, Scores
from memtable.index_spec import IndexSpec
from memtable.text_analysis import analyzer

_TEXT, _ROW, _TOKENIZER = "text", "row", "memtable"
HEAP_BYTES = 15_000_000  # the least tantivy accepts for one thread; it starts a segment when it is used up
# Bytes held per byte of text and per document, measured on package descriptions and on longer prose, rounded
# up.
BYTES_PER_TEXT_BYTE = 2
BYTES_PER_DOCUMENT = 64
FETCH_SLACK = 64


class TextIndex:
    """Texts of one column by row position.

    Thread safety. add() by one writer; searcher() and match() from any thread: one lock guards the index
    writer.
    Invariants. (1) Null and empty texts are not documents, as in Lance. (2) A document's row
    never changes.
    Units. Scores are BM25 (k1 = 1.2, b = 0.75), higher is better, statistics over all rows of the index.
    """

    def __init__(self, spec: IndexSpec) -> None:
        self.column = spec.column
        self.analyzer = analyzer(spec)
        builder = tantivy.SchemaBuilder()
        builder.add_text_field(_TEXT, tokenizer_name=_TOKENIZER, index_option="freq")
        builder.add_integer_field(_ROW, fast=True)
        self._schema = builder.build()
        self._index = tantivy.Index(self._schema)
        self._index.register_tokenizer(_TOKENIZER, self.analyzer)
        self._writer: Any = None
        self._lock = threading.Lock()
        self._uncommitted = False
        self._documents = 0
        self._text_bytes = 0

    def add(self, texts: pa.ChunkedArray, first: int) -> None:
        """Hand over the texts of the rows first, first+1, ..."""
        present = len(texts) - texts.null_count
        if not present:
            return
        with self._lock:
            self._hand_over(texts, first)
            self._uncommitted = True
        self._documents += present
        self._text_bytes += int(pc.sum(pc.binary_length(texts)).as_py() or 0)

    def close_writer(self) -> None:
        """Commit and end tantivy's threads: no add() follows. Called when the memtable freezes."""
        with self._lock:
            self._commit()
            self._writer = None

    def searcher(self) -> Any:
        """A fixed view of all documents added so far; later adds do not change what it answers."""
        with self._lock:
            self._commit()
            return self._index.searcher()

    def match(self, searcher: Any, text: str, k: int, mask: Mask) -> tuple[Positions, Scores]:
        """The k rows of `mask` that match any word of `text` best, descending by score, ties by row position.

        mask: bool [n]. Returns (int64 [<=k], float32 [<=k]); fewer than k only where fewer rows of the mask
        match.
        """
        words = list(dict.fromkeys(self.analyzer.analyze(text)))
        documents = searcher.num_docs
        if not words or k < 1 or not documents:
            return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32)
        terms = [tantivy.Query.term_query(self._schema, _TEXT, word, "freq") for word in words]
        query = tantivy.Query.boolean_query([(tantivy.Occur.Should, term) for term in terms])
        limit = k + FETCH_SLACK
        while True:
            hits = searcher.search(query, limit=min(limit, documents), count=False).hits
            rows, scores = _allowed(searcher, hits, mask)
            if len(rows) >= k or len(hits) < limit:
                order = np.lexsort((rows, -scores))[:k]
                return rows[order], scores[order]
            limit *= 4

    def _hand_over(self, texts: pa.ChunkedArray, first: int) -> None:
        if self._writer is None:
            self._writer = self._index.writer(HEAP_BYTES, 1)
        add = self._writer.add_document
        # tantivy takes documents one by one: the one loop per row on the put path.
        for row, text in enumerate(texts.to_pylist(), start=first):
            if text:
                add(tantivy.Document(text=text, row=row))

    def _commit(self) -> None:
        if self._uncommitted:
            self._writer.commit()
            self._index.reload()
            self._uncommitted = False

    @property
    def bytes(self) -> int:
        """Estimate from the texts and the number of documents; tantivy does not tell what it holds."""
        return self._text_bytes * BYTES_PER_TEXT_BYTE + self._documents * BYTES_PER_DOCUMENT


def _allowed(searcher: Any, hits: list[tuple[float, Any]], mask: Mask) -> tuple[Positions, Scores]:
    """Rows and scores of those hits the mask allows; rows beyond the mask came after the snapshot."""
    if not hits:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32)
    scores, addresses = zip(*hits, strict=True)
    rows = np.asarray(searcher.fast_field_values(_ROW, list(addresses)), dtype=np.int64)
    allowed = rows < len(mask)
    allowed[allowed] = mask[rows[allowed]]
    return rows[allowed], np.asarray(scores, dtype=np.float32)[allowed]
