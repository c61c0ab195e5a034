"""Unusable records of a real broker: letters with their bytes and offsets, replayed once they are usable."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lance
from pyspark.sql import SparkSession

import memwal
from tests.conftest import toml
from tests.kafka_server import KafkaServer, Record

POISON = (b"\xff\x00 no JSON", b'{"id": "x"}', b'{"n": 1}', b"", b'{"id": 5000, "n": %d}' % (2**63 - 1))


def test_a_poison_record_every_100_records_of_a_topic(
    kafka: KafkaServer, kafka_connector: dict[str, str], tmp_path: Path, cli: Callable[..., Any]
) -> None:
    topic = tmp_path.name
    kafka.create_topic(topic, partitions=1)
    events = [Record(json.dumps({"id": id, "n": id}).encode(), str(id).encode()) for id in range(800)]
    for at in range(8):
        events[at * 100 + 50] = Record(POISON[at % len(POISON)], b"\xfe %d" % at, {"from": b"%d" % at} if at else {})
    events.append(Record(None, b"0"))
    kafka.produce(topic, events)
    uri, config = str(tmp_path / "t.lance"), tmp_path / "config.toml"
    source = {"format": "kafka", "brokers": kafka.brokers, "topics": [topic], "max_offsets_per_trigger": 300}
    sections = {
        "table": {"uri": uri, "key": ["id"], "columns": {"id": "int64", "twice": "int64"}},
        "dlq": {"mode": "table"},
        "source": {**source, "spark": kafka_connector, "fields": {"value.n": "int64"}},
    }

    def configured(*columns: str) -> Path:
        config.write_text("\n".join([toml(sections), "[source.columns]", *columns, ""]))
        return config

    def rows() -> dict[int, int]:
        with memwal.open(uri) as table:
            return {row["id"]: row["twice"] for row in table.scan().read_all().to_pylist()}

    twice = 'twice = { sql = "value.n * 2" }'
    ran = cli("run", configured(twice), "--once")
    assert (ran.code, ran.error_lines) == (0, [])
    assert "8 left out, 8 new dead letters" in ran.out
    good = {id: 2 * id for id in range(1, 800) if id % 100 != 50}
    assert rows() == good
    letters = lance.dataset(f"{uri}.dlq").to_table().sort_by("offset").to_pylist()
    assert [each["offset"] for each in letters] == [at * 100 + 50 for at in range(8)]
    assert [each["raw_value"] for each in letters] == [*POISON, *POISON[:3]]
    assert [each["raw_key"] for each in letters] == [b"\xfe %d" % at for at in range(8)]
    headers = [[{"key": "from", "value": b"%d" % at}] if at else [] for at in range(8)]
    assert [each["raw_headers"] for each in letters] == headers
    assert {(each["topic"], each["partition"]) for each in letters} == {(topic, 0)}
    assert {each["stage"] for each in letters} == {"parse", "map"}
    assert letters[4]["reason"] == "column 'twice' (sql) cannot be evaluated: value.n * 2"

    # With a default for the key in the mapping two letters are valid now; the same key twice is one row.
    replayed = cli("dlq", "replay", configured('id = { from = "value.id", default = -1 }', twice))
    assert (replayed.code, replayed.error_lines) == (0, [])
    assert "replayed 2 dead letters" in replayed.out
    assert "6 remain" in replayed.out
    assert SparkSession.getActiveSession() is None, "a replay stops the Spark that it has started"
    assert rows() == good | {-1: 2}
    assert lance.dataset(f"{uri}.dlq").count_rows() == 6
