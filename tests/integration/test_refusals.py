"""Every way into a daemon, and every kind of wrong call: rejected and counted, without an effect or a leak.

The test reads the ways from the code, so it fails for a new way without a case.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import memwal
from memwal.ingest.protocol import ASK_WHO, OURS
from memwal.ingest.service.daemon.limits import Limits
from memwal.ingest.service.daemon.service import FlightService
from memwal.ingest.service.daemon.tables import OneTable
from memwal.ingest.service.ops.http_server import BRIEF, OPEN
from memwal.ingest.service.ops.live_server import QUERY_BYTES
from memwal.ingest.service.rpc.exchange import rows_of
from memwal.ingest.service.rpc.guard import Guard, Role
from memwal.ingest.service.rpc.wire import StreamSum, pack
from memwal.ingest.settings.sections import DaemonSettings
from tests.integration.test_http_limits import HOST, sent, status
from tests.page_site import Site
from tests.raw_calls import message_from

TOKENS = {"read": "the-readers-token", "write": "the-writers-token", "admin": "the-admins-token"}
GUARDED = DaemonSettings(token="env:ADMIN", write_token="env:WRITE", read_token="env:READ")
ENV = {name.upper(): token for name, token in TOKENS.items()}
SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("v", pa.string())])
ROWS = pa.table({"id": [1, 2], "v": ["a", "b"]}, schema=SCHEMA)
MESSAGE, PUT = 100_000, 200_000
PAD = {"pad": "x" * MESSAGE}
LARGE = pa.table({"id": [7, 8, 9], "v": ["x" * 90_000] * 3}, schema=SCHEMA)
GARBAGE = b"\xff\xff\xff\xff\x00{" + b"\x9f" * 60
LEVEL = {"level": "latest"}
STATED = {"protocol": str(OURS)}


class Served:
    """A table with two rows, its daemon and its page, which both require a token."""

    def __init__(self, table: Any, folder: Path, site: Site) -> None:
        self.table, self.folder, self.site = table, folder, site
        self.guard = Guard.of(GUARDED, ENV)
        limits = Limits(DaemonSettings().model_copy(update={"message_max": MESSAGE, "put_max": PUT}))
        engine = getattr(table, "_engine", table)
        self.service = FlightService(OneTable(engine), "grpc://127.0.0.1:0", guard=self.guard, limits=limits)
        self.raw = flight.connect(f"grpc://127.0.0.1:{self.service.port}")
        self.region = table.status()["regions"][0]["id"]

    def refused(self, way: str) -> Mapping[str, int]:
        return dict((self.guard if way == "flight" else self.site.guard).refused.counts(way))  # type: ignore[arg-type]

    def state(self) -> Any:
        """Return everything that a call may change."""
        region = self.table.status()["regions"][0]
        names = ("wal_position", "generation", "memtable_rows", "ssts", "epoch", "state")
        rows = self.table.scan().read_all().sort_by("id").to_pylist()
        return rows, [region[name] for name in names], self.table.list_indexes(), self.table.status()["base_version"]

    def expect_no_leak(self, said: str) -> None:
        for told in ("Traceback", ".py", str(self.folder), "site-packages", *TOKENS.values()):
            assert told not in said, said

    def expect_healthy(self) -> None:
        assert message_from(self.raw, "status", {}, options("admin"))["regions"][0]["state"] == "serving"
        assert self.site.ask("GET", "/health/readyz")[0] == 200

    def close(self) -> None:
        self.raw.close()
        self.service.shutdown()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Yield one daemon for all tests, since none changes anything."""
    folder, quiet = tmp_path_factory.mktemp("refusals"), {"commit": {"interval": "0s"}}
    with memwal.open(folder / "t.lance", schema=SCHEMA, key="id", regions=1, settings=quiet) as table:
        table.put(ROWS)
        with closing(Site(table, token=TOKENS["admin"])) as site, closing(Served(table, folder, site)) as opened:
            yield opened


def options(token: str | None) -> flight.FlightCallOptions:
    """Return call options with the token of a role, or with a wrong token."""
    headers = [] if token is None else [(b"authorization", f"Bearer {TOKENS.get(token, token)}".encode())]
    return flight.FlightCallOptions(headers=headers, timeout=60)


# ---- Flight ---------------------------------------------------------------------------------------------------------

Send = Callable[[Served, bytes, flight.FlightCallOptions], object]


@dataclass(frozen=True)
class Case:
    """One way in. `request`: a valid request, with "REGION" in place of the region's id."""

    send: Send
    needs: Role
    request: Mapping[str, Any]
    rows: pa.Table | None = None
    """Fields of the request."""

    def packed(self, served: Served, **more: Any) -> bytes:
        text = json.dumps({**self.request, **STATED, **more}).replace('"REGION"', json.dumps(served.region))
        return pack(json.loads(text), self.rows)


