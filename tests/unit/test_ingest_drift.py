"""New fields in a source: their names and types, and that each one is added as a column once."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, date, datetime, time
from decimal import Decimal
from itertools import product
from typing import Any
from uuid import UUID

import fastavro
import lance
import pyarrow as pa
import pytest
from pyspark.sql import types as spark

from memwal.flush import BaseTable
from memwal.ingest.errors import Invalid, Unavailable
from memwal.ingest.settings.load import load
from memwal.ingest.spark.drift import detect
from memwal.ingest.spark.drift.detect import MOST_COLUMNS, ColumnsAdded, Drift, FieldsTask, add_columns
from memwal.ingest.spark.drift.kinds import (
    ANY,
    EXACT,
    Kind,
    Kinds,
    column,
    listed,
    new_columns,
    packed,
    unpacked,
    widened,
)
from memwal.ingest.spark.drift.schemas import fields_of_schema, kind_of
from memwal.ingest.spark.errors import found_in
from memwal.ingest.spark.schema import spark_type
from memwal.ingest.spark.source.columns import PROBLEM
from memwal.ingest.spark.source.kafka.rows import column_name, mapped, record_mapping
from memwal.ingest.spark.task import TaskError
from tests.kafka_records import batch_of, kafka_settings
from tests.kafka_server import Record
from tests.messages import raises
from tests.schema_registry import SchemaRegistry, avro


def columns(*records: Any, known: tuple[str, ...] = ("id",), **how: str) -> tuple[dict[str, str], list[str]]:
    """Return the columns that the fields of records become, and the names of the fields that become no column."""
    raw = [record if isinstance(record, bytes | None) else json.dumps(record).encode() for record in records]
    task = FieldsTask(frozenset(known), **how)
    (told,) = task(iter([pa.record_batch({"value": pa.array(raw, pa.binary())})]))
    new, passed = new_columns(unpacked(told["found"][0].as_py()), frozenset(known))
    return {field.name: "any" if field.metadata else str(field.type) for field in new}, passed


def found(*records: Any, **how: Any) -> dict[str, str]:
    return columns(*records, **how)[0]


def test_types_are_such_that_every_value_fits() -> None:
    rows = [{"id": 1, "a": 1, "b": True, "c": "x", "d": 1, "e": 0.5}, {"id": 2, "d": 2.5, "c": "2026-01-02T03:04:05Z"}]
    assert found(*rows) == {"a": "int64", "b": "bool", "c": "string", "d": "double", "e": "double"}
    mixed = [*rows, {"a": "text", "b": 1}]
    assert found(*mixed) == {"a": "any", "b": "any", "c": "string", "d": "double", "e": "double"}
    assert found({"a": "2026-01-02"}, {"a": None}) == {"a": "string"}


@pytest.mark.parametrize("odd", [(), (b"{",)], ids=["at once", "one by one"])
def test_lists_of_one_kind_stay_lists_and_other_nested_values_are_text(odd: tuple[bytes, ...]) -> None:
    first = {"a": [1, None], "b": ["x"], "c": [[1]], "d": {"e": 1}, "f": [{"g": 1}], "h": [], "i": {}}
    second = {"a": [], "b": None, "j": ["2026-01-02T03:04:05"]}
    kinds = {"a": "list<item: int64>", "b": "list<item: string>", "c": "any", "d": "any", "f": "any", "i": "any"}
    assert found(first, second, *odd) == {**kinds, "j": "list<item: string>"}
    assert found({"a": [1]}, {"a": [0.5]}, {"h": []}, {"h": [True]}) == {
        "a": "list<item: double>",
        "h": "list<item: bool>",
    }
    assert found({"a": [1, "x"]}, {"b": [1]}, {"b": 1}, {"c": {}}, {"c": "x"}) == {"a": "any", "b": "any", "c": "any"}


BEYOND = 2**53 + 1
NUMBERS: dict[str, tuple[list[str], str]] = {
    "beyond int64": ([str(2**63)], "any"),
    "below int64": ([str(-(2**63) - 1)], "any"),
    "the ends of int64": ([str(2**63 - 1), str(-(2**63))], "int64"),
    "of uint64": ([str(2**64 - 1)], "any"),
    "exact in a float, but beyond int64": ([str(2**70)], "any"),
    "with more digits than a float has": (["9" * 400], "any"),
    "beyond every float": (["1e400"], "any"),
    "2**53 beside a float": ([str(2**53), "0.5", str(-(2**53))], "double"),
    "2**53 + 1 beside a float": ([str(BEYOND), "0.5"], "any"),
    "-2**53 - 1 beside a float": (["0.5", str(-BEYOND)], "any"),
    "large and small": (["1", str(BEYOND)], "int64"),
    "large floats": (["1e300", "9007199254740993.0", "1"], "double"),
    "large floats beside a text of digits": (["1e300", f'"{BEYOND}"'], "any"),
    "in a list": ([f"[1, {BEYOND}, 0.5]"], "any"),
    "in two lists": ([f"[{BEYOND}]", "[0.5]"], "any"),
    "whole in a list": ([f"[1, {BEYOND}]"], "list<item: int64>"),
    "small in a list": (["[1]", "[0.5, null]"], "list<item: double>"),
    "too large in a list": ([f"[1, {2**63}]"], "any"),
}  # what the records have, the column's type


@pytest.mark.parametrize("odd", [(), (b"{",)], ids=["at once", "one by one"])
@pytest.mark.parametrize("case", NUMBERS)
def test_a_column_takes_the_numbers_that_it_is_made_for(case: str, odd: tuple[bytes, ...]) -> None:
    literals, wanted = NUMBERS[case]
    raw = [f'{{"id": 1, "a": {each}}}'.encode() for each in literals]
    for given in (raw, raw[::-1]):
        assert found(*given, *odd) == {"a": wanted}
    apart = [pa.record_batch({"value": pa.array([each, *odd], pa.binary())}) for each in raw]
    (told,) = FieldsTask(frozenset({"id"}))(iter(apart))
    (new,), _ = new_columns(unpacked(told["found"][0].as_py()), {"id"})
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), new])
    rows = mapped(
        batch_of(list(map(Record, raw))), record_mapping(kafka_settings({"id": "int64"}).source, schema, ("id",))
    )
    assert rows[PROBLEM].to_pylist() == [None] * len(raw)
    if wanted == "any":
        texts = [each.replace(" ", "").strip('"') for each in literals]
        assert rows[column_name(1)].to_pylist() == texts
    else:
        assert rows[column_name(1)].to_pylist() == list(map(json.loads, literals))


def test_a_column_of_the_table_does_not_slow_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """An example is a uint64 column, whose numbers Arrow's reader takes for floats."""
    monkeypatch.setattr(detect.kinds, "of_value", None)
    assert found({"id": 2**64 - 1, "a": 1}, {"id": 2, "a": 0.5}) == {"a": "double"}


