"""Kafka to a table with a real broker and Spark's own connector, as a user runs it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import lance
import pytest

from memwal.ingest.spark.session import configuration, start_session
from memwal.ingest.spark.source.columns import DELETE, PROBLEM
from memwal.ingest.spark.source.kafka.stream import rows_of
from tests.conftest import ROOT, Cli, Start, WaitUntil, toml
from tests.integration.test_http_edge import reasons
from tests.kafka_records import kafka_settings, mapping_of
from tests.kafka_server import KafkaServer, Record
from tests.s3_server import free_ports
from tests.schema_registry import SchemaRegistry

EXAMPLE = ROOT / "configs" / "kafka.toml"
COLUMNS = {"id": "int64", "dep": "int32", "at": "timestamp[us, UTC]"}


def sent(id: int, version: int = 0, *, headers: Mapping[str, bytes] | None = None, **more: Any) -> Record:
    """Return one event of a flight; `version` distinguishes events of a flight."""
    value = {"id": id, "times": {"dep": version, "arr": version + 60}, "ms": id * 1000, **more}
    return Record(json.dumps(value).encode(), str(id).encode(), headers or {}, timestamp=1_700_000_000_000 + id)


@dataclass(frozen=True)
class Stream:
    """A topic of the broker, and the configuration of the table that it feeds."""

    kafka: KafkaServer
    topic: str
    config: Path
    uri: str


@pytest.fixture
def stream(kafka: KafkaServer, kafka_connector: dict[str, str], tmp_path: Path) -> Callable[..., Stream]:
    """Make a topic with four partitions, named after the test's directory, and a configuration."""

    def make(**source: Any) -> Stream:
        topic, uri = tmp_path.name, str(tmp_path / "t.lance")
        kafka.create_topic(topic, partitions=4)
        given = {"format": "kafka", "brokers": kafka.brokers, "topics": [topic], "spark": kafka_connector, **source}
        text = toml({"table": {"uri": uri, "key": ["id"], "columns": COLUMNS}, "source": given})
        config = tmp_path / "config.toml"
        config.write_text(text + '[source.columns]\ndep = "value.times.dep"\nat = { from = "value.ms", unit = "ms" }\n')
        return Stream(kafka, topic, config, uri)

    return make


def test_the_example_turns_records_into_rows_and_names_one_that_is_none(
    kafka: KafkaServer, kafka_connector: dict[str, str], cli: Cli, tmp_path: Path
) -> None:
    uri, topic = str(tmp_path / "t.lance"), "example-flights"  # the tutorial uses the topic flights on the same broker
    changes = {
        "MEMWAL__TABLE__URI": uri,
        "MEMWAL__SOURCE__BROKERS": kafka.brokers,
        "MEMWAL__SOURCE__TOPICS": json.dumps([topic]),
        "MEMWAL__SOURCE__SPARK": json.dumps(kafka_connector),
        "MEMWAL__SOURCE__MAX_OFFSETS_PER_TRIGGER": "200",
        "MEMWAL__SINK__CHECKPOINT": str(tmp_path / "checkpoint"),
    }
    kafka.create_topic(topic, partitions=4)
    carriers: list[dict[str, bytes]] = [{}, {"carrier": b"UA"}]
    events = [sent(id, version, headers=carriers[id % 2]) for id in range(100) for version in (1, 2, 3)]
    ends = [sent(id, op="D") for id in range(10)] + [Record(None, str(id).encode()) for id in range(10, 20)]
    big = "x" * (10 << 20)
    kafka.produce(topic, [*events, *ends, sent(10, 4), sent(1000, note=big)])
    ran = cli("run", EXAMPLE, "--once", env=changes)
    assert (ran.code, ran.error_lines) == (0, [])
    rows = rows_at(uri)
    assert sorted(rows) == [10, *range(20, 100), 1000]
    assert {id: row["dep"] for id, row in rows.items()} == {10: 4, 1000: 0} | dict.fromkeys(range(20, 100), 3)
    assert rows[1000]["note"] == big
    assert rows[21].pop("place") >= 2
    assert rows[21] == {
        "id": 21,
        "carrier": "UA",
        "dep": 3,
        "duration": 60,
        "at": datetime(1970, 1, 1, 0, 0, 21, tzinfo=UTC),
        "seen": datetime(2023, 11, 14, 22, 13, 20, 21_000, tzinfo=UTC),
        "note": None,
    }
    assert rows[20]["carrier"] == "??"

    # An unreadable record ends the run before any write of its micro-batch.
    kafka.produce(topic, [*(sent(id, 5) for id in range(20, 40)), Record(b'{"id": 1', partition=3)])
    ran = cli("run", EXAMPLE, "--once", env=changes)
    assert (ran.code, len(ran.error_lines)) == (2, 1)
    assert "not JSON: Expecting ',' delimiter" in ran.err
    assert "of partition 3 of topic example-flights" in ran.err
    assert rows_at(uri)[20]["dep"] == 3


def rows_at(uri: str) -> dict[int, dict[str, Any]]:
    return {row["id"]: row for row in lance.dataset(uri).to_table().to_pylist()}


