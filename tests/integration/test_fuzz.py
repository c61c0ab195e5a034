"""The fuzzer of the daemon: a short run finds no fault, and finds planted faults; requests that once ended a daemon."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from memwal.ingest.protocol import OURS
from memwal.ingest.service.rpc.wire import StreamSum, pack
from tests.conftest import extent
from tests.fuzz.planted import PLANTED
from tests.fuzz.requests import Flight, request
from tests.fuzz.scene import MEMORY, WIDTH, Scene
from tests.fuzz.search import Report, judged, scene, search

SEED, REQUESTS, SECONDS = 1, extent(150, 5000), extent(60.0, 300.0)
SECONDS_OF_A_FAULT = 120.0
AIMED = {
    "counts-not-bounded": "hostile fields",
    "rows-not-validated": "hostile keys",
    "only-bytes-counted": "hostile rows",
}
"""For each fault, the requests that may find it."""
FOUND_BY = {"counts-not-bounded": 4491, "rows-not-validated": 1219, "only-bytes-counted": 183}
"""A request that finds each fault. The test sends it first, since some faults need a thousand random requests."""
MOST = 2**31 - 1


@pytest.fixture(scope="module")
def attacked() -> Iterator[Scene]:
    """Yield a daemon with a limited address space."""
    with scene() as at:
        yield at


VECTOR = pa.table({"vector": pa.array([0.5] * WIDTH, pa.float32())})
SEARCH: dict[str, Any] = {"op": "search", "column": "vector", "level": "latest", "columns": ["id"]}
COUNTS: dict[str, tuple[dict[str, Any], pa.Table | None]] = {
    "k": ({**SEARCH, "k": MOST}, VECTOR),
    "refine_factor": ({**SEARCH, "refine_factor": MOST}, VECTOR),
    "nprobes": ({**SEARCH, "nprobes": MOST}, VECTOR),
    "k without an index": ({**SEARCH, "k": MOST, "metric": "dot"}, VECTOR),
    "candidates": ({"op": "candidates", "text": "alpha", "n": MOST, "level": "latest", "columns": ["id"]}, VECTOR),
    "match": ({"op": "match", "column": "body", "text": "alpha", "k": MOST, "level": "latest"}, None),
    "match of a prefix": ({"op": "match", "column": "body", "text": "alp*", "k": MOST, "level": "latest"}, None),
    "limit": ({"op": "scan", "limit": 2**61, "order_by": [["id", True]], "columns": ["id"], "level": "latest"}, None),
}


def stated(fields: dict[str, Any], rows: pa.Table | None = None) -> bytes:
    return pack({"protocol": str(OURS), **fields}, rows)


@pytest.mark.parametrize(("fields", "rows"), COUNTS.values(), ids=COUNTS)
def test_a_number_of_rows_is_no_amount_of_memory(
    attacked: Scene, fields: dict[str, Any], rows: pa.Table | None
) -> None:
    attacked.start()
    asked = Flight("exchange", "read", stated({"filter": None, **fields}, rows))
    assert judged(attacked, asked, report := Report()) == ""
    assert list(report.answers) == ["rows"]


def keys(offsets: list[int], data: bytes) -> pa.Table:
    """Return text keys with offsets that pyarrow rejects when it builds an array."""
    memory = bytearray(4 * len(offsets))
    table = pa.table(
        {"id": pa.Array.from_buffers(pa.string(), len(offsets) - 1, [None, pa.py_buffer(memory), pa.py_buffer(data)])}
    )
    memory[:] = struct.pack(f"<{len(offsets)}i", *offsets)
    return table


NULLS = pa.table({"id": pa.Array.from_buffers(pa.null(), 10**8, [None])})
HOSTILE = {
    "offsets that go down": keys([0, 10**6, 3], b"123"),
    "offsets beyond the data": keys([0, 1, MOST], b"123"),
    "negative offsets": keys([0, -(2**31), 3], b"123"),
    "nulls": NULLS,
}


@pytest.mark.parametrize("rows", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("call", ["get", "delete"])
def test_keys_are_validated_and_counted_before_they_are_read(attacked: Scene, call: str, rows: pa.Table) -> None:
    attacked.start()
    if call == "get":
        asked = Flight("exchange", "read", stated({"op": "get", "level": "latest"}, rows))
    else:
        total = StreamSum()
        total.add(rows.to_batches()[0])
        fields = {"op": "write", "delete": True, "durable": True, "token": None, "timeout": None}
        asked = Flight("exchange", "write", stated(fields), batches=rows.to_batches(), closing=total.closing())
    attacked.forget_peak()
    before, _ = attacked.memory()
    assert judged(attacked, asked, report := Report()) == ""
    assert list(report.answers) == ["INVALID"]
    assert attacked.memory()[1] - before < MEMORY / 4


FIELDS: dict[str, dict[str, Any]] = {
    "filter": {"op": "delete", "filter": None, "version": 1, "durable": True, "token": None},
    "filter that is no text": {"op": "delete", "filter": [1], "version": 1, "durable": True, "token": None},
    "version": {"op": "delete", "filter": "price > 1", "version": None, "durable": True, "token": None},
    "timeout": {"op": "write", "delete": True, "durable": True, "token": None, "timeout": "soon"},
    "sequence": {"op": "put", "region": "4a388480-a25b-59a8-b058-24217f980256", "producer": "p", "sequence": 2**63},
    "region": {"op": "put", "region": "x", "producer": "p", "sequence": 1},
}


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
def test_a_field_of_another_form_is_refused_as_such(attacked: Scene, fields: dict[str, Any]) -> None:
    attacked.start()
    batches = pa.table({"id": [1]}).to_batches()
    total = StreamSum()
    total.add(batches[0])
    asked = Flight("exchange", "write", stated(fields), batches=batches, closing=total.closing())
    assert judged(attacked, asked, report := Report()) == ""
    assert list(report.answers) == ["INVALID"]


def test_hostile_requests_end_no_daemon(attacked: Scene) -> None:
    attacked.start()
    report = search(attacked, SEED, iter(range(REQUESTS)), SECONDS)
    assert not report.findings, "\n".join(map(str, report.findings))
    assert report.sent > 100
    assert {"rows", "INVALID", "message"} <= set(report.answers), "some requests are valid, some rows are written"
    assert attacked.stop() == 0
    assert attacked.faults() == []


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_found(fault: str) -> None:
    aimed = (number for number in itertools.count() if request(SEED, number).what == AIMED[fault])
    numbers = itertools.chain(extent([FOUND_BY[fault]], []), aimed)
    with scene(fault) as at:
        report = search(at, SEED, numbers, SECONDS_OF_A_FAULT, most=1)
    assert report.findings, f"{report.sent} requests found nothing"