def action(name: str) -> Send:
    return lambda served, body, called: list(served.raw.do_action(flight.Action(name, body), called))


def exchange(rows: pa.Table | None = None, *, closed: bool = True) -> Send:
    def send(served: Served, body: bytes, called: flight.FlightCallOptions) -> object:
        writer, reader = served.raw.do_exchange(flight.FlightDescriptor.for_command(body), called)
        with writer:
            if rows is None:
                writer.done_writing()
            else:
                writer.begin(rows.schema)
                write(writer, rows, closed=closed)
            return list(reader)

    return send


def write(writer: Any, rows: pa.Table, *, closed: bool) -> None:
    arrived = StreamSum()
    for batch in rows.to_batches(1):
        arrived.add(batch)
        writer.write_batch(batch)
    if closed:
        writer.write_metadata(arrived.closing())
    writer.done_writing()


ACTS: Mapping[str, Mapping[str, Any]] = {
    "count": {"filter": None, **LEVEL},
    "applied": {"producer": "query", "regions": ["REGION"], "routing": 1},
    "changes_position": {"at": "latest"},
    "record": {"token": "a:1", "durable": True, "regions": ["REGION"], "routing": 1},
    "base_version": {},
    "status": {},
    "flush": {},
    "commit": {},
    "indexes": {},
    "versions": {},
    "tag": {"name": "t", "version": 1},
    "create_index": {"column": "v", "kind": "btree", "parameters": {}},
    "drop_index": {"name": "v_idx"},
    "schema": {},
    "regions": {},
    "tables": {},
    "create": {"table_name": "orders"},
    "look": {"from": "grpc://127.0.0.1:9"},
    "release": {"region": "REGION"},
}
WRITE = {"op": "write", "delete": False, "durable": True, "token": None}
PUTS: Mapping[str, Mapping[str, Any]] = {
    "put": {"op": "put", "region": "REGION", "producer": "query", "sequence": 1, "routing": 1},
    "write": WRITE,
    "delete": {**WRITE, "op": "delete", "filter": "id = 1", "version": 1},
    "update": {**WRITE, "op": "update", "filter": "id = 1", "version": 1, "expressions": {"v": "v + 1"}},
}
VECTOR = pa.table({"vector": pa.array([1.0, 2.0], pa.float32())})
GETS: Mapping[str, tuple[Mapping[str, Any], pa.Table | None]] = {
    "get": ({"columns": None}, pa.table({"id": [1]})),
    "scan": ({}, None),
    "search": ({"column": "v", "k": 1}, VECTOR),
    "match": ({"column": "v", "text": "a", "k": 1}, None),
    "candidates": ({}, VECTOR),
    "facets": ({"column": "v"}, None),
    "changes": ({}, None),
}
OPERATIONS = FlightService.operations
CASES: dict[str, Case] = {
    **{f"do_action {name}": Case(action(name), "read", ACTS[name]) for name in ASK_WHO},
    **{
        f"do_exchange {name}": Case(exchange(), OPERATIONS[name].role, {"op": name, **request})
        for name, request in ACTS.items()
    },
    **{f"do_exchange {name}": Case(exchange(ROWS), "write", request) for name, request in PUTS.items()},
    **{
        f"do_exchange {name}": Case(exchange(), "read", {"op": name, **LEVEL, **asked}, rows)
        for name, (asked, rows) in GETS.items()
    },
}


def put(served: Served, body: bytes, called: flight.FlightCallOptions) -> object:
    writer, reader = served.raw.do_put(flight.FlightDescriptor.for_command(body), ROWS.schema, called)
    with writer:
        writer.write_table(ROWS)
        writer.done_writing()
        return reader.read()


ABSENT: dict[str, Send] = {
    "list_flights": lambda served, body, called: list(served.raw.list_flights(body, called)),
    "list_actions": lambda served, _, called: list(served.raw.list_actions(called)),
    "get_flight_info": lambda served, body, called: served.raw.get_flight_info(
        flight.FlightDescriptor.for_command(body), called
    ),
    "get_schema": lambda served, body, called: no_columns(
        served.raw.get_schema(flight.FlightDescriptor.for_command(body), called)
    ),
}
"""Flight calls that a daemon does not implement."""
OLD: dict[str, Send] = {
    "do_get": lambda served, body, called: rows_of(served.raw.do_get(flight.Ticket(body), called)),
    "do_put": put,
}
"""Flight calls of version 1 of the protocol."""


