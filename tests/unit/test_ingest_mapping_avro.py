"""Avro values to rows: with a schema of the configuration, or with a registry and the id in front of each value."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime
from typing import Any

import pyarrow as pa
import pytest

from memwal.ingest.errors import Invalid, Unavailable
from memwal.ingest.spark.errors import found_in
from memwal.ingest.spark.source.kafka.rows import MapTask
from memwal.ingest.spark.task import TaskError
from tests.kafka_records import batch_of, kafka_settings, mapping_of, rows_of
from tests.kafka_server import Record
from tests.schema_registry import SchemaRegistry, avro

TABLE = {"id": "int64", "name": "string", "day": "date32", "at": "timestamp[us, UTC]", "vector": "vector[2]"}
SCHEMA = {
    "type": "record",
    "name": "Flight",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "name", "type": ["null", "string"]},
        {"name": "day", "type": {"type": "int", "logicalType": "date"}},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "vector", "type": {"type": "array", "items": "float"}},
    ],
}
AT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
ROW = {"id": 1, "name": "x", "day": date(2026, 1, 2), "at": AT, "vector": [1.0, 2.0]}


def test_a_schema_of_the_configuration() -> None:
    settings = kafka_settings(TABLE, value_format="avro", avro_schema=json.dumps(SCHEMA))
    good = avro(SCHEMA, ROW)
    first, cut, long, misfit, gone = rows_of(
        settings,
        Record(good),
        Record(good[:-3]),
        Record(good + b"x"),
        Record(avro(SCHEMA, ROW | {"vector": [1.0]})),
        Record(None, key=b"1"),
    )
    assert first == ROW
    assert "parse: not Avro of that schema" in cut["problem"]
    assert "1 bytes too many" in long["problem"]
    assert "has 1 numbers, vectors of the column have 2" in misfit["problem"]
    assert (gone["delete"], gone["id"], gone["at"]) == (True, 1, None)


def test_schemas_by_id_each_asked_for_once() -> None:
    with SchemaRegistry.started(user="me:secret") as registry:
        options = {"username": "me", "password": "secret"}
        settings = kafka_settings(TABLE, value_format="avro", registry=registry.url, registry_options=options)
        old = {"type": "record", "name": "Flight", "fields": SCHEMA["fields"][:1]}
        numbers = registry.register(old), registry.register(SCHEMA)
        values = [registry.encoded(numbers[0], {"id": 2}), *[registry.encoded(numbers[1], ROW)] * 3]
        unknown, bare = b"\0\0\0\0\x63x", avro(SCHEMA, ROW)
        first, *same, missing, without = rows_of(settings, *map(Record, [*values, unknown, bare]))
        assert first == {name: 2 if name == "id" else None for name in TABLE}
        assert same == [ROW] * 3
        assert "schema id 99 is not in the registry" in missing["problem"]
        assert "does not begin with a schema id" in without["problem"]
        assert registry.asked.count(f"/schemas/ids/{numbers[1]}") == 1


def test_types_that_a_schema_takes_from_another_and_a_key_of_its_own() -> None:
    with SchemaRegistry.started() as registry:
        place = {"type": "record", "name": "Place", "fields": [{"name": "code", "type": "string"}]}
        below = registry.register(place)
        flight = {"type": "record", "name": "F", "fields": [{"name": "to", "type": "Place"}]}
        reference = {"name": "Place", "subject": f"subject-{below}", "version": 1}
        number = registry.register(flight, [reference])
        key = registry.register({"type": "record", "name": "K", "fields": [{"name": "id", "type": "long"}]})
        whole = {**flight, "fields": [{"name": "to", "type": place}]}
        header = b"\0" + number.to_bytes(4, "big")
        settings = kafka_settings(
            {"id": "int64", "code": "string"},
            columns={"id": "key.id", "code": "value.to.code"},
            value_format="avro",
            registry=registry.url,
        )
        records = [Record(header + avro(whole, {"to": {"code": "JFK"}}), key=registry.encoded(key, {"id": 5}))]
        records.append(Record(None, key=registry.encoded(key, {"id": 6})))
        assert rows_of(settings, *records) == [{"id": 5, "code": "JFK"}, {"delete": True, "id": 6, "code": None}]


def test_a_tombstone_whose_key_is_no_record() -> None:
    with SchemaRegistry.started() as registry:
        text, number = registry.register("string"), registry.register("long")
        settings = kafka_settings({"id": "string", "v": "int64"}, value_format="avro", registry=registry.url)
        keys = [registry.encoded(text, "abc"), b"plain", registry.encoded(number, 7), b"\0\0\0\0\x63x"]
        framed, plain, misfit, unknown = rows_of(settings, *(Record(None, key=key) for key in keys))
        assert framed == {"delete": True, "id": "abc", "v": None}
        assert plain == {"delete": True, "id": "plain", "v": None}
        assert "7 is not a valid string" in misfit["problem"]
        assert "schema id 99 is not in the registry" in unknown["problem"]


def failure(settings: Any) -> Exception:
    task = MapTask(mapping_of(settings))
    with pytest.raises(TaskError) as raised:
        list(task(iter([batch_of([Record(b"\0\0\0\0\x01x")])])))
    found = found_in(str(raised.value))
    assert found is not None
    return found


def test_a_registry_that_refuses_or_does_not_answer_is_no_fault_of_a_record() -> None:
    with SchemaRegistry.started(user="me:secret") as registry:
        refused = failure(kafka_settings(TABLE, value_format="avro", registry=registry.url))
        gone = registry.url
    assert isinstance(refused, Invalid)
    assert "correct registry_options" in str(refused)
    silent = failure(kafka_settings(TABLE, value_format="avro", registry=gone, registry_options={"token": "t"}))
    assert isinstance(silent, Unavailable)
    assert gone in str(silent)


def test_debezium_in_avro() -> None:
    row = {"type": "record", "name": "Row", "fields": [{"name": "id", "type": "long"}]}
    fields = [{"name": "before", "type": ["null", row]}, {"name": "after", "type": ["null", "Row"]}]
    schema = {"type": "record", "name": "E", "fields": [*fields, {"name": "op", "type": "string"}]}
    settings = kafka_settings({"id": "int64"}, value_format="avro", avro_schema=json.dumps(schema), envelope="debezium")
    events = [{"before": None, "after": {"id": 1}, "op": "c"}, {"before": {"id": 1}, "after": None, "op": "d"}]
    assert rows_of(settings, *(Record(avro(schema, each)) for each in events)) == [{"id": 1}, {"delete": True, "id": 1}]


def test_a_column_of_no_rows_has_its_type() -> None:
    settings = kafka_settings(TABLE, value_format="avro", avro_schema=json.dumps(SCHEMA))
    (empty,) = MapTask(mapping_of(settings))(iter([batch_of([])]))
    assert empty.num_rows == 0
    assert empty.schema.field(4).type == pa.list_(pa.float32())
