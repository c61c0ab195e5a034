"""A process that commits, puts and reads for long keeps no more files and threads than it began with."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

COMMITS, SAMPLES = 48, 6
DESCRIPTORS, THREADS = 12, 40
"""What may come and go: files that are read at that moment, threads of Lance's pool for blocking calls."""


def test_descriptors_and_threads_stay_where_they_were(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "bench.soak",
        "--json",
        "--workdir",
        str(tmp_path),
        "--keys",
        "1000",
        "--rows",
        "100",
    ]
    asked = [*command, "--commits", str(COMMITS), "--samples", str(SAMPLES)]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=300, check=True)
    samples = [json.loads(line) for line in done.stdout.splitlines()]
    assert [each["commits"] for each in samples][-1] == COMMITS
    middle, end = samples[SAMPLES // 2 - 1], samples[-1]
    assert end["descriptors"] <= middle["descriptors"] + DESCRIPTORS, samples
    assert end["threads"] <= middle["threads"] + THREADS, samples
