"""Fixtures: the Kafka broker, and Spark's connector for a configuration."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kafka_server import KafkaServer, jars


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaServer]:
    """A real Kafka broker on loopback, for all tests of the run."""
    with KafkaServer.started(tmp_path_factory.mktemp("kafka")) as server:
        yield server


@pytest.fixture(scope="session")
def kafka_connector() -> dict[str, str]:
    """What `source.spark` says so that Spark has its connector without asking a repository for it."""
    return {"spark.master": "local[2]", "spark.jars": ",".join(map(str, jars("connector")))}
