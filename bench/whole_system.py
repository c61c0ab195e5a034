"""The parts of a run: freshness, take-over, growth, and the crossover to a direct `merge_insert`.

`python -m bench` measures them after the benchmarks and stores their figures in the same result. A part that this host
cannot run is skipped with one line. A part that fails is stored as failed, so that figures measured before are kept.
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from bench.parts import Curve, Measured, Part, PartResult
from bench.rounds import emptied
from bench.slopes import Crossover, Growth
from memwal.ingest.errors import Invalid
from memwal.ingest.spark.session import check_java

FRESH_P50, FRESH_P99 = 100.0, 300.0
"""Bars of the time from an event in Kafka until level `latest`, milliseconds."""
KILL_P99, HAND_OVER_P99, START_P50 = 500.0, 500.0, 2_000.0
"""Bars of a take-over, milliseconds."""
FAILED = "failed: "


class Freshness:
    """The time from an event in Kafka to level `latest`, with the embedded daemon at default settings."""

    name, title = "freshness", "From an event in Kafka to level latest"
    seconds, warm_up, trigger = 15.0, 15.0, 0.0
    """Trigger 0 is Spark's shortest: a micro-batch begins when the previous one has ended."""

    def absent(self) -> str:
        """Check for Java and the jars of the broker."""
        try:
            check_java(os.environ)
        except Invalid as error:
            return str(error)
        from tests.kafka_server import cache

        return "" if cache().exists() else "the Kafka broker is not in the cache; `make kafka` fetches it"

    def measure(self, at: Path, *, smoke: bool) -> PartResult:
        """Run once with a broker of its own."""
        from bench import freshness
        from tests.kafka_server import KafkaServer

        began = time.perf_counter()
        lasts = (freshness.SMOKE_SECONDS, freshness.SMOKE_WARM_UP) if smoke else (self.seconds, self.warm_up)
        rate = freshness.RATE // 10 if smoke else freshness.RATE
        options = argparse.Namespace(seconds=lasts[0], warm_up=lasts[1], rate=rate, trigger=self.trigger, daemons=0)
        with KafkaServer.started(at / "kafka") as kafka:
            found = freshness.measure(kafka, at, options)
        told = {"events a second": rate, "trigger": f"{self.trigger * 1e3:.0f} ms", "measured for": f"{lasts[0]:g} s"}
        seconds = time.perf_counter() - began
        return freshness_result(self.name, self.title, seconds, told, found.waits)


def freshness_result(
    name: str, title: str, seconds: float, told: Mapping[str, object], waits: Sequence[float]
) -> PartResult:
    """Return the part for these waits (seconds): quantiles with bars, and the share of events over milliseconds."""
    milliseconds = np.asarray(waits) * 1e3
    p50, p99 = (float(each) for each in np.percentile(milliseconds, [50, 99]))
    shares = np.linspace(0, 100, 101)
    points = zip(np.percentile(milliseconds, shares).tolist(), shares.tolist(), strict=True)
    figures = (
        Measured("event to latest, p50", p50, "ms", FRESH_P50),
        Measured("event to latest, p99", p99, "ms", FRESH_P99),
        Measured("events of the probe", float(len(waits)), "events"),
    )
    curve = Curve("events", "found", "milliseconds", "%", tuple(points))
    return PartResult(name, title, seconds, dict(told), figures, (curve,))


class TakeOver:
    """Two daemons under puts: one is killed, stopped with SIGTERM, and started again."""

    name, title = "take_over", "When a daemon goes: how long writes of its regions stop"
    trials, rest = 3, 6.0

    def absent(self) -> str:
        """Return "": the part needs nothing."""
        return ""

    def measure(self, at: Path, *, smoke: bool) -> PartResult:
        """Run a few trials of each kind. Raises: take_over.LostRows."""
        from bench import take_over
        from tests.s3_place import Place

        began, trials = time.perf_counter(), take_over.SMOKE if smoke else self.trials
        found, errors = take_over.measure(at, Place(str(at / "table.lance")), trials, 0.0, rest=self.rest)
        rest = take_over.SHORT_REST if smoke else self.rest
        told = {"trials": trials, "puts a second and region": take_over.RATE, "rest before each": f"{rest:g} s"}
        return take_over_result(self.name, self.title, time.perf_counter() - began, told, found, len(errors))


def take_over_result(
    name: str, title: str, seconds: float, told: Mapping[str, object], found: Mapping[str, Sequence[float]], errors: int
) -> PartResult:
    """Return the part for these trials (seconds by kind). With few trials p99 is close to the worst."""
    bars = {("kill", 99): KILL_P99, ("hand-over", 99): HAND_OVER_P99, ("start", 50): START_P50}
    figures, curves = [], []
    for kind, each in found.items():
        milliseconds = [second * 1e3 for second in each]
        for share in (50, 99):
            value = float(np.percentile(milliseconds, share))
            figures.append(Measured(f"{kind}, p{share}", value, "ms", bars.get((kind, share))))
        points = tuple((float(number), value) for number, value in enumerate(milliseconds, 1))
        curves.append(Curve("trials", kind, "trial", "ms", points))
    figures.append(Measured("puts that raised an error", float(errors), "puts", 0.0))
    return PartResult(name, title, seconds, dict(told), tuple(figures), tuple(curves))


PARTS: tuple[Part, ...] = (Freshness(), TakeOver(), Growth(), Crossover())


def measured(part: Part, at: Path, *, smoke: bool) -> PartResult:
    """Measure the part below the directory `at`, which is removed; if there are no figures, return the reason."""
    missing = part.absent()
    if not missing:
        began = time.perf_counter()
        try:
            return part.measure(emptied(at), smoke=smoke)
        except Exception as error:  # noqa: BLE001 - the figures measured so far are kept; the command's exit code is 1
            words = " ".join(str(error).split())
            missing = f"{FAILED}{type(error).__name__} after {time.perf_counter() - began:.0f} s: {words}"[:300]
        finally:
            shutil.rmtree(at, ignore_errors=True)
    return PartResult(part.name, part.title, 0.0, {}, missing=missing)
