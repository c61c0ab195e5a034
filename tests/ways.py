"""The ways into a table of this process: its object, a client of one or of two daemons, and a reader of its storage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

import memwal
from memwal.ingest.service.client.router import Owner
from memwal.ingest.service.daemon.service import FlightService
from memwal.ingest.service.daemon.tables import OneTable


@pytest.fixture
def ends() -> Iterator[ExitStack]:
    """Yield a stack of contexts that the end of the test closes."""
    with ExitStack() as stack:
        yield stack


def served(table: Any, ends: ExitStack) -> str:
    """Serve a table by Flight until `ends` is closed; return the endpoint."""
    service = FlightService(OneTable(table), "grpc://127.0.0.1:0")
    ends.callback(service.shutdown)
    return f"grpc://127.0.0.1:{service.port}"


def entered(way: str, table: Any, ends: ExitStack) -> Any:
    """Return the object that `way` names: "embedded", "flight", "two daemons" or "storage". `ends` closes it.

    The two daemons are services of one owner; the client believes that each owns one of the two regions.
    """
    if way == "embedded":
        return table
    if way == "storage":
        return ends.enter_context(memwal.open(table.base.uri, read_only=True))
    if way == "flight":
        return ends.enter_context(memwal.connect(served(table, ends)))
    client: Any = ends.enter_context(memwal.connect([served(table, ends), served(table, ends)]))
    router = client.router
    router.believe({region: Owner(each, 0) for region, each in zip(router.regions, router.endpoints, strict=True)})
    assert router.sole is None
    return client
