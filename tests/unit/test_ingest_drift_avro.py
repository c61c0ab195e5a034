"""New fields in Avro: the columns follow from the writers' schemas and accept the values of these schemas."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, date, datetime, time
from decimal import Decimal
from typing import Any
from uuid import UUID

import fastavro
import pyarrow as pa
import pytest

from memwal.flush import BaseTable
from memwal.ingest.errors import Invalid, Unavailable
from memwal.ingest.spark.drift.detect import MOST_COLUMNS, ColumnsAdded, Drift, FieldsTask
from memwal.ingest.spark.drift.kinds import ANY, Kinds, new_columns, unpacked
from memwal.ingest.spark.drift.schemas import fields_of_schema
from memwal.ingest.spark.errors import found_in
from memwal.ingest.spark.source.columns import PROBLEM
from memwal.ingest.spark.source.kafka.rows import column_name, mapped, record_mapping
from memwal.ingest.spark.task import TaskError
from tests.kafka_records import batch_of, kafka_settings
from tests.kafka_server import Record
from tests.messages import raises
from tests.schema_registry import SchemaRegistry, avro


def record(name: str, *fields: tuple[str, Any]) -> dict[str, Any]:
    return {"type": "record", "name": name, "fields": [{"name": each, "type": kind} for each, kind in fields]}


def logical(kind: str, name: str, **more: Any) -> dict[str, Any]:
    return {"type": kind, "logicalType": name, **more}


PLACE = record("Place", ("code", "string"), ("near", {"type": "array", "items": "Place"}))
AT = datetime(2026, 1, 2, 3, 4, 5, 678_000, UTC)
EVERY: dict[str, tuple[Any, Any, pa.DataType, Any]] = {
    "flag": ("boolean", True, pa.bool_(), True),
    "small": ("int", -5, pa.int32(), -5),
    "large": (["null", "long"], 2**40, pa.int64(), 2**40),
    "single": ("float", 0.5, pa.float32(), 0.5),
    "double": (["double", "null"], 0.1, pa.float64(), 0.1),
    "text": ({"type": "string", "avro.java.string": "String"}, "x", pa.string(), "x"),
    "raw": ("bytes", b"\xff", pa.binary(), b"\xff"),
    "four": ({"type": "fixed", "name": "Four", "size": 4}, b"abcd", pa.binary(), b"abcd"),
    "suit": ({"type": "enum", "name": "Suit", "symbols": ["HEARTS"]}, "HEARTS", pa.string(), "HEARTS"),
    "day": (logical("int", "date"), date(2026, 1, 2), pa.date32(), date(2026, 1, 2)),
    "milli": (["null", logical("long", "timestamp-millis")], AT, pa.timestamp("us", "UTC"), AT),
    "micro": (logical("long", "timestamp-micros"), AT, pa.timestamp("us", "UTC"), AT),
    "wall": (
        logical("long", "local-timestamp-micros"),
        AT.replace(tzinfo=None),
        pa.timestamp("us"),
        AT.replace(tzinfo=None),
    ),
    "noon": (logical("int", "time-millis"), time(12, 30), pa.string(), "12:30:00"),
    "price": (
        logical("bytes", "decimal", precision=10, scale=2),
        Decimal("12.50"),
        pa.decimal128(10, 2),
        Decimal("12.50"),
    ),
    "uuid": (logical("string", "uuid"), UUID(int=1), pa.string(), str(UUID(int=1))),
    "either": (["null", "int", "double"], 1, pa.float64(), 1.0),
    "wide": (["null", "long", "double"], 2**53 + 1, pa.string(), "9007199254740993"),
    "half": (["null", "float", "long"], 0.5, pa.string(), "0.5"),
    "wides": ({"type": "array", "items": ["long", "double"]}, [2**53 + 1, 0.5], pa.string(), "[9007199254740993,0.5]"),
    "tags": ({"type": "array", "items": ["null", "string"]}, ["a", None], pa.list_(pa.string()), ["a", None]),
    "days": (
        {"type": "array", "items": logical("int", "date")},
        [date(2026, 1, 2)],
        pa.list_(pa.date32()),
        [date(2026, 1, 2)],
    ),
    "place": (PLACE, {"code": "JFK", "near": []}, pa.string(), '{"code":"JFK","near":[]}'),
    "again": (["null", "Place"], None, pa.string(), None),
    "props": (
        {"type": "map", "values": logical("int", "date")},
        {"a": date(2026, 1, 2)},
        pa.string(),
        '{"a":"2026-01-02"}',
    ),
    "mixed": (["null", "string", "int"], 7, pa.string(), "7"),
    "words": (["null", "string", "int"], "7 o'clock", pa.string(), "7 o'clock"),
}  # name: what the schema says, a value, the column's type, what the column holds
SCHEMA = record("Row", ("id", "long"), ("nothing", "null"), *((name, each[0]) for name, each in EVERY.items()))


def parsed(schema: Any) -> Any:
    return fastavro.parse_schema(json.loads(json.dumps(schema)))


def test_every_type_of_avro_has_a_column_that_takes_its_values() -> None:
    columns, passed = new_columns(fields_of_schema(parsed(SCHEMA)), {"id"})
    assert {each.name: each.type for each in columns} == {name: kind for name, (_, _, kind, _) in EVERY.items()}
    assert passed == []
    settings = kafka_settings({"id": "int64"}, value_format="avro", avro_schema=json.dumps(SCHEMA))
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), *columns])
    mapping = record_mapping(settings.source, schema, ("id",))
    value = {"id": 1, "nothing": None} | {name: each[1] for name, each in EVERY.items()}
    (row,) = mapped(batch_of([Record(avro(SCHEMA, value))]), mapping).to_pylist()
    assert row[PROBLEM] is None
    found = {each.name: row[column_name(number)] for number, each in enumerate(mapping.columns)}
    assert found == {"id": 1} | {name: each[3] for name, each in EVERY.items()}


def test_the_row_inside_an_envelope_counts() -> None:
    row = record("Value", ("id", "long"), ("n", ["null", "int"]))
    sides = (("before", ["null", row]), ("after", ["null", "Value"]))
    envelope = record("Envelope", *sides, ("op", "string"), ("source", record("Source", ("lsn", "long"))))
    kinds = {"id": pa.int64(), "n": pa.int32()}
    assert fields_of_schema(parsed(envelope), "debezium") == kinds
    assert fields_of_schema(parsed(record("Wrapper", ("payload", envelope))), "debezium") == kinds


def looked(registry: SchemaRegistry, *values: bytes | None, known: tuple[str, ...] = ("id",)) -> Kinds:
    batches = [pa.record_batch({"value": pa.array([value], pa.binary())}) for value in values]
    (told,) = FieldsTask(frozenset(known), registry=registry.url)(iter(batches))
    return unpacked(told["found"][0].as_py())


def test_schemas_of_the_registry_are_looked_at_by_id_and_of_several_versions_the_widest_counts() -> None:
    with SchemaRegistry.started() as registry:
        first = registry.register(record("Row", ("id", "long")))
        second = registry.register(record("Row", ("id", "long"), ("n", "int"), ("gone", "string")))
        third = registry.register(record("Row", ("id", "long"), ("n", "long"), ("d", "double")))
        floats = registry.register(record("Row", ("id", "long"), ("n", "double")))
        old = [registry.encoded(first, {"id": 1})]
        assert looked(registry, *old * 3, None) == {}
        assert len(registry.asked) == 1
        # The schema alone is enough: the bytes after the id need not be a value.
        new = [b"\0" + number.to_bytes(4, "big") for number in (second, third)]
        unreadable = [b"", b"\0\0", b"\1\0\0\0\1x", b"\0\0\0\0\x63x"]
        kinds = {"n": pa.int64(), "gone": pa.string(), "d": pa.float64()}
        assert looked(registry, *new, *old, *unreadable) == kinds
        assert looked(registry, *new, known=("id", "n", "gone", "d")) == {}
        double = b"\0" + floats.to_bytes(4, "big")
        assert looked(registry, new[0], double)["n"] == pa.float64()
        assert looked(registry, double, *new)["n"] == ANY


def test_a_registry_that_does_not_answer_hides_no_field() -> None:
    with SchemaRegistry.started() as registry:
        pass
    with pytest.raises(TaskError) as raised:
        looked(registry, b"\0\0\0\0\x01")
    assert isinstance(found_in(str(raised.value)), Unavailable)


def test_a_column_takes_the_values_of_a_wider_type_that_fit_it() -> None:
    wide = record("Row", ("id", "long"), ("n", "long"), ("x", "double"))
    with SchemaRegistry.started() as registry:
        number = registry.register(wide)
        settings = kafka_settings(
            {"id": "int32", "n": "int32", "x": "float32"}, value_format="avro", registry=registry.url
        )
        mapping = record_mapping(settings.source, settings.arrow_schema(), ("id",))
        values = [{"id": 1, "n": 2**31 - 1, "x": 0.5}, {"id": 2, "n": 2**31, "x": 0.5}, {"id": 3, "n": 1, "x": 1e300}]
        rows = mapped(batch_of([Record(registry.encoded(number, each)) for each in values]), mapping).to_pylist()
    fits, *others = rows
    assert (fits[column_name(1)], fits[column_name(2)], fits[PROBLEM]) == (2**31 - 1, 0.5, None)
    assert ["out of range" in others[0][PROBLEM], "not a finite number in range" in others[1][PROBLEM]] == [True, True]


def test_a_micro_batch_with_new_fields_is_not_written_before_they_are_columns(
    open_small: Callable[..., Any], uri: str, made: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A crash at any point has the same result: the next run finds the columns, and Spark repeats the micro-batch."""
    open_small().put(made.rows([1]))
    base, written = BaseTable.open(uri), []
    names = base.schema.names
    schema = record("Row", *((name, "string") for name in names), ("grade", "int"), ("Grade", "int"), ("_x", "int"))

    def drift(over: BaseTable, mode: str, told: set[str] | None = None) -> Drift:
        given = {"value_format": "avro", "avro_schema": json.dumps(schema), "schema_drift": mode}
        return Drift(kafka_settings({"id": "int64"}, **given), over, lambda *_: written.append(mode), told)

    failing = drift(base, "fail")
    with raises(Invalid):
        failing(None, 0)  # type: ignore[arg-type] # of no interest here: the schema says all
    assert isinstance(failing.failure, Invalid)
    assert BaseTable.open(uri).schema.names == names
    few = schema
    schema = record("Row", *((f"c{number}", "int") for number in range(MOST_COLUMNS)))
    with raises(Invalid):
        drift(base, "add")(None, 0)  # type: ignore[arg-type] # as above
    schema = few
    for adding in (first := drift(base, "add"), drift(base, "add", first.told)):
        with raises(ColumnsAdded):
            adding(None, 0)  # type: ignore[arg-type] # as above
    assert written == []
    again = drift(base.latest(), "add", first.told)
    again(None, 0)  # type: ignore[arg-type] # as above
    assert (written, again.failure) == (["add"], None)
    assert BaseTable.open(uri).schema.names == [*names, "grade"]
    assert [line for line in caplog.messages if "'Grade', '_x'" in line] == caplog.messages
    assert len(caplog.messages) == 1
