"""`memtable.index_mode`: both modes give the same answers, embedded and through a daemon, however
late the indexer is.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa
import pytest

import memwal
from memwal.ingest.engine.region.core import RegionCore
from memwal.memtable import MemTable
from tests.conftest import WIDTH, OpenSmall, wait_until
from tests.messages import raises
from tests.ways import entered

MODES = ("sync", "async")
TRAIN_ROWS = {"vector": {"type": "ivf_pq", "train_rows": 256}, "body": "fts", "price": "btree"}


class Gate:
    """Blocks the indexers' steps while it is closed; counts the steps that passed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._open, self.waits, self.passed = threading.Event(), threading.Event(), Counter[UUID]()
        self._open.set()
        step = RegionCore.index_step

        def gated(core: RegionCore) -> bool:
            self.waits.set()
            self._open.wait()
            self.passed[core.region] += 1
            return step(core)

        monkeypatch.setattr(RegionCore, "index_step", gated)

    def close(self) -> None:
        self.waits.clear()
        self._open.clear()

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    found = Gate(monkeypatch)
    yield found
    found.open()


@pytest.fixture(params=["embedded", "flight"])
def reached(request: pytest.FixtureRequest, ends: ExitStack) -> Callable[[Any], Any]:
    """Return the table, or a client of a daemon's service in front of it."""
    return lambda table: entered(request.param, table, ends)


def unindexed(table: Any) -> int:
    return sum(region["unindexed_rows"] for region in table.status()["regions"])


def body_of(made: Any, id: int) -> dict[str, Any]:
    """Return a row with a word that no other row has."""
    return {**made.row(id), "body": f"copper word{id}"}


def answers(table: Any, queries: Any) -> dict[str, Any]:
    """Return the answers of every kind of read, independent of the order of equal scores."""
    rows = sorted(table.scan(["id", "name", "price"]).read_all().to_pylist(), key=lambda row: row["id"])
    filtered = sorted(table.scan(["id"], filter="price < 300").read_all()["id"].to_pylist())
    near = [table.search("vector", query, k=5, columns=["id"]) for query in queries]
    matched = sorted(table.match("body", "harbor", k=1000, columns=["id"])["id"].to_pylist())
    return {
        "rows": rows,
        "filtered": filtered,
        "got": sorted(table.get(list(range(0, 900, 7)), ["id", "name"]).to_pylist(), key=lambda row: row["id"]),
        "near": [found["id"].to_pylist() for found in near],
        "distances": [np.round(found["_distance"].to_numpy(), 4).tolist() for found in near],
        "matched": matched,
    }


def test_the_same_sequence_gives_the_same_answers(
    reached: Callable[[Any], Any], tmp_path: Any, made: Any, gate: Gate
) -> None:
    """With sync mode, async mode, and a blocked indexer: puts, deletes, freezes, a flush, and a reopening."""
    queries = np.random.default_rng(5).standard_normal((8, WIDTH)).astype(np.float32)
    seen: dict[str, list[dict[str, Any]]] = {}
    for name in ("sync", "async", "behind"):
        if name == "behind":
            gate.close()
        settings = {
            "commit": {"interval": "0s"},
            "memtable": {"index_mode": "sync" if name == "sync" else "async", "rows_max": 500},
        }
        found = seen[name] = []
        at = str(tmp_path / name)
        table = memwal.open(at, schema=made.schema, key="id", regions=1, indexes=TRAIN_ROWS, settings=settings)
        through = reached(table)
        for step in range(8):
            through.put(made.table(range(step * 90, step * 90 + 180), step), durable=bool(step % 2))
            through.delete(list(range(step * 90, step * 90 + 180, 13)))
            if step == 4:
                table.flush()
            if step in (0, 3, 5, 7):
                found.append(answers(through, queries))
        if name != "behind":
            wait_until(lambda table=table: unindexed(table) == 0)
            found.append(answers(through, queries))
            table.close()
            with memwal.open(at, settings=settings) as again:
                assert answers(again, queries) == found[-1]
        else:
            assert unindexed(table) > 0
            gate.open()
            table.close()
        if len(found) == 5:
            assert found[-1] == found[-2]
    assert seen["sync"] == seen["async"]
    assert seen["behind"] == seen["sync"][:4]


