"""New fields in a source: which they are, of which type, and columns that are added once."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import lance
import pyarrow as pa
import pytest

from flush import BaseTable
from ingest.drift import FieldsTask, add_columns, fields_of
from ingest.errors import Invalid
from ingest.settings import load


def found(*records: Any, known: tuple[str, ...] = ("id",), envelope: str = "none") -> dict[str, str]:
    raw = [record if isinstance(record, bytes | None) else json.dumps(record).encode() for record in records]
    return {name: str(kind) for name, kind in fields_of(pa.array(raw, pa.binary()), frozenset(known), envelope).items()}


def test_types_are_such_that_every_value_fits() -> None:
    rows = [{"id": 1, "a": 1, "b": True, "c": "x", "d": 1, "e": 0.5}, {"id": 2, "d": 2.5, "c": "2026-01-02T03:04:05Z"}]
    assert found(*rows) == {"a": "int64", "b": "bool", "c": "string", "d": "double", "e": "double"}
    mixed = [*rows, {"a": "text", "b": 1}]
    assert found(*mixed) == {"a": "string", "b": "string", "c": "string", "d": "double", "e": "double"}
    assert found({"a": 2**70}) == {"a": "double"}
    assert found({"a": "2026-01-02"}, {"a": None}) == {"a": "string"}


def test_what_adds_no_column() -> None:
    assert found({"id": 1, "a": None, "b": {"c": 1}, "d": [1], "ID": 2, "_x": 1, "a.b": 1, "": 1}) == {}
    assert found() == found(None) == {}


def test_records_that_cannot_be_read_hide_no_field_of_the_others() -> None:
    assert found(b"{", {"a": 1}, b"[1]", b"\xff", None, {"b": 2.5}) == {"a": "int64", "b": "double"}


def test_the_row_inside_an_envelope_counts() -> None:
    record = {"op": "c", "before": None, "after": {"id": 1, "a": 1}, "source": {"x": 1}}
    assert found(record, envelope="debezium") == {"a": "int64"}


def test_a_task_tells_each_field_once() -> None:
    batches = [pa.record_batch({"value": [b'{"a": 1}']}), pa.record_batch({"value": [b'{"a": 1.5}', b'{"b": 1}']})]
    (told,) = FieldsTask(frozenset())(iter(batches))
    assert told.to_pylist() == [{"name": "a", "type": "double"}, {"name": "b", "type": "int64"}]


def test_columns_are_added_once_by_whoever_is_first(open_small: Callable[..., Any], uri: str, made: Any) -> None:
    table = open_small()
    table.put(made.rows([1]))
    one, other = BaseTable.open(uri), BaseTable.open(uri)
    assert add_columns(one, {"grade": pa.int64(), "note": pa.string()})
    assert add_columns(other, {"grade": pa.string(), "more": pa.bool_()}), "it has columns that the query does not know"
    assert not add_columns(other.latest(), {"grade": pa.int64()})
    schema = lance.dataset(uri).schema
    added = {name: str(schema.field(name).type) for name in schema.names if name not in made.schema.names}
    assert added == {"grade": "int64", "note": "string", "more": "bool"}
    table.put([{**made.row(2), "grade": 5}])
    assert {row["id"]: row["grade"] for row in table.scan(["id", "grade"]).to_pylist()} == {1: None, 2: 5}


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"source": {"format": "parquet", "schema_drift": "add"}}, "is for JSON"),
        ({"source": {"format": "json", "schema_drift": "adds"}}, "schema_drift"),
        (
            {
                "table": {"key": ["id"], "columns": {"id": "int64"}, "upsert": "merge"},
                "source": {"format": "json", "schema_drift": "add"},
            },
            "merge",
        ),
    ],
)
def test_settings_that_make_no_sense_are_refused(sections: dict[str, Any], says: str) -> None:
    with pytest.raises(Invalid, match=says):
        load({**sections, "table": {"uri": "t.lance", **sections.get("table", {})}}, {})
