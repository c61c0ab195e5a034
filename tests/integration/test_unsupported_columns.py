"""Another program adds a column that memwal cannot hold: no row is lost, and the other columns are read."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import lance
import pyarrow as pa
import pytest

import memwal
from memwal import wal
from memwal.flush import BaseTable
from memwal.flush.verification.runner import verify_table
from memwal.ingest.service.ops.metrics import TABLE, families
from tests.conftest import Made, OpenSmall
from tests.messages import raises
from tests.ways import entered

HELD_BACK = {"a`b"}
"""Columns that make Lance's merge fail: commits wait until the column is dropped."""
COLUMNS = [
    pa.field("extra", pa.map_(pa.string(), pa.int64())),
    pa.field("extra", pa.dictionary(pa.int32(), pa.string())),
    pa.field("extra", pa.json_()),
    pa.field("extra", pa.large_binary(), metadata={b"lance-encoding:blob": b"true"}),
    pa.field("extra", pa.struct([pa.field("x", pa.int64(), nullable=False)])),
    pa.field("extra", pa.list_(pa.null())),
    pa.field("_tombstone", pa.bool_()),
    pa.field("*", pa.int64()),
    pa.field("a`b", pa.int64()),
]


WAYS = [*(("embedded", column) for column in COLUMNS), ("flight", COLUMNS[0]), ("flight", COLUMNS[-1])]
"""A daemon's service calls the same table; the two columns show that its answers and errors reach the client."""


@pytest.fixture
def ways(request: pytest.FixtureRequest, open_small: OpenSmall, ends: ExitStack) -> tuple[Any, Any]:
    """Return the owner of an open table, and the handle that the test calls."""
    table = open_small()
    return table, entered(request.param, table, ends)


def filled(table: Any, made: Made) -> dict[int, Any]:
    """Put rows into the base table (0-9), an SST (10-19) and the memtable (20-29); one key changes at each level."""
    table.put(made.rows(range(10)))
    table.flush()
    table.commit()
    table.put([*made.rows(range(10, 20)), made.row(5, 1)])
    table.flush()
    table.put([*made.rows(range(20, 30)), made.row(6, 1)])
    return {id: made.row(id, int(id in (5, 6))) for id in range(30)}


def rows_of(table: Any, level: str = "latest") -> dict[int, Any]:
    return {row["id"]: row for row in table.scan(level=level).read_all().to_pylist()}


def drop(uri: str, name: str, before: int) -> None:
    """Drop the column that was added after version `before`."""
    if name in HELD_BACK:  # Lance cannot drop this name
        lance.dataset(uri, version=before).restore()
    else:
        lance.dataset(uri).drop_columns([name])


@pytest.mark.parametrize(
    ("ways", "column"),
    WAYS,
    indirect=["ways"],
    ids=lambda given: given if isinstance(given, str) else f"{given.name} {given.type}",
)
def test_a_column_that_cannot_be_held_stops_puts_and_nothing_else(
    ways: tuple[Any, Any], uri: str, made: Made, column: pa.Field
) -> None:
    table, reader = ways
    expected = filled(table, made)
    before = lance.dataset(uri).version
    lance.dataset(uri).add_columns(column)
    assert rows_of(reader) == expected  # the read finds the column
    for put in (lambda: reader.put([made.row(40)]), lambda: reader.put(pa.table({"id": [41]}), missing="null")):
        with raises(memwal.Invalid):
            put()
    reader.delete([29])
    del expected[29]
    table.flush()
    if column.name in HELD_BACK:
        with raises(memwal.Invalid):
            table.commit()
        assert rows_of(reader) == expected
    else:
        table.commit()
        assert rows_of(reader, "committed") == expected
        assert column.name in lance.dataset(uri).schema.names
    assert list(reader.status()["unsupported_columns"]) == [column.name]
    (value,) = (m.samples[0].value for m in families(TABLE, {"": table}) if m.name == "memwal_unsupported_columns")
    assert value == 1
    found = verify_table(wal.open_store(uri), uri, deep=True).findings
    assert [finding.where for finding in found if finding.check == "columns"] == [f"column {column.name} (base table)"]
    drop(uri, column.name, before)
    reader.put([made.row(40)])
    table.flush()
    table.commit()
    assert rows_of(reader, "committed") == expected | {40: made.row(40)}
    assert not reader.status()["unsupported_columns"]
    assert not verify_table(wal.open_store(uri), uri, deep=True).findings


