"""Measure how many bytes of JSON in Kafka one core ingests into a table: the whole path, with all its processor time.

    python -m bench.kafka_path [--smoke] [--records N] [--bytes N] [--per-trigger N] [--regions N]

A real broker holds a topic of flights as JSON, produced before the measurement. `memwal run` reads it in micro-batches
of a fixed number of records, with its own daemon and defaults otherwise. The measurement begins when a quarter of the
records is acknowledged, so that Spark is warm, and ends with the last record. The figure is the bytes of the records'
values divided by the processor time of Spark's JVM, its Python workers, `memwal run` and the daemon, including flushes
and commits, without the broker.

The bar is 36 MB per second and core, the best figure published for a path from a topic to a table of a lakehouse.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from bench import freshness
from tests.conftest import toml
from tests.kafka_server import KafkaServer, jars

BAR = 36.0
"""Megabytes (10**6 bytes) per second and core."""
RECORDS, PER_TRIGGER, REGIONS = 4_000_000, 500_000, 2
SMOKE_RECORDS, SMOKE_PER_TRIGGER = 2_000, 500
TOPIC, PARTITIONS = "flights", 4
COLUMNS = {
    "id": "int64",
    "carrier": "string",
    "flight": "int64",
    "tail": "string",
    "origin": "string",
    "destination": "string",
    "departure_delay": "float64",
    "arrival_delay": "float64",
    "distance": "int64",
    "remark": "string",
}
_DIFFERENT = 10_000
"""Number of records that differ in more than their key; generating each record would take longer than sending it."""
_WARM = 0.25


@dataclass(frozen=True)
class Found:
    """Figures of the measured part: `megabytes` of values, `rows`, `seconds`.

    `used`: processor seconds by kind of process.
    """

    megabytes: float
    rows: int
    seconds: float
    used: Mapping[str, float]

    @property
    def per_core(self) -> float:
        """Return megabytes per second of processor time."""
        return self.megabytes / sum(self.used.values())


def produce(kafka: KafkaServer, records: int, size_min: int) -> int:
    """Send the records, of `size_min` bytes or slightly more; return the bytes of their values."""
    from confluent_kafka import Producer

    producer, rests = Producer({"bootstrap.servers": kafka.brokers, "log_level": 0, "linger.ms": 20}), _rests(size_min)
    size = 0
    for number in range(records):
        value = f'{{"id": {number}, {rests[number % _DIFFERENT]}'
        size += len(value)
        while True:
            try:
                producer.produce(TOPIC, value, partition=number % PARTITIONS)
                break
            except BufferError:
                producer.poll(0.1)
    producer.flush(120)
    return size


def _rests(size_min: int) -> list[str]:
    """Return what follows the key in a record; words extend it to the wanted size."""
    made, airports = random.Random(4), ("JFK", "LGA", "EWR", "ORD", "ATL", "LAX", "SFO", "DEN", "SEA", "BOS")
    words = ("late", "aircraft", "weather", "crew", "gate", "security", "carrier", "on", "time", "boarding", "closed")
    found = []
    for _ in range(_DIFFERENT):
        rest = {
            "carrier": made.choice(("UA", "AA", "B6", "DL", "EV")),
            "flight": made.randrange(1, 9000),
            "tail": f"N{made.randrange(10_000, 99_999)}",
            "origin": made.choice(airports),
            "destination": made.choice(airports),
            "departure_delay": round(made.uniform(-20, 180), 1),
            "arrival_delay": round(made.uniform(-40, 200), 1),
            "distance": made.randrange(80, 3000),
            "remark": " ".join(made.choices(words, k=made.randrange(4, 12) + max(0, size_min - 240) // 7)),
        }
        found.append(json.dumps(rest)[1:])
    return found


def measure(kafka: KafkaServer, at: Path, options: argparse.Namespace) -> Found:
    """Run once over a topic of `options.records`."""
    kafka.create_topic(TOPIC, PARTITIONS)
    size = produce(kafka, options.records, options.bytes)
    with ExitStack() as stack:
        run = stack.enter_context(freshness.process(["run", str(_config(kafka, at, options))], at))
        url = freshness.until(lambda: freshness.url_of(run, at / "run.log"))
        daemon = freshness.until(lambda: freshness.child_of(run))
        processes = {"Kafka": kafka.process.pid, "run": run.pid, "daemons": [daemon]}
        first = _rows_reach(url, options.records * _WARM)
        began, before = time.perf_counter(), freshness.processor_times(processes)
        last = _rows_reach(url, options.records)
        seconds, after = time.perf_counter() - began, freshness.processor_times(processes)
    ours = [kind for kind in after if kind not in ("Kafka", "producer and probe")]
    used = {kind: after[kind] - before.get(kind, 0.0) for kind in ours}
    return Found(size * (last - first) / options.records / 1e6, last - first, seconds, used)


def _rows_reach(url: str, rows: float) -> int:
    """Wait until micro-batches with at least `rows` rows have finished, and return their rows.

    Raises: TimeoutError if no micro-batch finishes for two minutes.
    """
    seen = 0
    while seen < rows:
        seen = freshness.until(partial(_more_than, url, seen))
    return seen


def _more_than(url: str, rows: int) -> int | None:
    """Return the rows of finished micro-batches; None if they are not more than `rows`."""
    told = int(freshness.status_of(url)["rows"])
    return told if told > rows else None


def _config(kafka: KafkaServer, at: Path, options: argparse.Namespace) -> Path:
    config = at / "kafka_path.toml"
    spark = {"spark.master": f"local[{psutil.cpu_count()}]", "spark.jars": ",".join(map(str, jars("connector")))}
    source = {
        "format": "kafka",
        "brokers": kafka.brokers,
        "topics": [TOPIC],
        "max_offsets_per_trigger": options.per_trigger,
        "spark": spark,
    }
    sections = {
        "table": {"uri": str(at / "flights.lance"), "key": ["id"], "columns": COLUMNS},
        "regions": {"count": options.regions},
        "source": source,
        "sink": {"http_port": 0, "checkpoint": str(at / "checkpoint")},
    }
    config.write_text(toml(sections))
    return config


def lines(found: Found) -> Iterator[str]:
    """Yield the figures of a run."""
    verdict = "held" if found.per_core >= BAR else "missed"
    rows = found.rows / sum(found.used.values())
    yield f"a core: {found.per_core:.1f} MB/s (bar {BAR:g}: {verdict}), {rows:,.0f} rows/s"
    yield (
        f"in all: {found.megabytes / found.seconds:.1f} MB/s, {found.rows / found.seconds:,.0f} rows/s on "
        f"{sum(found.used.values()) / found.seconds:.2f} cores, {found.megabytes / found.rows * 1e6:.0f} bytes a record"
    )
    for kind, seconds in sorted(found.used.items(), key=lambda each: -each[1]):
        yield f"{kind:<24} {seconds / found.rows * 1e6:.2f} s of processor time for each million records"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.kafka_path", description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="few records, not warm")
    parser.add_argument("--records", type=int, help=f"records of the topic ({RECORDS:,})")
    parser.add_argument("--bytes", type=int, default=0, help="least bytes of a record, about; by default some 234")
    parser.add_argument("--per-trigger", type=int, help=f"records of a micro-batch ({PER_TRIGGER:,})")
    parser.add_argument("--regions", type=int, default=REGIONS, help="regions of the table (%(default)s)")
    given = parser.parse_args(arguments)
    records, per_trigger = (SMOKE_RECORDS, SMOKE_PER_TRIGGER) if given.smoke else (RECORDS, PER_TRIGGER)
    given.records, given.per_trigger = given.records or records, given.per_trigger or per_trigger
    with tempfile.TemporaryDirectory() as directory, KafkaServer.started(Path(directory) / "kafka") as kafka:
        for line in lines(measure(kafka, Path(directory), given)):
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
