"""Columns with special handling in Lance: nested structs, booleans inside them, and decimals read from IPC."""

from __future__ import annotations

from contextlib import ExitStack
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import memwal
import memwal.flush.sst.data
from tests.ways import entered

INNER = pa.struct([("a", pa.int64()), ("text", pa.string()), ("yes", pa.bool_())])
OUTER = pa.struct([("inner", INNER), ("x", pa.int32())])
NESTED = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("doc", OUTER),
        pa.field("docs", pa.list_(OUTER)),
        pa.field("flags", pa.struct([("yes", pa.bool_())])),
    ]
)


def nested(first: int, count: int, pad: int = 0) -> pa.Table:
    """Return rows with nulls at every depth; each text has `pad` additional bytes."""

    def inner(n: int) -> Any:
        return None if n % 7 == 3 else {"a": n, "text": f"t{n}" + "x" * pad, "yes": [True, False, None][n % 3]}

    def outer(n: int) -> Any:
        return None if n % 11 == 5 else {"inner": inner(n), "x": n}

    rows = [
        {
            "id": n,
            "doc": outer(n),
            "docs": [outer(n + part) for part in range(n % 3)],
            "flags": None if n % 5 == 0 else {"yes": [True, None][n % 2]},
        }
        for n in range(first, first + count)
    ]
    return pa.Table.from_pylist(rows, schema=NESTED)


@pytest.fixture
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a flush pass a memtable of 15,000 rows to Lance in many slices, like a memtable of some MiB."""
    monkeypatch.setattr(memwal.flush.sst.data, "SLICE_BYTES", 10_000)


def by_id(table: Any, **read: Any) -> list[dict[str, Any]]:
    return sorted(table.scan(**read).read_all().to_pylist(), key=lambda row: row["id"])


@pytest.mark.usefixtures("small_slices")
@pytest.mark.parametrize("wal_format", ["lance", "arrow"])
def test_structs_inside_structs_are_flushed_from_slices(tmp_path: Path, wal_format: str) -> None:
    settings = {"commit": {"interval": 0}, "wal": {"format": wal_format}}
    rows = nested(0, 2_000)
    with memwal.open(tmp_path / "t.lance", schema=NESTED, key="id", regions=1, settings=settings) as table:
        table.put(rows.slice(0, 1_500))
        table.put(rows.slice(1_000))  # superseded rows use another code path into the SST
        table.flush()
        assert by_id(table, level="flushed") == rows.to_pylist()
        table.put(rows.slice(300, 40))
        table.flush()
        table.commit()
        assert by_id(table, level="committed") == rows.to_pylist()
    with memwal.open(tmp_path / "t.lance", settings=settings) as table:
        assert by_id(table) == rows.to_pylist()
        assert by_id(table, filter="doc.inner.a = 300") == [rows.to_pylist()[300]]


@pytest.mark.parametrize("wal_format", ["lance", "arrow"])
def test_structs_inside_structs_are_logged_in_parts(tmp_path: Path, wal_format: str) -> None:
    """An entry above `wal.entry_size_max` is split, and each part has a slice of the rows."""
    settings = {"commit": {"interval": 0}, "wal": {"format": wal_format, "entry_size_max": "1MiB"}}
    rows = nested(0, 2_000, pad=1_000)
    assert rows.nbytes > 2 << 20
    with memwal.open(tmp_path / "t.lance", schema=NESTED, key="id", regions=1, settings=settings) as table:
        table.put(rows)
    with memwal.open(tmp_path / "t.lance", settings=settings) as table:
        assert by_id(table) == rows.to_pylist()
        assert table.count("doc.inner.a >= 1000") == sum(
            (row["doc"] or {}).get("inner") is not None and row["id"] >= 1_000 for row in rows.to_pylist()
        )
        table.flush()
        table.commit()
        assert by_id(table, level="committed") == rows.to_pylist()


@pytest.mark.usefixtures("small_slices")
def test_structs_inside_structs_are_appended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a key a commit reads an SST in batches, which are slices of Lance's pages."""
    monkeypatch.setattr("memwal.flush.sst.files._BATCH_ROWS", 100)
    rows = nested(0, 2_000)
    settings = {"commit": {"interval": 0}}
    with memwal.open(tmp_path / "t.lance", schema=NESTED, key=(), regions=1, settings=settings) as table:
        table.put(rows)
        table.flush()
        table.commit()
        assert by_id(table, level="committed") == rows.to_pylist()


MONEY = pa.decimal128(20, 2)
PRICES = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("small", pa.decimal128(9, 4)),
        pa.field("price", MONEY),
        pa.field("large", pa.decimal256(60, 3)),
        pa.field("item", pa.struct([("price", MONEY), ("large", pa.decimal256(60, 3))])),
        pa.field("deep", pa.struct([("item", pa.struct([("price", MONEY)]))])),
        pa.field("prices", pa.list_(MONEY)),
        pa.field("items", pa.list_(pa.struct([("price", MONEY)]))),
        pa.field("pair", pa.list_(MONEY, 2)),
    ]
)


def prices(first: int, count: int) -> pa.Table:
    """Return rows whose number, together with the variable-length columns before it, shifts every decimal buffer of an
    IPC message.
    """

    def row(n: int) -> dict[str, Any]:
        value = None if n % 5 == 2 else Decimal(n)
        return {
            "id": n,
            "small": value,
            "price": value,
            "large": value,
            "item": None if n % 3 == 1 else {"price": value, "large": value},
            "deep": {"item": {"price": value}},
            "prices": [value] * (n % 4),
            "items": [{"price": value}] * (n % 2),
            "pair": [value, value],
        }

    return pa.Table.from_pylist([row(n) for n in range(first, first + count)], schema=PRICES)


@pytest.mark.parametrize("name", PRICES.names[1:])
@pytest.mark.parametrize("wal_format", ["lance", "arrow"])
def test_decimals_that_were_replayed_are_flushed(tmp_path: Path, wal_format: str, name: str) -> None:
    """Each type is tested alone, since the preceding columns determine which buffer is at an odd address."""
    settings = {"commit": {"interval": 0}, "wal": {"format": wal_format}}
    schema, count = pa.schema([PRICES.field("id"), PRICES.field(name)]), 0
    rows = prices(0, 14).select(schema.names)
    with memwal.open(tmp_path / "t.lance", schema=schema, key="id", regions=1, settings=settings) as table:
        for more in (1, 2, 5, 6):
            table.put(rows.slice(count, more))
            count += more
    with memwal.open(tmp_path / "t.lance", settings=settings) as table:
        assert by_id(table) == rows.to_pylist()
        table.flush()
        assert by_id(table, level="flushed") == rows.to_pylist()
        table.commit()
        assert by_id(table, level="committed") == rows.to_pylist()


@pytest.mark.parametrize("wal_format", ["lance", "arrow"])
def test_decimals_come_through_a_daemon(tmp_path: Path, wal_format: str, ends: ExitStack) -> None:
    settings = {"commit": {"interval": 0}, "wal": {"format": wal_format}}
    rows = prices(0, 200)
    table = memwal.open(tmp_path / "t.lance", schema=PRICES, key="id", regions=2, settings=settings)
    client = entered("flight", ends.enter_context(table), ends)
    for start in range(0, 200, 13):
        client.put(rows.slice(start, 13))
    dear = [row for row in rows.to_pylist() if (row["price"] or 0) >= 7]
    assert by_id(client, filter="price >= 7") == dear
    client.flush()
    client.commit()
    assert by_id(client, level="committed") == rows.to_pylist()
