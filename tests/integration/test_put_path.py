"""No per-row Python on the put path: fifty thousand rows cost few more bytecodes than a hundred.

The test counts every bytecode that any thread executes between the call of `put` and its ack: validation, routing, the
WAL, the memtable with its key, B-tree and vector index. Any loop over rows costs several bytecodes per row.

The number of steps that an indexer takes before the ack depends on the operating system's scheduling, so they are not
counted. In "sync" mode the put itself takes all steps, so they count: some three bytecodes per row, in blocks of
rows.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import memwal
from memwal.ingest.engine.region.core import RegionCore

FEW, MANY = 100, 50_000
A_ROW = {"async": 1, "sync": 5}
"""The maximum number of bytecodes per row."""


class Bytecodes:
    """Counts the bytecodes of all threads started after it, except in indexers, while `counting`."""

    def __init__(self) -> None:
        self.counting, self.indexing = False, threading.local()
        self.by_place: Counter[str] = Counter()

    def trace(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        if event == "call" and frame.f_code is RegionCore.index_step.__code__:
            self.indexing.on = True
        indexing = getattr(self.indexing, "on", False)
        if event == "return" and frame.f_code is RegionCore.index_step.__code__:
            self.indexing.on = False
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if self.counting and event == "opcode" and not indexing:
            code = frame.f_code
            self.by_place[f"{code.co_filename}:{code.co_qualname}"] += 1
        return self.trace

    def of(self, call: Callable[[], Any]) -> Counter[str]:
        """Return the bytecodes of one call, by function."""
        self.by_place = Counter()
        previous = sys.gettrace()
        sys.settrace(self.trace)
        self.counting = True
        try:
            call()
        finally:
            self.counting = False
            sys.settrace(previous)
        return self.by_place


@pytest.fixture
def bytecodes() -> Iterator[Bytecodes]:
    """Yield the counter, which covers the threads that the test starts."""
    counter = Bytecodes()
    threading.settrace(counter.trace)
    yield counter
    threading.settrace(None)  # type: ignore[arg-type]


def batch(start: int, count: int, key: str) -> pa.Table:
    """Return `count` rows with keys from `start`."""
    ids = np.arange(start, start + count)
    rng = np.random.default_rng(start)
    columns: dict[str, Any] = {
        "int": pa.array(ids, pa.int64()),
        "text": pa.array([f"key-{n:07d}" for n in ids]),
        "price": pa.array(rng.integers(0, 1000, count)),
        "vector": pa.FixedSizeListArray.from_arrays(pa.array(rng.standard_normal(count * 8).astype(np.float32)), 8),
    }
    names = key.split(",")
    return pa.table({name: columns[name] for name in [*names, "price", "vector"]})


@pytest.mark.parametrize("mode", A_ROW)
@pytest.mark.parametrize("key", ["int", "text", "int,text"])
def test_the_put_path_has_no_loop_over_rows(key: str, mode: str, tmp_path: Path, bytecodes: Bytecodes) -> None:
    settings = {"commit": {"interval": "0s"}, "gc": {"interval": "0s"}, "memtable": {"index_mode": mode}}
    most = A_ROW[mode] * (MANY - FEW)
    indexes = {"vector": "ivf_pq", "price": "btree"}
    schema, names = batch(0, 1, key).schema, key.split(",")
    with memwal.open(tmp_path / "t.lance", schema=schema, key=names, indexes=indexes, settings=settings) as table:
        table.put(batch(0, 5_000, key))  # imports, training of the vector index
        few, many = batch(10_000, FEW, key), batch(20_000, MANY, key)
        of_few = bytecodes.of(lambda: table.put(few))
        of_many = bytecodes.of(lambda: table.put(many))
        grown = (of_many - of_few).most_common(8)
        assert of_many.total() - of_few.total() < most, f"more than {A_ROW[mode]} bytecodes per row: {grown}"
        assert of_few.total() > 500, "the counter should see the put path"
        updates = batch(20_000, MANY, key)
        of_updates = bytecodes.of(lambda: table.put(updates))
        grown = (of_updates - of_few).most_common(8)
        assert of_updates.total() - of_few.total() < most, f"more than {A_ROW[mode]} bytecodes per updated row: {grown}"
        assert table.count() == 5_000 + FEW + MANY


def test_the_counter_sees_a_loop(bytecodes: Bytecodes) -> None:
    rows = list(range(MANY))

    def loop() -> None:
        worker = threading.Thread(target=lambda: [row + 1 for row in rows])
        worker.start()
        worker.join()

    assert bytecodes.of(loop).total() > MANY
