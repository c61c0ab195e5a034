"""Fixtures: the Kafka broker, and Spark's connector for a configuration."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kafka_server import KafkaServer, jars


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaServer]:
    """Run a real Kafka broker on loopback, for all tests of the run."""
    with KafkaServer.started(tmp_path_factory.mktemp("kafka")) as server:
        yield server


@pytest.fixture(scope="session")
def kafka_connector() -> dict[str, str]:
    """Return the `source.spark` settings that give Spark its connector without a download."""
    return {"spark.master": "local[2]", "spark.jars": ",".join(map(str, jars("connector")))}
