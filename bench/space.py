"""Measure what an upsert stream keeps on the disk, and what one commit of it writes.

    python -m bench.space [--smoke] [--commits N] [--pace SECONDS] [--workdir PATH]

A table of 100,000 rows (id, price, text, vector) with a full-text, a B-tree and a vector index gets commits of 1,000
upserts of random keys. A week with a commit every 30 s (20,160 commits) is compressed into `commits`: every age in [gc]
is scaled so that `commits` times `pace` seconds are the week. A commit begins at each multiple of the pace, or when the
previous one has ended. If commits take longer than the pace, the run is longer than the scaled week, and an age covers
fewer commits than it would in a real week.

1. **Written**: the bytes of new files per commit, by kind, for rows of 200 bytes (vector of 32, 6 words) and of 450
   bytes (64, 20): by the commit alone, and with merges of segments and compaction after each commit.
2. **Kept**, with rows of 450 bytes: after every share of the commits, bytes by kind and as a multiple of the newest
   version; `last hour` is data that only versions of the scaled last hour use.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

# Lance logs a line for each index that it cannot describe. Set before its import.
os.environ.setdefault("LANCE_LOG", "critical")

import numpy as np
import pyarrow as pa

import memwal
from memwal import wal
from memwal.flush.base.version_files import VersionFiles, stored_bytes, stored_versions

COMMITS, PACE, SAMPLES, ROWS, UPSERTS = 3_000, 0.4, 15, 100_000, 1_000
SMOKE = (30, 0.05, 3, 2_000, 100)
BAR = 3.0
"""Highest accepted multiple of the newest version's bytes, without those of the last hour."""
_WEEK = 604_800.0
"""Seconds of a week."""
WRITTEN = {False: 10, True: 128}
"""Commits whose bytes are counted, without and with upkeep. 128 commits replace every row once."""
_UPKEEP = 0.3
"""Seconds to wait for upkeep after each commit."""
SHAPES = ((32, 6), (64, 20))
"""Width of a vector and words of a text: rows of 200 and of 450 bytes."""
_VOCABULARY = np.array([f"word{n}" for n in range(5_000)])
INDEXES = {"embedding": "ivf_pq", "body": "fts", "price": "btree"}


@dataclass(frozen=True, slots=True)
class Sample:
    """Bytes on the disk after `commits` commits.

    `newest`: of the newest version. `hour`: of data that only other versions of the last hour use. `older`: of older
    versions. `beside`: of SSTs, log and orphans. `versions`: the number of versions.
    """

    commits: int
    versions: int
    newest: int
    hour: int
    older: int
    beside: int

    @property
    def factor(self) -> float:
        """Return all bytes without those of the last hour, as a multiple of the newest version's bytes."""
        return (self.newest + self.older + self.beside) / self.newest


class Stream:
    """Generate random rows.

    Thread safety. One thread.
    """

    def __init__(self, width: int = 64, words: int = 20) -> None:
        """Seed the generator. `width`: numbers of a vector. `words`: words of a text."""
        self._random, self._width, self._words = np.random.default_rng(38), width, words
        self.schema = pa.schema(
            [
                pa.field("id", pa.int64(), nullable=False),
                ("price", pa.float64()),
                ("body", pa.string()),
                ("embedding", pa.list_(pa.float32(), width)),
            ]
        )

    def rows(self, ids: Any) -> pa.Table:
        """Return a row for each of `ids`."""
        draw, n, width = self._random, len(ids), self._width
        texts = [" ".join(words) for words in draw.choice(_VOCABULARY, (n, self._words))]
        vectors = pa.FixedSizeListArray.from_arrays(pa.array(draw.random(n * width, np.float32)), width)
        columns = [pa.array(ids), pa.array(draw.random(n)), pa.array(texts), vectors]
        return pa.Table.from_arrays(columns, schema=self.schema)

    def upserts(self, keys: int, count: int) -> pa.Table:
        """Return new rows for `count` of the keys below `keys`."""
        return self.rows(self._random.choice(keys, count, replace=False))


def settings(week: float) -> dict[str, Any]:
    """Return the default settings with every age and interval scaled so that a week is `week` seconds."""

    def scaled(seconds: float) -> str:
        return f"{max(seconds * week / _WEEK, 0.001):.6f}s"

    ages = {"wal_age_min": 600.0, "sst_age_min": 600.0, "manifest_age_min": 86_400.0}
    ages |= {"versions_age_min": 3600.0, "versions_hourly": 86_400.0, "versions_daily": _WEEK}
    gc = {name: scaled(age) for name, age in ages.items()}
    gc |= {"interval": scaled(300.0), "versions_interval": scaled(600.0)}
    upkeep = {"optimize_interval": scaled(10.0), "compact_interval": scaled(10.0)}
    return {"commit": {"interval": "0s", **upkeep}, "gc": gc}


