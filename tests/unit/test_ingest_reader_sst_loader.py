"""An SST loaded as a memtable has all its rows by key, and only the requested indexes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from memwal import flush, wal
from memwal.ingest.engine.read.sst_cache import load_sst
from memwal.memtable import IndexSpec, InvalidRows, MemTable, row_schema, with_tombstone
from tests.messages import raises
from tests.support.clock import SeededIds

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("size", pa.int64()),
        pa.field("text", pa.string()),
        pa.field("vec", pa.list_(pa.float32(), 4)),
    ]
)
INDEXES = (IndexSpec("vec", "ivf_pq"), IndexSpec("text", "fts"), IndexSpec("size", "btree"))


@pytest.fixture
def sst(tmp_path: Path) -> tuple[flush.BaseTable, wal.ObjectStore, wal.SsTable]:
    """Return an SST with ten rows, each with a vector, a text and a size."""
    base = flush.BaseTable.create(str(tmp_path / "table"), SCHEMA, ["id"], 1, INDEXES)
    store, rows = wal.open_store(base.uri), row_schema(base.schema, base.key)
    columns = {"id": range(10), "size": range(10), "text": ["font"] * 10, "vec": [[float(n)] * 4 for n in range(10)]}
    table = MemTable(rows, base.key, INDEXES, 1)
    table.apply(with_tombstone(pa.table(columns, schema=base.schema), rows))
    written = flush.write_sst(
        store,
        wal.bucket_region(0),
        table.snapshot(),
        flush.SstFormat.of(base),
        generation=1,
        ids=SeededIds(0),
    )
    return base, store, written


@pytest.mark.parametrize(
    "columns", [set(), {"text"}, {"vec"}, {"text", "vec"}], ids=lambda each: " ".join(sorted(each))
)
def test_exactly_the_indexes_asked_for_are_there(
    sst: tuple[flush.BaseTable, wal.ObjectStore, wal.SsTable], columns: set[str]
) -> None:
    base, store, written = sst
    found = load_sst(base, store, wal.bucket_region(0), written, columns).snapshot()

    assert found.generation == 1
    assert found.take(found.lookup(pa.table({"id": [7]}))).column("size").to_pylist() == [7]
    assert np.flatnonzero(found.where("size > 6", found.live())).tolist() == [7, 8, 9]
    reads = {
        "text": lambda: found.match("text", "fonts", 3, found.live()),
        "vec": lambda: found.search("vec", [9.0] * 4, 3, found.live()),
    }
    for column, read in reads.items():
        if column in columns:
            assert len(read()[0]) == 3
        else:
            with raises(InvalidRows):
                read()
