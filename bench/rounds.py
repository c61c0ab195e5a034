"""Run a benchmark: all contenders in turn, round after round, so that a slow minute of the host affects all of them."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from bench.benchmark import Benchmark, Contender, Sample, Watch
from bench.result import BenchmarkResult, ContenderResult, Round


class ResultsDiffer(Exception):
    """Contenders with the same question returned different rows, so their times are not comparable."""


def run(
    benchmark: Benchmark, at: Path, *, smoke: bool, rounds: int, progress: Callable[[str], None] = lambda _: None
) -> BenchmarkResult:
    """Run all rounds of one benchmark below the directory `at`, and remove `at` at the end.

    Nothing is removed before the end: ext4 takes up to 0.4 ms to create a file in a directory near many deleted files,
    so the next contender would pay for the deletions of the previous one. The order of the contenders rotates by one
    each round, so that none always runs after the same other one.

    Raises: ResultsDiffer.
    """
    values = benchmark.values(smoke=smoke)
    contenders = list(benchmark.contenders(values))
    taken: list[list[Round]] = [[] for _ in contenders]
    with ExitStack() as opened:
        for n, contender in enumerate(contenders):
            opened.callback(contender.close)
            progress(f"{benchmark.name}: preparing {contender.name}")
            contender.prepare(emptied(at / f"prepared-{n}"))
        for number in range(rounds):
            for n in _turned(len(contenders), number):
                progress(f"{benchmark.name}: round {number + 1} of {rounds}, {contenders[n].name}")
                taken[n].append(_round(contenders[n], emptied(at / f"round-{number}-{n}")))
            _check(benchmark, contenders, taken)
    shutil.rmtree(at, ignore_errors=True)
    results = [ContenderResult.of(each, found) for each, found in zip(contenders, taken, strict=True)]
    return BenchmarkResult(benchmark.name, benchmark.title, benchmark.figure, values, tuple(results))


def _turned(count: int, by: int) -> list[int]:
    return [(n + by) % count for n in range(count)]


def _round(contender: Contender, at: Path) -> Round:
    gc.collect()
    os.sync()  # a contender that syncs would wait for data that others left unsynced
    return _judged(contender.round(at, Watch()))


def _judged(sample: Sample) -> Round:
    milliseconds = sample.latencies * 1e3
    return Round(
        p50_ms=float(np.median(milliseconds)),
        p99_ms=float(np.quantile(milliseconds, 0.99)),
        rows_per_second=sample.rows / sample.seconds,
        digest=sample.digest,
        measures=dict(sample.measures),
    )


def _check(benchmark: Benchmark, contenders: Sequence[Contender], taken: Sequence[Sequence[Round]]) -> None:
    found: dict[str, dict[str, str]] = {}
    for contender, rounds in zip(contenders, taken, strict=True):
        for each in rounds:
            if each.digest and contender.question:
                found.setdefault(contender.question, {}).setdefault(each.digest, contender.name)
    for digests in found.values():
        if len(digests) > 1:
            named = ", ".join(f"{name}: {digest}" for digest, name in digests.items())
            raise ResultsDiffer(f"{benchmark.name}: different rows came back ({named}); the times are not comparable")


def emptied(at: Path) -> Path:
    """Return the directory `at`, created or emptied."""
    shutil.rmtree(at, ignore_errors=True)
    at.mkdir(parents=True)
    return at
