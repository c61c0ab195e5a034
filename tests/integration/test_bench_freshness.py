"""The benchmarks with a broker run briefly: `freshness` finds its events, and the whole path counts its records."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from bench import kafka_path
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


@pytest.mark.long
def test_the_whole_path_of_records_is_counted_per_core(kafka: KafkaServer, tmp_path: Path) -> None:
    options = Namespace(records=2_000, bytes=0, per_trigger=500, regions=2)
    found = kafka_path.measure(kafka, tmp_path, options)
    assert 0 < found.rows <= 1_500
    assert found.megabytes == pytest.approx(found.rows * 250e-6, rel=0.5)
    assert {"Spark's JVM", "memwal run", "daemons"} <= set(found.used)
    assert found.per_core > 0
    assert next(iter(kafka_path.lines(found))).startswith("a core: ")
