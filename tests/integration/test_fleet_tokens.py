"""Tokens that are limited to tables of a fleet, over Flight and HTTP: they neither use nor see other tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.flight as flight
import pytest

import memwal
from memwal.ingest.errors import Invalid
from tests.conftest import Cli, Start
from tests.fleet_daemon import FleetDaemon
from tests.messages import raises
from tests.raw_calls import message_from

ENV = {"ADMIN": "the-admins-token", "ORDERS": "the-orders-token", "OPS": "the-operators-token"}
ADMIN, ORDERS, OPS = ENV.values()
SETTINGS = """
[daemon]
http_port = 0
port = 0
token = "env:ADMIN"
[[daemon.tokens]]
token = "env:ORDERS"
role = "write"
tables = ["orders", "t_*"]
[[daemon.tokens]]
token = "env:OPS"
role = "admin"
tables = ["orders"]
"""
ROWS = [{"id": 1, "v": 1.0}]


@pytest.fixture
def daemon(tmp_path: Path, start: Start) -> FleetDaemon:
    return FleetDaemon(tmp_path, ["orders", "t_1", "secrets"], start, SETTINGS, env=ENV)


def test_a_limited_token_uses_its_tables_only(daemon: FleetDaemon) -> None:
    with daemon.connect("orders", ORDERS) as orders, daemon.connect("t_1", ORDERS) as other:
        orders.put(ROWS)
        other.put(ROWS)
        assert orders.count() == 1
    with raises(Invalid):
        daemon.connect("secrets", ORDERS)
    with raises(Invalid):
        memwal.connect(daemon.endpoint, token=ORDERS)
    assert [each["name"] for each in memwal.tables(daemon.endpoint, token=ORDERS)] == ["orders", "t_1"]
    assert len(memwal.tables(daemon.endpoint, token=ADMIN)) == 3
    with daemon.connect("secrets", ADMIN) as secrets:
        secrets.put(ROWS)
        assert secrets.count() == 1


CALLS: list[tuple[str, dict[str, Any]]] = [
    ("schema", {"table_name": "secrets"}),
    ("count", {"table_name": "secrets", "level": "latest"}),
    ("regions", {"table_name": "secrets"}),
    ("regions", {"from": "grpc://127.0.0.1:9"}),
    ("regions", {"from": "grpc://127.0.0.1:9", "table_name": "orders"}),
    ("look", {"from": "grpc://127.0.0.1:9", "table_name": "orders"}),
    ("create", {"table_name": "s_1"}),
    ("flush", {"table_name": "secrets"}),
    ("schema", {}),
]


@pytest.mark.parametrize("token", [ORDERS, OPS], ids=["write", "admin"])
def test_raw_calls_for_other_tables_are_refused_and_name_none(daemon: FleetDaemon, token: str) -> None:
    options = flight.FlightCallOptions(headers=[(b"authorization", f"Bearer {token}".encode())])
    with flight.connect(daemon.endpoint) as raw:
        for op, request in CALLS:
            with pytest.raises(flight.FlightError) as refused:
                message_from(raw, op, request, options)
            assert str(refused.value).startswith(("the token is for the tables", "the token has the role")), (
                op,
                request,
            )
            assert "t_1" not in str(refused.value)
        told = message_from(raw, "regions", {}, options)
        assert "secrets" not in str(told["tables"])
    assert not (daemon.prefix / "s_1.lance").exists()


def test_a_limited_token_creates_what_it_names(daemon: FleetDaemon) -> None:
    options = flight.FlightCallOptions(headers=[(b"authorization", f"Bearer {ORDERS}".encode())])
    with flight.connect(daemon.endpoint) as raw:
        message_from(raw, "create", {"table_name": "t_2"}, options)
    with daemon.connect("t_2", ORDERS) as table:
        assert table.count() == 0


def test_pages_show_a_limited_token_its_tables_only(daemon: FleetDaemon) -> None:
    assert daemon.names("sort=name", ORDERS) == ["orders", "t_1"]
    assert daemon.get("/tables", ORDERS)["total"] == 2
    assert daemon.names("sort=name", ADMIN) == ["orders", "secrets", "t_1"]
    for path in ("/status", "/live"):
        assert daemon.get(f"{path}?table=orders", ORDERS)
        for query in ("", "?table=secrets", "?table=nothing"):
            status, told = daemon.ask("GET", path + query, token=ORDERS)
            assert status == 403, (path, query)
            assert "the token is for the tables orders, t_*" in told["error"]["message"]
    for path in ("/metrics", "/live/events", "/live/events?table=secrets"):
        assert daemon.ask("GET", path, token=ORDERS)[0] == 403
    assert daemon.ask("POST", "/flush?table=orders", token=ORDERS)[0] == 403, "the role"
    assert daemon.ask("POST", "/flush?table=orders", token=OPS)[0] == 200
    assert daemon.ask("POST", "/flush?table=t_1", token=OPS)[0] == 403
    assert daemon.ask("POST", "/query?table=secrets", {}, token=OPS)[0] == 403
    assert daemon.ask("GET", "/tables")[0] == 401
    assert 'memwal_refused_requests_total{over="http",reason="role"} 12.0' in daemon.get("/metrics", ADMIN)


@pytest.mark.parametrize(
    ("tables", "line"),
    [
        ('[tables.orders]\nuri = "o"\nkey = ["id"]\ncolumns = { id = "int64" }', "no table has the name 'oders'"),
        ('[table]\nuri = "o"\nkey = ["id"]\ncolumns = { id = "int64" }', "[table] is the only one and has no name"),
    ],
    ids=["unknown name", "one table"],
)
def test_tables_of_a_token_that_cannot_be_are_refused(cli: Cli, tmp_path: Path, tables: str, line: str) -> None:
    config = tmp_path / "c.toml"
    entry = '{ token = "env:ORDERS", tables = ["oders"] }'
    config.write_text(f'{tables}\n[daemon]\ntoken = "env:ADMIN"\ntokens = [{entry}]\n')
    ran = cli("config", "check", config)
    assert ran.code == 2
    assert "tokens[0]" in ran.err
    assert line in ran.err
