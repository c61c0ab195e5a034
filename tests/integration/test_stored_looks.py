"""A stored table that is read repeatedly: each look at storage sees all durable rows, with few requests."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lance
import pytest

from memwal import flush, wal
from memwal.ingest.engine.table.garbage import Ages
from memwal.ingest.engine.table.stored import StoredTable
from memwal.ingest.errors import Invalid
from memwal.wal import LocalStore, StoreRefused
from memwal.wal.layout import parse_entry_key
from tests.conftest import OpenSmall
from tests.messages import raises

NOW = Ages(0.0, 0.0, 604_800.0, 0.0)


class Watched(LocalStore):
    """Counts its calls, and calls `before` ahead of each read."""

    def __init__(self, root: str | Path) -> None:
        super().__init__(root)
        self.asked = Counter[str]()
        self.before: Callable[[str], None] = lambda key: None

    def _noted(self, kind: str, key: str) -> None:
        self.asked[kind] += 1
        self.before(key)

    def get(self, key: str) -> bytes | None:
        self._noted("get", key)
        return super().get(key)

    def exists(self, key: str) -> bool:
        self._noted("exists", key)
        return super().exists(key)

    def children(self, prefix: str) -> list[str]:
        self._noted("list", prefix)
        return super().children(prefix)

    def list_some(self, prefix: str, most: int) -> list[str]:
        self._noted("list", prefix)
        return super().list_some(prefix, most)


def stored(uri: str) -> tuple[StoredTable, Watched]:
    store = Watched(uri)
    return StoredTable(flush.BaseTable.open(uri), store), store


def ids(table: Any) -> list[int]:
    found: list[int] = sorted(table.scan(["id"], level="durable").read_all()["id"].to_pylist())
    return found


def test_an_unchanged_look_reads_no_entry_and_lists_nothing(open_small: OpenSmall, made: Any, uri: str) -> None:
    table = open_small(regions=2)
    table.put(made.rows(range(10)))
    reader, store = stored(uri)
    assert ids(reader) == list(range(10))
    for rows in ([], [10]):
        store.asked.clear()
        if rows:
            table.put(made.rows(rows))
        assert ids(reader) == list(range(10 + len(rows)))
        assert store.asked == {"get": 4 + len(rows), "exists": 2}  # three per region, and one for each new entry


def test_a_look_sees_the_flush_commit_and_collection_of_what_it_had_read(
    open_small: OpenSmall, made: Any, uri: str
) -> None:
    """The look also sees entries that it had not read: one reader sees every step, the other one sleeps in between."""
    table = open_small(regions=1)
    table.put(made.rows([0]))
    awake, slept = stored(uri)[0], stored(uri)[0]
    assert ids(awake) == ids(slept) == [0]
    for number in range(1, 4):
        table.put(made.rows([number]))
        assert ids(awake) == list(range(number + 1))
        table.flush()
        assert ids(awake) == list(range(number + 1))
        table.put(made.rows([number], version=number))
        table.flush()
        table.upkeep.collect(NOW)
        assert ids(awake) == list(range(number + 1))
        table.commit()
        assert awake.get([number], ["name"], level="durable")["name"].to_pylist() == [f"row {number} v{number}"]
        table.upkeep.collect(NOW)
    assert len([key for key in wal.open_store(uri).list("_mem_wal/") if parse_entry_key(key)]) == 1
    assert ids(slept) == ids(awake) == [0, 1, 2, 3]


def test_rows_flushed_and_collected_within_a_look_are_seen(open_small: OpenSmall, made: Any, uri: str) -> None:
    """The rows are acknowledged before the look begins, and are flushed and collected before one of its requests."""
    table = open_small(regions=1)
    table.put(made.rows([0]))
    reader, store = stored(uri)
    assert ids(reader) == [0]
    for request in range(1, 4):
        table.put(made.rows([request]))
        left = [request]

        def meanwhile(key: str, left: list[int] = left) -> None:
            left[0] -= 1
            if not left[0]:
                table.flush()
                table.put(made.rows([0]))
                table.upkeep.collect(NOW)

        store.before = meanwhile
        assert ids(reader) == list(range(request + 1)), f"before request {request}"
        assert left[0] <= 0
        store.before = lambda key: None


def test_after_a_failed_look_the_next_one_is_whole(open_small: OpenSmall, made: Any, uri: str) -> None:
    """Whichever request fails, also in the middle of a batch of new entries, no row is lost or doubled."""
    table = open_small(regions=2)
    table.put(made.rows(range(4)))
    reader, store = stored(uri)
    assert ids(reader) == [0, 1, 2, 3]
    for request in range(1, 9):
        new = [4 * request + n for n in range(4)]
        table.put(made.rows(new[:2]))
        table.put(made.rows(new[2:]))
        left = [request]

        def failing(key: str, left: list[int] = left) -> None:
            left[0] -= 1
            if not left[0]:
                raise StoreRefused(f"{key}: no")

        store.before = failing
        with raises(Invalid):
            ids(reader)
        store.before = lambda key: None
        assert ids(reader) == list(range(4 * request + 4))
        assert reader.count(level="durable") == 4 * request + 4


@pytest.mark.parametrize("wal_format", ["lance", "arrow"])
def test_a_resize_is_seen_with_the_rows_of_its_new_regions(
    open_small: OpenSmall, made: Any, uri: str, wal_format: str
) -> None:
    """In arrow format the schema does not show the routing."""
    table = open_small(regions=1, wal={"format": wal_format})
    table.put(made.rows(range(5)))
    reader = stored(uri)[0]
    assert ids(reader) == list(range(5))
    for count, regions in enumerate((4, 2), 1):
        table.flush()
        table.commit()
        assert ids(reader) == list(range(5 * count))  # the known regions have nothing to drain
        table.close()
        store = wal.open_store(uri)
        flush.resize(uri, {}, store, regions, clock=wal.SystemClock(), ids=wal.SystemIds())
        table = open_small(wal={"format": wal_format})
        table.put(made.rows(range(5 * count, 5 * count + 5)))
        assert ids(reader) == ids(stored(uri)[0]) == list(range(5 * count + 5))


def test_a_take_over_and_changed_columns_between_two_looks(open_small: OpenSmall, made: Any, uri: str) -> None:
    table = open_small(regions=2)
    table.put(made.rows(range(5)))
    reader = stored(uri)[0]
    assert ids(reader) == list(range(5))
    successor = open_small(take_over=True)
    successor.put(made.rows([5]))
    assert ids(reader) == list(range(6))
    lance.dataset(uri).add_columns({"grade": "cast(null as int)"})
    successor.put([{**made.row(6), "grade": 7}])
    found = reader.scan(["id", "grade"], level="durable").read_all().sort_by("id").to_pylist()
    assert found == [{"id": id, "grade": 7 if id == 6 else None} for id in range(7)]
    assert ids(reader) == list(range(7))


def test_readers_in_many_threads_see_every_row_acknowledged_before(open_small: OpenSmall, made: Any, uri: str) -> None:
    """Threads share looks, but none that began before their own call."""
    table = open_small(regions=2)
    table.put(made.rows([0]))
    reader, acked, wrong, done = stored(uri)[0], [0], list[str](), threading.Event()

    def look() -> None:
        while not done.is_set():
            before = acked[0]
            found = reader.count(level="durable")
            if found <= before:
                wrong.append(f"{found} rows, though {before + 1} were acknowledged before")

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        for number in range(1, 60):
            table.put(made.rows([number]))
            acked[0] = number
            if number % 20 == 0:
                table.flush()
                table.commit()
                table.upkeep.collect(NOW)
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert wrong == []
    assert ids(reader) == list(range(60))


def test_close_lets_the_rows_of_the_log_go_and_later_reads_read_them_again(
    open_small: OpenSmall, made: Any, uri: str
) -> None:
    table = open_small(regions=1)
    table.put(made.rows([0, 1]))
    reader, store = stored(uri)
    assert ids(reader) == [0, 1]
    reader.close()
    store.asked.clear()
    assert ids(reader) == [0, 1]
    assert store.asked["list"] > 0
