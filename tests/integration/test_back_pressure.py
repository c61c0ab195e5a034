"""When ingestion outpaces commits, puts are rejected as busy and wait, and succeed after a commit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import memwal
from memwal import flush, wal
from memwal.ingest.engine.region.state import RegionLevels
from memwal.ingest.settings.load import load
from memwal.ingest.spark.sink.route import RouteTask
from memwal.ingest.spark.sink.send import SendTask
from tests.messages import raises
from tests.opened import open_table
from tests.routed import placed, shuffled
from tests.ways import entered

PENDING = 2


@pytest.fixture
def full(small_config: Callable[..., Path], made: Any) -> Iterator[Any]:
    """A table of one region that commits only on demand, with the maximum number of SSTs waiting."""
    commit = {"interval": "0s", "pending_max": PENDING}
    config = small_config(regions={"count": 1}, commit=commit, wal={"put_timeout": "1s"})
    with open_table(load(config, {}), {}) as table:
        for at in range(PENDING):
            table.put(made.rows([at]))
            table.flush()
        yield table


@pytest.fixture
def client(full: Any, ends: ExitStack) -> Any:
    return entered("flight", full, ends)


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Return an event that is set once a region has rejected a put for lack of room."""
    said, real = threading.Event(), RegionLevels.no_room

    def no_room(levels: RegionLevels, limits: Any) -> memwal.Unavailable:
        said.set()
        return real(levels, limits)

    monkeypatch.setattr(RegionLevels, "no_room", no_room)
    return said


def commit_elsewhere(uri: str) -> None:
    """Commit like `memwal commit` in any process: the writer of the region detects it without a message."""
    assert flush.commit(uri, {}, wal.open_store(uri), clock=wal.SystemClock()).ssts == PENDING


def test_too_many_ssts_that_wait_make_puts_wait_and_then_say_why(full: Any, made: Any) -> None:
    with raises(memwal.Unavailable) as refused:
        full.put(made.rows([7]), token="loader:1")
    assert refused.value.details["reason"] == "busy"
    assert full.count() == PENDING
    full.commit()
    assert full.put(made.rows([7]), token="loader:1").applied
    assert full.count() == PENDING + 1


def test_a_put_that_waits_goes_on_when_somebody_commits(
    full: Any, client: Any, made: Any, uri: str, refused: threading.Event
) -> None:
    """The put has no token: a put rejected as busy was not applied anywhere, so the client may send it again."""
    receipts: list[Any] = []
    putting = threading.Thread(target=lambda: receipts.append(client.put(made.rows(range(10, 20)))))
    putting.start()
    assert refused.wait(60)
    commit_elsewhere(uri)
    putting.join(60)
    assert receipts[0].rows == 10
    assert full.count() == PENDING + 10


def test_a_spark_task_waits_for_a_commit(full: Any, client: Any, made: Any, uri: str, refused: threading.Event) -> None:
    rows = shuffled(RouteTask(uri, ())(iter([placed(made.table(range(50)))])))
    send, receipts = SendTask(client.endpoint, full.base.regions, "query", 0, 120.0), list[Any]()
    sending = threading.Thread(target=lambda: receipts.extend(send(iter([rows]))))
    sending.start()
    assert refused.wait(60)
    commit_elsewhere(uri)
    sending.join(60)
    assert [row["rows"] for batch in receipts for row in batch.to_pylist()] == [50]
    assert full.count() == 50


def test_without_a_limit_nobody_waits(small_config: Callable[..., Path], made: Any) -> None:
    config = small_config(regions={"count": 1}, commit={"interval": "0s", "pending_max": 0})
    with open_table(load(config, {}), {}) as table:
        for at in range(4):
            table.put(made.rows([at]))
            table.flush()
        assert table.count() == 4