def written(at: Path, stream: Stream, rows: int, upserts: int, commits: int, *, upkeep: bool) -> Counter[str]:
    """Return the mean bytes of new files per commit, by kind. `upkeep`: whether it follows each commit."""
    intervals = {"interval": "0s"} | dict.fromkeys(
        ("optimize_interval", "compact_interval"), "0.001s" if upkeep else "0s"
    )
    settings = {"commit": intervals, "gc": {"interval": "0s", "versions_interval": "0s"}}
    with memwal.open(at, schema=stream.schema, key="id", indexes=INDEXES, regions=1, settings=settings) as table:
        _filled(table, stream, rows)
        before = _by_kind(at)
        for _ in range(commits):
            table.put(stream.upserts(rows, upserts))
            _committed(table)
            time.sleep(_UPKEEP if upkeep else 0)
        after = _by_kind(at)
    return Counter({kind: (after[kind] - before[kind]) // commits for kind in after})


def kept(at: Path, commits: int, pace: float, samples: int, rows: int, upserts: int) -> Iterator[Sample]:
    """Run the stream; yield a sample after every share of the commits."""
    stream, hour, scaled = Stream(), commits * pace / 168, settings(commits * pace)
    table: Any
    with memwal.open(at, schema=stream.schema, key="id", indexes=INDEXES, regions=1, settings=scaled) as table:
        _filled(table, stream, rows)
        due = time.monotonic()
        for number in range(1, commits + 1):
            table.put(stream.upserts(rows, upserts))
            _committed(table)
            if number % max(commits // samples, 1) == 0:
                yield _sample(at, number, hour)
            due = max(due + pace, time.monotonic())
            time.sleep(max(0.0, due - time.monotonic()))


def _filled(table: Any, stream: Stream, rows: int) -> None:
    for first in range(0, rows, 20_000):
        table.put(stream.rows(np.arange(first, min(first + 20_000, rows))))
    _committed(table)


def _committed(table: Any) -> None:
    table.flush()
    table.commit()


def _sample(at: Path, commits: int, hour: float) -> Sample:
    store, since = wal.open_store(str(at)), time.time() - hour
    versions, files = stored_versions(store), VersionFiles(store)
    replaced = {old.version: new.written for old, new in pairwise(versions)}
    held = {each.version: files.of(each.version) for each in versions}
    last = versions[-1].version
    old = [held[number] for number, when in replaced.items() if when <= since]
    newest, every = stored_bytes([held[last]]), stored_bytes(held.values())
    older = stored_bytes([held[last], *old]) - newest
    total = sum(path.stat().st_size for path in at.rglob("*") if path.is_file())
    return Sample(commits, len(versions), newest, every - newest - older, older, total - every)


def _by_kind(at: Path) -> Counter[str]:
    kinds: Counter[str] = Counter()
    for path in at.rglob("*"):
        if path.is_file():
            folder, *rest = path.relative_to(at).parts
            if folder == "_mem_wal" and len(rest) > 1:
                folder = "SSTs" if "_gen_" in rest[1] else "log" if rest[1] == "wal" else "rest"
            kinds[folder] += path.stat().st_size
    return kinds


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 1 if a sample is above the bar, else 0."""
    parser = argparse.ArgumentParser(prog="python -m bench.space", description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="a tiny table")
    parser.add_argument("--commits", type=int, default=COMMITS)
    parser.add_argument("--pace", type=float, default=PACE, help="seconds from a commit to the next")
    parser.add_argument("--workdir", help="an existing directory on the disk to be used")
    given = parser.parse_args(arguments)
    size = SMOKE if given.smoke else (given.commits, given.pace, SAMPLES, ROWS, UPSERTS)
    commits, pace, samples, rows, upserts = size
    missed = False
    with tempfile.TemporaryDirectory(dir=given.workdir) as at:
        for width, words in SHAPES:
            for upkeep, most in WRITTEN.items():
                place = Path(at) / f"written-{width}-{upkeep}"
                bytes_of = written(place, Stream(width, words), rows, upserts, min(commits, most), upkeep=upkeep)
                which = f"vector of {width}, {'with' if upkeep else 'without'} upkeep"
                print(f"written per commit, {which}: {bytes_of.total():,} {dict(bytes_of.most_common())}", flush=True)
        print("commits | versions | newest | last hour | older | beside | factor (MB)", flush=True)
        for each in kept(Path(at) / "kept", commits, pace, samples, rows, upserts):
            figures = " | ".join(f"{n / 1e6:.1f}" for n in (each.newest, each.hour, each.older, each.beside))
            print(f"{each.commits} | {each.versions} | {figures} | {each.factor:.2f}", flush=True)
            missed |= each.factor > BAR
    print(f"bar {BAR:g}: {'missed' if missed else 'held'}")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
