"""Limits of a daemon's calls: their number at a time, size, duration and memory."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight
import pytest

import memwal
from memwal.ingest.engine.read import lance_scans
from memwal.ingest.errors import Invalid, Unavailable
from memwal.ingest.service.daemon.limits import Limits
from memwal.ingest.service.daemon.service import FlightService
from memwal.ingest.service.daemon.tables import OneTable
from memwal.ingest.service.rpc.connection import BATCH_BYTES, Connection
from memwal.ingest.service.rpc.exchange import OpenRead, command_of
from memwal.ingest.service.rpc.guard import Guard
from memwal.ingest.settings.sections import DaemonSettings
from tests.messages import raises
from tests.page_site import Site

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("v", pa.string())])
ROWS = [{"id": id, "v": f"word{id % 7}"} for id in range(3000)]


class Served:
    """A table with rows in its base and above it, and its daemon with small limits."""

    def __init__(self, table: Any, **limits: Any) -> None:
        self.table, self.guard = table, Guard()
        self.service = FlightService(
            OneTable(getattr(table, "_engine", table)),
            "grpc://127.0.0.1:0",
            guard=self.guard,
            limits=Limits(DaemonSettings().model_copy(update=limits)),
        )
        self.endpoint = f"grpc://127.0.0.1:{self.service.port}"
        self.client = memwal.connect(self.endpoint)
        self.connection = Connection(self.endpoint)

    def under_way(self) -> int:
        return self.service.calls.under_way

    def refused(self, why: str) -> int:
        return dict(self.guard.refused.counts("flight"))[why]  # type: ignore[index]

    def close(self) -> None:
        self.client.close()
        self.connection.close()
        self.service.shutdown()


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    """Yield a function that serves the table with the given limits."""
    with memwal.open(
        tmp_path / "t.lance",
        schema=SCHEMA,
        key="id",
        regions=1,
        settings={"commit": {"interval": "0s"}, "table": {"indexes": {"v": "fts"}}},
    ) as table:
        table.put(ROWS[:2000])
        table.flush()
        table.commit()
        table.put(ROWS[2000:])
        opened: list[Served] = []

        def begin(**limits: Any) -> Served:
            opened.append(Served(table, **limits))
            return opened[-1]

        yield begin
        for each in opened:
            each.close()


# ---- calls at a time -------------------------------------------------------------------------------------------------


def test_one_call_too_many_is_refused_and_our_client_asks_again(
    serve: Callable[..., Served], wait_until: Callable[..., Any]
) -> None:
    served = serve(calls_max=1)
    region = served.table.status()["regions"][0]["id"]
    stream = served.connection.open_put(region, memwal.Token("query", 0), SCHEMA)
    stream.write(pa.Table.from_pylist(ROWS[:1], SCHEMA))
    other = Connection(served.endpoint)
    # gRPC decides when the put begins. The test reads the counter, since a call that polls might be in progress then,
    # and the daemon would reject the put.
    wait_until(lambda: served.under_way() == 1)
    with raises(Unavailable) as refused:
        other.act("count", {"filter": None, "level": "latest"})
    assert (refused.value.details["reason"], refused.value.details["retry_after"]) == ("busy", 0.1)
    with raises(Unavailable):
        other.read("get", {"columns": None, "level": "latest"}, pa.table({"id": [1]}))
    assert other.act("regions")["regions"], "daemons look at one another however busy they are"
    before, counted = served.refused("busy"), list[int]()
    asking = threading.Thread(target=lambda: counted.append(served.client.count()))
    asking.start()
    while served.refused("busy") == before:
        asking.join(0.01)
    assert counted == []
    stream.abort()
    asking.join(60)
    assert counted == [3000]
    other.close()


def test_a_scan_counts_as_a_call_until_its_end_and_no_longer(
    serve: Callable[..., Served], wait_until: Callable[..., Any]
) -> None:
    served = serve(calls_max=2)
    for _ in range(3):
        assert served.client.scan().read_all().num_rows == 3000
    left = served.client.scan()
    next(left)
    left.close()
    with pytest.raises(Invalid):
        served.client.scan(filter="nothing = 1")
    options = flight.FlightCallOptions(timeout=30)
    with flight.connect(served.endpoint) as raw:
        for _ in range(3):  # streams that are dropped before their first batch
            wait_until(lambda: served.under_way() < 2)
            read = OpenRead(raw, command_of("scan", {"level": "latest"}), options)
            del read
    wait_until(lambda: served.under_way() == 0)
    assert served.refused("busy") == 0


def test_what_ends_the_waiting_of_puts_is_taken_however_many_calls_are_under_way(serve: Callable[..., Served]) -> None:
    served = serve(calls_max=1)
    with served.service.calls.enter():
        served.connection.act("flush", None, 30)
        assert served.connection.act("commit", None, 30)["ssts"] == 1
        with raises(Unavailable):
            served.connection.act("status", None, 30)


# ---- sizes -----------------------------------------------------------------------------------------------------------


def test_a_put_that_is_too_large_is_refused_in_its_middle(serve: Callable[..., Served]) -> None:
    """Covers every way of sending rows; the client gets the daemon's own error."""
    served = serve(put_max=1 << 20)
    before = served.table.status()["regions"][0]["wal_position"]
    rows = pa.table({"id": list(range(9000, 9200)), "v": ["x" * 200_000] * 200}, schema=SCHEMA)
    with raises(Invalid):
        served.client.put(rows)
    region = served.table.status()["regions"][0]["id"]
    with raises(Invalid):
        send(served.client.open_stream(region, memwal.Token("query", 0), timeout=60), rows)
    assert served.refused("size") == 2
    assert served.table.status()["regions"][0]["wal_position"] == before
    assert served.client.put(ROWS[:10]).applied


