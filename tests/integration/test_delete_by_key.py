"""Deletes by key: which values are keys, and how many rows the receipt counts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import memwal
from memwal.ingest.engine.read.reader import Reader
from memwal.ingest.engine.table import writes
from memwal.ingest.errors import Invalid, Unavailable
from tests.integration.test_router import Pair
from tests.messages import raises
from tests.ways import entered

SCHEMA = pa.schema([pa.field("name", pa.string(), nullable=False), pa.field("price", pa.int64())])
WAYS = ("embedded", "flight", "daemons")


@pytest.fixture
def opened(tmp_path: Path, ends: ExitStack) -> Callable[..., Any]:
    """Open a table with text keys, and return it embedded, as a client of a daemon, or as a client of two daemons."""

    def opened(way: str = "embedded", **table: Any) -> Any:
        uri, settings = str(tmp_path / "t.lance"), {"commit": {"interval": "0s"}, "table": table}
        new = memwal.open(uri, schema=SCHEMA, key="name", regions=3, settings=settings)
        if way == "daemons":
            new.close()
            config = tmp_path / "t.toml"
            config.write_text(f'[table]\nuri = "{uri}"\n[commit]\ninterval = "0s"\n')
            return ends.enter_context(memwal.connect(Pair(config, ends).endpoints))
        ends.enter_context(new)
        return entered(way, new, ends)

    return opened


def rows(ids: Any) -> list[dict[str, Any]]:
    return [{"name": f"row {id}", "price": id} for id in ids]


def names(ids: Any) -> list[str]:
    return [row["name"] for row in rows(ids)]


@pytest.mark.parametrize("way", WAYS)
def test_a_condition_in_the_place_of_keys_is_refused(way: str, opened: Callable[..., Any]) -> None:
    table = opened(way)
    table.put(rows(range(20)))
    for call in (table.delete, table.get):
        for text in ("price > 10", "row 1"):
            with raises(Invalid):
                call(text)
    assert table.count() == 20
    # Inside a list every text is a key, even if it resembles a condition.
    table.put([{"name": "price > 10", "price": 1}])
    assert table.get(["price > 10"])["price"].to_pylist() == [1]
    assert table.delete(["price > 10"]).rows == 1
    assert table.delete(filter="price > 10").rows == 9
    assert table.count() == 11


def test_a_text_alone_is_refused_where_keys_are_numbers(tmp_path: Path) -> None:
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("price", pa.int64())])
    with memwal.open(tmp_path / "t.lance", schema=schema, key="id") as table:
        table.put([{"id": 17, "price": 1}])
        with raises(Invalid):
            table.delete("price > 10")
        assert table.get(["17"]).num_rows == table.delete(17).rows == 1
    with memwal.open(tmp_path / "t.lance", read_only=True) as table, raises(Invalid):
        table.get("id = 17")


@pytest.mark.parametrize("way", WAYS)
def test_a_receipt_counts_the_rows_that_existed(way: str, opened: Callable[..., Any]) -> None:
    table = opened(way)
    for step in ((), (table.flush,), (table.flush, table.commit)):
        table.put(rows(range(20)))
        for each in step:
            each()
        receipt = table.delete(names(range(15, 25)))
        assert (receipt.rows, receipt.applied) == (5, True)
        assert sum(counts.applied for counts in receipt.regions.values()) == 10
        assert table.delete(names(range(15, 25))).rows == 0
        assert table.delete([*names([3]), *names([3]), "none"], durable=False).rows == 1
        assert table.count() == 14
    assert table.delete([]).rows == 0


@pytest.mark.parametrize("way", WAYS)
def test_a_repeat_counts_nothing(way: str, opened: Callable[..., Any]) -> None:
    table = opened(way)
    table.put(rows(range(8)))
    first = table.delete(names(range(4)), token="cleaner:1")
    table.put(rows(range(4)))
    again = table.delete(names(range(4)), token="cleaner:1")
    assert [(each.rows, each.applied) for each in (first, again)] == [(4, True), (0, False)]
    assert table.count() == 8


@pytest.mark.parametrize("way", WAYS)
def test_many_keys_are_not_looked_up(way: str, opened: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    table = opened(way)
    table.put(rows(range(10)))
    monkeypatch.setattr(writes, "COUNTED_MAX", 3)
    assert table.delete(names(range(8, 11))).rows == 2
    assert table.delete(names(range(100, 160))).rows == 60
    assert table.count() == 8


def test_a_large_base_without_an_index_is_not_scanned(
    opened: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = opened()
    table.put(rows(range(10)))
    table.flush()
    table.commit()
    monkeypatch.setattr(writes, "SCANNED_MAX", 3)
    assert table.delete(["none"]).rows == 1
    table.create_index("name", "btree")
    assert table.delete(["none"]).rows == 0
    assert table.delete(names([0])).rows == 1


def test_a_lookup_that_fails_fails_no_delete(opened: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    table = opened()
    table.put(rows(range(4)))

    def fails(*_: Any, **__: Any) -> Any:
        raise Unavailable("storage does not answer")

    with monkeypatch.context() as broken:
        broken.setattr(Reader, "get", fails)
        assert table.delete(names([0, 9])).rows == 2
    assert table.count() == 3


def test_a_row_that_has_expired_is_not_counted(tmp_path: Path) -> None:
    schema = SCHEMA.append(pa.field("at", pa.timestamp("us")))
    settings = {"table": {"ttl": "1h", "ttl_column": "at"}, "commit": {"interval": "0s"}}
    with memwal.open(tmp_path / "t.lance", schema=schema, key="name", settings=settings) as table:
        old = pa.scalar(0, pa.timestamp("us")).as_py()
        table.put([{"name": "old", "price": 1, "at": old}, {"name": "new", "price": 1, "at": None}])
        assert table.delete(["old", "new"]).rows == 1
