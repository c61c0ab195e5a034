"""Kafka as a source: mistakes in its settings are one line with the remedy, and topics are identified by their ids."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from memwal.ingest.errors import Invalid
from memwal.ingest.settings.load import Settings, load
from memwal.ingest.settings.reference import render_settings
from memwal.ingest.spark.checkpoint_files import LocalFiles
from memwal.ingest.spark.session import connector
from memwal.ingest.spark.source.kafka.stream import _reader_options, check_reachable
from memwal.ingest.spark.source.kafka.topics import Topic, TopicGuard, check_places, wanted
from memwal.ingest.values.spec import references
from tests.kafka_records import kafka_settings
from tests.messages import raises

TABLE = {"id": "int64", "carrier": "string", "at": "timestamp[us, UTC]", "vector": "vector[4]"}

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "brokers": ({"brokers": ""}, 'brokers is not set; list at least one, such as "localhost:9092"'),
    "broker": ({"brokers": "a:1, b"}, "brokers: 'b' is not of the form 'host:port'"),
    "topics": ({"topics": []}, "topics is not set"),
    "both": ({"topic_pattern": "f.*"}, "topics and topic_pattern are both set"),
    "topic": ({"topics": ["a*"]}, "'a*' is not a topic name"),
    "pattern": ({"topics": [], "topic_pattern": "("}, "is not a regular expression"),
    "offsets": ({"starting_offsets": "earlist"}, 'write "earliest", "latest" or JSON'),
    "offsets as JSON": ({"starting_offsets": '{"t": {"0": "x"}}'}, "is not valid; write"),
    "taken option": ({"options": {"startingOffsets": "latest"}}, "set starting_offsets instead"),
    "consumer option": ({"options": {"kafka.auto.offset.reset": "latest"}}, "set starting_offsets instead"),
    "Spark's option": ({"options": {"kafka.enable.auto.commit": "true"}}, "Spark's source sets it itself"),
    "a file's": ({"path": "in"}, "path is for file sources; remove it"),
    "format": ({"value_format": "jsn"}, "did you mean 'json'?"),
    "avro": ({"value_format": "avro"}, "needs one of avro_schema and registry"),
    "schema": ({"value_format": "avro", "avro_schema": "{}"}, "avro_schema is not an Avro schema"),
    "registry": ({"value_format": "avro", "registry": "file:///etc"}, "must be an http:// or https:// URL"),
    "registry's password": ({"value_format": "avro", "registry": "http://a:b@c"}, "put them into registry_options"),
    "no avro": ({"registry": "http://h"}, 'registry is for value_format = "avro", not for \'json\''),
    "raw envelope": ({"value_format": "raw", "envelope": "debezium"}, "envelope needs values with fields"),
    "column": ({"columns": {"carier": "value.x"}}, "the table has no such column; did you mean 'carrier'?"),
    "root": ({"columns": {"carrier": "header.x"}}, "did you mean 'headers'?"),
    "no root": ({"columns": {"carrier": "carrier"}}, "a field is value.carrier"),
    "word": ({"columns": {"carrier": {"form": "value.x"}}}, "unknown key 'form'; did you mean 'from'?"),
    "two ways": ({"columns": {"carrier": {"from": "value.x", "sql": "1"}}}, "write either from or sql"),
    "default": ({"columns": {"carrier": {"from": "value.x", "default": 5}}}, "5 is not a valid string"),
    "unit": ({"columns": {"at": {"from": "value.x", "unit": "msec"}}}, "did you mean 'ms'?"),
    "unit of text": ({"columns": {"carrier": {"from": "value.x", "unit": "ms"}}}, "is for time columns"),
    "type": ({"columns": {"carrier": "offset"}}, "offset is int64, the column is string"),
    "vector": ({"columns": {"vector": "key"}}, "vectors come from JSON or Avro fields"),
    "header": ({"columns": {"carrier": "headers"}}, "does not name a header; write headers.NAME"),
    "raw field": ({"value_format": "raw", "columns": {"id": "value.id"}}, "the value has no fields"),
    "raw column": ({"value_format": "raw"}, "columns.carrier: a raw value has no fields; write where the column"),
    "envelope": ({"columns": {"carrier": "envelope.op"}}, "'envelope.op' is not a part of a record"),
    "no SQL": ({"columns": {"carrier": {"sql": "value.a +"}}}, "'value.a +' is not SQL"),
    "SQL type": ({"columns": {"carrier": {"sql": "value.a"}}}, "value.a has no type; add it to [source.fields]"),
    "SQL name": ({"delete_when": "op = 'D'"}, "'op' is not a part of a record"),
    "field": ({"fields": {"a": "int64"}}, "a field is value.a"),
    "field type": ({"fields": {"value.a": "int"}}, "is not a column type"),
    "SQL vector": ({"fields": {"value.a": "vector[3]"}}, "SQL has no vector type"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_mistake_is_one_line_with_the_remedy(case: str) -> None:
    source, says = WRONG[case]
    with pytest.raises(Invalid) as refused:
        kafka_settings(TABLE, **source)
    lines = [line for line in refused.value.lines if says in line]
    assert len(lines) == 1, refused.value.lines
    assert "[source]" in lines[0]


def test_what_only_kafka_has_is_refused_elsewhere() -> None:
    with raises(Invalid):
        kafka_settings(TABLE, format="parquet")


def test_deletes_need_a_key() -> None:
    with raises(Invalid):
        kafka_settings(TABLE, key=(), delete_when="topic = 'x'")


def test_secrets_are_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"kafka.sasl.jaas.config": "mine, secret", "kafka.ssl.key.password": "env:KEY", "minPartitions": "8"}
    settings = kafka_settings(
        TABLE, options=options, value_format="avro", registry="http://h", registry_options={"password": "mine, too"}
    )
    shown = render_settings(settings)
    assert "mine" not in shown
    assert '"kafka.ssl.key.password" = "env:KEY"' in shown
    assert '"minPartitions" = "8"' in shown
    spark = {"spark.hadoop.fs.s3a.secret.key": "mine", "spark.jars": "file:/x.jar"}
    shown = render_settings(kafka_settings(TABLE, spark=spark))
    assert '"spark.hadoop.fs.s3a.secret.key" = "(hidden)", "spark.jars" = "file:/x.jar"' in shown
    with pytest.raises(Invalid) as refused:
        kafka_settings(TABLE, value_format="avro", registry="ftp://h/?apikey=mine")
    assert "mine" not in str(refused.value)
    with pytest.raises(Invalid) as refused:
        kafka_settings(TABLE, spark={"spark.hadoop.fs.s3a.secret.key": 12345678})
    assert "12345678" not in str(refused.value)
    with raises(Invalid) as refused:
        kafka_settings(TABLE, options={"kafka.sasl.jaas.config": "env:"})


def test_what_sparks_source_is_told() -> None:
    settings = kafka_settings(TABLE, max_offsets_per_trigger=50, columns={"carrier": "headers.x"})
    assert _reader_options(settings.source, headers=True) == {
        "kafka.max.poll.records": "100000",
        "kafka.fetch.max.wait.ms": "0",
        "kafka.isolation.level": "read_committed",
        "kafka.bootstrap.servers": "127.0.0.1:9092",
        "subscribe": "t",
        "startingOffsets": "earliest",
        "failOnDataLoss": "true",
        "includeHeaders": "true",
        "maxOffsetsPerTrigger": "50",
    }
    pattern = kafka_settings(TABLE, topics=[], topic_pattern="f.*", fail_on_data_loss=False).source
    told = _reader_options(pattern, headers=False)
    assert (told["subscribePattern"], told["failOnDataLoss"], "subscribe" in told) == ("f.*", "false", False)
    own = kafka_settings(TABLE, options={"kafka.Max.poll.records": "7", "kafka.isolation.level": "read_uncommitted"})
    assert not {"kafka.max.poll.records", "kafka.isolation.level"} & set(_reader_options(own.source, headers=False))


def test_the_connector_is_that_of_the_spark_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyspark

    wanted = f"org.apache.spark:spark-sql-kafka-0-10_2.13:{pyspark.__version__}"
    assert connector(kafka_settings(TABLE).source) == {"spark.jars.packages": wanted}
    assert connector(kafka_settings(TABLE, spark={"spark.jars": "a.jar"}).source) == {}
    monkeypatch.setenv("SPARK_HOME", str(tmp_path))
    assert connector(kafka_settings(TABLE).source) == {"spark.jars.packages": wanted}
    (tmp_path / "jars").mkdir()
    (tmp_path / "jars" / f"spark-sql-kafka-0-10_2.13-{pyspark.__version__}.jar").touch()
    assert connector(kafka_settings(TABLE).source) == {}, "the image has it, and fetches nothing at its start"


def test_topics_that_are_not_there() -> None:
    with raises(Invalid):
        wanted(kafka_settings(TABLE).source, [])
    with raises(Invalid):
        wanted(kafka_settings(TABLE, topics=["flight"]).source, ["flights"])
    with raises(Invalid):
        wanted(kafka_settings(TABLE, topics=[], topic_pattern="f").source, ["flights"])


def test_a_broker_that_nobody_is_at() -> None:
    from memwal.ingest.errors import Unavailable

    with raises(Unavailable):
        check_reachable(kafka_settings(TABLE, brokers="127.0.0.1:1,127.0.0.1:2").source)


@pytest.mark.parametrize(
    ("sql", "uses"),
    [
        ("value.offset + offset", ["value.offset", "offset"]),
        ("date_trunc('day', timestamp)", ["timestamp"]),
        ("value.a.b.c.d.e > 1", ["value.a.b.c.d.e"]),
        ("transform(value.x, y -> y + 1)", ["value.x"]),
        ("CASE WHEN headers.op = 'D' THEN cast(key AS string) END", ["headers.op", "key"]),
        ("value.`a.b`", ["value.a.b"]),
    ],
)
def test_what_an_expression_uses(sql: str, uses: list[str]) -> None:
    assert {str(origin) for origin in references(sql, kafka_settings(TABLE).source)} == set(uses)


def of(at: Path | str, **source: Any) -> Settings:
    """Return settings with the checkpoint `at`."""
    given = {"format": "kafka", "brokers": "b:1", "topic_pattern": ".*", **source}
    return load({"table": {"uri": "t", "key": ["id"]}, "sink": {"checkpoint": str(at)}, "source": given}, {})


class Brokers:
    """A stand-in for brokers, with topics that a test changes."""

    def __init__(self, **ids: str) -> None:
        self.all, self.calls = ids, 0

    def wanted(self) -> dict[str, Topic]:
        """Return all topics, with one partition each."""
        return {name: Topic(id, 1) for name, id in self.all.items()}

    def ids(self, names: Iterable[str]) -> dict[str, str]:
        """Return the ids of topics, and count the call."""
        self.calls += 1
        return {name: self.all[name] for name in names if name in self.all}

    def close(self) -> None:
        """Nothing is open."""


def guard(at: Path, brokers: Brokers, **source: Any) -> TopicGuard:
    """Return the guard of a query that starts."""
    started = TopicGuard(of(at, **source), brokers, LocalFiles(at))
    started.start()
    return started


def planned(at: Path, batch_id: int, *topics: str) -> None:
    """Write the offsets of a micro-batch as Spark does."""
    (at / "offsets").mkdir(parents=True, exist_ok=True)
    offsets = json.dumps({topic: {"0": 7} for topic in topics})
    (at / "offsets" / str(batch_id)).write_text(f'v1\n{{"batchWatermarkMs":0}}\n{offsets}')


def test_a_recreated_topic_is_recognised_at_the_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    planned(tmp_path, 0, "a", "b")
    for brokers in (Brokers(a="A", b="B"), Brokers(a="A", c="C")):  # topics come and go
        guard(tmp_path, brokers)
    back = Brokers(b="B2")
    for _ in range(2):
        with raises(Invalid):
            guard(tmp_path, back)
    guard(tmp_path, back, fail_on_data_loss=False)
    assert "topic 'b' was deleted and created anew" in caplog.text
    guard(tmp_path, back)


def test_a_checkpoint_without_offsets_knows_no_topic(tmp_path: Path) -> None:
    guard(tmp_path, Brokers(a="A"))
    guard(tmp_path, Brokers(a="A2"))
    (tmp_path / "sources" / "0").mkdir(parents=True)
    (tmp_path / "sources" / "0" / "0").touch()  # the offsets at which Spark begins; no micro-batch had records yet
    with raises(Invalid):
        guard(tmp_path, Brokers(a="A3"))


def test_a_topic_is_noted_before_its_first_micro_batch_and_compared_in_each(tmp_path: Path) -> None:
    brokers = Brokers(a="A")
    query = guard(tmp_path, brokers)
    brokers.all["b"] = "B"
    planned(tmp_path, 0, "a", "b")
    query.begin(0)
    assert json.loads((tmp_path / "memwal-topics").read_text()) == {"a": "A", "b": "B"}
    query.check()
    calls = brokers.calls
    planned(tmp_path, 1, "a", "b")
    query.begin(1)
    query.check()
    assert brokers.calls == calls + 1, "one call in a micro-batch without new topics"
    brokers.all["b"] = "B2"
    with raises(Invalid):
        query.check()
    with raises(Invalid):
        guard(tmp_path, brokers)


def test_a_topic_that_is_gone_ends_the_run_unless_loss_is_accepted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    brokers = Brokers(a="A", b="B")
    planned(tmp_path, 0, "a", "b")
    query, lax = guard(tmp_path, brokers), guard(tmp_path, brokers, fail_on_data_loss=False)
    del brokers.all["b"]
    for each in (query, lax):
        each.begin(0)
    with raises(Invalid):
        query.check()
    lax.check()
    brokers.all["b"] = "B2"
    for _ in range(2):
        lax.check()
    assert caplog.text.count("topic 'b' was deleted and created anew") == 1


def test_lost_offsets_are_reported(tmp_path: Path) -> None:
    with raises(Invalid):
        guard(tmp_path, Brokers(a="A")).begin(3)


@pytest.mark.parametrize(
    "offsets",
    [
        {"a": {"0": 5}},
        {"a": {"0": 5, "1": 5, "2": 5}},
        {"b": {"0": 5}},
    ],
)
def test_starting_offsets_are_of_the_partitions_that_there_are(tmp_path: Path, offsets: Any) -> None:
    found = {"a": Topic("A", 2)}
    with raises(Invalid):
        check_places(of(tmp_path, starting_offsets=json.dumps(offsets)), found, LocalFiles(tmp_path))
    check_places(of(tmp_path, starting_offsets='{"a": {"0": -2, "1": 17}}'), found, LocalFiles(tmp_path))
    planned(tmp_path, 0, "a")
    check_places(of(tmp_path, starting_offsets=json.dumps(offsets)), found, LocalFiles(tmp_path))