def send(stream: Any, rows: pa.Table) -> None:
    for batch in rows.to_batches(10):
        stream.write(batch)
    stream.finish()


def test_our_client_sends_wide_rows_as_small_messages(serve: Callable[..., Served]) -> None:
    served = serve(message_max=BATCH_BYTES + (1 << 20))
    rows = pa.table({"id": list(range(9000, 9040)), "v": ["x" * (1 << 20)] * 40}, schema=SCHEMA)
    assert served.client.put(rows).applied
    assert served.client.get([9000, 9039])["v"].to_pylist() == ["x" * (1 << 20)] * 2


TEXT, VIEW = "x" * 20_000, struct.pack("<i4sii", 20_000, b"xxxx", 0, 0)
MANY = pa.Array.from_buffers(pa.null(), 10**7, [None])
NO_BYTES = {
    "nulls": MANY,
    "a value of a dictionary": pa.DictionaryArray.from_arrays(
        pa.array([0] * 1000, pa.int8()), pa.array(["x" * 20_000])
    ),
    "views of one text": pa.Array.from_buffers(
        pa.string_view(), 1000, [None, pa.py_buffer(VIEW * 1000), pa.py_buffer(TEXT.encode())]
    ),
    "lists of nulls": pa.FixedSizeListArray.from_arrays(MANY, 10**7),
}


@pytest.mark.parametrize("values", NO_BYTES.values(), ids=NO_BYTES)
def test_rows_count_with_the_size_that_they_have_in_the_table(serve: Callable[..., Served], values: pa.Array) -> None:
    """A message of few bytes may hold any number of nulls, and refer to one large value any number of times."""
    served = serve(message_max=4 << 20, put_max=8 << 20)
    before = served.table.count()
    with raises(Invalid):
        served.connection.read("get", {"columns": None, "level": "latest"}, pa.table({"id": values}))
    for put in (
        {"op": "write", "delete": False},
        {"op": "write", "delete": True},
        {"op": "delete", "filter": "id > 1"},
    ):
        rows = pa.table({"id": values} if put.get("delete", True) else {"id": range(len(values)), "v": values})
        with raises(Invalid):
            served.connection.write(rows, {**put, "durable": True, "token": None, "version": 1})
    assert served.table.count() == before
    assert served.client.put(pa.table({"id": [1, 2], "v": pa.array(["a", "a"]).dictionary_encode()})).applied


def test_columns_that_a_put_lacks_count(tmp_path: Path) -> None:
    wide = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("v", pa.list_(pa.float32(), 4096))])
    with memwal.open(tmp_path / "t.lance", schema=wide, key="id", regions=1) as table:
        served = Served(table, put_max=8 << 20)
        with raises(Invalid):
            served.client.put(pa.table({"id": range(1000)}), missing="null")
        assert served.client.put(pa.table({"id": range(100)}), missing="null").applied
        served.close()


