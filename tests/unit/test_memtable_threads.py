"""One writer with concurrent readers and indexers: every snapshot has whole batches only, and never changes."""

import threading
from functools import partial

import numpy as np
import pyarrow as pa
import pytest

from memwal.memtable import IndexSpec, MemTable, Snapshot, row_schema, tombstones, with_tombstone
from tests.index_modes import memtable_in
from tests.support.together import together

WIDTH = 16
KEYS = 300
BATCH = 50
BATCHES = 120
BASE = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        ("batch", pa.int64()),
        ("body", pa.string()),
        ("vector", pa.list_(pa.float32(), WIDTH)),
    ]
)
ROWS = row_schema(BASE, ["id"])
INDEXES = [
    IndexSpec("vector", "ivf_pq", {"train_rows": 500}),
    IndexSpec("body", "fts"),
    IndexSpec("batch", "btree"),
]


def ids_of(batch: int) -> np.ndarray:
    return (np.arange(BATCH) * 7 + batch * 11) % KEYS


def batch_rows(batch: int) -> pa.Table:
    """Return batch number `batch`: every fourth batch deletes its keys, and the rows of the others hold the number."""
    ids = ids_of(batch)
    if batch % 4 == 3:
        return tombstones(pa.table({"id": ids}), ROWS)
    vectors = np.random.default_rng(batch).standard_normal((BATCH, WIDTH)).astype(np.float32)
    column = pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), WIDTH)
    rows = pa.table({"id": ids, "batch": np.full(BATCH, batch), "body": [f"word{batch % 5}"] * BATCH, "vector": column})
    return with_tombstone(rows, ROWS)


def expected(batches: int) -> dict[int, int]:
    """Return the batch number of each id's live row after the first `batches` batches."""
    state: dict[int, int] = {}
    for batch in range(batches):
        for key in ids_of(batch).tolist():
            if batch % 4 == 3:
                state.pop(key, None)
            else:
                state[key] = batch
    return state


def check(snapshot: Snapshot, query: np.ndarray) -> None:
    """Assert that every read of a snapshot agrees with the batches that it holds."""
    assert snapshot.n % BATCH == 0
    wanted = expected(snapshot.n // BATCH)
    live = snapshot.live()
    rows = snapshot.take(np.flatnonzero(live), ["id", "batch"])
    assert dict(zip(rows["id"].to_pylist(), rows["batch"].to_pylist(), strict=True)) == wanted
    positions = snapshot.lookup(pa.table({"id": np.arange(KEYS)}))
    assert {key for key in range(KEYS) if positions[key] >= 0 and live[positions[key]]} == set(wanted)
    assert snapshot.where("id < 20", live).sum() == sum(key < 20 for key in wanted)
    assert snapshot.where("batch >= 5", live).sum() == sum(batch >= 5 for batch in wanted.values())
    found, distances = snapshot.search("vector", query, 10, live)
    assert len(found) == min(10, len(wanted))
    assert live[found].all()
    assert (np.diff(distances) >= 0).all()
    matched, _ = snapshot.match("body", "word2", KEYS, live)
    assert len(matched) == sum(batch % 5 == 2 for batch in wanted.values())


def read_until(written: threading.Event, table: MemTable, reader: int) -> None:
    """Check snapshots until all batches are written, at least five; at the end, check the kept ones again."""
    query = np.random.default_rng(reader).standard_normal(WIDTH).astype(np.float32)
    kept: list[Snapshot] = []
    checked = 0
    while not written.is_set() or checked < 5:
        snapshot = table.snapshot()
        check(snapshot, query)
        if checked % 3 == 0:
            kept.append(snapshot)
        checked += 1
    for snapshot in kept:
        check(snapshot, query)


def index_until(written: threading.Event, table: MemTable) -> None:
    """Index rows until all are written, then until none waits. Another thread may index at the same time, so only at
    the end no row waits."""
    while not written.is_set():
        table.index_step()
    while table.index_step():
        pass


@pytest.mark.parametrize(("mode", "indexers"), [("sync", 0), ("async", 0), ("async", 2), ("sync", 1)])
def test_readers_of_a_memtable_being_written(mode: str, indexers: int) -> None:
    table, written = memtable_in(mode, ROWS, ["id"], INDEXES, 1), threading.Event()

    def write() -> None:
        try:
            for batch in range(BATCHES):
                table.apply(batch_rows(batch))
                assert table.bytes > 0
            table.freeze()
        finally:
            written.set()

    readers = [partial(read_until, written, table, reader) for reader in range(2)]
    together(write, *readers, *[partial(index_until, written, table)] * indexers)
    assert not indexers or not table.index_step()
    check(table.snapshot(), np.ones(WIDTH, dtype=np.float32))


def test_what_the_writer_put_it_reads_at_once_whatever_indexers_do() -> None:
    table, written = MemTable(ROWS, ["id"], INDEXES, 1), threading.Event()

    def write_and_read() -> None:
        try:
            for batch in range(BATCHES // 2):
                table.apply(batch_rows(batch))
                check(table.snapshot(), np.ones(WIDTH, dtype=np.float32))
        finally:
            written.set()

    together(write_and_read, partial(index_until, written, table))


def test_the_rows_of_a_frozen_memtable_are_indexed_while_they_are_read() -> None:
    table, written = MemTable(ROWS, ["id"], INDEXES, 1), threading.Event()
    for batch in range(BATCHES):
        table.apply(batch_rows(batch))
    table.freeze()
    written.set()
    readers = [partial(read_until, written, table, reader) for reader in range(2)]
    together(*readers, partial(index_until, written, table))
    assert not table.index_step()