def test_what_adds_no_column_is_told_unless_there_is_no_value_yet() -> None:
    names = {"ID": 2, "_x": 1, "a.b": 1, "": 1, 'c"': 1, "d\n": 1, "\ud800": 1}
    passed = [*list(names)[:-1], "\\ud800"]
    assert columns({"id": 1, "a": None, "b": [], **names}) == ({}, passed)
    assert columns() == columns(None) == ({}, [])


def test_of_two_fields_that_differ_in_case_only_one_is_a_column() -> None:
    assert columns({"grade": 1}, {"Grade": "x"}) == ({"grade": "int64"}, ["Grade"])


def test_columns_of_files_are_what_spark_reads_them_as() -> None:
    nested = pa.struct([("a", pa.list_(pa.date32())), ("b", pa.timestamp("us"))])
    kinds = [
        pa.int8(),
        pa.float32(),
        pa.binary(),
        pa.decimal128(38, 9),
        pa.timestamp("us", "UTC"),
        nested,
        pa.list_(nested),
    ]
    assert [kind_of(spark_type(kind)) for kind in kinds] == kinds
    within = spark.StructType([spark.StructField("m", spark.MapType(spark.StringType(), spark.StringType()))])
    none = [within.fields[0].dataType, within, spark.ArrayType(within), spark.StructType([]), spark.VariantType()]
    assert [kind_of(kind) for kind in none] == [ANY] * len(none)


def test_kinds_widen_whichever_comes_first() -> None:
    kinds = [pa.int32(), pa.int64(), pa.float32(), pa.float64(), pa.decimal128(5, 2), pa.decimal128(6, 0)]
    wide = {widened(one, other) for one in kinds[:4] for other in kinds[:4]}
    assert wide == {*kinds[:4], ANY}
    assert widened(kinds[0], kinds[2]) == pa.float64()
    assert widened(*kinds[4:]) == widened(*reversed(kinds[4:])) == pa.decimal128(8, 2)
    assert column("a", widened(pa.date32(), pa.int32())).type == pa.string()


SCALARS: list[Kind] = [
    *(pa.int8(), pa.int32(), EXACT, pa.int64(), pa.float32(), pa.float64(), pa.bool_(), pa.string()),
    *(pa.decimal128(38, 0), pa.decimal128(5, 2), pa.decimal128(38, 38), pa.uint64()),
]
ALL = [None, *SCALARS, ANY, *map(listed, SCALARS)]


def test_kinds_of_many_records_are_the_same_in_any_order_and_grouping() -> None:
    """Records are divided among tasks, and the tasks' answers come in any order."""
    for one, other in product(ALL, ALL):
        both = widened(one, other)
        assert both == widened(other, one)
        assert widened(both, one) == both
        assert unpacked(packed({"a": both})) == ({} if both is None else {"a": both})
        for third in ALL:
            assert widened(both, third) == widened(one, widened(other, third)), (one, other, third)
    assert widened(EXACT, pa.float32()) == widened(EXACT, pa.float64()) == pa.float64()
    assert widened(EXACT, pa.int32()) == EXACT
    assert widened(pa.int64(), pa.float32()) == widened(pa.int64(), pa.float64()) == ANY


