"""What a topic of a real broker may have beside records that are just there: transactions, and another topic's past."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import lance

from tests.conftest import toml
from tests.kafka_server import KafkaServer, Record


def values(ids: Iterable[int]) -> list[bytes]:
    return [json.dumps({"id": id, "n": id}).encode() for id in ids]


def test_transactions_and_a_topic_that_is_created_anew(
    kafka: KafkaServer, kafka_connector: dict[str, str], tmp_path: Path, cli: Callable[..., Any]
) -> None:
    topic, config = tmp_path.name, tmp_path / "config.toml"
    kafka.create_topic(topic)
    sections = {
        "table": {"uri": str(tmp_path / "t.lance"), "columns": {"id": "int64", "n": "int64"}, "append_only": True},
        "source": {"format": "kafka", "brokers": kafka.brokers, "topics": [topic], "spark": kafka_connector},
    }

    def run(**sink: str) -> Any:
        config.write_text(toml({**sections, "sink": sink} if sink else sections))
        return cli("run", config, "--once")

    def ids() -> list[int]:
        return sorted(lance.dataset(str(tmp_path / "t.lance")).to_table(["id"])["id"].to_pylist())

    # Each transaction ends with a record of the broker's own, so offsets have gaps, the last one among them.
    for first in range(0, 20, 5):
        kafka.produce_at_once(topic, values(range(first, first + 5)), kept=first % 10 == 0)
    ran = run()
    assert (ran.code, ran.error_lines) == (0, [])
    assert ids() == [0, 1, 2, 3, 4, 10, 11, 12, 13, 14]

    # The new topic has more records than the old one had: by offsets alone the first of them would be taken for read.
    kafka.delete_topic(topic)
    kafka.create_topic(topic)
    kafka.produce(topic, [Record(value) for value in values(range(100, 150))])
    ran = run()
    assert (ran.code, len(ran.error_lines)) == (2, 1)
    assert f"topic '{topic}' was deleted and created anew" in ran.err
    assert "set sink.checkpoint to a new one" in ran.err
    assert len(ids()) == 10
    ran = run(checkpoint=str(tmp_path / "anew"))
    assert (ran.code, ran.error_lines) == (0, [])
    assert ids() == [0, 1, 2, 3, 4, 10, 11, 12, 13, 14, *range(100, 150)]
