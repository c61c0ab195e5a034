"""`memwal.connect_async`: the answers of the synchronous table, with few threads; a cancelled call releases its
resources.
"""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import memwal
from memwal import wal
from memwal.ingest.engine.api.changes import Changes
from memwal.ingest.engine.api.results import RowStream
from memwal.ingest.engine.read import merged
from memwal.ingest.engine.read.base import BaseReads
from memwal.ingest.service.client.async_streams import AsyncChanges, AsyncRowStream
from memwal.ingest.service.client.async_table import AT_ONCE, AsyncTable
from memwal.ingest.service.client.remote import RemoteTable
from tests.conftest import toml
from tests.integration.test_router import Pair
from tests.messages import raises
from tests.support.views import within
from tests.ways import served

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("text", pa.string()),
        pa.field("vector", pa.list_(pa.float32(), 2)),
    ]
)
SOON = 0.5
"""Seconds within which a cancelled call returns to its task; tens of milliseconds on an idle machine."""


def rows(ids: range) -> list[dict[str, Any]]:
    return [{"id": id, "text": f"word{id % 7} common", "vector": [id, 1.0]} for id in ids]


class World:
    """An embedded table and the daemons in front of it."""

    def __init__(self, path: Path, ends: ExitStack) -> None:
        patient = {"put_timeout": "50s", "retry_budget": "100s"}
        settings = {"commit": {"interval": "0s"}, "memtable": {"size_max": "4MiB"}, "wal": patient}
        self.uri = str(path / "t.lance")
        self.owner: Any = memwal.open(
            self.uri, schema=SCHEMA, key="id", regions=2, indexes={"text": "fts"}, settings=settings
        )
        self._ends = ends
        ends.enter_context(self.owner)
        self.owner.put(rows(range(200)))
        self.owner.flush()
        self.owner.commit()
        self.owner.put(rows(range(200, 300)))
        self.owner.flush()
        self.owner.put(rows(range(300, 400)))
        self.at = self.serve()

    def serve(self) -> str:
        return served(self.owner, self._ends)

    def divide(self) -> list[str]:
        """Close the table, and open it in two daemons, each with one region; return their endpoints."""
        self.owner.close()
        config = Path(f"{self.uri}.toml")
        config.write_text(toml({"table": {"uri": self.uri}, "commit": {"interval": "0s"}}))
        return Pair(config, self._ends).endpoints


@pytest.fixture
def world(tmp_path: Path, ends: ExitStack) -> World:
    return World(tmp_path, ends)


def connected(world: World) -> Coroutine[Any, Any, AsyncTable]:
    return memwal.connect_async(world.at)


def idle(table: AsyncTable) -> bool:
    """Return whether no thread of the table makes a call."""
    return all(len(pool.idle) == pool.threads for pool in (table._reads, table._writes))


# ---- the same answers ----------------------------------------------------------------------------------------------

READS: dict[str, tuple[Any, dict[str, Any]]] = {
    "get": (([5, 250, 399, 7],), {"columns": ["id", "text"]}),
    "count": (("id >= 150",), {}),
    "search": (("vector", [250.2, 1.0]), {"k": 3, "columns": ["id"]}),
    "match": (("text", "word3"), {"k": 500, "columns": ["id"]}),
    "hybrid": (([250.2, 1.0], "word3"), {"k": 3, "vector_column": "vector", "columns": ["id"]}),
    "candidates": (([250.2, 1.0], "word3"), {"n": 3, "vector_column": "vector", "columns": ["id"]}),
    "changes_position": ((), {}),
    "list_indexes": ((), {}),
    "status": ((), {}),
}


def comparable(answer: Any) -> Any:
    if isinstance(answer, pa.Table):
        return answer.schema, sorted(answer.to_pylist(), key=lambda row: row["id"])
    if isinstance(answer, dict) and "regions" in answer:
        return [answer["table"], answer.get("rows")]  # of a status: the parts that do not depend on the clock
    return answer