# ---- time and memory of reads ---------------------------------------------------------------------------------------

READS: dict[str, Callable[[Any], Any]] = {
    "get": lambda table: table.get([1, 2500]),
    "scan": lambda table: table.scan().read_all(),
    "ordered scan": lambda table: table.scan(order_by="v").read_all(),
    "count": lambda table: table.count("id > 5"),
    "match": lambda table: table.match("v", "word3"),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_read_that_takes_too_long_ends_with_a_clear_error(serve: Callable[..., Served], read: Any) -> None:
    served = serve(query_timeout=1e-9)
    with raises(Invalid) as late:
        read(served.client)
    assert late.value.details["reason"] == "late"
    assert served.refused("time") == 1
    assert served.client.put(ROWS[:1]).applied, "writes have no such limit"
    assert read(serve().client) is not None


class Endless:
    """A Lance scan of an endless table; no row passes its filter."""

    def __init__(self, scanner: Any) -> None:
        self._scanner, self.ended, self.steps = scanner, threading.Event(), 0

    def to_batches(self) -> Iterator[pa.RecordBatch]:
        batch = next(iter(self._scanner.to_batches())).slice(0, 0)
        try:
            while True:
                self.steps += 1
                yield batch
        finally:
            self.ended.set()


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> list[Endless]:
    """Make scans of the base table endless; yield them."""
    scans: list[Endless] = []

    def awaited(scanner: Any) -> Iterator[pa.RecordBatch]:
        scans.append(Endless(scanner))
        return lance_scans.awaited(scans[-1])

    monkeypatch.setattr("memwal.ingest.engine.read.base.awaited", awaited)
    return scans


def test_the_work_of_a_read_ends_at_the_next_batch(serve: Callable[..., Served], endless: list[Endless]) -> None:
    served = serve(query_timeout=0.2)
    rows = served.client.scan()
    with raises(Invalid):
        rows.read_all()
    (scan,) = endless
    assert scan.ended.wait(60)
    assert scan.steps > 1


def test_a_query_of_the_page_that_got_no_answer_in_time_works_no_longer(
    serve: Callable[..., Served],
    endless: list[Endless],
    site: Callable[..., Site],
    monkeypatch: pytest.MonkeyPatch,
    wait_until: Callable[..., Any],
) -> None:
    monkeypatch.setattr("memwal.ingest.service.ops.live_server.QUERY_SECONDS", 0.3)
    pages = site(serve().table)
    status, told = pages.query(level="committed")
    assert (status, "no answer within 0.3 s" in told["error"]["message"]) == (504, True)
    assert endless[0].ended.wait(60)
    assert pages.guard.refused.counts("http")["time"] == 1
    wait_until(lambda: pages.query(near="1", near_column="nothing")[0] == 400)


def test_a_read_that_gathers_too_much_is_refused_and_one_that_streams_is_not(serve: Callable[..., Served]) -> None:
    served = serve(query_memory=10_000)
    for read in (READS["ordered scan"], lambda table: table.get(list(range(3000)))):
        with raises(Invalid) as refused:
            read(served.client)
        assert refused.value.details["reason"] == "memory"
    assert served.refused("memory") == 2
    assert served.client.scan().read_all().num_rows == 3000
    assert served.client.get([1, 2500]).num_rows == 2
    assert served.client.scan(order_by="id", limit=3).read_all().num_rows == 3


def test_a_read_looks_for_no_more_rows_than_there_are(serve: Callable[..., Served]) -> None:
    """Lance and faiss allocate memory for the requested number of rows at once."""
    served = serve(query_memory=100_000)
    assert served.client.match("v", "word3", k=2**31 - 1).num_rows == 429
    assert served.client.match("v", "word3", k=100_000, columns=["id"], offset=2**31 - 1 - 100_000).num_rows == 0
    assert served.client.scan(limit=2**61).read_all().num_rows == 3000
    assert served.client.scan(order_by="id", limit=2**61, columns=["id"]).read_all().num_rows == 3000
    with raises(Invalid) as refused:
        serve(query_memory=20_000).client.match("v", "word3", k=2**31 - 1)
    assert refused.value.details["reason"] == "memory"


def test_zero_is_no_limit_of_reads(serve: Callable[..., Served]) -> None:
    served = serve(query_timeout=0.0, query_memory=0)
    for read in READS.values():
        assert read(served.client) is not None
