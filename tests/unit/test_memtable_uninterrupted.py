"""Work that a reader's thread does for all readers stays intact after an interrupt or a failure half-way."""

from __future__ import annotations

import signal
import threading
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from memwal.memtable import IndexSpec
from memwal.memtable.key.code_table import CodeTable
from memwal.memtable.text import index as text_index
from memwal.memtable.text.index import TextIndex
from memwal.memtable.threads import uninterrupted
from memwal.memtable.vector.column import VectorBatch
from memwal.memtable.vector.index import VectorIndex
from memwal.memtable.vector.quantiser import Quantiser
from tests.messages import raises


def test_a_step_runs_to_its_end_though_its_caller_is_interrupted() -> None:
    ended, interrupted, handled = threading.Event(), threading.Event(), threading.Event()

    def raise_once(*_: Any) -> None:
        if not handled.is_set():
            handled.set()
            raise KeyboardInterrupt

    def step() -> None:
        while not handled.wait(0.05):  # again and again: a signal just before the caller waits does not wake it
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        assert interrupted.wait(60)
        ended.set()

    before = signal.signal(signal.SIGINT, raise_once)
    try:
        with pytest.raises(KeyboardInterrupt):
            uninterrupted(step)
        assert not ended.is_set()
        interrupted.set()
        assert ended.wait(60)
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_step_hands_on_what_it_returns_and_raises() -> None:
    def refuse() -> None:
        raise ValueError("refused")

    assert uninterrupted(lambda: 7) == 7
    with raises(ValueError):
        uninterrupted(refuse)


def test_a_hand_over_that_fails_adds_no_document_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    index = TextIndex(IndexSpec("body", "fts"))
    index.add(pa.chunked_array([[f"harbor number {row}" for row in range(300)]]), 0)
    made = text_index.tantivy.Document.from_dict
    count = [0]

    def scarce(*given: Any) -> Any:
        count[0] += 1
        if count[0] == 100:
            raise MemoryError
        return made(*given)

    class Documents:
        from_dict = staticmethod(scarce)

    monkeypatch.setattr(text_index.tantivy, "Document", Documents)
    with pytest.raises(MemoryError):
        index.index_step()
    rows, _ = index.match(index.searcher(), index.parser.parse("harbor"), 400, np.ones(300, dtype=bool))
    assert sorted(rows.tolist()) == list(range(300))


def test_a_block_of_vectors_that_was_added_twice_is_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    index = VectorIndex(IndexSpec("v", "ivf_pq", {"metric": "l2"}), 8)
    vectors = np.random.default_rng(1).standard_normal((9_000, 8)).astype(np.float32)
    index.add(VectorBatch(vectors, np.ones(len(vectors), dtype=bool)))
    add, fails = Quantiser.add, [True]

    def failing(self: Quantiser, *given: Any) -> None:
        add(self, *given)
        if fails.pop() if fails else False:
            raise MemoryError

    monkeypatch.setattr(Quantiser, "add", failing)
    assert index.index_step()  # trains
    with pytest.raises(MemoryError):
        index.index_step()
    while index.index_step():
        pass
    rows, distances = index.search(vectors[0], 700, np.ones(len(vectors), dtype=bool))
    assert len(set(rows.tolist())) == 700
    exact = np.sort(((vectors - vectors[0]) ** 2).sum(axis=1))[:700]
    assert np.allclose(distances, exact, atol=1e-4)


def test_codes_put_again_after_a_failure_do_not_fill_the_table_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second put counts no new codes. If the failed put had not counted them, they would fill the table uncounted,
    and faiss rejects puts into a full table."""
    table, codes = CodeTable(), np.arange(6_000, dtype=np.int64)
    with monkeypatch.context() as broken:
        broken.setattr("memwal.memtable.key.code_table._put", lambda *_: (_ for _ in ()).throw(MemoryError))
        with pytest.raises(MemoryError):
            table.put(codes, codes, 6_000)
    table.put(codes, codes, 0)
    more = np.arange(6_000, 12_000, dtype=np.int64)
    table.put(more, more, 6_000)
    assert (table.find(np.concatenate([codes, more])) == np.arange(12_000)).all()
