"""Requests of the fuzzer: valid ones, the same with hostile values, and the same with changed bytes.

Request number n of seed s is always the same; it depends on nothing else.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from memwal.ingest.protocol import OURS
from memwal.ingest.service.rpc.wire import StreamSum, pack
from tests.fuzz.arrays import changed, hostile_array, hostile_table

WIDTH, KEYS = 16, 3000


@dataclass(frozen=True)
class Flight:
    """One Flight call. `call`: exchange, or action as of version 1 of the protocol; `batches`: sent after the command,
    followed by `closing`."""

    call: str
    role: str
    command: bytes
    action: str = ""
    batches: Sequence[pa.RecordBatch] = ()
    closing: bytes = b""
    what: str = ""

    def __str__(self) -> str:
        rows = f", {len(self.batches)} batches" if self.batches else ""
        return f"{self.what}: {self.call} {self.action} {self.command[:300]!r} ({len(self.command)} bytes{rows})"


@dataclass(frozen=True)
class Http:
    """One HTTP request."""

    method: str
    path: str
    headers: Sequence[tuple[str, str]] = ()
    body: bytes = b""
    what: str = "http"

    def __str__(self) -> str:
        return f"{self.what}: {self.method} {self.path[:200]!r} {self.headers!r:.200} {self.body[:200]!r}"


Request = Flight | Http
Fields = dict[str, Any]
LEVELS = ("latest", "durable", "flushed", "committed")
FILTERS = (
    "price > 50", "name = 'name3' AND price < 20", "id IN (1, 2, 3)", "body LIKE 'alpha%'", "vector IS NOT NULL",
    "place.x > 3.5", "price BETWEEN 1 AND 9 OR id = 7", "NOT (name = 'x')",
)  # fmt: skip
TEXTS = ("alpha", "+beta -gamma", '"alpha beta"', "wor*", "alfa~", "delta~2 word3", "+alpha +word1")
NUMBERS = (
    0, -1, 1, 2, 255, 65536, 10**6, 2**30, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**61, 2**63 - 1, 2**63,
    2**64 - 1, 2**64, -(2**31), -(2**63), 10**30, 0.5, -0.0, 1e308, float("nan"), float("inf"), float("-inf"),
)  # fmt: skip
COUNTS = ("k", "n", "refine_factor", "nprobes", "limit")
IDS = ("00000000-0000-0000-0000-000000000000", "4a388480-a25b-59a8-b058-24217f980256", "x", "4a388480")


def hostile_value(rng: random.Random, depth: int = 0) -> Any:
    """Return a value that a field of a request should not have."""
    kind = rng.randrange(10)
    if kind < 4:
        return rng.choice(NUMBERS)
    if kind == 4:
        return rng.choice(
            [None, True, False, "", "latest", "\x00", "\ud800", "a" * 100_000, "../..", "é" * 300, "%s{}"]
        )
    if kind == 5:
        nested: Any = rng.choice(NUMBERS)
        for _ in range(rng.choice([1, 3, 50, 400])):
            nested = [nested]
        return nested
    if kind == 6:
        return {rng.choice(["", "id", "price", "x" * 1000, "body"]): rng.choice(NUMBERS) for _ in range(3)}
    if kind == 7:
        return ["id"] * rng.choice([0, 1, 2, 1000, 100_000])
    if kind == 8:
        return rng.choice(FILTERS) + rng.choice(["", " AND " + rng.choice(FILTERS), "'", " -- ", ")", " = ", "\n"])
    return [hostile_value(rng, depth + 1) for _ in range(rng.randrange(4))] if depth < 3 else []


def hostile_text(rng: random.Random) -> str:
    """Return a text for `match` that is hard for its parser or its indexes."""
    word = rng.choice(["alpha", "a", "x" * 5000, "ü", "\x00", "+", "-", '"', "~", "*", "word1~2", "a*", "\U0001f600"])
    joined = rng.choice([" ", "", " +", " -", '" "', "~ "]).join([word] * rng.choice([1, 3, 100, 2000]))
    return rng.choice(["", "+", '"']) + joined + rng.choice(["", '"', "~2", "*"])


# ---- valid requests --------------------------------------------------------------------------------------------------


def _common(rng: random.Random) -> Fields:
    found: Fields = {"level": rng.choice(LEVELS)}
    if rng.random() < 0.5:
        found["filter"] = rng.choice([None, *FILTERS])
    if rng.random() < 0.5:
        found["columns"] = rng.choice([None, ["id"], ["id", "vector"], ["body", "place"]])
    return found


def _vector(rng: random.Random) -> pa.Table:
    return pa.table({"vector": pa.array([rng.random() for _ in range(WIDTH)], pa.float32())})


def _how(rng: random.Random) -> Fields:
    given: Fields = {
        "metric": rng.choice(["l2", "cosine", "dot"]),
        "nprobes": rng.choice([1, 20]),
        "refine_factor": rng.choice([1, 5]),
        "distance_range": rng.choice([[None, 100.0], [0.0, None], None]),
    }
    return {name: value for name, value in given.items() if rng.random() < 0.4}


def _get(rng: random.Random) -> tuple[Fields, pa.Table | None]:
    asked = {name: value for name, value in _common(rng).items() if name != "filter"}
    return {"op": "get", **asked}, pa.table({"id": [rng.randrange(KEYS) for _ in range(rng.choice([1, 5, 200]))]})


def _scan(rng: random.Random) -> tuple[Fields, pa.Table | None]:
    order = rng.choice([{}, {"order_by": [["price", True]]}, {"order_by": [["name", False], ["id", True]]}])
    columns = {"columns": ["id", "price", "name"]} if order else {}
    return {"op": "scan", **_common(rng), **order, **columns, "limit": rng.choice([None, 1, 100])}, None


def _search(rng: random.Random) -> tuple[Fields, pa.Table | None]:
    return {"op": "search", **_common(rng), **_how(rng), "column": "vector", "k": rng.choice([1, 10])}, _vector(rng)


def _match(rng: random.Random) -> tuple[Fields, pa.Table | None]:
    column = rng.choice(["body", {"body": 2.0}])
    return {"op": "match", **_common(rng), "column": column, "text": rng.choice(TEXTS), "k": rng.choice([1, 10])}, None


def _candidates(rng: random.Random) -> tuple[Fields, pa.Table | None]:
    text = {"text": rng.choice(TEXTS), "n": rng.choice([1, 50])}
    return {"op": "candidates", **_common(rng), **_how(rng), **text}, _vector(rng)


def _changes(rng: random.Random) -> tuple[Fields, pa.Table | None]:
    since = {"table": "t", "routing": 1, "regions": {IDS[1]: rng.choice([0, 1, 5])}}
    return {
        "op": "changes",
        "since": since,
        "until": None,
        "images": rng.choice(["after", "both"]),
        "columns": None,
    }, None


READS: tuple[Callable[[random.Random], tuple[Fields, pa.Table | None]], ...] = (
    _get, _scan, _search, _match, _candidates, _changes,
)  # fmt: skip
ACTIONS: dict[str, Fields] = {
    "count": {"level": "latest", "filter": "price > 5"},
    "applied": {"producer": "fuzz", "regions": [IDS[1]], "routing": 1},
    "changes_position": {"at": "latest"},
    "regions": {},
    "status": {},
    "schema": {},
    "indexes": {},
    "base_version": {},
    "versions": {},
    "tag": {"name": "fuzz", "version": 1, "replace": True},
    "record": {"token": "fuzz:1", "durable": True, "regions": [IDS[1]], "routing": 1},
}


def _some_rows(rng: random.Random) -> pa.Table:
    from tests.fuzz.scene import rows_of

    return rows_of([KEYS + rng.randrange(1000) for _ in range(rng.choice([1, 10, 100]))])


def _write(rng: random.Random) -> tuple[Fields, pa.Table]:
    kind, durable = rng.randrange(5), rng.random() < 0.5
    keys = pa.table({"id": [KEYS + rng.randrange(1000) for _ in range(5)]})
    token = rng.choice([None, f"fuzz:{rng.randrange(10**6)}"])
    common = {"durable": durable, "token": token, "timeout": rng.choice([None, 5.0])}
    if kind == 0:
        return {
            "op": "put",
            "region": IDS[1],
            "routing": 1,
            "producer": "f",
            "sequence": rng.randrange(10**6),
            "rows": None,
        }, _some_rows(rng)
    if kind == 1:
        return {"op": "write", "delete": True, **common}, keys
    if kind == 2:
        return {"op": "delete", "filter": "price > 1000", "version": 1, **common}, keys
    if kind == 3:
        expressions = {"price": rng.choice(["price + 1", "price * price", hostile_text(rng)])}
        keys = keys.append_column("name", pa.array(["x"] * 5))
        return {"op": "update", "filter": "price < 9", "version": 1, "expressions": expressions, **common}, keys
    return {"op": "write", "delete": False, **common}, _some_rows(rng)


# ---- mutations -------------------------------------------------------------------------------------------------------


def _hostile_fields(rng: random.Random, fields: Fields) -> Fields:
    """Return the request with one or two hostile values."""
    changed = dict(fields)
    for _ in range(rng.choice([1, 1, 1, 2])):
        known = [*changed, "regions", "routing", "at", "protocol", "needs", "table", "k", "offset", "limit"]
        known.append("refine_factor")
        name = rng.choice(known)
        if rng.random() < 0.25 and (counts := [each for each in COUNTS if each in changed]):
            changed[rng.choice(counts)] = rng.choice(NUMBERS)
            continue
        if name == "op" and rng.random() < 0.8:
            continue
        if rng.random() < 0.1:
            changed.pop(name, None)
        elif name in ("text", "column") and rng.random() < 0.5:
            changed[name] = hostile_text(rng)
        else:
            changed[name] = hostile_value(rng)
    return changed


def _packed(fields: Fields, rows: pa.Table | None) -> bytes:
    fields = {"protocol": str(OURS), **fields}
    try:
        return pack(fields, rows)
    except (pa.ArrowException, ValueError, TypeError):
        return pack(fields)


def mutated(rng: random.Random, data: bytes) -> bytes:
    """Return `data` with some bytes changed."""
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 8])):
        if not changed:
            break
        at, kind = rng.randrange(len(changed)), rng.randrange(6)
        if kind == 0:
            changed[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            form = rng.choice(["<i", "<I", "<q", "<Q", "<H"])
            low = form[1].islower()
            size = 8 * struct.calcsize(form)
            value = rng.choice([0, 1, 2 ** (size - 1) - 1, -1 if low else 2**size - 1, 1000, 10**4])
            at = at // 4 * 4
            changed[at : at + size // 8] = struct.pack(form, value)
        elif kind == 2:
            del changed[at:]
        elif kind == 3:
            changed[at:at] = rng.randbytes(rng.choice([1, 4, 8, 64]))
        elif kind == 4:
            end = min(len(changed), at + rng.choice([1, 8, 64]))
            changed[at:at] = changed[at:end]
        else:
            changed[at : at + 8] = bytes(8)
    return bytes(changed)


def _read_request(rng: random.Random) -> Flight:
    fields, rows = rng.choice(READS)(rng)
    what = "valid read"
    if rng.random() < 0.1:
        fields["explain"] = True
    strategy = rng.random()
    if strategy < 0.45:
        fields, what = _hostile_fields(rng, fields), "hostile fields"
    elif strategy < 0.75 and rows is not None:
        name = rows.column_names[0]
        rows, what = hostile_table(rng, {name: rows.schema.field(0).type}), "hostile keys"
    command = _packed(fields, rows)
    if 0.75 < strategy < 0.95:
        command, what = mutated(rng, command), "changed bytes"
    return Flight("exchange", rng.choice(["read", "write"]), command, what=what)


def _action_request(rng: random.Random) -> Flight:
    name = rng.choice(list(ACTIONS))
    fields, what, rows = {"op": name, **ACTIONS[name]}, "valid action", None
    strategy = rng.random()
    if strategy < 0.6:
        fields, what = _hostile_fields(rng, fields), "hostile action"
    if strategy > 0.9:
        rows, what = changed(pa.table({"x": hostile_array(rng)})), "action with rows"
    command = _packed(fields, rows)
    if 0.6 < strategy < 0.8:
        command, what = mutated(rng, command), "changed bytes of an action"
    role = rng.choice(["read", "write"])
    if rng.random() < 0.2:
        named = rng.choice(["schema", "regions", name, "", "\x00", "x" * 3000])
        return Flight("action", role, command, named, what=what)
    return Flight("exchange", role, command, what=what)


def _write_request(rng: random.Random) -> Flight:
    fields, rows = _write(rng)
    what, strategy = "valid write", rng.random()
    if strategy < 0.35:
        fields, what = _hostile_fields(rng, fields), "hostile write"
    elif strategy < 0.85:
        kinds = {field.name: field.type for field in rows.schema}
        rows, what = hostile_table(rng, kinds), "hostile rows"
    command = _packed(fields, None)
    if strategy > 0.95:
        command, what = mutated(rng, command), "changed bytes of a write"
    batches = rows.to_batches() or []
    total = StreamSum()
    for batch in batches:
        if batch.num_rows:
            total.add(batch)
    closing = total.closing()
    if rng.random() < 0.1:
        closing = rng.choice([b"", b"{}", b"null", b"[", json.dumps({"close": 10**30, "crc": -1}).encode(), b"\xff"])
    return Flight("exchange", "write", command, batches=batches, closing=closing, what=what)


PATHS = (
    "/",
    "/metrics",
    "/status",
    "/health/livez",
    "/health/readyz",
    "/live",
    "/query",
    "/page/page.js",
    "/live/../x",
)


def _http_request(rng: random.Random) -> Http:
    token = ("Authorization", "Bearer " + rng.choice(["fuzz-read", "fuzz-write", "x", "", "\xff", "a" * 9000]))
    headers = [token]
    if rng.random() < 0.6:
        asked: Fields = {"filter": rng.choice(FILTERS), "limit": 5}
        if rng.random() < 0.5:
            asked |= {"words": rng.choice(TEXTS), "words_column": "body"}
        if rng.random() < 0.5:
            asked |= {"near": "7", "near_column": "vector"}
        if rng.random() < 0.6:
            asked = _hostile_fields(rng, asked)
        body = json.dumps(asked).encode()
        if rng.random() < 0.2:
            body = mutated(rng, body)
        length = str(len(body)) if rng.random() < 0.95 else rng.choice(["-1", "99999999999", "x", "0"])
        return Http(
            "POST", "/query", (*headers, ("Content-Type", "application/json"), ("Content-Length", length)), body
        )
    path = rng.choice(PATHS) + rng.choice(["", "", "?x=1", "?since=99999999999999999999", "%00", "/" * 5000])
    method = rng.choice(["GET", "GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "TRACE", "X" * 50])
    if rng.random() < 0.2:
        headers.append((rng.choice(["Range", "Host", "Expect", "Transfer-Encoding", "Origin"]), "x" * 100))
    return Http(method, path, tuple(headers))


def request(seed: int, number: int) -> Request:
    """Return request `number` of `seed`."""
    rng = random.Random(f"{seed}:{number}")
    kind = rng.random()
    if kind < 0.5:
        return _read_request(rng)
    if kind < 0.65:
        return _action_request(rng)
    if kind < 0.9:
        return _write_request(rng)
    return _http_request(rng)


def chosen(seed: int, number: int, **changes: Any) -> Request:
    """Return request `number` of `seed` with other attributes, for tests."""
    return replace(request(seed, number), **changes)