def no_columns(found: flight.SchemaResult) -> None:
    """Raise an error in place of the default answer without information: pyarrow would send a traceback with it."""
    assert found.schema == pa.schema([])
    raise flight.FlightServerError("no columns", extra_info=b'{"kind": "INVALID", "message": "no columns"}')


_OF_SERVERS = {"port", "run", "serve", "shutdown", "wait"}
UNKNOWN = "a-token-of-nobody"


TEXTS = st.text(max_size=20)
FIELDS = st.dictionaries(TEXTS.filter(lambda name: name != "table"), TEXTS)
"""Fields of requests. A caller with a token that requests another `table` gets the name of the served one
(`test_out_of_date`).
"""


def refusal(served: Served, send: Send, body: bytes, token: str | None) -> tuple[str, str, str]:
    """Return the kind and the text of a refusal, and the reason under which it was counted; check that nothing else
    changed.
    """
    before, counted = served.state(), served.refused("flight")
    with pytest.raises((pa.ArrowException, OSError)) as refused:
        send(served, body, options(token))
    served.expect_no_leak(str(refused.value))
    extra = getattr(refused.value, "extra_info", b"")
    served.expect_no_leak(extra.decode())
    assert served.state() == before
    why = [name for name, number in served.refused("flight").items() for _ in range(number - counted[name])]
    assert len(why) == 1, (why, str(refused.value))
    told = json.loads(extra) if extra else {"kind": "", "message": str(refused.value)}
    return told["kind"], told["message"], why[0]


def test_every_way_into_the_service_has_a_case(served: Served) -> None:
    methods = {name for name in dir(flight.FlightServerBase) if not name.startswith("_")} - _OF_SERVERS
    assert methods == {name.partition(" ")[0] for name in CASES} | set(ABSENT) | set(OLD)
    assert {*ACTS, *PUTS, *GETS} == set(OPERATIONS)


@pytest.mark.parametrize("name", [*CASES, *ABSENT, *OLD])
def test_a_caller_without_the_right_token_is_refused(served: Served, name: str) -> None:
    case = CASES.get(name)
    send, body = ((ABSENT | OLD)[name], b"") if case is None else (case.send, case.packed(served))
    for token in (None, UNKNOWN, ""):
        kind, message, why = refusal(served, send, body, token)
        assert (kind, why, message.startswith("missing or wrong token")) == ("", "token", True)
    for role in {"read": (), "write": ("read",), "admin": ("read", "write")}["read" if case is None else case.needs]:
        kind, message, why = refusal(served, send, body, role)
        assert (kind, why) == ("INVALID", "role")
        assert f"the token has the role '{role}'" in message
    served.expect_healthy()


@pytest.mark.parametrize("name", ABSENT)
def test_calls_that_a_daemon_does_not_have_are_refused_to_admins_too(served: Served, name: str) -> None:
    for body in (b"", GARBAGE, b"x" * MESSAGE * 2):
        kind, _, why = refusal(served, ABSENT[name], body, "admin")
        assert (kind, why) == ("INVALID", "invalid")
    served.expect_healthy()


@pytest.mark.parametrize("send", [*OLD.values(), action("flush")], ids=[*OLD, "do_action"])
def test_a_call_of_version_1_is_refused_with_the_process_to_upgrade(served: Served, send: Send) -> None:
    kind, message, why = refusal(served, send, b"", "admin")
    assert (kind, why) == ("INVALID", "invalid")
    assert message.endswith("upgrade the caller first")
    served.expect_healthy()


@pytest.mark.parametrize("name", CASES)
def test_a_request_that_is_too_large_cut_off_or_garbage_is_refused(served: Served, name: str) -> None:
    case = CASES[name]
    whole = case.packed(served)
    kind, message, why = refusal(served, case.send, case.packed(served, **PAD), "admin")
    assert (kind, why, "daemon.message_max" in message) == ("INVALID", "size", True)
    for body in (whole[:-1], whole[: len(whole) // 2], whole[:3], b"", GARBAGE):
        kind, message, why = refusal(served, case.send, body, "admin")
        assert (kind, why) == ("INVALID", "invalid"), (body, message)
        assert len(message) < 500
        assert "\n" not in message
    served.expect_healthy()


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.request])
def test_a_request_whose_fields_are_of_other_types_is_refused(served: Served, name: str) -> None:
    case = CASES[name]
    fields = {field: {"a": [1]} for field in case.request if field not in ("op", "from")}
    if fields:
        kind, message, why = refusal(served, case.send, case.packed(served, **fields), "admin")
        assert (kind, why) == ("INVALID", "invalid"), message
    served.expect_healthy()


