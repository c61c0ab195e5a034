"""Measure the time from an event in Kafka until a read at level `latest` returns it.

    python -m bench.freshness [--smoke] [--seconds N] [--rate N] [--trigger SECONDS] [--daemons N …] [--s3 [MS]]

A real broker, `memwal run` with its Kafka source, and a producer with a fixed rate. A client, the probe, runs beside
them: at random moments the stream has events with keys of the probe, and every 20 ms the probe reads those that it has
not found yet. The wait of an event begins before the producer's `produce` and ends when a `get` has returned its row,
so it includes the producer's linger, the broker, and the probe's own 20 ms. Commits run at their default interval.

`--daemons 0` uses the daemon that `memwal run` starts; a larger number of daemons is started with `memwal serve`
before. With `--s3` the table is on an S3 server behind a proxy that counts requests and delays each by MS milliseconds;
the checkpoint stays on local disk. Broker and server are those of the tests (`make kafka`, `make s3-server`).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil
from prometheus_client.parser import text_string_to_metric_families

import memwal
from memwal.ingest.engine.table.public import Table
from tests.cluster import spread
from tests.conftest import toml
from tests.kafka_server import KafkaServer, jars
from tests.s3_place import Place, on_s3

TOPIC, PARTITIONS, REGIONS = "events", 4, 2
KEYS = 100_000
"""Number of keys in the stream, each written many times; the keys of the probe are above."""
SECONDS, WARM_UP = 60.0, 20.0
SMOKE_SECONDS, SMOKE_WARM_UP = 3.0, 0.0
RATE, TRIGGER = 5000, 0.5
_MARKERS_PER_SECOND = 20
_TICK, _LOOK = 0.01, 0.02
_PATIENCE = 120.0
_COLUMNS = {"id": "int64", "value": "float64", "count": "int64"}
_STEPS = ("triggerExecution", "addBatch", "latestOffset", "queryPlanning", "walCommit", "commitOffsets")
T = TypeVar("T")


@dataclass
class Marks:
    """Events that the probe waits for: when each was produced, and how long it took until a read returned it."""

    sent: dict[int, float] = field(default_factory=dict)
    waits: list[tuple[float, float]] = field(default_factory=list)
    """Pairs of the time of production and the wait, in seconds."""


class Producer:
    """Send events at a fixed rate, and record when the events of the probe were sent."""

    def __init__(self, brokers: str, rate: int, marks: Marks) -> None:
        from confluent_kafka import Producer as Client

        self._client = Client({"bootstrap.servers": brokers, "log_level": 0})
        self._rate, self._marks = rate, marks
        self._random, self._stop = random.Random(6), threading.Event()
        self.events = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        began, marker, per_event = time.perf_counter(), KEYS, _MARKERS_PER_SECOND / self._rate
        while not self._stop.wait(_TICK):
            for _ in range(int((time.perf_counter() - began) * self._rate) - self.events):
                key = self._random.randrange(KEYS)
                if self._random.random() < per_event:
                    key = marker = marker + 1
                    self._marks.sent[key] = time.perf_counter()
                value = f'{{"id": {key}, "value": {self._random.random():.6f}, "count": {self.events}}}'
                self._client.produce(TOPIC, value, str(key))
                self.events += 1
            self._client.poll(0)

    def stop(self) -> None:
        """Stop sending; returns when all produced events are stored."""
        self._stop.set()
        self._thread.join()
        self._client.flush(_PATIENCE)


class Probe:
    """Read the events of `marks` until `stop`."""

    def __init__(self, table: Table, marks: Marks) -> None:
        self._table, self._marks, self._stop = table, marks, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(_LOOK):
            wanted = list(self._marks.sent)
            if wanted:
                found = self._table.get(wanted, columns=["id"], level="latest").column("id").to_pylist()
                now = time.perf_counter()
                for key in found:
                    sent = self._marks.sent.pop(key)
                    self._marks.waits.append((sent, now - sent))

    def stop(self) -> None:
        """Stop the probe."""
        self._stop.set()
        self._thread.join()


@dataclass(frozen=True)
class Found:
    """The figures of one run; times in seconds, processor time in cores."""

    waits: list[float]
    rate: float
    steps: Mapping[str, list[float]]
    cores: Mapping[str, float]
    told: Mapping[str, Any]
    """/status of `memwal run` at the end."""
    counted: Mapping[float, float]
    """Counts of /metrics during the run: rows that were queryable within each bound, in seconds."""
    requests: Mapping[str, float]
    """Requests per second to an S3 server, by method."""


def measure(kafka: KafkaServer, at: Path, options: argparse.Namespace, place: Place | None = None) -> Found:
    """Run once. `options`: seconds, warm_up, rate, trigger, daemons. `place`: where the table is; None: below `at`."""
    place = place or Place(str(at / "events.lance"))
    kafka.create_topic(TOPIC, PARTITIONS)
    marks = Marks()
    with ExitStack() as stack:
        endpoints = spread(options.daemons, REGIONS) if options.daemons else []
        config = _config(kafka, at, place, endpoints, options.trigger)
        ports = [{**place.environ, "MEMWAL__DAEMON__PORT": each.rpartition(":")[2]} for each in endpoints]
        daemons = [stack.enter_context(process(["serve", str(config)], at, port)) for port in ports]
        producer = Producer(kafka.brokers, options.rate, marks)
        stack.callback(producer.stop)
        run = stack.enter_context(process(["run", str(config)], at, place.environ))
        url = until(lambda: url_of(run, at / "run.log"))
        owners = [psutil.Process(each.pid) for each in daemons] or [until(lambda: child_of(run))]
        at_daemons = ",".join(endpoints) or until(lambda: _endpoint(owners[0]))
        table = stack.enter_context(memwal.connect(at_daemons))
        probe = Probe(table, marks)
        stack.callback(probe.stop)
        until(lambda: marks.waits)
        time.sleep(options.warm_up)
        processes = {"Kafka": kafka.process.pid, "run": run.pid, "daemons": owners}
        found = _watched(url, marks, processes, place, options.seconds)
        producer.stop()
        until(lambda: not marks.sent)
    return found


def _watched(url: str, marks: Marks, processes: Mapping[str, Any], place: Place, seconds: float) -> Found:
    """Measure for `seconds`, and for at least one micro-batch with rows.

    Then wait until the probe has found all its events.
    """
    before, told, counted = processor_times(processes), status_of(url), _queryable(url)
    began, rows, asked = time.perf_counter(), told["rows"], place.counted()
    steps: dict[int, Mapping[str, float]] = {}
    while time.perf_counter() - began < seconds or told["rows"] == rows or not any(map(_is_whole, steps.values())):
        time.sleep(0.5)
        told = status_of(url)
        steps[told["batch_id"]] = told["steps"]
    ended, after, asked = time.perf_counter(), processor_times(processes), place.counted() - asked
    counted = {bound: number - counted.get(bound, 0.0) for bound, number in _queryable(url).items()}
    until(lambda: not [sent for sent in list(marks.sent.values()) if sent < ended])
    lasted = ended - began
    return Found(
        waits=[wait for sent, wait in list(marks.waits) if began <= sent < ended],
        rate=(told["rows"] - rows) / lasted,
        steps={name: [each[name] for each in steps.values() if name in each] for name in _STEPS},
        cores={name: (after[name] - before.get(name, 0.0)) / lasted for name in after},
        told=told,
        counted=counted,
        requests={method: number / lasted for method, number in asked.most_common()},
    )


def _is_whole(steps: Mapping[str, float]) -> bool:
    """Return whether these are the steps of a micro-batch with rows."""
    return "addBatch" in steps


def processor_times(processes: Mapping[str, Any]) -> dict[str, float]:
    """Return the processor seconds that each kind of process has used so far."""
    found = {"producer and probe": _used(psutil.Process()), "Kafka": _used(psutil.Process(processes["Kafka"]))}
    run, daemons = psutil.Process(processes["run"]), processes["daemons"]
    found |= {"memwal run": _used(run), "daemons": sum(map(_used, daemons))}
    for each in run.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if each not in daemons:
                kind = "Spark's JVM" if "java" in each.name() else "Spark's Python workers"
                found[kind] = found.get(kind, 0.0) + _used(each)
    return found


def _used(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


# ---- processes -----------------------------------------------------------------------------------------------------


def _config(kafka: KafkaServer, at: Path, place: Place, endpoints: Sequence[str], trigger: float) -> Path:
    config = at / "freshness.toml"
    spark = {"spark.master": "local[2]", "spark.jars": ",".join(map(str, jars("connector")))}
    source = {
        "format": "kafka",
        "brokers": kafka.brokers,
        "topics": [TOPIC],
        "trigger": f"{trigger * 1e3:.0f}ms",
        "spark": spark,
    }
    config.write_text(
        toml(
            {
                "table": {**place.section, "key": ["id"], "columns": _COLUMNS},
                "regions": {"count": REGIONS},
                "source": source,
                "sink": {"http_port": 0, "checkpoint": str(at / "checkpoint")},
                "daemon": {"endpoints": list(endpoints)},
            }
        )
    )
    return config


@contextmanager
def process(
    command: Sequence[str], at: Path, environ: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a `memwal` command whose output goes to a file named after it."""
    with (at / f"{command[0]}.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "memwal.ingest.cli.app", *command],
            env={**os.environ, "PYTHONUNBUFFERED": "1", **(environ or {})},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def url_of(run: subprocess.Popen[bytes], log: Path) -> str | None:
    """Return the URL of the pages of `memwal run`, or None if it is not printed yet.

    Raises: RuntimeError with the log if the command has ended.
    """
    if run.poll() is not None:
        raise RuntimeError(f"memwal run ended with exit code {run.returncode}: {log.read_text()}")
    line = next((line for line in log.read_text().splitlines() if "metrics, health and status at" in line), "")
    return line.rpartition(" ")[2] or None


def status_of(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}/status", timeout=_PATIENCE) as answer:
        found: dict[str, Any] = json.loads(answer.read())
    return found


def _queryable(url: str) -> dict[float, float]:
    """Return the buckets of memwal_run_queryable_seconds, summed over regions."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=_PATIENCE) as answer:
        families = {each.name: each for each in text_string_to_metric_families(answer.read().decode())}
    found: dict[float, float] = {}
    for sample in families["memwal_run_queryable_seconds"].samples:
        if sample.name.endswith("_bucket"):
            bound = float(sample.labels["le"])
            found[bound] = found.get(bound, 0.0) + sample.value
    return found


def quantile(counted: Mapping[float, float], share: float) -> float:
    """Return a quantile of a histogram like Prometheus: values are spread evenly within a bucket."""
    wanted, least, below = share * max(counted.values()), 0.0, 0.0
    for bound, number in sorted(counted.items()):
        if number >= wanted:
            return least + (bound - least) * (wanted - below) / (number - below)
        least, below = bound, number
    return least


def child_of(run: subprocess.Popen[bytes]) -> psutil.Process | None:
    """Return the daemon that `memwal run` has started."""
    return next(
        (each for each in psutil.Process(run.pid).children() if "memwal.ingest.service.daemon" in each.cmdline()), None
    )


def _endpoint(daemon: psutil.Process) -> str | None:
    listening = [each.laddr.port for each in daemon.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
    return f"grpc://127.0.0.1:{listening[0]}" if listening else None


def until(condition: Callable[[], T | None]) -> T:
    """Return the first true result of `condition`. Raises: TimeoutError after two minutes."""
    deadline = time.perf_counter() + _PATIENCE
    while not (answer := condition()):
        if time.perf_counter() > deadline:
            raise TimeoutError("the pipeline does not come to what is waited for")
        time.sleep(0.05)
    return answer


# ---- what is printed -----------------------------------------------------------------------------------------------


def lines(found: Found) -> Iterator[str]:
    """Yield the figures of a run."""
    p50, p99 = np.percentile(found.waits, [50, 99])
    most, events = max(found.waits), len(found.waits)
    yield f"event to latest   p50 {p50:.3f} s   p99 {p99:.3f} s   max {most:.3f} s   ({events} events)"
    by_metrics = [quantile(found.counted, share) for share in (0.5, 0.99)]
    yield f"by /metrics       p50 {by_metrics[0]:.3f} s   p99 {by_metrics[1]:.3f} s"
    yield f"rate              {found.rate:,.0f} rows/s"
    for name, seconds in found.steps.items():
        if seconds:
            p50, p99 = np.percentile(seconds, [50, 99])
            yield f"{name:<17} p50 {p50:.3f} s   p99 {p99:.3f} s   ({len(seconds)} micro-batches)"
    yield f"acks of regions   p50 {found.told['ack_p50']:.3f} s   p99 {found.told['ack_p99']:.3f} s"
    if found.requests:
        shown = ", ".join(f"{method} {number:.1f}" for method, number in found.requests.items())
        yield f"requests to S3    {sum(found.requests.values()):.1f} /s   ({shown})"
    for name, cores in sorted(found.cores.items(), key=lambda each: -each[1]):
        yield f"{name:<24} {cores:.2f} cores"


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.freshness", description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="a few seconds, not warmed up")
    parser.add_argument("--seconds", type=float, help=f"how long to measure ({SECONDS:g})")
    parser.add_argument("--warm-up", type=float, help=f"how long to wait before ({WARM_UP:g})")
    parser.add_argument("--rate", type=int, default=RATE, help="events per second (%(default)s)")
    parser.add_argument("--trigger", type=float, default=TRIGGER, help="source.trigger, seconds (%(default)s)")
    parser.add_argument(
        "--daemons", type=int, nargs="+", default=[0, 2], help="configured daemons, 0: the embedded one"
    )
    parser.add_argument("--s3", type=float, nargs="?", const=0.0, help="milliseconds that a request takes longer")
    given = parser.parse_args(arguments)
    default = (SMOKE_SECONDS, SMOKE_WARM_UP) if given.smoke else (SECONDS, WARM_UP)
    given.seconds = default[0] if given.seconds is None else given.seconds
    given.warm_up = default[1] if given.warm_up is None else given.warm_up
    return given


def main() -> None:
    """Measure and print."""
    given = options_of()
    for daemons in given.daemons:
        with tempfile.TemporaryDirectory() as directory, KafkaServer.started(Path(directory) / "kafka") as kafka:
            print(f"{daemons} daemons" if daemons else "the embedded daemon", flush=True)
            each = argparse.Namespace(**{**vars(given), "daemons": daemons})
            with nullcontext() if given.s3 is None else on_s3(Path(directory), given.s3 / 1e3) as place:
                for line in lines(measure(kafka, Path(directory), each, place)):
                    print(f"  {line}", flush=True)


if __name__ == "__main__":
    main()
