"""The benchmark of freshness runs for a moment, finds its events, and /metrics counts what it sees."""

from __future__ import annotations

from pathlib import Path

from bench.freshness import lines, measure, options_of, quantile
from tests.kafka_server import KafkaServer


def test_events_are_found_and_metrics_count_them(kafka: KafkaServer, tmp_path: Path) -> None:
    options = options_of(["--smoke", "--rate", "500", "--daemons", "0"])
    options.daemons = 0
    found = measure(kafka, tmp_path, options)
    assert found.waits
    assert min(found.waits) > 0
    assert found.rate > 0
    assert {"Kafka", "Spark's JVM", "memwal run", "daemons"} < set(found.cores)
    assert found.steps["addBatch"]
    assert quantile(found.counted, 0.5) > 0
    assert [line.split("  ")[0] for line in lines(found)][:3] == ["event to latest", "by /metrics", "rate"]


def test_a_quantile_lies_evenly_within_its_bucket() -> None:
    assert quantile({0.5: 0.0, 1.0: 4.0, 2.0: 8.0}, 0.25) == 0.75
    assert quantile({0.5: 0.0, 1.0: 4.0, float("inf"): 8.0}, 0.5) == 1.0
