"""SSTs loaded as memtables: with all rows and the requested indexes, and each once, by a cache."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from uuid import UUID

import numpy as np
import pyarrow as pa
import pytest

from memwal import flush, wal
from memwal.ingest.engine.read.sst_cache import Columns, SstCache, SstId, load_sst
from memwal.memtable import IndexSpec, InvalidRows, MemTable, Snapshot, row_schema, with_tombstone
from tests.messages import raises
from tests.support.clock import SeededIds
from tests.support.together import together

BASE = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("text", pa.string())])


NONE: Columns = frozenset()


def loader(rows: int, loads: list[int]) -> Callable[[Columns], MemTable]:
    def load(columns: Columns) -> MemTable:
        loads.append(rows)
        schema = row_schema(BASE, ["id"])
        table = MemTable(schema, ["id"], (), 1)
        table.apply(with_tombstone(pa.table({"id": list(range(rows)), "text": ["x" * 100] * rows}), schema))
        table.freeze()
        return table

    return load


def test_a_flushed_memtable_is_kept_in_place_of_its_sst() -> None:
    cache, loads = SstCache(), list[int]()
    memtable = loader(3, loads)(NONE)

    cache.keep("a", frozenset({"text"}), memtable)
    assert cache.get("a", frozenset({"text"}), loader(5, loads)).n == 3
    assert cache.get("a", NONE, loader(5, loads)).n == 3
    assert loads == [3]

    read = cache.get("b", NONE, loader(4, loads))
    cache.keep("b", NONE, memtable)
    assert cache.get("b", NONE, loader(4, loads)) is read  # one snapshot of an SST for all reads
    assert cache.bytes > 600


def test_the_least_recently_used_goes_first_and_the_newest_always_stays() -> None:
    loads: list[int] = []
    size = loader(1000, [])(NONE).bytes
    cache = SstCache(limit=int(size * 2.5))
    for path in ("a", "b", "a", "c"):
        cache.get(path, NONE, loader(1000, loads))

    cache.get("a", NONE, loader(1000, loads))
    assert len(loads) == 3
    cache.get("b", NONE, loader(1000, loads))
    assert len(loads) == 4
    assert cache.bytes <= size * 2.5

    tiny = SstCache(limit=1)
    tiny.get("a", NONE, loader(1000, loads))
    assert len(tiny) == 1


def test_a_failed_load_is_told_to_everyone_who_waits_and_then_forgotten() -> None:
    cache, loads = SstCache(), list[int]()

    def broken(columns: Columns) -> MemTable:
        raise OSError("storage is away")

    with raises(OSError):
        cache.get("a", NONE, broken)
    assert cache.get("a", NONE, loader(2, loads)).n == 2


def test_an_sst_is_loaded_anew_for_an_index_it_lacks_and_never_for_fewer() -> None:
    cache, indexed = SstCache(), list[set[str]]()

    def load(columns: Columns) -> MemTable:
        indexed.append(set(columns))
        return loader(3, [])(columns)

    for columns in ({"text"}, set[str](), {"text"}, {"vector"}, {"text"}, {"text", "vector"}):
        cache.get("a", frozenset(columns), load)

    assert indexed == [{"text"}, {"text", "vector"}]
    assert len(cache) == 1


def test_an_index_that_cannot_be_built_does_no_lasting_harm() -> None:
    cache, loads = SstCache(), list[int]()
    cache.get("a", NONE, loader(2, loads))

    def broken(columns: Columns) -> MemTable:
        raise OSError("storage is away")

    with raises(OSError):
        cache.get("a", frozenset({"text"}), broken)
    assert cache.get("a", NONE, loader(2, loads)).n == 2
    assert cache.get("a", frozenset({"text"}), loader(2, loads)).n == 2


def test_many_threads_that_ask_for_one_sst_load_it_once() -> None:
    cache, loads, found = SstCache(), list[int](), list[Snapshot]()
    barrier = threading.Barrier(8)

    def ask() -> None:
        barrier.wait()
        found.append(cache.get("a", NONE, loader(500, loads)))

    together(*[ask] * 8)

    assert len(loads) == 1
    assert len({id(snapshot) for snapshot in found}) == 1


def test_what_is_dead_is_dropped_and_what_lives_stays() -> None:
    cache, loads = SstCache(), list[int]()
    region = UUID(int=1)
    ssts = [SstId(1, region, f"0000000{n}_gen_{n}", n) for n in (1, 2, 3)]
    held = [cache.get(sst, NONE, loader(3, loads)) for sst in ssts]

    cache.drop(lambda sst: sst.region == region and sst.generation <= 2)

    assert len(cache) == 1
    assert cache.get(ssts[2], NONE, loader(3, loads)) is held[2]
    assert held[0].n == 3  # a running read may still use it
    assert len(loads) == 3


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
