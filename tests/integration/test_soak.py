"""A process that puts, commits, collects and reads for long keeps no more files and threads than it began with."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BATCHES, SAMPLES = 1800, 8
DESCRIPTORS, THREADS, FILES = 40, 40, 400
"""What may come and go: files that are read at that moment or wait to be collected, Lance's threads for calls that
block."""


def test_descriptors_threads_and_files_stay_where_they_were(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.soak", "--json", "--workdir", str(tmp_path), "--keys", "1000"]
    asked = [*command, "--batches", str(BATCHES), "--samples", str(SAMPLES)]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=300, check=True)
    samples = [json.loads(line) for line in done.stdout.splitlines()]
    assert samples[-1]["batches"] == BATCHES
    for name, most in (("descriptors", DESCRIPTORS), ("threads", THREADS), ("files", FILES)):
        before, after = ([each[name] for each in some] for some in (samples[2:4], samples[-2:]))
        assert min(after) <= max(before) + most, samples  # files come and go in waves, with each collection