def test_a_broker_that_is_down_loses_nothing(
    stream: Callable[..., Stream], cli: Cli, start: Start, wait_until: WaitUntil
) -> None:
    quick = {
        "kafka.request.timeout.ms": "5000",
        "kafka.default.api.timeout.ms": "8000",
        "fetchOffset.numRetries": "1",
    }
    flights = stream(options=quick)
    kafka = flights.kafka
    kafka.stop()
    before = sorted(flights.config.parent.iterdir())
    ran = cli("run", flights.config, "--once")
    assert (ran.code, len(ran.error_lines)) == (1, 1)
    assert f"source.brokers: no broker answers ({kafka.brokers}: " in ran.err
    assert sorted(flights.config.parent.iterdir()) == before

    kafka.restart()
    kafka.produce(flights.topic, [sent(id) for id in range(100)])
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    env = {"MEMWAL__SINK__HTTP_PORT": str(port), "MEMWAL__SOURCE__FRESHNESS_MAX": "0s"}  # the records are years old
    running = start([sys.executable, "-m", "memwal.ingest.cli.app", "run", str(flights.config)], env=env)
    running.line_with("streaming")
    running.line_with(": 100 rows in")
    kafka.stop()
    wait_until(lambda: "Kafka does not answer" in "".join(running.errors))
    assert reasons(url) == ["source_silent"]
    kafka.restart()
    kafka.produce(flights.topic, [sent(id) for id in range(100, 180)])
    running.line_with(": 180 rows in")
    wait_until(lambda: reasons(url) == [])
    running.process.terminate()
    assert running.wait() == 0
    assert {line.split(": ")[1] for line in running.errors} == {flights.uri}, "a line at each attempt, no other"

    ran = cli("run", flights.config, "--once")
    assert (ran.code, ran.error_lines) == (0, [])
    assert sorted(rows_at(flights.uri)) == list(range(180))


def test_a_run_waits_for_the_first_record_of_an_empty_topic(
    stream: Callable[..., Stream], cli: Cli, start: Start, wait_until: WaitUntil
) -> None:
    flights = stream()
    running = start([sys.executable, "-m", "memwal.ingest.cli.app", "run", str(flights.config)])
    running.line_with("streaming")
    wait_until(lambda: Path(f"{flights.uri}.checkpoint/commits/0").exists())  # Spark's micro-batch without partitions
    flights.kafka.produce(flights.topic, [sent(id) for id in range(100)])
    running.line_with(": 100 rows in")
    running.process.terminate()
    assert running.wait() == 0
    assert cli("run", flights.config, "--once").code == 0  # commits the rows
    assert sorted(rows_at(flights.uri)) == list(range(100))


def test_a_topic_that_is_not_there_is_named_before_anything_is_written(stream: Callable[..., Stream], cli: Cli) -> None:
    flights = stream()
    topic = f"{flights.topic}s"
    flights.config.write_text(flights.config.read_text().replace(json.dumps(flights.topic), json.dumps(topic)))
    before = sorted(flights.config.parent.iterdir())
    ran = cli("run", flights.config, "--once")
    assert (ran.code, len(ran.error_lines)) == (2, 1)
    assert f"create or correct {topic!r}, which is no topic at {flights.kafka.brokers}" in ran.err
    assert f"did you mean '{flights.topic}'?" in ran.err
    assert sorted(flights.config.parent.iterdir()) == before


# ---- in this process -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def spark(kafka_connector: dict[str, str]) -> Iterator[Any]:
    """Start a Spark with the connector."""
    session = start_session(configuration(kafka_settings({"id": "int64"}, spark=kafka_connector), 2, once=True))
    yield session
    session.stop()


@pytest.fixture
def read(spark: Any, kafka: KafkaServer) -> Callable[..., list[dict[str, Any]]]:
    """Return the rows that Spark maps from all records of a topic, in the order of their offsets."""

    def read_topic(topic: str, settings: Any) -> list[dict[str, Any]]:
        options = {"kafka.bootstrap.servers": kafka.brokers, "subscribe": topic, "includeHeaders": "true"}
        records = spark.read.format("kafka").options(**options).load()
        rows = rows_of(records, mapping_of(settings)).orderBy("_memwal_partition", "_memwal_offset").collect()
        shown = [name for name in rows[0].asDict() if not name.startswith("_memwal") or name in (DELETE, PROBLEM)]
        return [{name: row[name] for name in shown} for row in rows]

    return read_topic


def test_avro_by_registry_through_spark(kafka: KafkaServer, read: Callable[..., Any]) -> None:
    kafka.create_topic("avro")
    schema = {"type": "record", "name": "F", "fields": [{"name": "id", "type": "long"}, {"name": "x", "type": "float"}]}
    with SchemaRegistry.started() as registry:
        number = registry.register(schema)
        values = [registry.encoded(number, {"id": id, "x": 0.5}) for id in range(3)]
        kafka.produce("avro", [*map(Record, values), Record(b"no"), Record(None, key=b"1")])
        table = {"id": "int64", "x": "float32", "twice": "float64", "u": "uint64"}
        columns = {"twice": {"sql": "value.x * 2"}, "u": "offset"}
        settings = kafka_settings(table, value_format="avro", registry=registry.url, columns=columns)
        *rows, bad, gone = read("avro", settings)
    common = {DELETE: False, PROBLEM: None}
    assert rows == [{"id": id, "x": 0.5, "twice": 1.0, "u": id} | common for id in range(3)]
    assert "does not begin with a schema id" in bad[PROBLEM]
    assert gone == {"id": 1, "x": None, "twice": None, "u": None, DELETE: True, PROBLEM: None}


