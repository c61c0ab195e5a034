"""Records of Kafka to rows: a value that fits is kept exactly, any other gives a reason, none silently becomes null."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime
from typing import Any

import pyarrow as pa
import pytest

from memwal.ingest.errors import Invalid, Unavailable
from memwal.ingest.spark.errors import found_in
from memwal.ingest.spark.source.columns import OFFSET, RAW_HEADERS, RAW_KEY, RAW_VALUE
from memwal.ingest.spark.source.kafka.rows import MapTask, mapped
from memwal.ingest.spark.task import TaskError
from memwal.ingest.values import json_columns as mapping_json
from memwal.ingest.values.json_columns import finished, json_type
from memwal.ingest.values.type_names import parse_type
from memwal.ingest.values.values import column
from tests.kafka_records import WHEN, batch_of, kafka_settings, mapping_of, rows_of
from tests.kafka_server import Record
from tests.schema_registry import SchemaRegistry, avro

FLIGHT = {"id": "int64", "carrier": "string", "dep": "int32", "at": "timestamp[us, UTC]"}


def said(value: Any, **more: Any) -> Record:
    return Record(value if isinstance(value, bytes) else json.dumps(value).encode(), **more)


def test_without_a_mapping_columns_are_fields_of_their_names() -> None:
    settings = kafka_settings(FLIGHT | {"vector": "vector[2]", "day": "date32", "raw": "binary"})
    value = {"id": 1, "dep": None, "at": "2026-01-02T03:04:05.5Z", "more": [{}], "day": "2026-01-02", "raw": "aGk="}
    (row, sparse) = rows_of(settings, said(value | {"vector": [1, 2.5]}), said({"id": 2}))
    assert row == {
        "id": 1,
        "carrier": None,
        "dep": None,
        "at": datetime(2026, 1, 2, 3, 4, 5, 500_000, UTC),
        "vector": [1.0, 2.5],
        "day": date(2026, 1, 2),
        "raw": b"hi",
    }
    assert sparse == {"id": 2} | dict.fromkeys([name for name in row if name != "id"])


def test_every_part_of_a_record_can_be_a_column() -> None:
    columns = {
        "id": {"from": "key.who.id"},
        "carrier": {"from": "headers.carrier", "default": "??"},
        "dep": "value.`dep.time`.at",
        "at": {"from": "value.ms", "unit": "ms"},
        "seen": "timestamp",
        "wall": "timestamp",
        "place": "offset",
        "part": "partition",
        "topic": "topic",
        "text": "value",
        "bytes": "key",
        "hops": "headers.hops",
    }
    kinds = FLIGHT | {
        "seen": "timestamp[us, UTC]",
        "wall": "timestamp[us]",
        "place": "uint64",
        "part": "int8",
        "topic": "string",
        "text": "string",
        "bytes": "binary",
        "hops": "int16",
    }
    value, key = {"dep.time": {"at": 5}, "ms": 1500}, b'{"who": {"id": 7}}'
    headers = {"carrier": b"UA", "hops": b"3"}
    first, second = rows_of(
        kafka_settings(kinds, columns=columns), said(value, key=key, headers=headers), said({"ms": 0}, key=key)
    )
    assert first == {
        "id": 7,
        "carrier": "UA",
        "dep": 5,
        "at": datetime(1970, 1, 1, 0, 0, 1, 500_000, UTC),
        "seen": WHEN,
        "wall": WHEN.replace(tzinfo=None),
        "place": 0,
        "part": 0,
        "topic": "t",
        "text": json.dumps(value),
        "bytes": key,
        "hops": 3,
    }
    assert (second["carrier"], second["hops"], second["dep"]) == ("??", None, None)


BAD = {
    "cut off": (b'{"id": 1', "parse: not JSON: Expecting ',' delimiter at character 8"),
    "empty": (b"", "parse: not JSON: Expecting value at character 0"),
    "not UTF-8": (b'{"id": 1, "carrier": "\xff"}', "parse: byte 22 is not UTF-8"),
    "trailing": (b'{"id": 1} {"id": 2}', "parse: not JSON: Extra data at character 10"),
    "twice": (b'{"id": 1, "id": 2}', "map: column 'id' (value.id): ambiguous JSON: 'id' occurs twice"),
    "NaN": (b'{"id": NaN}', "parse: not JSON: NaN is not a JSON number"),
    "a list": (b"[1]", "parse: the value is a list, not an object"),
    "null": (b"null", "parse: the value is null, not an object"),
    "text": (b'{"id": "1"}', "map: column 'id' (value.id): '1' is not a valid int64"),
    "fraction": (b'{"id": 1.5}', "map: column 'id' (value.id): 1.5 is not a valid int64"),
    "bool": (b'{"id": true}', "map: column 'id' (value.id): True is not a valid int64"),
    "too large": (
        b'{"id": 1, "dep": 2147483648}',
        "map: column 'dep' (value.dep): 2147483648 is not a valid int32 (out of range)",
    ),
    "number as text": (b'{"id": 1, "carrier": 5}', "map: column 'carrier' (value.carrier): 5 is not a valid string"),
    "no time": (b'{"id": 1, "at": "soon"}', "map: column 'at' (value.at): 'soon' is not a valid timestamp[us, UTC]"),
    "no zone": (b'{"id": 1, "at": "2026-01-01T00:00:00"}', "with an offset, such as Z"),
    "no unit": (b'{"id": 1, "at": 17}', "numbers need a unit"),
    "surrogate": (b'{"id": 1, "carrier": "\\ud800"}', "half of a surrogate pair"),
    "no key": (b'{"dep": 1}', "map: column 'id' (value.id) is missing; it is part of the key"),
    "deep": (b'{"id": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "parse: JSON nested too deep"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_record_that_does_not_fit_says_why_and_its_neighbours_are_as_ever(case: str) -> None:
    value, reason = BAD[case]
    good = said({"id": 1, "carrier": "UA"})
    before, bad, after = rows_of(kafka_settings(FLIGHT), good, said(value), good)
    assert before == after == {"id": 1, "carrier": "UA", "dep": None, "at": None}
    assert list(bad) == ["problem"]
    assert reason in bad["problem"]


def test_values_that_are_objects_only_together_are_not_taken_for_ones() -> None:
    cut = [b'{"id": 1, "more": {}', b'{"id": 2}} {"id": 3}', b'{"id": 4, "carrier": "}', b'{"}']
    assert all("parse" in row.get("problem", "") for row in rows_of(kafka_settings(FLIGHT), *map(said, cut)))


VALUES: dict[str, list[Any]] = {
    "int8": [0, -128, 127, 128, -129, 1.0, "1", True, None, [], {}],
    "uint64": [0, 2**64 - 1, 2**64, -1, None],
    "int64": [2**63 - 1, -(2**63), 2**63, 1e3],
    "float32": [1, 1.5, 3.4e38, 3.5e38, "1", False, None],
    "float64": [1, 1e308, 0.1],
    "bool": [True, False, 0, "true", None],
    "string": ["", "a\u0000b", "é", 1, {}, None],
    "binary": ["aGk=", "a", "!!", "", 1, None],
    "date32": ["2026-01-02", "2026-13-01", "2026-01-02T00:00:00", 5, None],
    "timestamp[us]": ["2026-01-02 03:04:05", "2026-01-02T03:04:05Z", "2026-01-02", "x", 1, None],
    "timestamp[us, UTC]": ["2026-01-02T03:04:05+02:00", "2026-01-02T03:04:05.123456Z", "2026-01-02", None],
    "vector[2]": [[1, 2], [1.5, 2], [1], [], [1, None], [1, "2"], "x", None, [1, 3.5e38]],
}


@pytest.mark.parametrize("name", VALUES)
def test_the_fast_way_and_the_exact_one_agree(name: str) -> None:
    import pyarrow as pa

    kind = parse_type(name)
    for value in VALUES[name]:
        exact, problems = column([value], kind, "")
        raw = pa.array([json.dumps({"a": value}).encode()], pa.binary())
        fast = mapping_json.plain(raw, [(("a",), kind, "")])
        assert (fast is None) == bool(problems), (value, problems)
        if fast is not None:
            assert fast[0].equals(exact), value
    assert finished(pa.array([], json_type(kind, "")), kind, "").type == exact.type


# ---- deletes -------------------------------------------------------------------------------------------------------

GONE = {"delete": True, "id": 7, "carrier": None, "dep": None, "at": None}


WRAPPED = b'{"schema": {"a": 1}, "payload": {"id": 7}}', b'{"schema": {"type": "int64"}, "payload": 7}'


@pytest.mark.parametrize("key", [b"7", b'{"id": 7}', *WRAPPED])
def test_a_tombstone_deletes_the_key_that_its_own_key_names(key: bytes) -> None:
    settings = kafka_settings(FLIGHT, columns={"carrier": {"from": "value.carrier", "default": "??"}})
    good, gone = rows_of(settings, said({"id": 7}), Record(None, key=key))
    assert good["carrier"] == "??"
    assert gone == GONE


@pytest.mark.parametrize(
    ("key", "id"), [(b"abc", "abc"), (b"7", "7"), (b'"a"', '"a"'), (b'{"schema": {}, "payload": "abc"}', "abc")]
)
def test_a_key_of_text_is_the_text_unless_it_is_wrapped(key: bytes, id: str) -> None:
    assert rows_of(kafka_settings({"id": "string"}), Record(None, key=key)) == [{"delete": True, "id": id}]


def test_a_tombstone_that_names_no_key_says_so() -> None:
    found = rows_of(kafka_settings(FLIGHT), Record(None), Record(None, key=b"x"), Record(None, key=b'{"di": 7}'))
    reasons = [row["problem"] for row in found]
    assert "column 'id' (value.id) is missing" in reasons[0]
    assert "'x' is not a valid int64" in reasons[1]
    assert "column 'id' (value.id) is missing" in reasons[2]
    (refused,) = rows_of(kafka_settings(FLIGHT, key=()), Record(None, key=b"7"))
    assert "the table has no key" in refused["problem"]


def test_a_tombstone_of_a_key_of_several_columns() -> None:
    settings = kafka_settings(FLIGHT, key=["id", "carrier"])
    found = rows_of(settings, Record(None, key=b'{"carrier": "UA", "id": 7}'), Record(None, key=b"7"))
    assert found[0] == GONE | {"carrier": "UA"}
    assert "the key is no object of the key columns" in found[1]["problem"]


@pytest.mark.parametrize("bare", [True, False], ids=["bare", "with its schema"])
@pytest.mark.parametrize("fast", [True, False], ids=["fast", "one by one"])
def test_debezium(bare: bool, fast: bool) -> None:
    columns = {"at": {"from": "envelope.ts_ms", "unit": "ms"}}
    settings = kafka_settings(FLIGHT, envelope="debezium", columns=columns)
    row = {"id": 7, "carrier": "UA", "dep": 1}

    def event(op: str, before: Any, after: Any) -> Record:
        inner = {"before": before, "after": after, "op": op, "ts_ms": 1000, "source": {"lsn": 5}}
        return said(inner if bare else {"schema": {"type": "struct"}, "payload": inner})

    events = [event("c", None, row), event("u", row, row | {"dep": 2}), event("d", {"id": 7}, None), Record(None, b"7")]
    events += [] if fast else [event("t", None, None), said({"id": 7}), event("u", row, None), event("d", None, None)]
    at = datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)
    created, updated, deleted, gone, *bad = rows_of(settings, *events)
    assert created == row | {"at": at}
    assert updated == row | {"at": at, "dep": 2}
    assert deleted == gone == GONE
    for found, reason in zip(bad, ["truncate", "it has no op", "without 'after'", "without 'before'"], strict=False):
        assert reason in found["problem"]


def test_of_a_row_that_deletes_only_its_key_must_fit() -> None:
    settings = kafka_settings(FLIGHT, envelope="debezium")
    before = {"id": 7, "dep": "not a number"}
    (found,) = rows_of(settings, said({"op": "d", "before": before, "after": None}))
    assert found == GONE
    (bad,) = rows_of(settings, said({"op": "d", "before": {"id": "x"}, "after": None}))
    assert "'x' is not a valid int64" in bad["problem"]


# ---- other formats -------------------------------------------------------------------------------------------------


def test_raw_values_are_taken_as_they_are() -> None:
    settings = kafka_settings({"key": "string", "value": "binary", "offset": "int64"}, key=["key"], value_format="raw")
    rows = rows_of(settings, Record(b"\xff\x00", key=b"k"), Record(None, key=b"k"), Record(b"", key=b"\xff"))
    assert rows[0] == {"key": "k", "value": b"\xff\x00", "offset": 0}
    assert rows[1] == {"delete": True, "key": "k", "value": None, "offset": None}
    assert "is not UTF-8 text" in rows[2]["problem"]
    numbers = kafka_settings({"key": "int64", "value": "float64"}, key=["key"], value_format="raw")
    assert rows_of(numbers, Record(b" 1.5", key=b"12"))[0] == {"key": 12, "value": 1.5}
    assert "'x' is not a valid float64" in rows_of(numbers, Record(b"x", key=b"12"))[0]["problem"]


def test_the_bytes_of_a_record_come_along_where_they_are_wanted() -> None:
    batch, mapping = (
        batch_of([said({"id": 1}, key=b"k", headers={"a": b"\xff"}), said(b"no JSON")]),
        mapping_of(kafka_settings(FLIGHT)),
    )
    assert RAW_VALUE not in mapped(batch, mapping).schema.names
    rows = mapped(batch, mapping, raw=True).to_pylist()
    assert [(row[RAW_KEY], row[RAW_VALUE], row[OFFSET]) for row in rows] == [
        (b"k", b'{"id": 1}', 0),
        (None, b"no JSON", 1),
    ]
    assert [row[RAW_HEADERS] for row in rows] == [[{"key": "a", "value": b"\xff"}], []]


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
