"""Other Arrow libraries read tables and results directly; the representations of a table."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import Any

import duckdb
import polars
import pyarrow as pa
import pytest
from datafusion import SessionContext

import memwal
from tests.conftest import OpenSmall
from tests.messages import raises
from tests.ways import entered


@pytest.fixture(params=["embedded", "flight", "storage"])
def table(request: pytest.FixtureRequest, open_small: OpenSmall, made: Any, ends: ExitStack) -> Any:
    """Return a table with 30 rows: 20 in the base, 5 of them newer in an SST, 10 in the log and the memtables."""
    owner = open_small()
    owner.put(made.rows(range(20)))
    owner.flush()
    owner.commit()
    owner.put(made.rows(range(5), 1))
    owner.flush()
    owner.put(made.rows(range(20, 30)))
    return entered(request.param, owner, ends)


def expected(made: Any) -> list[tuple[int, str]]:
    rows = [*made.rows(range(5), 1), *made.rows(range(5, 30))]
    return sorted((row["id"], row["name"]) for row in rows)


def test_duckdb_reads_a_table_and_a_result(table: Any, made: Any) -> None:
    found = table  # noqa: F841 - DuckDB finds the table by this name
    assert sorted(duckdb.sql("select id, name from found").fetchall()) == expected(made)
    assert duckdb.sql("select count(*) from found a join found b on a.id = b.id").fetchall() == [(30,)]
    rows = table.scan(["id"], filter="id < 7")  # noqa: F841
    assert duckdb.sql("select sum(id) from rows").fetchall() == [(21,)]


def test_polars_reads_a_table_and_a_result(table: Any, made: Any) -> None:
    for frame in (polars.DataFrame(table), table.scan().to_polars()):
        assert sorted(frame.select("id", "name").rows()) == expected(made)
    assert polars.DataFrame(table.scan(["id"], limit=3)).shape == (3, 1)


def test_datafusion_reads_a_table_and_a_result(table: Any, made: Any) -> None:
    context = SessionContext()
    context.from_arrow(table, "found")
    found = context.sql("select id, name from found").to_arrow_table()
    assert sorted(zip(*found.to_pydict().values(), strict=True)) == expected(made)


def test_pyarrow_and_pandas_take_results(table: Any, made: Any) -> None:
    assert pa.table(table).num_rows == 30
    assert sorted(pa.RecordBatchReader.from_stream(table.scan(["id"])).read_all()["id"].to_pylist()) == list(range(30))
    frame = table.scan(["id", "name"]).to_pandas()
    assert sorted(zip(frame["id"], frame["name"], strict=True)) == expected(made)
    reader = table.scan(["id"]).to_reader()
    assert isinstance(reader, pa.RecordBatchReader)
    assert reader.read_all().num_rows == 30
    assert repr(table.scan(["id"])) == "<memwal.RowStream id: int64>"


def test_a_requested_schema_is_honoured(table: Any) -> None:
    class Asked:
        def __arrow_c_stream__(self, _requested: object = None) -> object:
            wanted = pa.schema([pa.field("id", pa.int32())])
            return table.scan(["id"]).__arrow_c_stream__(wanted.__arrow_c_schema__())

    assert pa.table(Asked()).schema.field("id").type == pa.int32()


def test_rows_put_by_another_library(table: Any, open_small: OpenSmall) -> None:
    """A put accepts the result of a read."""
    if not hasattr(table, "upkeep"):
        return
    receipt = table.put(table.scan(filter="id < 3").to_polars())
    assert receipt.rows == 3
    assert table.count() == 30


def test_a_table_has_a_length_and_is_always_true(table: Any) -> None:
    assert len(table) == 30
    assert table
    text = repr(table)
    assert "table.lance" in text
    assert "key id" in text
    assert "2 regions" in text
    assert "columns id, name" in text
    assert "\n" not in text


def test_a_table_without_rows_is_true_and_gives_its_columns(open_small: OpenSmall) -> None:
    table = open_small()
    assert len(table) == 0
    assert table
    assert pa.table(table).schema.names == table.schema.names
    assert table.scan().to_polars().shape == (0, len(table.schema.names))


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_a_library_that_is_missing_is_named(
    open_small: OpenSmall, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = open_small().scan()
    monkeypatch.setitem(sys.modules, library, None)
    with raises(memwal.Invalid):
        getattr(rows, f"to_{library}")()