@pytest.mark.parametrize("way", ["daemon", "two daemons", "storage"])
def test_every_read_gives_the_answer_of_the_synchronous_table(world: World, way: str) -> None:
    where, more = (world.uri, {"fallback": "durable"}) if way == "storage" else (world.at, {})
    where = world.divide() if way == "two daemons" else where

    async def ask() -> None:
        with memwal.connect(where, **more) as sync:
            async with await memwal.connect_async(where, **more) as table:
                assert (table.schema, table.key) == (sync.schema, sync.key)
                for name, (given, options) in READS.items():
                    expected = comparable(getattr(sync, name)(*given, **options))
                    assert comparable(await getattr(table, name)(*given, **options)) == expected, name
                async with await table.scan(["id"], "id < 350", order_by="id") as found:
                    assert found.schema.names == ["id"]
                    assert [id async for batch in found for id in batch["id"].to_pylist()] == list(range(350))
                for to in ("read_all", "to_table", "to_pandas", "read_pandas", "to_polars"):
                    assert len(await getattr(await table.scan(), to)()) == 400
                told = [batch async for batch in await table.changes(images="both")]
                assert pa.Table.from_batches(told).num_rows == 400
                assert (await (await table.changes()).read_all()).num_rows == 400

    asyncio.run(ask())


def test_every_write_and_step_does_what_the_synchronous_one_does(world: World) -> None:
    async def write() -> None:
        async with await connected(world) as table:
            receipt = await table.put(rows(range(400, 410)), token="loader:1")
            assert (receipt.rows, receipt.applied) == (10, True)
            assert not (await table.put(rows(range(400, 410)), token="loader:1")).applied
            assert (await table.delete([400, 401])).rows == 2
            assert (await table.delete(filter="id >= 408")).rows == 2
            assert await table.create_index("id", "btree") in {each["name"] for each in await table.list_indexes()}
            await table.drop_index("id_idx")
            await table.flush()
            assert (await table.commit()).ssts >= 2
            assert await table.count(level="committed") == 406
            assert "AsyncTable" in repr(table)

    asyncio.run(write())


def test_mistakes_are_raised_by_the_await_with_their_kinds(world: World) -> None:
    async def mistaken() -> None:
        async with await connected(world) as table:
            for call in (
                lambda: table.get(1, colums=["id"]),  # type: ignore[call-arg]
                lambda: table.get(1, ["idd"]),
                lambda: table.put([{"idd": 1}]),
                lambda: table.scan(level="newest"),
                lambda: table.changes("yesterday"),
                lambda: memwal.connect_async(world.at, fallback="flushed"),
                lambda: memwal.connect_async(lokation=world.at),  # type: ignore[call-arg]
            ):
                with raises(memwal.Invalid):
                    await call()
        await table.close()
        with raises(memwal.Invalid):
            await table.get(1)
        with pytest.raises(memwal.Unavailable):
            await memwal.connect_async("grpc://127.0.0.1:1")

    asyncio.run(mistaken())


# ---- the same surface ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asynchronous", "synchronous", "absent"),
    [
        # `to_reader` hands rows to another library, which reads them without an event loop; `schema` may have to read
        # the log.
        (AsyncRowStream, RowStream, {"to_reader"}),
        (AsyncChanges, Changes, {"schema"}),
    ],
)
def test_streams_have_the_methods_of_the_synchronous_ones(
    asynchronous: type, synchronous: type, absent: set[str]
) -> None:
    public = {name for name in dir(synchronous) if not name.startswith("_")} - absent
    assert {name for name in dir(asynchronous) if not name.startswith("_")} - {"schema"} == public - {"schema"}
    for name in public - {"position", "schema"}:
        assert inspect.iscoroutinefunction(getattr(asynchronous, name)), name
        ours, theirs = (inspect.signature(getattr(kind, name)).parameters for kind in (asynchronous, synchronous))
        assert list(ours.values()) == list(theirs.values()), name


