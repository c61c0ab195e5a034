"""A process that puts, commits, collects and reads for long keeps no more files and threads than at its beginning;
otherwise the judge of `tests.soak` reports it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import memwal
from memwal import flush
from tests.conftest import Made
from tests.soak.bars import PROCESSES, value
from tests.soak.samples import of_process
from tests.soak.trends import Verdict, judge

BATCHES, SAMPLES = 1800, 8
DESCRIPTORS, THREADS = 40, 40
"""Allowed fluctuations: files that are read at that moment, and Lance's threads for blocking calls."""
SETTLE, FILES = 8, 700
"""Seconds to wait after the last put, so that the collector finishes, and the maximum number of files then (usually
about 400). While rows are put, a faster machine has more files that wait for their collection.
"""


def test_descriptors_threads_and_files_stay_where_they_were(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.soak", "--json", "--workdir", str(tmp_path), "--keys", "1000"]
    asked = [*command, "--batches", str(BATCHES), "--samples", str(SAMPLES), "--settle", str(SETTLE)]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=300, check=True)
    *samples, settled = [json.loads(line) for line in done.stdout.splitlines()]
    assert samples[-1]["batches"] == BATCHES
    for name, most in (("descriptors", DESCRIPTORS), ("threads", THREADS)):
        before, after = ([each[name] for each in some] for some in (samples[2:4], samples[-2:]))
        assert min(after) <= max(before) + most, samples
    assert settled["files"] <= FILES, [*samples, settled]


FLUSHES = 80
"""More than the number of SST directories whose descriptors a local store keeps open."""


def flushes(table: Any, made: Made, first: int) -> Verdict:
    """Compare the descriptors of this process during some flushes with the soak's limit for daemons. A flush stands for
    15 s.
    """
    samples = []
    for number in range(first, first + FLUSHES):
        table.put(made.table([number % 10], number))
        table.flush()
        samples += of_process(15.0 * number, "daemon", 1, os.getpid())
    table.commit()
    points = [(sample.at, value(sample, "descriptors")) for sample in samples]
    return judge("descriptors", points, PROCESSES["daemon"]["descriptors"])


def test_a_descriptor_that_each_flush_keeps_is_found(
    tmp_path: Path, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, right = list[int](), flush.flush

    def flush_and_keep(*given: Any, **named: Any) -> Any:
        kept.append(os.open(os.devnull, os.O_RDONLY))
        return right(*given, **named)

    by_hand = {"commit": {"interval": "0s"}, "gc": {"interval": "0s"}}
    with memwal.open(tmp_path / "table", schema=made.schema, key="id", regions=1, settings=by_hand) as table:
        flushes(table, made, 0)
        assert not flushes(table, made, FLUSHES).broken
        monkeypatch.setattr(flush, "flush", flush_and_keep)
        assert flushes(table, made, 2 * FLUSHES).broken.startswith("descriptors: grew by ")
    for each in kept:
        os.close(each)
