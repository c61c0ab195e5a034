"""A broker that authenticates clients (SASL), and one that presents a certificate (TLS): options by reference alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lance
import pytest

from tests.conftest import Cli, toml
from tests.kafka_server import PASSWORD, KafkaServer, Record


@pytest.fixture
def config(kafka: KafkaServer, kafka_connector: dict[str, str], tmp_path: Path) -> Path:
    """Return a pipeline for each of the broker's secured listeners."""
    options = {
        "sasl": {
            "kafka.security.protocol": "SASL_PLAINTEXT",
            "kafka.sasl.mechanism": "PLAIN",
            "kafka.sasl.jaas.config": "env:TEST_LOGIN",
        },
        "tls": {
            "kafka.security.protocol": "SSL",
            "kafka.ssl.truststore.type": "PEM",
            "kafka.ssl.truststore.certificates": f"file:{kafka.authority}",
        },
    }
    sections: dict[str, Any] = {"source": {"format": "kafka", "spark": kafka_connector}}
    for name, brokers in (("sasl", kafka.sasl_brokers), ("tls", kafka.tls_brokers)):
        topic = f"{tmp_path.name}-{name}"
        kafka.create_topic(topic)
        kafka.produce(topic, [Record(json.dumps({"id": id, "by": name}).encode()) for id in range(20)])
        table = {"uri": str(tmp_path / f"{name}.lance"), "key": ["id"], "columns": {"id": "int64", "by": "string"}}
        sections[f"pipelines.{name}.table"] = table
        source = {"brokers": brokers, "topics": [topic], "options": options[name]}
        sections[f"pipelines.{name}.source"] = source
    path = tmp_path / "config.toml"
    path.write_text(toml(sections))
    return path


def test_one_topic_over_sasl_and_one_over_tls(config: Path, kafka: KafkaServer, tmp_path: Path, cli: Cli) -> None:
    ran = cli("run", config, "--once", env={"TEST_LOGIN": kafka.login()})
    assert (ran.code, ran.error_lines) == (0, [])
    for name in ("sasl", "tls"):
        rows = lance.dataset(tmp_path / f"{name}.lance").to_table().sort_by("id").to_pylist()
        assert rows == [{"id": id, "by": name} for id in range(20)]
    shown = cli("config", "show", f"{config}:sasl", env={"TEST_LOGIN": kafka.login()})
    assert shown.code == 0
    assert PASSWORD not in ran.out + ran.err + shown.out + shown.err
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and PASSWORD.encode() in path.read_bytes()]


def test_a_wrong_password_is_one_line_without_it(config: Path, kafka: KafkaServer, tmp_path: Path, cli: Cli) -> None:
    ran = cli("run", f"{config}:sasl", "--once", env={"TEST_LOGIN": kafka.login("wrong-and-secret")})
    assert (ran.code, len(ran.error_lines)) == (2, 1)
    assert "Kafka refuses us" in ran.error_lines[0]
    assert "wrong-and-secret" not in ran.out + ran.err
    assert not (tmp_path / "sasl.lance").exists(), "nothing was written"