@pytest.mark.parametrize("op", ["write", "delete"])
def test_rows_that_are_too_many_or_cut_off_are_refused(served: Served, op: str) -> None:
    body, way = pack({**PUTS[op], **STATED}), exchange
    kind, message, why = refusal(served, way(LARGE), body, "admin")
    assert (kind, why, "daemon.put_max" in message) == ("INVALID", "size", True)
    wide = pa.table({"id": [7], "v": ["x" * MESSAGE]}, schema=SCHEMA)
    assert refusal(served, way(wide), body, "admin")[2] == "size"
    kind, message, why = refusal(served, way(ROWS, closed=False), body, "admin")
    assert (kind, why, "nothing was applied" in message) == ("INVALID", "invalid", True)
    other = pa.table({"id": ["a"], "nothing": [b"\xff"]})
    assert refusal(served, way(other), body, "admin")[0] == "INVALID"
    served.expect_healthy()


@given(st.binary(max_size=200), st.sampled_from(sorted({*CASES} - {"do_exchange put"})), FIELDS)
@settings(max_examples=60, deadline=None)
def test_no_bytes_change_anything_or_show_the_inside(
    served: Served, garbage: bytes, name: str, fields: Mapping[str, str]
) -> None:
    """The garbage goes into tickets, descriptors and bodies, and into the metadata of a stream of rows."""
    before = served.state()
    for body in (garbage, pack(fields), pack({"op": name.partition(" ")[2], **STATED, **fields})[: len(garbage)]):
        for role in ("admin", "read"):
            if name.endswith(("flush", "commit")) and role == "admin":
                continue
            try:
                CASES[name].send(served, body, options(role))
            except (pa.ArrowException, flight.FlightError) as error:
                served.expect_no_leak(str(error))
    descriptor = flight.FlightDescriptor.for_command(pack({**WRITE, **STATED}))
    writer, reader = served.raw.do_exchange(descriptor, options("write"))
    with pytest.raises((pa.ArrowException, flight.FlightError)) as refused, writer:  # noqa: PT012
        writer.begin(SCHEMA)
        writer.write_with_metadata(ROWS.to_batches()[0], garbage)
        writer.write_metadata(garbage)
        writer.done_writing()
        list(reader)
    served.expect_no_leak(str(refused.value))
    assert served.state() == before


# ---- HTTP -----------------------------------------------------------------------------------------------------------


def test_every_page_refuses_who_may_not_see_it_and_what_is_no_request(served: Served) -> None:
    before, site = served.state(), served.site
    assert {method for method, _ in site.routes()} == {"GET", "HEAD", "POST"}
    assert len(site.routes()) > 20
    for method, path in site.routes():
        for header in (b"", b"Authorization: Bearer " + UNKNOWN.encode() + b"\r\n", b"Authorization: Basic eDp5\r\n"):
            body = b"Content-Type: application/json\r\nContent-Length: 2\r\n\r\n{}" if method == "POST" else b"\r\n"
            answer = asked(served, f"{method} {path}", header + body)
            shown = path in OPEN or (path in BRIEF and not header)
            assert status(answer) == (200 if shown else 401), (method, path)
            if path in BRIEF and not header and method == "GET":
                assert answer.endswith(b'{"ready": true}\n')
        admin = b"Authorization: Bearer " + TOKENS["admin"].encode() + b"\r\n"
        counted = site.guard.refused.counts("http")
        large = asked(served, f"{method} {path}", admin + b"Content-Length: %d\r\n\r\n" % (QUERY_BYTES + 1))
        garbage = asked(served, f"{method} {path}", admin + b"\x00\xff: \x01\r\n\r\n")
        other = asked(served, f"PATCH {path}", admin + b"\r\n")
        assert [status(each) for each in (large, garbage, other)] == [413, 400, 405], (method, path)
        now = site.guard.refused.counts("http")
        assert (now["size"] - counted["size"], now["invalid"] - counted["invalid"]) == (1, 2)
    closed = [path for method, path in site.routes() if path not in OPEN]
    assert site.guard.refused.counts("http")["token"] == 3 * len(closed) - 2, "readyz answers GET and HEAD"
    assert served.state() == before
    served.expect_healthy()


def asked(served: Served, line: str, rest: bytes) -> bytes:
    request = line.encode() + b" HTTP/1.1\r\n" + HOST + b"Connection: close\r\n" + rest
    answer = sent(served.site, request, body=not line.startswith("HEAD"))
    served.expect_no_leak(answer.decode() if b"text/javascript" not in answer else "")
    return answer