# ---- threads ---------------------------------------------------------------------------------------------------------


def call_threads() -> int:
    return sum(thread.name in ("async-read", "async-write") for thread in threading.enumerate())


def test_a_thousand_gets_and_puts_at_once_take_few_threads(world: World) -> None:
    async def many() -> None:
        async with await connected(world) as table:
            most = 0

            async def get(id: int) -> int:
                nonlocal most
                found = await table.get(id % 400)
                most = max(most, call_threads() if id % 20 == 0 else 0)
                return int(found.num_rows)

            puts = [table.put(rows(range(1000 + id, 1001 + id))) for id in range(500)]
            answers = await asyncio.gather(*(get(id) for id in range(500)), *puts)
            assert answers[:500] == [1] * 500
            assert await table.count("id >= 1000") == 500
            assert 2 <= most <= 2 * AT_ONCE
        assert within(5, lambda: not call_threads())
        made = set(threading.enumerate()) - before
        assert not [thread for thread in made if thread.name.startswith("asyncio")]

    before = set(threading.enumerate())
    asyncio.run(many())


def test_a_table_serves_one_event_loop_after_another(world: World) -> None:
    table = asyncio.run(connected(world))
    assert [asyncio.run(table.count()) for _ in range(2)] == [400, 400]
    asyncio.run(table.close())


# ---- cancelling ------------------------------------------------------------------------------------------------------


async def until(met: Callable[[], bool]) -> None:
    for _ in range(3_000):
        if met():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never came to be")


async def cancelled(call: Awaitable[Any], begun: Callable[[], bool]) -> float:
    """Cancel a call once it has `begun`; return the seconds that it took to return."""
    task = asyncio.ensure_future(call)
    await asyncio.sleep(0)  # a call that has not started would not observe its cancellation
    await until(begun)
    started = time.monotonic()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    return time.monotonic() - started


class Gate:
    """A point in the daemon at which its threads wait."""

    def __init__(self) -> None:
        self.entered, self.opened = threading.Event(), threading.Event()

    def wait(self) -> None:
        self.entered.set()
        assert self.opened.wait(30), "the test forgot to open the gate"


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.opened.set()


