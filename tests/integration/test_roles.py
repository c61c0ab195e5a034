"""The permissions of each role at a daemon, over every way in: other calls are rejected in one line
and change nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight
import pytest

import memwal
from memwal.ingest.errors import Invalid
from memwal.ingest.service.daemon.service import FlightService
from memwal.ingest.service.daemon.tables import OneTable
from memwal.ingest.service.rpc.guard import Guard
from memwal.ingest.settings.sections import DaemonSettings
from tests.conftest import Cli, SmallConfig
from tests.messages import raises
from tests.raw_calls import message_from

TOKENS = {"read": "the-readers-token", "write": "the-writers-token", "admin": "the-admins-token"}
SETTINGS = DaemonSettings(token="env:ADMIN", write_token="env:WRITE", read_token="env:READ")
ENV = {name.upper(): token for name, token in TOKENS.items()}
SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("v", pa.string())])
ROWS = pa.table({"id": [1, 2], "v": ["a", "b"]}, schema=SCHEMA)

READS: dict[str, Callable[[Any], Any]] = {
    "get": lambda table: table.get([1]),
    "scan": lambda table: table.scan(filter="id > 0").read_all(),
    "count": lambda table: table.count(),
    "status": lambda table: table.status(),
    "list_indexes": lambda table: table.list_indexes(),
    "changes": lambda table: list(table.changes("earliest")),
    "sql": lambda table: table.sql("select count(*) from table"),
}
WRITES: dict[str, Callable[[Any], Any]] = {
    "put": lambda table: table.put(ROWS),
    "put with a token": lambda table: table.put(ROWS, token="loader:7"),
    "put not durable": lambda table: table.put(ROWS, durable=False),
    "delete": lambda table: table.delete([1]),
    "delete by filter": lambda table: table.delete(filter="id = 1"),
}
ADMINS: dict[str, Callable[[Any], Any]] = {
    "flush": lambda table: table.flush(),
    "commit": lambda table: table.commit(),
    "create_index": lambda table: table.create_index("v", "btree"),
    "drop_index": lambda table: table.drop_index("v_idx"),
}
RANKS = ("read", "write", "admin")


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Any, Callable[[str], Any], str]]:
    """Yield a table with two rows, a client of it for each role, and its endpoint."""
    with memwal.open(
        tmp_path / "t.lance", schema=SCHEMA, key="id", regions=1, settings={"commit": {"interval": "0s"}}
    ) as table:
        table.put(ROWS)
        service = FlightService(OneTable(table), "grpc://127.0.0.1:0", guard=Guard.of(SETTINGS, ENV))
        endpoint = f"grpc://127.0.0.1:{service.port}"
        clients: list[Any] = []

        def client(role: str) -> Any:
            clients.append(memwal.connect(endpoint, token=TOKENS[role]))
            return clients[-1]

        yield table, client, endpoint
        for each in clients:
            each.close()
        service.shutdown()


def state(table: Any) -> Any:
    """Return everything that a client's call may change."""
    region = table.status()["regions"][0]
    names = ("wal_position", "generation", "memtable_rows", "ssts", "epoch")
    rows = table.scan().read_all().sort_by("id").to_pylist()
    return rows, [region[name] for name in names], table.list_indexes(), table.status()["base_version"]


@pytest.mark.parametrize("role", RANKS)
def test_every_role_reads(served: Any, role: str) -> None:
    _, client, _ = served
    reader = client(role)
    for name, call in READS.items():
        assert call(reader) is not None, name


@pytest.mark.parametrize(("role", "calls"), [("read", WRITES | ADMINS), ("write", ADMINS)], ids=["read", "write"])
def test_what_a_role_may_not_do_is_refused_without_effect(
    served: Any, role: str, calls: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    table, client, _ = served
    before, caller = state(table), client(role)
    for call in calls.values():
        with caplog.at_level(logging.WARNING, "memwal.access"), raises(Invalid):
            call(caller)
    assert state(table) == before
    refusals = [each for each in caplog.records if getattr(each, "event", "") == "refused"]
    assert 0 < len(refusals) <= len(calls), "one a second at most"
    assert not any(token in caplog.text for token in TOKENS.values())


@pytest.mark.parametrize("role", ["write", "admin"])
def test_writers_write(served: Any, role: str) -> None:
    table, client, _ = served
    writer = client(role)
    for call in WRITES.values():
        call(writer)
    assert table.count() == 1


def test_what_admins_do_is_logged_with_their_address(served: Any, caplog: pytest.LogCaptureFixture) -> None:
    table, client, _ = served
    admin = client("admin")
    with caplog.at_level(logging.INFO, "memwal.access"):
        admin.create_index("v", "btree")
        admin.flush()
        admin.commit()
        admin.count()
    told = [(each.call, each.peer) for each in caplog.records if getattr(each, "event", "") == "admin"]
    assert [call for call, _ in told] == ["create_index", "flush", "commit"]
    assert all("127.0.0.1" in peer for _, peer in told)
    assert table.count() == 2


@pytest.mark.parametrize("op", ["release", "look", "flush", "commit", "regions"])
def test_what_daemons_say_to_one_another_needs_an_admin(served: Any, op: str) -> None:
    """The test makes raw calls, like a program without memwal's client."""
    table, _, endpoint = served
    region = table.status()["regions"][0]["id"]
    request = {"region": region, "from": "grpc://127.0.0.1:9"}
    before = state(table)
    for role in ("read", "write"):
        options = flight.FlightCallOptions(headers=[(b"authorization", f"Bearer {TOKENS[role]}".encode())])
        with flight.connect(endpoint) as raw, pytest.raises(flight.FlightError) as refused:
            message_from(raw, op, request, options)
        assert "role" in str(refused.value)
    assert state(table) == before


def test_roles_without_a_token_of_admins_are_refused(cli: Cli, small_config: SmallConfig) -> None:
    ran = cli("config", "check", small_config(daemon={"read_token": "env:READ"}))
    assert ran.code == 2
    assert "read_token is; set the token of admins as well" in ran.err
