"""Which series must be flat, how flat, and how much legitimate growth is expected."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from memwal.flush.garbage.plans import PLANS_MIN
from tests.soak.samples import Sample
from tests.soak.trends import Bar, Verdict, judge

MIB = 1 << 20
SETTLED, HALF_MOST = 150.0, 600.0
"""Seconds. After SETTLED a run keeps a stable number of files: superseded files are kept for KEPT and then collected.
Files and requests are judged from half of the run on, a process from half of its life on; both at the latest from
HALF_MOST on."""
_AGE, _LIVES = (60.0, 90.0), 4
"""The age, in seconds, at which lives of a process are compared, and the minimum number of lives."""

PROCESSES = {
    "daemon": {
        "memory": Bar(64, 24, 0.15, 900, most=700),
        "threads": Bar(40, 8),
        "descriptors": Bar(40, 4, shortest=900),
    },
    "run": {"memory": Bar(24, 16, 0.10, 60), "threads": Bar(8, 4), "descriptors": Bar(12, 4)},
    "driver's JVM": {"memory": Bar(400, 0, 0.5, most=2000), "threads": Bar(40, 8), "descriptors": Bar(60, 8)},
    "executor": {"memory": Bar(300, 0, 0.5, most=1200), "threads": Bar(30, 8), "descriptors": Bar(40, 8)},
    "writer": {"memory": Bar(16, 8, 0.10), "threads": Bar(8, 4), "descriptors": Bar(12, 4)},
    "reader": {"memory": Bar(64, 24, 0.15, 90), "threads": Bar(60, 8), "descriptors": Bar(40, 4)},
    "feed": {"memory": Bar(24, 16, 0.10, 90), "threads": Bar(12, 4), "descriptors": Bar(16, 4)},
}
"""Bars by kind of process; memory in MiB.

A daemon claims and releases regions while it lives, and Lance's threads for blocking calls follow the load. A daemon
takes a quarter of an hour to reach the memory that it keeps. A clean-up of the base table makes Lance read the manifest
of each version, 64 at a time, over connections that stay open for half a minute: a daemon's descriptors vary by that
number, and so does a slope over less than a quarter of an hour. The heap of a JVM grows to its limit before it is
collected, so its bar limits the highest value.
"""
YOUNG = {"daemon": {"descriptors": Bar(130)}}
"""Bars of processes a minute after their start, where they differ: a daemon of that age may have the connections of two
clean-ups."""
_REGIONS_MAX = 6
FILES = {  # without the two notes of each pause, which are never deleted
    "entries beyond fences": Bar(150, 0, 0.5, SETTLED),
    "manifests": Bar(150, 0, 0.5, SETTLED),
    "SSTs": Bar(40, 0, 0.5, SETTLED),
    "commit plans": Bar(_REGIONS_MAX * PLANS_MIN, 0, 0.0, SETTLED),
    "applied snapshots": Bar(10, 0, 0.5, SETTLED),
    "staged rows": Bar(10, 0, 0.0, SETTLED),
    "probes": Bar(4, 0, 0.0, SETTLED),
    "notes": Bar(24, 0, 0.0, SETTLED),
    "base versions": Bar(20, 0, 0.5, SETTLED),
    "transactions": Bar(20, 0, 0.5, SETTLED),
    "deletion files": Bar(30, 0, 0.5, SETTLED),
    "index segments": Bar(30, 0, 0.5, SETTLED),
    "data files": Bar(30, 0, 0.5, SETTLED),
    "unfinished uploads": Bar(0),
    "checkpoint files": Bar(24, 0, 0.5, SETTLED),
    "temporary files": Bar(12, 0, 0.0, SETTLED),
}
"""Plans of a region are collected once there are PLANS_MIN. Each region has four notes, and each resize adds one."""
ORPHANS = {"transactions": 2, "deletion files": 6, "index segments": 6, "data files": 8, "staged rows": 2, "probes": 1}
"""Files that an interrupted commit, micro-batch or start leaves: they are kept for a day at least
(`gc.orphan_age_min`)."""
REQUESTS = Bar(60, 0, 0.5, 90, shortest=900)
"""Requests of one kind per minute. Not judged in a short run, where they follow outages, pauses and resizes."""


@dataclass
class Series:
    """The samples of a run; times in seconds since its start. `files`, `requests`: by kind; requests per minute."""

    samples: list[Sample] = field(default_factory=list)
    files: list[tuple[float, Counter[str]]] = field(default_factory=list)
    requests: list[tuple[float, Counter[str]]] = field(default_factory=list)


def verdicts(series: Series, cut_off: int) -> Iterator[Verdict]:
    """Judge every series by its bar. `cut_off`: how many commits, micro-batches or starts may have been interrupted."""
    yield from _of_processes(series.samples)
    yield from _of_lives(series.samples)
    half = min(HALF_MOST, max((at for at, _ in (*series.files, *series.requests)), default=0.0) / 2)
    for kind, bar in FILES.items():
        points = [(at, float(counts[kind])) for at, counts in series.files]
        slack, warm_up = bar.slack + ORPHANS.get(kind, 0) * cut_off, max(bar.warm_up, half)
        yield judge(f"files: {kind}", points, replace(bar, slack=slack, warm_up=warm_up))
    for kind in sorted({kind for _, counts in series.requests for kind in counts}):
        points = [(at, float(counts[kind])) for at, counts in series.requests]
        yield judge(f"requests a minute: {kind}", points, replace(REQUESTS, warm_up=max(REQUESTS.warm_up, half)))


def _of_processes(samples: Sequence[Sample]) -> Iterator[Verdict]:
    """Judge each life of each process."""
    lives: defaultdict[tuple[str, int], list[Sample]] = defaultdict(list)
    for sample in samples:
        lives[sample.name, sample.life].append(sample)
    numbers: Counter[str] = Counter()
    for (name, _), life in sorted(lives.items(), key=lambda each: (each[0][0], each[1][0].at)):
        numbers[name] += 1
        half = min(HALF_MOST, (life[-1].at - life[0].at) / 2)
        for what, bar in _bars(name).items():
            points = [(sample.at, value(sample, what)) for sample in life]
            settled = replace(bar, warm_up=max(bar.warm_up, half))
            verdict = judge(f"{name}, life {numbers[name]}: {what}", points, settled)
            if verdict.judged or verdict.broken:
                yield verdict


def _of_lives(samples: Sequence[Sample]) -> Iterator[Verdict]:
    """Compare the lives of each process: their values a minute after their start."""
    starts: dict[tuple[str, int], float] = {}
    young: defaultdict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        age = sample.at - starts.setdefault((sample.name, sample.life), sample.at)
        if _AGE[0] <= age <= _AGE[1]:
            young[sample.name].append(sample)
    for name, some in sorted(young.items()):
        for what, bar in (_bars(name) | _bars(name, YOUNG)).items():
            points = [(sample.at, value(sample, what)) for sample in some]
            verdict = judge(
                f"{name}, a minute after each start: {what}", points, replace(bar, per_hour=0.0, warm_up=0.0)
            )
            if verdict.judged and len({sample.life for sample in some}) >= _LIVES:
                yield verdict


def _bars(name: str, bars: Mapping[str, dict[str, Bar]] = PROCESSES) -> dict[str, Bar]:
    return bars.get(name) or bars.get(name.replace("-", " ").split()[0], {})


def value(sample: Sample, what: str) -> float:
    """Return the judged value of a sample; memory in MiB."""
    return sample.memory / MIB if what == "memory" else float(getattr(sample, what))