@pytest.fixture
def steps(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Make each step of a search, match or count wait at the gate; collect the steps."""
    through, taken = merged.MergedView._passing, list[int]()

    def passing(self: Any, *args: Any) -> Any:
        taken.append(len(taken))
        gate.wait()
        return through(self, *args)

    monkeypatch.setattr(merged.MergedView, "_passing", passing)
    return taken


@asynccontextmanager
async def idle_after(at: str | list[str]) -> AsyncIterator[AsyncTable]:
    """Yield a table whose threads must all be idle at the end, within a second plus the delay of a busy machine."""
    async with await memwal.connect_async(at) as table:
        yield table
        assert within(5, lambda: idle(table))


@pytest.mark.parametrize(
    ("read", "daemons"), [("search", 1), ("match", 1), ("candidates", 1), ("count", 1), ("match", 2)]
)
def test_a_cancelled_read_ends_at_the_daemon_before_its_next_step(
    world: World, gate: Gate, held: list[Any], steps: list[int], read: str, daemons: int
) -> None:
    async def ask() -> None:
        async with idle_after(world.at if daemons == 1 else world.divide()) as table:
            given, options = READS[read]
            assert await cancelled(getattr(table, read)(*given, **options), lambda: len(steps) == daemons) < SOON
        gate.opened.set()
        assert within(10, lambda: not [view for view in held if view() is not None])
        assert len(steps) == daemons  # one step per daemon, for several levels each

    asyncio.run(ask())


@pytest.mark.parametrize("when", ["while it opens", "while it is read", "while nobody reads"])
def test_a_cancelled_scan_lets_its_moment_go(
    world: World, gate: Gate, held: list[Any], monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    through, batches = BaseReads.batches, [0]
    monkeypatch.setattr(merged, "ROWS_PER_STEP", 10)

    def slow(self: BaseReads, *args: Any) -> Iterator[pa.Table]:
        if when != "while nobody reads":
            gate.wait()
        yield from through(self, *args)

    monkeypatch.setattr(BaseReads, "batches", slow)
    # Only rows of the base pass this filter, so the first batch comes from the base.
    filter = "id < 100" if when == "while it opens" else None

    def begun() -> bool:
        entered = gate.entered.is_set() or when == "while nobody reads"
        return entered and (batches[0] > 0 or when == "while it opens")

    async def read(table: AsyncTable) -> None:
        async for _ in await table.scan(["id"], filter):
            batches[0] += 1
            if when == "while nobody reads":
                await asyncio.sleep(60)

    async def ask() -> None:
        async with idle_after(world.at) as table:
            assert await cancelled(read(table), begun) < SOON
        gate.opened.set()
        assert within(10, lambda: not [view for view in held if view() is not None])
        assert (batches[0] > 0) == (when != "while it opens")

    asyncio.run(ask())


def test_a_result_whose_read_was_cancelled_is_closed(world: World, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    through = BaseReads.batches

    def slow(self: BaseReads, *args: Any) -> Iterator[pa.Table]:
        gate.wait()
        yield from through(self, *args)

    monkeypatch.setattr(BaseReads, "batches", slow)

    async def ask() -> None:
        async with await connected(world) as table:
            found = await table.scan(["id"])
            assert await cancelled(found.read_all(), gate.entered.is_set) < SOON
            with raises(memwal.Invalid):
                await anext(found)

    asyncio.run(ask())


def test_a_cancelled_put_that_waits_for_room_is_withdrawn(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    from memwal.ingest.engine.region.state import RegionLevels

    full, through = threading.Event(), RegionLevels.has_room
    full.set()

    def has_room(self: Any, limits: Any) -> bool:
        return not full.is_set() and through(self, limits)

    monkeypatch.setattr(RegionLevels, "has_room", has_room)

    async def put() -> None:
        async with idle_after(world.at) as table:
            assert await cancelled(table.put(rows(range(900, 901))), anybody_waits_for_room) < SOON
            assert within(5, lambda: not anybody_waits_for_room())
            full.clear()
            await table.put(rows(range(901, 902)))
            assert (await table.get([900, 901], ["id"])).to_pylist() == [{"id": 901}]

    asyncio.run(put())


def anybody_waits_for_room() -> bool:
    """Return whether any thread waits for room, including threads of gRPC, which `threading` does not list."""
    names = set()
    for frame in sys._current_frames().values():
        at: Any = frame
        while at is not None:
            names.add(at.f_code.co_name)
            at = at.f_back
    return "_wait_for_room" in names


def test_a_cancelled_put_that_began_may_be_applied_and_its_repeat_changes_nothing(
    world: World, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    through = wal.LocalStore.put_if_absent

    def put_if_absent(self: Any, key: str, data: bytes) -> Any:
        if "/wal/" in key:
            gate.wait()
        return through(self, key, data)

    monkeypatch.setattr(wal.LocalStore, "put_if_absent", put_if_absent)
    lone = rows(range(900, 901))

    async def put() -> None:
        async with idle_after(world.at) as table:
            assert await cancelled(table.put(lone, token="loader:1"), gate.entered.is_set) < SOON
            behind = table.put(rows(range(900, 901)), token="loader:2")  # same region: waits behind the first put
            queued = time.monotonic()
            assert await cancelled(behind, lambda: time.monotonic() > queued + 0.5) < SOON
            assert within(5, lambda: idle(table))
            await asyncio.sleep(0.3)  # the daemon checks 20 times a second
            gate.opened.set()
            receipt = await table.put(lone, token="loader:1")
            assert not receipt.applied
            assert await table.count("id = 900") == 1
            assert (await table.put(lone, token="loader:2")).applied  # the cancelled put was withdrawn before it began

    asyncio.run(put())


def test_a_call_that_waits_for_a_thread_is_never_made(world: World, gate: Gate, monkeypatch: Any) -> None:
    through = RemoteTable.get
    asked: list[Any] = []

    def get(self: Any, keys: Any, *args: Any, **options: Any) -> Any:
        asked.append(keys)
        gate.wait()
        return through(self, keys, *args, **options)

    monkeypatch.setattr(RemoteTable, "get", get)

    async def ask() -> None:
        async with await connected(world) as table:
            first = [asyncio.ensure_future(table.get(id)) for id in range(AT_ONCE)]
            await until(lambda: len(asked) == AT_ONCE)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await table.get(399)
            gate.opened.set()
            assert sum([found.num_rows for found in await asyncio.gather(*first)]) == AT_ONCE
        assert sorted(asked) == list(range(AT_ONCE))

    asyncio.run(ask())


def test_a_feed_that_follows_holds_no_thread_and_loses_nothing_when_it_is_cancelled(world: World) -> None:
    async def follow() -> None:
        async with await connected(world) as table:
            async with await table.changes("latest", follow=True) as changes:
                for _ in range(3):
                    with pytest.raises(TimeoutError):
                        async with asyncio.timeout(0.3):
                            await anext(changes)
                assert within(5, lambda: idle(table))
                told: list[int] = []
                for id in range(1000, 1020):
                    await table.put(rows(range(id, id + 1)))
                    try:
                        async with asyncio.timeout(0.005 * (id - 999)):
                            told += (await anext(changes))["id"].to_pylist()
                    except TimeoutError:
                        continue
                while len(told) < 20:
                    told += (await anext(changes))["id"].to_pylist()
                assert sorted(told) == list(range(1000, 1020))
                waiting = asyncio.ensure_future(anext(changes))
                await asyncio.sleep(0.1)
            with raises(memwal.Invalid):
                await asyncio.wait_for(waiting, 5)

    asyncio.run(follow())


# ---- ends ------------------------------------------------------------------------------------------------------------


def test_closing_ends_the_calls_under_way(world: World, steps: list[int]) -> None:
    async def close() -> None:
        table = await connected(world)
        asked = [asyncio.ensure_future(table.match("text", "word3")) for _ in range(AT_ONCE + 5)]
        await until(lambda: bool(steps))
        started = time.monotonic()
        await table.close()
        answers = await asyncio.gather(*asked, return_exceptions=True)
        assert time.monotonic() - started < 5
        assert {type(answer) for answer in answers} == {memwal.Unavailable, memwal.Invalid}
        assert all("closed" in str(answer) for answer in answers)

    asyncio.run(close())


AT_EXIT = """
import asyncio, sys, memwal
async def main():
    table = await memwal.connect_async(sys.argv[1])
    asked = asyncio.ensure_future(table.count("id > 0"))
    await asyncio.sleep(0.5)
    print(asked.done(), flush=True)
    if sys.argv[2] == "stop":
        asyncio.get_running_loop().stop()
        await asyncio.sleep(60)
loop = asyncio.new_event_loop()
if sys.argv[2] == "stop":
    task = loop.create_task(main())
    loop.run_forever()
    loop.close()
else:
    asyncio.run(main())
"""


@pytest.mark.parametrize("how", ["run", "stop"])
def test_a_program_ends_with_a_call_under_way(world: World, steps: list[int], how: str) -> None:
    ended = subprocess.run([sys.executable, "-c", AT_EXIT, world.at, how], capture_output=True, text=True, timeout=30)
    assert (ended.returncode, ended.stdout, len(steps)) == (0, "False\n", 1), ended.stderr
