"""The tests' Kafka broker stores records, and starts and stops as it should."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import kafka_server as module
from tests.kafka_server import KafkaServer, Record
from tests.messages import raises


def consumed(server: KafkaServer, topic: str, count: int) -> list[Any]:
    """Return the first `count` messages of partition 0."""
    from confluent_kafka import Consumer, TopicPartition

    consumer = Consumer({"bootstrap.servers": server.brokers, "group.id": "test", "enable.auto.commit": False})
    try:
        consumer.assign([TopicPartition(topic, 0, 0)])
        found = consumer.consume(count, timeout=90)
        assert [each.error() for each in found] == [None] * count
        return found
    finally:
        consumer.close()


def test_what_was_stored_outlives_the_broker_on_the_same_port(tmp_path: Path) -> None:
    big = os.urandom(10 << 20)
    with KafkaServer.started(tmp_path) as server:
        server.create_topic("t", partitions=2)
        server.produce("t", [Record(b"v", key=b"k", headers={"h": b"1"}, partition=0, timestamp=1234)])
        brokers = server.brokers
        server.restart()
        assert server.brokers == brokers
        server.pause()
        server.resume()
        server.produce("t", [Record(None, key=b"k", partition=0), Record(big, partition=0)])
        first, gone, large = consumed(server, "t", 3)
        assert (first.value(), first.key(), first.headers()) == (b"v", b"k", [("h", b"1")])
        assert first.timestamp()[1] == 1234
        assert (gone.value(), gone.key(), gone.offset()) == (None, b"k", 1)
        assert large.value() == big
    assert server.process.returncode is not None


def test_a_machine_without_the_jars_is_told_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "cache", lambda: tmp_path / "absent")
    with raises(RuntimeError):
        KafkaServer.start(tmp_path)
    nowhere = " ".join(f"-D{scheme}.proxyHost=127.0.0.1 -D{scheme}.proxyPort=9" for scheme in ("http", "https"))
    offline = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "JAVA_TOOL_OPTIONS": nowhere}
    command = [sys.executable, "-m", "tests.kafka_server"]
    ran = subprocess.run(command, env=offline, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 1
    begins, ends = ran.stderr.splitlines()
    assert "once per machine" in begins
    assert ends.startswith("memwal: the tests' Kafka broker and Spark's connector cannot be fetched: ")
    assert [each.name for each in (tmp_path / "memwal" / "kafka").iterdir()] == ["fetching"]