@pytest.mark.parametrize("envelope", ["none", "debezium"])
def test_what_new_columns_take_from_kafka(envelope: str) -> None:
    added = [column("more", ANY), pa.field("tags", pa.list_(pa.string())), pa.field("price", pa.decimal128(4, 2))]
    settings = kafka_settings({"id": "int64"}, envelope=envelope)
    mapping = record_mapping(settings.source, pa.schema([pa.field("id", pa.int64(), nullable=False), *added]), ("id",))
    good = [
        ({"more": {"a": [1, 2.5, "é"], "b": None}, "tags": ["x", None]}, '{"a":[1,2.5,"é"],"b":null}'),
        ({"more": 'te"xt', "tags": []}, 'te"xt'),
        ({"more": 2**70, "price": 1.5}, str(2**70)),
        ({"more": False, "price": "1.50"}, "false"),
        ({"more": ["\ud800"]}, '["\\ud800"]'),
        ({"more": None, "price": 1}, None),
    ]
    bad = [b"{", {"tags": [1]}, {"price": 1.505}, {"price": "x"}, {"price": 100}, {"price": True}, {"tags": "x"}]
    rows = [row if isinstance(row, bytes) else {"id": 1, **row} for row in [*(row for row, _ in good), *bad]]
    whole = [row if isinstance(row, bytes) or envelope == "none" else {"op": "c", "after": row} for row in rows]
    for some in (whole[: len(good)], whole):
        raw = [Record(each if isinstance(each, bytes) else json.dumps(each).encode()) for each in some]
        found = mapped(batch_of(raw), mapping).to_pylist()
        taken = [(row["_memwal_c1"], row["_memwal_c2"]) for row in found[: len(good)]]
        assert taken == [(text, row.get("tags")) for row, text in good]
        assert [str(row["_memwal_c3"]) for row in found[2:4]] == ["1.50", "1.50"]
        assert [row[PROBLEM] is None for row in found] == [True] * len(good) + [False] * (len(some) - len(good))


def test_records_that_cannot_be_read_hide_no_field_of_the_others() -> None:
    assert found(b"{", {"a": 1}, b"[1]", b"\xff", None, {"b": 2.5}) == {"a": "int64", "b": "double"}


@pytest.mark.parametrize(
    "unread", [(b'{"x":1}{"y":2}',), (b'{"x":1', b"}"), (b'{"x": NaN}',), (b'{"x": -Infinity}',), (b'{"x":1},',)]
)
def test_records_that_are_no_json_make_no_columns_together(unread: tuple[bytes, ...]) -> None:
    assert found({"a": 1}, *unread, {"b": 2.5}) == {"a": "int64", "b": "double"}


def test_the_row_inside_an_envelope_counts() -> None:
    record = {"op": "c", "before": None, "after": {"id": 1, "a": 1}, "source": {"x": 1}}
    assert found(record, envelope="debezium") == {"a": "int64"}


def test_a_task_tells_each_field_once() -> None:
    batches = [pa.record_batch({"value": [b'{"a": 1}']}), pa.record_batch({"value": [b'{"a": 1.5}', b'{"b": 1}']})]
    (told,) = FieldsTask(frozenset())(iter(batches))
    assert unpacked(told["found"][0].as_py()) == {"a": pa.float64(), "b": EXACT}


def test_columns_are_added_once_by_whoever_is_first(open_small: Callable[..., Any], uri: str, made: Any) -> None:
    table = open_small()
    table.put(made.rows([1]))
    one, other = BaseTable.open(uri), BaseTable.open(uri)
    assert add_columns(one, [pa.field("grade", pa.int64()), pa.field("note", pa.string())])
    more = [pa.field("Grade", pa.string()), pa.field("more", pa.bool_())]
    assert add_columns(other, more), "it has columns that the query does not know"
    assert not add_columns(other.latest(), more[:1])
    schema = lance.dataset(uri).schema
    added = {name: str(schema.field(name).type) for name in schema.names if name not in made.schema.names}
    assert added == {"grade": "int64", "note": "string", "more": "bool"}
    table.put([{**made.row(2), "grade": 5}])
    assert {row["id"]: row["grade"] for row in table.scan(["id", "grade"]).read_all().to_pylist()} == {1: None, 2: 5}


def test_drift_that_adds_columns_and_puts_that_merge_are_refused_together() -> None:
    table = {"uri": "t.lance", "key": ["id"], "columns": {"id": "int64"}, "upsert": "merge"}
    with raises(Invalid):
        load({"table": table, "source": {"format": "json", "schema_drift": "add"}}, {})


def test_the_last_attempt_to_add_columns_counts(
    open_small: Callable[..., Any], uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_small()
    monkeypatch.setattr("memwal.ingest.spark.drift.detect._TRIES", 1)
    assert add_columns(BaseTable.open(uri), [pa.field("grade", pa.int64())])


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


def test_the_row_inside_an_envelope_of_avro_counts() -> None:
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
