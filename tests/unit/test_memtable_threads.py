"""One writer and several readers at once: every snapshot is a whole number of batches and never changes."""

import threading

import numpy as np
import pyarrow as pa

from memtable import IndexSpec, MemTable, Snapshot, row_schema, tombstones, with_tombstone

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
    """Batch number `batch`: every fourth deletes its keys, all rows of the others carry the number."""
    ids = ids_of(batch)
    if batch % 4 == 3:
        return tombstones(pa.table({"id": ids}), ROWS)
    vectors = np.random.default_rng(batch).standard_normal((BATCH, WIDTH)).astype(np.float32)
    column = pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), WIDTH)
    rows = pa.table({"id": ids, "batch": np.full(BATCH, batch), "body": [f"word{batch % 5}"] * BATCH, "vector": column})
    return with_tombstone(rows, ROWS)


def expected(batches: int) -> dict[int, int]:
    """id -> batch of its live row after so many batches."""
    state: dict[int, int] = {}
    for batch in range(batches):
        for key in ids_of(batch).tolist():
            if batch % 4 == 3:
                state.pop(key, None)
            else:
                state[key] = batch
    return state


def check(snapshot: Snapshot, query: np.ndarray) -> None:
    """Everything a snapshot answers agrees with the batches it holds."""
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


def test_readers_of_a_memtable_being_written() -> None:
    table = MemTable(ROWS, ["id"], INDEXES, 1)
    written = threading.Event()
    failures: list[BaseException] = []
    checked = [0, 0, 0]

    def read(reader: int) -> None:
        query = np.random.default_rng(reader).standard_normal(WIDTH).astype(np.float32)
        kept: list[Snapshot] = []
        try:
            while not written.is_set() or checked[reader] < 5:
                snapshot = table.snapshot()
                check(snapshot, query)
                if checked[reader] % 3 == 0:
                    kept.append(snapshot)
                checked[reader] += 1
            for snapshot in kept:
                check(snapshot, query)
        except BaseException as failure:  # noqa: BLE001 - handed to the test
            failures.append(failure)

    threads = [threading.Thread(target=read, args=(reader,)) for reader in range(len(checked))]
    for thread in threads:
        thread.start()
    for batch in range(BATCHES):
        table.apply(batch_rows(batch))
        assert table.bytes > 0
    table.freeze()
    written.set()
    for thread in threads:
        thread.join()
    assert failures == []
    assert min(checked) >= 5
    check(table.snapshot(), np.ones(WIDTH, dtype=np.float32))