def test_raw_and_debezium_through_spark(kafka: KafkaServer, read: Callable[..., Any]) -> None:
    kafka.create_topic("raw")
    kafka.produce("raw", [Record(b"\xff", key=b"k", headers={"h": b"5"}), Record(b"D", key=b"k")])
    settings = kafka_settings(
        {"key": "string", "value": "binary", "h": "int32", "vector": "string"},
        key=["key"],
        value_format="raw",
        columns={"h": "headers.h", "vector": {"sql": "concat(topic, '/', partition, '/', offset)"}},
        delete_when="value = X'44'",
    )
    first, second = read("raw", settings)
    assert first == {"key": "k", "value": b"\xff", "h": 5, "vector": "raw/0/0", DELETE: False, PROBLEM: None}
    assert second == {"key": "k", "value": None, "h": None, "vector": None, DELETE: True, PROBLEM: None}

    kafka.create_topic("cdc")
    events = [{"before": None, "after": {"id": 1, "n": 2}, "op": "c"}, {"before": {"id": 1}, "after": None, "op": "d"}]
    kafka.produce("cdc", [Record(json.dumps({"schema": {}, "payload": each}).encode()) for each in events])
    settings = kafka_settings(
        {"id": "int64", "n": "int64", "m": "int64"},
        envelope="debezium",
        columns={"m": {"sql": "value.n + 1"}},
    )
    created, deleted = read("cdc", settings)
    assert created == {"id": 1, "n": 2, "m": 3, DELETE: False, PROBLEM: None}
    assert deleted == {"id": 1, "n": None, "m": None, DELETE: True, PROBLEM: None}


def test_sql_of_a_row_that_has_a_problem_is_not_evaluated(kafka: KafkaServer, read: Callable[..., Any]) -> None:
    kafka.create_topic("sql")
    values = [b'{"id": 1, "n": "x"}', b'{"id": 2, "n": 0}', b'{"id": 3, "op": "D", "n": "x"}', b'{"op": "D"}']
    kafka.produce("sql", [Record(value) for value in values])
    settings = kafka_settings(
        {"id": "int64", "m": "int64"},
        columns={"m": {"sql": "assert_true(value.n IS NOT NULL) IS NULL AND value.n = 0"}},
        fields={"value.n": "int64", "value.op": "string"},
        delete_when="value.op = 'D'",
    )
    misfit, good, gone, keyless = read("sql", settings)
    assert "value.n: 'x' is not a valid int64" in misfit[PROBLEM]
    assert good == {"id": 2, "m": 1, DELETE: False, PROBLEM: None}
    assert gone == {"id": 3, "m": None, DELETE: True, PROBLEM: None}
    assert "'id' (value.id) is missing" in keyless[PROBLEM]


def test_sql_that_fails_for_a_row_is_that_rows_problem(kafka: KafkaServer, read: Callable[..., Any]) -> None:
    kafka.create_topic("odd")
    values = [{"a": "1", "n": 4}, {"a": "x", "n": 4}, {"n": 4}, {"a": "2", "n": 0}, {"a": "3", "n": 4, "op": "?"}]
    kafka.produce("odd", [Record(json.dumps(value).encode(), key=b"7") for value in values] + [Record(None, key=b"8")])
    columns = {
        "id": "key",
        "a": {"sql": "cast(value.a as int)"},
        "b": {"sql": "cast(value.a as int) + 8 div value.n"},  # shares a subexpression with the previous column
    }
    table = {"id": "int64", "a": "int32", "b": "int64"}
    fields, delete_when = {"value.a": "string", "value.n": "int64"}, "cast(nullif(value.op, 'D') as int) = 1"
    given = {"fields": {**fields, "value.op": "string"}, "delete_when": delete_when}
    one, bad, null, zero, odd, gone = read("odd", kafka_settings(table, columns=columns, **given))
    assert (one["a"], one["b"], one[PROBLEM]) == (1, 3, None)
    assert bad[PROBLEM] == "map: column 'a' (sql) cannot be evaluated: cast(value.a as int)"
    assert (null["a"], null["b"], null[PROBLEM]) == (None, None, None), "a null is no failure"
    assert zero[PROBLEM] == "map: column 'b' (sql) cannot be evaluated: cast(value.a as int) + 8 div value.n"
    assert (odd[PROBLEM], odd[DELETE]) == (f"map: delete_when cannot be evaluated: {delete_when}", False)
    assert (gone["id"], gone[DELETE], gone[PROBLEM]) == (8, True, None)