def test_rows_in_the_log_are_committed_after_a_crash(open_small: OpenSmall, uri: str, made: Made) -> None:
    """The table is opened with the column; stored values of the column stay unchanged."""
    table = open_small()
    expected = filled(table, made)
    kind = pa.map_(pa.string(), pa.int64())
    lance.dataset(uri).add_columns(pa.field("extra", kind))
    values = pa.table({"id": pa.array([3, 5]), "extra": pa.array([[("a", 1)], [("b", 2)]], kind)})
    values = values.cast(pa.schema([lance.dataset(uri).schema.field("id"), values.schema.field("extra")]))
    lance.dataset(uri).merge_insert("id").when_matched_update_all().execute(values)
    with memwal.open(uri, settings={"commit": {"interval": "0s"}}, take_over=True) as again:
        assert rows_of(again) == expected
        again.flush()
        again.commit()
        assert rows_of(again, "committed") == expected
    stored = {row["id"]: row["extra"] for row in lance.dataset(uri).to_table(columns=["id", "extra"]).to_pylist()}
    assert stored == dict.fromkeys(expected, None) | {3: [("a", 1)], 5: [("b", 2)]}


def test_a_table_that_lance_cannot_read_says_so_and_loses_nothing(open_small: OpenSmall, uri: str, made: Made) -> None:
    table = open_small()
    expected = filled(table, made)
    lance.dataset(uri).add_columns(pa.field("_rowid", pa.int64()))
    for act in (table.scan, table.commit, table.count):
        with raises(memwal.Invalid):
            act()
    lance.dataset(uri).drop_columns(["_rowid"])
    table.commit()
    assert rows_of(table) == expected
    assert BaseTable.open(uri).puts_rejected is None


def test_a_table_without_a_key(tmp_path: Any, made: Made) -> None:
    uri = str(tmp_path / "log.lance")
    with memwal.open(uri, schema=made.schema, key=(), settings={"commit": {"interval": "0s"}}) as table:
        table.put(made.rows(range(5)))
        lance.dataset(uri).add_columns(pa.field("extra", pa.map_(pa.string(), pa.int64())))
        assert table.count() == 5
        with raises(memwal.Invalid):
            table.put(made.rows([7]))
        table.flush()
        table.commit()
        assert rows_of(table, "committed") == {id: made.row(id) for id in range(5)}


def test_a_deep_verification_reads_the_column_too(open_small: OpenSmall, uri: str, made: Made) -> None:
    """Another program writes values that Lance cannot read: pages of a struct that begins with a list."""
    table = open_small()
    table.put(made.rows(range(5)))
    table.flush()
    table.commit()
    kind = pa.struct([("tags", pa.list_(pa.string()))])
    lance.dataset(uri).add_columns(pa.field("extra", kind))
    schema = pa.schema(list(lance.dataset(uri).schema))
    parts = [
        pa.Table.from_pylist([made.row(id) | {"extra": extra} for id in range(first, first + 6)], schema).to_batches()[
            0
        ]
        for first, extra in ((10, {"tags": None}), (20, None))
    ]
    reader = pa.RecordBatchReader.from_batches(schema, parts)
    lance.write_dataset(reader, uri, mode="append", data_cache_bytes=1)
    assert len(rows_of(table)) == 17
    found = [finding.check for finding in verify_table(wal.open_store(uri), uri, deep=True).findings]
    assert found == ["columns", "base rows"]
    assert [each.check for each in verify_table(wal.open_store(uri), uri).findings] == ["columns"]
