"""Facets: the values of a column with their counts, of every type that has an order."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import date
from typing import Any

import pyarrow as pa
import pytest

import memwal
from tests.ways import served

ID = uuid.UUID(int=7).bytes
SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        ("section", pa.string()),
        ("price", pa.float64()),
        ("owner", pa.uuid()),
        ("on_sale", pa.bool_()),
        ("day", pa.date32()),
        ("sizes", pa.list_(pa.int32())),
        ("place", pa.struct([("city", pa.string())])),
    ]
)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Yield a table whose rows are spread over the base table, SSTs and memtables of three regions."""
    uri, settings = str(tmp_path_factory.mktemp("facets") / "t.lance"), {"commit": {"interval": "0s"}}
    with memwal.open(uri, schema=SCHEMA, key="id", regions=3, settings=settings) as opened:
        opened.put([row(n) for n in range(60)])
        opened.flush()
        opened.commit()
        opened.put([row(n, section="devel") for n in range(10)])
        opened.flush()
        opened.delete([*range(50, 60)])
        opened.put([row(100, section=None)])
        yield opened


def row(n: int, **changed: Any) -> dict[str, Any]:
    """Return a row: three sections in turn, every fourth price NaN."""
    price = float("nan") if n % 4 == 0 else n % 4 / 2
    made = {"id": n, "section": ("admin", "net", "text")[n % 3], "price": price, "owner": ID, "on_sale": n % 2 == 0}
    return made | {"day": date(2026, 1, 1 + n % 2), "sizes": [n], "place": {"city": "x"}} | changed


def test_the_most_frequent_value_is_first_and_null_is_a_value(table: Any) -> None:
    found = table.facets("section").to_pydict()
    assert found == {"section": ["net", "admin", "text", "devel", None], "_count": [14, 13, 13, 10, 1]}


@pytest.mark.parametrize("column", ["id", "section", "price", "owner", "on_sale", "day"])
def test_every_row_is_counted_once(column: str, table: Any) -> None:
    found = table.facets(column)
    assert sum(found["_count"].to_pylist()) == table.count() == 51
    assert found.schema.field(column) == table.schema.field(column)
    assert len(set(map(str, found[column].to_pylist()))) == found.num_rows


def test_nan_is_one_value(table: Any) -> None:
    found = table.facets("price", "id < 50").to_pydict()
    assert dict(zip(map(str, found["price"]), found["_count"], strict=True)) == {
        "nan": 13,
        "0.5": 13,
        "1.0": 12,
        "1.5": 12,
    }


def test_a_filter_that_no_row_passes_counts_nothing(table: Any) -> None:
    found = table.facets("owner", "id > 1000")
    assert found.num_rows == 0
    assert found.schema.field("owner") == table.schema.field("owner")


@pytest.mark.parametrize("column", ["sizes", "place", "sections", 3, None])
def test_a_column_without_an_order_or_that_does_not_exist_is_rejected(column: Any, table: Any) -> None:
    with pytest.raises(memwal.Invalid) as refused:
        table.facets(column)
    assert "column" in str(refused.value)


def test_many_values_are_counted_in_parts(table: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memwal.ingest.engine.read.reader._UNCOUNTED", 3)
    assert table.facets("section").num_rows == 5
    assert sum(table.facets("id")["_count"].to_pylist()) == 51


def test_the_explanation_names_the_rows_that_were_counted(table: Any) -> None:
    told: list[memwal.Explanation] = []
    table.facets("section", explain=told.append)
    assert (told[0].read, told[0].rows) == ("facets", 51)


def test_a_client_and_an_asynchronous_client_get_the_same(table: Any, ends: ExitStack) -> None:
    async def awaited(at: str) -> Any:
        async with await memwal.connect_async(at) as client:
            return await client.facets("section", "id < 20")

    at, expected = served(table, ends), table.facets("section", "id < 20")
    with memwal.connect(at) as client:
        assert client.facets("section", "id < 20").equals(expected)
    assert asyncio.run(awaited(at)).equals(expected)