@pytest.mark.parametrize("state", ["sync", "async", "behind"])
def test_a_row_is_found_the_moment_its_put_returns(
    state: str, reached: Callable[[Any], Any], open_small: OpenSmall, made: Any, gate: Gate
) -> None:
    """Searches race puts of several threads; each put's own rows are read at once, by vector and by word."""
    if state == "behind":
        gate.close()
    table = open_small(memtable={"index_mode": "sync" if state == "sync" else "async"}, regions=2)
    through = reached(table)
    through.put([body_of(made, id) for id in range(1000)])
    stop, wrong = threading.Event(), list[Any]()

    def write(first: int) -> None:
        for id in range(first, first + 25):
            wrong.extend(misses(through, body_of(made, id)))

    def read() -> None:
        while not stop.is_set():
            through.search("vector", made.row(3)["vector"], k=20, columns=["id"])
            through.match("body", "copper", k=20, columns=["id"])

    writers = [threading.Thread(target=write, args=(first,)) for first in (10_000, 20_000)]
    reader = threading.Thread(target=read)
    for thread in (reader, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    stop.set()
    reader.join()
    assert wrong == []
    if state == "behind":
        assert (
            unindexed(table)
            == table.status()["regions"][0]["memtable_rows"] + (table.status()["regions"][1]["memtable_rows"])
        )
        gate.open()
    wait_until(lambda: unindexed(table) == 0)


def misses(table: Any, row: dict[str, Any]) -> Iterator[Any]:
    """Put a row and read it at once, then delete it and read again; return the wrong answers."""
    id = row["id"]
    table.put([row], durable=bool(id % 3))
    near = table.search("vector", row["vector"], k=1, columns=["id"])["id"].to_pylist()
    words = table.match("body", f"word{id}", columns=["id"])["id"].to_pylist()
    if near != [id] or words != [id]:
        yield id, near, words
    if id % 5 == 0:
        table.delete([id])
        if table.match("body", f"word{id}").num_rows or id in ids_near(table, row):
            yield id, "deleted"


def ids_near(table: Any, row: dict[str, Any]) -> list[int]:
    found: list[int] = table.search("vector", row["vector"], k=5, columns=["id"])["id"].to_pylist()
    return found


def test_the_indexer_works_only_where_it_has_work_and_ends_at_close(
    open_small: OpenSmall, tmp_path: Any, made: Any, gate: Gate
) -> None:
    settings = {"commit": {"interval": "0s"}}
    with memwal.open(
        tmp_path / "plain", schema=made.schema, key="id", indexes={"price": "btree"}, settings=settings
    ) as table:
        table.put(made.table(range(10)))
        wait_until(lambda: unindexed(table) == 0 and bool(gate.passed))  # of keys
    with open_small(str(tmp_path / "sync"), memtable={"index_mode": "sync"}) as table:
        gate.passed.clear()
        table.put(made.table(range(10)))
    assert not gate.passed
    table = open_small(regions=2)
    gate.close()
    table.put(made.table(range(100)))
    assert gate.waits.wait(60)
    closing = threading.Thread(target=table.close)
    closing.start()
    closing.join(0.3)
    assert closing.is_alive(), "it waits for the step under way"
    gate.open()
    closing.join(60)
    assert not closing.is_alive()
    passed = gate.passed.copy()
    closing.join(0.1)
    assert gate.passed == passed
    with open_small() as again:
        assert again.count() == 100


def test_the_indexer_ends_with_a_region_that_was_fenced(open_small: OpenSmall, made: Any) -> None:
    older = open_small(regions=1)
    older.put(made.table([1]))
    newer = open_small()
    with pytest.raises(memwal.FencedError):
        older.put(made.table([2]))
    newer.put(made.table([3]))
    wait_until(lambda: unindexed(newer) == 0)


@pytest.mark.parametrize("mode", MODES)
def test_a_failing_index_step_is_told_and_harmless(
    mode: str, open_small: OpenSmall, made: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    step, fails = MemTable.index_step, True

    def failing(table: MemTable) -> bool:
        if fails:
            raise MemoryError("no room for an index")
        return step(table)

    monkeypatch.setattr(MemTable, "index_step", failing)
    table = open_small(memtable={"index_mode": mode}, regions=1)
    with caplog.at_level(logging.WARNING, "memwal.region"):
        for id in range(20):
            table.put([body_of(made, id)])
        wait_until(lambda: "generation 1 is not indexed any further" in caplog.text)
    assert "MemoryError: no room for an index" in caplog.text
    assert len(caplog.records) == 1
    assert unindexed(table) == 20
    assert table.match("body", "word7", columns=["id"])["id"].to_pylist() == [7]
    assert ids_near(table, made.row(9))[0] == 9
    fails = False
    table.flush()
    table.put([body_of(made, 20)])
    wait_until(lambda: unindexed(table) == 0)
    table.commit()
    assert table.count(level="committed") == 20
    assert table.match("body", "copper", k=100).num_rows == 21


def test_memtables_freeze_and_are_flushed_while_they_are_indexed(open_small: OpenSmall, made: Any, gate: Gate) -> None:
    """Each generation is frozen, published and dropped while one of its indexing steps is in progress."""
    table = open_small(regions=1)
    for generation in range(3):
        gate.close()
        table.put(made.table(range(generation * 100, generation * 100 + 200), generation))
        assert gate.waits.wait(60)
        table.flush()
        assert not table.status()["regions"][0]["memtable_rows"]
        gate.open()
        wait_until(lambda: unindexed(table) == 0)
    table.put(made.table(range(500, 520)))
    wait_until(lambda: unindexed(table) == 0)
    assert table.count() == 420
    assert ids_near(table, made.row(250, 2))[0] == 250
    table.commit()
    assert table.count(level="committed") == 400


def test_memtables_begin_with_the_model_of_the_base_table(
    open_small: OpenSmall, uri: str, made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is read when the table is opened and after the commit that builds the index; never by the region's own
    thread.
    """
    known: list[tuple[int, list[str]]] = []
    begin = MemTable.__init__

    def noted(table: MemTable, *args: Any, **more: Any) -> None:
        known.append((args[3], sorted(more.get("models") or {})))
        begin(table, *args, **more)

    monkeypatch.setattr(MemTable, "__init__", noted)
    table = open_small(regions=1)
    table.put(made.table(range(600)))
    table.flush()
    assert (2, []) in known
    table.commit()
    table.put(made.table(range(600, 640)))
    table.flush()
    assert known[-1] == (3, ["vector"])
    table.close()
    known.clear()
    with open_small() as again:
        assert (3, ["vector"]) in known
        assert ids_near(again, made.row(17))[0] == 17


def test_a_model_that_cannot_be_read_is_told_and_done_without(
    open_small: OpenSmall, made: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from memwal.flush import BaseTable

    def broken(_: BaseTable) -> Any:
        raise OSError("half of an index")

    monkeypatch.setattr(BaseTable, "vector_models", broken)
    table = open_small(regions=1)
    table.put(made.table(range(600)))
    table.flush()
    with caplog.at_level(logging.WARNING, "memwal.models"):
        assert table.commit().rows_inserted == 600
    assert "cannot read the models of its vector indexes: half of an index" in caplog.text
    table.put(made.table(range(600, 620)))
    assert ids_near(table, made.row(610))[0] == 610


@pytest.mark.parametrize("mode", MODES)
def test_what_waits_is_told(mode: str, open_small: OpenSmall, made: Any, gate: Gate) -> None:
    from memwal.ingest.service.daemon.pages import TableCollector
    from memwal.ingest.service.daemon.tables import OneTable

    if mode == "async":
        gate.close()
    table = open_small(memtable={"index_mode": mode}, regions=1)
    table.put(made.table(range(30)))
    found = {each.name: each.samples[0].value for each in TableCollector(OneTable(table)).collect() if each.samples}
    assert found["memwal_unindexed_rows"] == unindexed(table) == (30 if mode == "async" else 0)


def test_an_unknown_mode_is_refused(uri: str, made: Any) -> None:
    with raises(memwal.Invalid):
        memwal.open(uri, schema=pa.schema(made.schema), key="id", settings={"memtable": {"index_mode": "later"}})
