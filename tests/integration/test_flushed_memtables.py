"""Reads after a flush: the memtable stays in memory in place of its SST, up to a limit, until it is committed."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import lance
import pyarrow as pa
import pytest

import memwal
from memwal.ingest.engine.read import reader
from memwal.memtable import MemTable

Open, Made = Callable[..., Any], Any


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Collect the generations of the SSTs that reads load from storage."""
    through, generations = reader.load_sst, list[int]()

    def noted(base: Any, store: Any, region: Any, sst: Any, columns: Any) -> Any:
        generations.append(sst.generation)
        return through(base, store, region, sst, columns)

    monkeypatch.setattr(reader, "load_sst", noted)
    return generations


def changed(table: Any, made: Made) -> None:
    """Put two generations that replace rows of the base and of each other, with repeated keys and deletes in each."""
    table.put(made.table(range(100)))
    table.flush()
    table.commit()
    for version, ids in ((1, range(50, 150)), (2, range(100, 180))):
        table.put(made.table(ids, 10 + version))
        table.put(made.table(ids, version))
        table.delete([ids[0], ids[1]])
        table.flush()


def answers(table: Any, made: Made, level: str) -> list[Any]:
    vector, by_id = made.row(60, 1)["vector"], [("id", "ascending")]
    matched = table.match("body", "harbor copper", 300, columns=["id"], level=level)
    return [
        table.scan(level=level).read_all().sort_by(by_id),
        table.get([1, 50, 99, 100, 101, 102, 160, 999], level=level),
        table.count("price < 500", level=level),
        table.search("vector", vector, 20, level=level),
        sorted(matched["id"].to_pylist()),  # scores count older versions of a row too, as in a memtable
        table.scan(["id"], "price < 300", order_by="id", level=level).read_all(),
    ]


def test_reads_after_a_flush_load_nothing_and_equal_those_of_the_sst(
    open_small: Open, made: Made, loads: list[int]
) -> None:
    table = open_small()
    changed(table, made)
    kept = {level: answers(table, made, level) for level in ("flushed", "latest")}
    assert loads == []
    with memwal.open(table.base.uri, read_only=True) as stored:
        assert answers(stored, made, "flushed") == kept["flushed"] == kept["latest"]
    assert set(loads) == {2, 3}


def test_a_kept_memtable_goes_with_its_commit(
    open_small: Open, made: Made, loads: list[int], wait_until: Callable[..., Any]
) -> None:
    earlier = {id(each): each for each in gc.get_objects() if isinstance(each, MemTable)}  # of tables that still close

    def memtables() -> int:
        gc.collect()
        return sum(isinstance(each, MemTable) and id(each) not in earlier for each in gc.get_objects())

    table = open_small()
    before = memtables()
    changed(table, made)
    wait_until(lambda: memtables() == before + 4)  # two per region
    table.commit()
    assert table.count() == table.count(level="committed") == 176
    wait_until(lambda: memtables() == before)
    assert loads == []


def test_memory_is_bounded(open_small: Open, made: Made, loads: list[int]) -> None:
    table = open_small(flush={"cache_max": "1KiB"})
    changed(table, made)
    before = table.count()
    assert table.scan(["id"]).read_all().num_rows == before == 176
    assert set(loads) == {2, 3}


def test_rows_that_waited_for_their_index_at_the_flush_are_indexed_after_it(
    open_small: Open, made: Made, wait_until: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    step, may, stepped = MemTable.index_step, list[bool](), dict[int, list[bool]]()

    def noted(memtable: MemTable) -> bool:
        stepped.setdefault(id(memtable), []).append(bool(may) and step(memtable))
        return stepped[id(memtable)][-1]

    monkeypatch.setattr(MemTable, "index_step", noted)
    table = open_small(regions=1)
    table.put(made.table(range(300)))
    wait_until(lambda: stepped)
    table.flush()
    (flushed,) = stepped
    may.append(True)
    table.put(made.table(range(300, 301)))  # wakes the thread that indexes
    wait_until(lambda: True in stepped[flushed] and not stepped[flushed][-1])


def test_a_change_of_columns_leaves_kept_memtables_behind(open_small: Open, made: Made, loads: list[int]) -> None:
    table = open_small()
    changed(table, made)
    lance.dataset(table.base.uri).add_columns(pa.field("added", pa.int64()))
    assert table.scan(["id", "added"]).read_all().num_rows == 176
    assert set(loads) == {2, 3}
