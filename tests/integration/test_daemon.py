"""`memwal serve` as a process: it serves, is killed, drains, is replaced, and ends with its parent as a child."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import UUID

import psutil
import pytest

import memwal
from tests.support.rows import names


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_daemon_told_to_stop_drains_and_exits_0(
    number: signal.Signals,
    small_config: Callable[..., Path],
    serve: Callable[..., Any],
    made: Any,
    wait_until: Callable[..., Any],
) -> None:
    config = small_config()
    running, endpoint = serve(config)
    acked: set[int] = set()
    problems: list[str] = []

    def write(first: int) -> None:
        table = memwal.connect(endpoint)
        for id in range(first, first + 10_000):
            try:
                table.put(made.rows([id]))
            except (memwal.Unavailable, memwal.UnknownOutcome):
                return
            except memwal.MemWalError as error:
                problems.append(repr(error))
                return
            acked.add(id)

    writers = [threading.Thread(target=write, args=(thread * 100_000,)) for thread in range(3)]
    memwal.connect(endpoint).put(made.rows([-1]), durable=False)
    for writer in writers:
        writer.start()
    wait_until(lambda: len({id // 100_000 for id in list(acked)}) == 3 and len(acked) > 5)
    running.process.send_signal(number)
    assert running.wait() == 0, running.errors
    for writer in writers:
        writer.join(60)
    assert problems == []
    assert running.errors == []
    _, endpoint = serve(config)
    found = names(memwal.connect(endpoint))
    assert acked | {-1} <= set(found), "rows acked before the end, the one without durability too"
    assert len(acked) > 5


# ---- the child of `memwal run` -------------------------------------------------------------------------------------


@pytest.fixture
def parent(small_config: Callable[..., Path], script: Callable[..., Any]) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield a process with a child daemon, and the JSON line that it printed."""
    running = script("parent.py", small_config(daemon={"drain_timeout": "2s"}))
    said = json.loads(running.line())
    child = psutil.Process(said["pid"])
    yield running, said
    with suppress(psutil.NoSuchProcess):  # most of these tests end it
        child.kill()


def test_a_child_daemon_ends_when_its_parent_is_killed(
    parent: tuple[Any, dict[str, Any]], made: Any, wait_until: Callable[..., Any]
) -> None:
    """A client that holds a stream open does not keep the daemon alive."""
    running, said = parent
    child = psutil.Process(said["pid"])
    table = memwal.connect(said["endpoint"])
    region = table.status()["regions"][0]["id"]
    stream = table.open_stream(UUID(region), memwal.Token("query", 0))
    stream.write(made.table(range(3)).to_batches()[0])
    running.kill()
    wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
    stream.abort()
    with pytest.raises((memwal.Unavailable, memwal.UnknownOutcome)):
        table.put(made.rows([9]))


def test_a_child_daemon_stops_in_order(parent: tuple[Any, dict[str, Any]], made: Any) -> None:
    running, said = parent
    memwal.connect(said["endpoint"]).put(made.rows(range(5)), durable=False)
    running.tell("stop")
    assert json.loads(running.line()) == {"code": 0}
    assert running.wait() == 0


def test_a_child_daemon_that_cannot_start_tells_its_parent_why(
    small_config: Callable[..., Path], tmp_path: Path, script: Callable[..., Any]
) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    (photos / "cat.jpg").write_bytes(b"meow")
    running = script("parent.py", small_config(table={"uri": str(photos)}))
    assert running.line() is None
    assert running.wait() != 0
    assert "memwal.ingest.errors.Invalid" in running.errors[-1]
    assert str(photos) in running.errors[-1]
