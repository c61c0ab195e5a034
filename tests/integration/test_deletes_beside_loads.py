"""`delete(filter=…)` beside loads past the log: a loaded row that does not pass stays, whenever the load lands."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pytest

import memwal
from memwal import flush, wal
from memwal.flush import BaseTable
from memwal.flush.commits import load_notes
from memwal.flush.commits.load_notes import has_landed, load_id
from memwal.ingest.engine.region import resolve
from memwal.ingest.engine.region.resolve import Conditions
from memwal.ingest.engine.table.writes import TableWrites
from tests.conftest import wait_until
from tests.load_world import rows_of
from tests.messages import raises

DEAR = "price >= 500"
CLOCK = wal.SystemClock()


def rows(ids: range, price: int) -> list[dict[str, Any]]:
    return [{"id": id, "name": None, "price": price, "body": None, "vector": None} for id in ids]


def prices(table: Any, level: str = "latest") -> dict[int, int]:
    found = table.scan(["id", "price"], level=level).read_all().to_pylist()
    return {row["id"]: row["price"] for row in found}


def begun(uri: str, token: str = "t") -> flush.LoadAttempt:
    return flush.begin_load(wal.open_store(uri), BaseTable.open(uri), load_id(token), CLOCK, wal.SystemIds())


def loaded(table: Any, ids: range, price: int, attempt: flush.LoadAttempt, *, settle: bool = True) -> None:
    """Do steps 4 and 5 of a load, and remove its note."""
    if settle:
        table.flush()
        table.commit()
    base, store = BaseTable.open(table.base.uri), wal.open_store(table.base.uri)
    given = pa.Table.from_pylist(rows(ids, price), base.schema)
    report = flush.load(table.base.uri, {}, store, rows_of(given, ["id"]), "t", attempt, clock=CLOCK)
    assert report.rows_inserted + report.rows_replaced == len(ids)
    attempt.withdraw(store)


@contextmanager
def once_looked(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Make the region wait after its lookup of stored rows. Yield the event that the region sets, and the event that it
    awaits.
    """
    looked, go_on, look_up = threading.Event(), threading.Event(), resolve.look_up

    def waiting(*given: Any, **options: Any) -> Any:
        found = look_up(*given, **options)
        looked.set()
        assert go_on.wait(60)
        return found

    monkeypatch.setattr(resolve, "look_up", waiting)
    try:
        yield looked, go_on
    finally:
        go_on.set()


@pytest.mark.parametrize("owner", ["daemon", "program"])
def test_a_load_that_begins_while_a_region_looks(
    owner: str, open_small: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load requests a flush from a daemon, and the flush waits for the tombstones. It requests none from a
    program that has opened the table.
    """
    if owner == "daemon":
        monkeypatch.setattr(Conditions, "_loads", lambda self: {})
    with open_small(regions=1) as table, ThreadPoolExecutor(2) as pool, once_looked(monkeypatch) as (looked, go_on):
        table.put(rows(range(5), 700))
        table.flush()
        table.commit()
        if owner == "daemon":
            table.put(rows(range(5, 8), 700))
        delete: Future[Any] = pool.submit(table.delete, filter=DEAR)
        assert looked.wait(60)
        attempt = begun(table.base.uri)
        if owner == "daemon":
            load = pool.submit(loaded, table, range(3, 6), 50, attempt)
            go_on.set()
            assert delete.result(60).rows == 8
            load.result(60)
        else:  # all rows were flushed before the load checked
            loaded(table, range(3, 6), 50, attempt, settle=False)
            go_on.set()
            with raises(memwal.Unavailable):
                delete.result(60)
        found = prices(table)
        assert {id: found.get(id) for id in range(3, 6)} == dict.fromkeys(range(3, 6), 50)
        if owner == "daemon":
            assert set(found) == {3, 4, 5}


def test_a_delete_waits_for_a_load_and_goes_on(open_small: Callable[..., Any]) -> None:
    with open_small() as table, ThreadPoolExecutor(1) as pool:
        table.put(rows(range(10), 700))
        attempt = begun(table.base.uri)
        with raises(memwal.Unavailable):
            table.delete(filter=DEAR, timeout=0.2)
        assert len(prices(table)) == 10
        table.delete([9])  # by key: the load may have landed before it
        delete = pool.submit(table.delete, filter=DEAR)
        loaded(table, range(5), 50, attempt)
        assert delete.result(60).rows == 4
        assert prices(table) == dict.fromkeys(range(5), 50)


def test_a_delete_does_not_wait_for_a_load_that_was_killed(
    open_small: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_small() as table:
        table.put(rows(range(10), 700))
        monkeypatch.setattr(load_notes, "LASTS", 0.3)
        attempt = begun(table.base.uri)
        assert table.delete(filter=DEAR, timeout=60).rows == 10
        with pytest.raises(flush.LoadEnded):  # the load was not killed, but stopped
            loaded(table, range(5), 50, attempt)
        monkeypatch.undo()
        loaded(table, range(5), 50, begun(table.base.uri))
        assert has_landed(BaseTable.open(table.base.uri).committed, load_id("t"))
        assert prices(table) == dict.fromkeys(range(5), 50)


def test_a_region_refuses_where_the_wait_did_not_see_the_load(
    open_small: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts, piece = list[flush.LoadAttempt](), TableWrites.piece

    def begins(self: TableWrites, *given: Any, **options: Any) -> Any:
        with monkeypatch.context() as blind:
            blind.setattr(flush, "end_abandoned", lambda *_: attempts.append(begun(table.base.uri)))
            return piece(self, *given, **options)

    with open_small() as table:
        table.put(rows(range(10), 700))
        monkeypatch.setattr(TableWrites, "piece", begins)
        with raises(memwal.Unavailable):
            table.delete(filter=DEAR)
        loaded(table, range(5), 50, attempts[0])
        assert prices(table) == dict.fromkeys(range(5), 50) | dict.fromkeys(range(5, 10), 700)


def test_through_a_daemon_every_loaded_row_that_does_not_pass_stays(
    small_config: Callable[..., Any], serve: Callable[..., Any], cli: Callable[..., Any], tmp_path: Any, uri: str
) -> None:
    """Loads of cheap rows run beside deletes of expensive rows and puts of expensive rows with other keys."""
    config = small_config(commit={"interval": "200ms"})
    _, endpoint = serve(config)
    stop = threading.Event()

    def deletes() -> int:
        number = 0
        with memwal.connect(endpoint) as table:
            while not stop.is_set():
                table.put(rows(range(100, 140), 700))
                try:
                    number += table.delete(filter=DEAR).rows
                except (memwal.Unavailable, memwal.UnknownOutcome) as error:  # a load began after the wait for loads
                    if "call it again when it has ended" not in str(error):
                        raise
        return number

    with ThreadPoolExecutor(1) as pool:
        deleting = pool.submit(deletes)
        try:
            for turn in range(4):
                with memwal.connect(endpoint) as table:
                    table.put(rows(range(20), 900))
                path = tmp_path / f"{turn}.ndjson"
                path.write_text("".join(f'{{"id": {id}, "price": {turn}}}\n' for id in range(20)))
                assert cli("load", config, path).code == 0
                with memwal.connect(endpoint) as table:
                    found = prices(table)
                assert {id: found.get(id) for id in range(20)} == dict.fromkeys(range(20), turn)
        finally:
            stop.set()
        assert deleting.result(60) > 0
    wait_until(lambda: not wal.open_store(uri).list("_mem_wal/loading/"))
