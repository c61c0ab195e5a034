"""New fields that appear while a stream runs: they become columns from then on, or end the run."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pyarrow.parquet as pq

from tests.kafka_server import KafkaServer, Record
from tests.schema_registry import SchemaRegistry


def test_new_fields_become_columns_and_no_row_is_lost_or_doubled(
    small_config: Callable[..., Path], cli: Callable[..., Any], tmp_path: Path, uri: str
) -> None:
    (tmp_path / "in").mkdir()

    def land(number: int, *rows: dict[str, Any]) -> None:
        lines = [json.dumps(row, separators=(",", ":")) for row in rows]
        (tmp_path / "in" / f"{number} [odd] %20.json").write_text("".join(f"{line}\n" for line in lines))

    def configured(drift: str) -> Path:
        columns = {"append_only": True, "columns": {"id": "int64", "name": "string"}, "key": [], "indexes": {}}
        source = {"format": "json", "path": str(tmp_path / "in"), "schema_drift": drift}
        return small_config(table=columns, source=source)

    def rows() -> list[dict[str, Any]]:
        return sorted(lance.dataset(uri).to_table().to_pylist(), key=lambda row: row["id"])

    land(0, *({"id": id, "name": "a"} for id in range(10)))
    land(1, *({"id": id, "name": "b", "grade": id} for id in range(10, 20)), {"id": 20, "Grade": 1})
    large = {"big": 2**63, "mixed": 2**53 + 1, "exact": 2**53}
    land(
        2,
        {"id": 21, "grade": 7, "tags": ["x", None], "more": {"deep": [1]}, **large},
        {"id": 22, "more": "text", "mixed": 0.5, "exact": 0.5},
    )
    ran = cli("run", configured("add"), "--once")
    assert ran.code == 0
    assert "new columns: grade" in ran.out
    assert "tags, more, big, mixed, exact" in ran.out  # on a line of its own, unless one check saw both files
    assert "fields of the source that become no columns, and are left out: 'Grade'" in ran.err
    nothing = dict.fromkeys(["name", "grade", "tags", "more", *large])
    first = [{**nothing, "id": id, "name": "a"} for id in range(10)]
    second = [{**nothing, "id": id, "name": "b", "grade": id} for id in range(10, 20)] + [{**nothing, "id": 20}]
    third = {**nothing, "id": 21, "grade": 7, "tags": ["x", None], "more": '{"deep":[1]}'}
    third |= {"big": str(2**63), "mixed": str(2**53 + 1), "exact": 2.0**53}
    fourth = {**nothing, "id": 22, "more": "text", "mixed": "0.5", "exact": 0.5}
    expected = [*first, *second, third, fourth]
    assert rows() == expected

    land(3, {"id": 23, "late": 1.5})
    ran = cli("run", configured("fail"), "--once")
    assert (ran.code, len(ran.error_lines)) == (2, 1)
    assert "late (double)" in ran.err
    assert "source.schema_drift" in ran.err
    assert rows() == expected


def test_new_columns_of_parquet_files_become_columns(
    small_config: Callable[..., Path], cli: Callable[..., Any], tmp_path: Path, uri: str
) -> None:
    """Files come in any order: those without a column give null, also after a restart of the run."""
    (tmp_path / "in").mkdir()
    narrow = pa.schema([("id", pa.int64()), ("name", pa.string())])
    place = pa.struct([("city", pa.string()), ("at", pa.list_(pa.float64()))])
    wide = [("price", pa.decimal128(10, 2)), ("tags", pa.list_(pa.string())), ("place", place)]
    wider = pa.schema([*narrow, *wide, ("seen", pa.timestamp("us", "UTC")), ("more", pa.map_(pa.string(), pa.int64()))])
    new = {"price": Decimal("1.50"), "tags": ["x"], "place": {"city": "c", "at": [0.5]}}
    seen = {"seen": datetime(2026, 1, 2, tzinfo=UTC), "more": {"a": 1}}

    def land(name: str, row: dict[str, Any], schema: pa.Schema) -> None:
        path = tmp_path / "in" / name
        pq.write_table(pa.Table.from_pylist([row], schema=schema), path)
        os.utime(path, (row["id"], row["id"]))  # files of the same millisecond come to Spark in any order

    land("0.parquet", {"id": 0, "name": "a"}, narrow)
    land("odd [1] {2} %20.parquet", {"id": 1, "name": "b", **new}, pa.schema([*narrow, *wide]))
    land("2.parquet", {"id": 2, "name": "c"}, narrow)
    land("3.parquet", {"id": 3, "name": "d", **new, **seen}, wider)
    table = {"append_only": True, "columns": {"id": "int64", "name": "string"}, "key": [], "indexes": {}}
    source = {"format": "parquet", "path": str(tmp_path / "in"), "schema_drift": "add"}
    ran = cli("run", small_config(table=table, source=source), "--once")
    assert ran.code == 0
    assert "new columns: price, tags, place" in ran.out
    assert "new columns: seen" in ran.out
    assert "left out: 'more'" in ran.err
    nothing = dict.fromkeys([*new, "seen"])
    assert sorted(lance.dataset(uri).to_table().to_pylist(), key=lambda row: row["id"]) == [
        {"id": 0, "name": "a", **nothing},
        {"id": 1, "name": "b", **nothing, **new},
        {"id": 2, "name": "c", **nothing},
        {"id": 3, "name": "d", **new, "seen": seen["seen"]},
    ]


def test_new_versions_of_an_avro_schema_in_debeziums_envelope_become_columns(
    kafka: KafkaServer,
    kafka_connector: dict[str, str],
    small_config: Callable[..., Path],
    cli: Callable[..., Any],
    uri: str,
) -> None:
    """A version may also remove a field: its column stays, and is null."""

    def version(*fields: tuple[str, Any]) -> dict[str, Any]:
        row = {"type": "record", "name": "Value", "fields": [{"name": name, "type": kind} for name, kind in fields]}
        sides = [{"name": "before", "type": ["null", row]}, {"name": "after", "type": ["null", "Value"]}]
        return {"type": "record", "name": "Envelope", "fields": [*sides, {"name": "op", "type": "string"}]}

    key, name = ("id", "long"), ("name", ["null", "string"])
    price = ("price", ["null", {"type": "bytes", "logicalType": "decimal", "precision": 10, "scale": 2}])
    place = ("place", {"type": "record", "name": "Place", "fields": [{"name": "city", "type": "string"}]})
    seen = ("seen", {"type": "long", "logicalType": "timestamp-micros"})
    at = datetime(2026, 1, 2, 3, 4, 5, 6, UTC)
    kafka.create_topic("drift")
    with SchemaRegistry.started() as registry:
        first = registry.register(version(key, name))
        second = registry.register(version(key, name, price, place))
        third = registry.register(version(key, place, seen))

        def put(number: int, **row: Any) -> Record:
            return Record(registry.encoded(number, {"before": None, "after": row, "op": "c"}))

        more = {"price": Decimal("1.50"), "place": {"city": "x"}}
        gone = Record(registry.encoded(second, {"before": {"id": 1, "name": "a", **more}, "after": None, "op": "d"}))
        old = [put(first, id=id, name="a") for id in range(4)]
        new = [
            put(second, id=4, name="b", **more),
            put(second, id=0, name="b", **more),
            gone,
            put(first, id=5, name="c"),
        ]
        kafka.produce("drift", [*old, *new, put(third, id=2, place={"city": "y"}, seen=at)])
        source = {"format": "kafka", "brokers": kafka.brokers, "topics": ["drift"], "spark": kafka_connector}
        source |= {"value_format": "avro", "registry": registry.url, "envelope": "debezium"}
        source |= {"schema_drift": "add", "max_offsets_per_trigger": 4}
        table = {"columns": {"id": "int64", "name": "string"}, "key": ["id"], "indexes": {}}
        ran = cli("run", small_config(table=table, source=source), "--once")
    assert (ran.code, ran.error_lines) == (0, [])
    assert "new columns: price, place" in ran.out
    assert "new columns: seen" in ran.out
    nothing = dict.fromkeys(["name", "price", "place", "seen"])
    filled = {"name": "b", "price": Decimal("1.50"), "place": '{"city":"x"}'}
    assert sorted(lance.dataset(uri).to_table().to_pylist(), key=lambda row: row["id"]) == [
        {"id": 0, **nothing, **filled},
        {"id": 2, **nothing, "place": '{"city":"y"}', "seen": at},
        {"id": 3, **nothing, "name": "a"},
        {"id": 4, **nothing, **filled},
        {"id": 5, **nothing, "name": "c"},
    ]
