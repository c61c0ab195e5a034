"""`memwal config new --from kafka://…` with a real broker: the written configuration runs the topic into a table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lance
import pytest

from tests.conftest import Cli
from tests.kafka_server import KafkaServer, Record
from tests.schema_registry import SchemaRegistry

PLACE = {"type": "record", "name": "Place", "fields": [{"name": "city", "type": "string"}]}
ORDER: dict[str, Any] = {
    "type": "record",
    "name": "Order",
    "fields": [
        {"name": "order_id", "type": "long"},
        {"name": "price", "type": ["null", "double"]},
        {"name": "made", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "place", "type": PLACE},
    ],
}


@pytest.fixture
def environ(kafka_connector: dict[str, str]) -> dict[str, str]:
    return {"MEMWAL__SOURCE__SPARK": json.dumps(kafka_connector)}


def test_json_of_a_topic(kafka: KafkaServer, environ: dict[str, str], cli: Cli, tmp_path: Path) -> None:
    kafka.create_topic(tmp_path.name, partitions=2)
    made = ["2026-01-02T03:04:05Z", "2026-01-02T03:04:06Z"]
    rows = [{"order_id": n, "note": f"the note of order {n}", "made": made[n % 2]} for n in range(20)]
    values = [json.dumps(row, indent=1).encode() for row in rows]
    kafka.produce(tmp_path.name, [*(Record(value) for value in values), Record(None, b"99")])
    config = tmp_path / "orders.toml"
    ran = cli("config", "new", config, "--from", f"kafka://{kafka.brokers}/{tmp_path.name}", env=environ, cwd=tmp_path)
    assert ran.code == 0, ran.err
    assert "3 columns, from 20 rows" in ran.out
    text = config.read_text()
    for line in ('key = ["order_id"]', 'order_id = "int64"', 'made = "timestamp[us, UTC]"', 'note = "fts"'):
        assert line in text
    ran = cli(
        "run", config, "--once", env=environ | {"MEMWAL__SINK__CHECKPOINT": str(tmp_path / "checkpoint")}, cwd=tmp_path
    )
    assert ran.code == 0, ran.err
    assert lance.dataset(tmp_path / "orders.lance").count_rows() == 20


def test_avro_of_a_topic(kafka: KafkaServer, environ: dict[str, str], cli: Cli, tmp_path: Path) -> None:
    kafka.create_topic(tmp_path.name)
    with SchemaRegistry.started() as registry:
        number = registry.register(ORDER)
        rows = [{"order_id": n, "price": None, "made": n, "place": {"city": "Rome"}} for n in range(5)]
        kafka.produce(tmp_path.name, [Record(registry.encoded(number, row)) for row in rows])
        url = f"kafka://{kafka.brokers}/{tmp_path.name}"
        refused = cli("config", "new", tmp_path / "o.toml", "--from", url, env=environ)
        assert (refused.code, refused.err.count("\n")) == (2, 1)
        assert "?registry=URL" in refused.err
        ran = cli("config", "new", tmp_path / "o.toml", "--from", f"{url}?registry={registry.url}", env=environ)
        assert ran.code == 0, ran.err
        text = (tmp_path / "o.toml").read_text()
        for line in ('key = ["order_id"]', 'price = "float64"', 'made = "timestamp[us, UTC]"', 'place = "string"'):
            assert line in text
        assert f'registry = "{registry.url}"' in text
        assert cli("config", "check", tmp_path / "o.toml", env=environ, cwd=tmp_path).code == 0


def test_a_topic_that_shows_no_columns(kafka: KafkaServer, environ: dict[str, str], cli: Cli, tmp_path: Path) -> None:
    kafka.create_topic(tmp_path.name)
    for place, said in (
        (f"{kafka.brokers}/{tmp_path.name}", "no record of"),
        (f"{kafka.brokers}/{tmp_path.name}x", "is no topic"),
        ("127.0.0.1:1/t", "no broker answers"),
        (f"{kafka.brokers}", "TOPIC"),
    ):
        ran = cli("config", "new", tmp_path / "c.toml", "--from", f"kafka://{place}", env=environ)
        assert ran.code in (1, 2)
        assert ran.err.count("\n") == 1
        assert said in ran.err
        assert not (tmp_path / "c.toml").exists()
