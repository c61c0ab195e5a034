"""Measure how much memory the compaction of wide rows takes, independent of the size of the table.

    python -m bench.compaction_memory [--smoke] [--gigabytes N] [--row-kib N] [--fragment-mib N] [--workdir PATH]

Rows of random bytes, which do not compress, are written into fragments of a Lance table, like commits would. A process
of its own compacts with memwal's defaults until nothing is left to compact, and reports its peak memory (VmHWM of
Linux) above the peak before the first compaction. Old versions are deleted after each run, so the disk needs room for
the table and a few gigabytes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

# Lance logs a line for each index that it cannot describe. Set before its import.
os.environ.setdefault("LANCE_LOG", "critical")

import lance
import numpy as np
import pyarrow as pa

from memwal.flush.commits.maintenance import CompactionLimits, compact

BAR = 1 << 30
"""Bytes: `commit.memory_max`."""
GIGABYTES, ROW_KIB, FRAGMENT_MIB = 10.0, 1024, 100
SMOKE = (0.02, 64, 1)
SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), ("value", pa.binary())])


@dataclass(frozen=True, slots=True)
class Compacted:
    """The result. `runs`: of the compaction. `memory`: peak bytes above the start. `largest`: bytes of the largest
    file.
    """

    runs: int
    fragments_before: int
    fragments_after: int
    memory: int
    largest: int
    seconds: float


def write(uri: str, gigabytes: float, row_kib: int, fragment_mib: int) -> int:
    """Write the table; return its number of rows."""
    rows = max(fragment_mib * 1024 // row_kib, 1)
    fragments = max(int(gigabytes * 1024 / fragment_mib), 1)
    for first in range(0, fragments * rows, rows):
        values = [np.random.default_rng(id).bytes(row_kib << 10) for id in range(first, first + rows)]
        table = pa.table([pa.array(range(first, first + rows)), pa.array(values, pa.binary())], schema=SCHEMA)
        lance.write_dataset(table, uri, mode="append")
    return fragments * rows


def compacted(uri: str) -> Compacted:
    """Compact the table until nothing is left to compact, in the process whose memory is measured."""
    before, dataset, runs, began = _most_memory(), lance.dataset(uri), 0, time.perf_counter()
    count = len(dataset.get_fragments())
    while compact(dataset, CompactionLimits()) != (0, 0):
        runs += 1
        dataset.cleanup_old_versions(older_than=timedelta(0))
    files = [file.file_size_bytes or 0 for each in dataset.get_fragments() for file in each.metadata.files]
    seconds = time.perf_counter() - began
    return Compacted(runs, count, len(files), _most_memory() - before, max(files), seconds)


def run(at: Path, gigabytes: float, row_kib: int, fragment_mib: int) -> Compacted:
    """Write a table below `at`, and compact it in a process of its own. Raises: RuntimeError if a row is missing."""
    uri = str(at / "wide.lance")
    rows = write(uri, gigabytes, row_kib, fragment_mib)
    command = [sys.executable, "-m", "bench.compaction_memory", "--compact", uri]
    done = Compacted(**json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    if (left := lance.dataset(uri).count_rows()) != rows:
        raise RuntimeError(f"{uri}: {left:,} rows after the compaction, {rows:,} before")
    return done


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 1 if the memory is above the bar, else 0."""
    given = _parser().parse_args(arguments)
    if given.compact:
        print(json.dumps(asdict(compacted(given.compact))))
        return 0
    size = SMOKE if given.smoke else (given.gigabytes, given.row_kib, given.fragment_mib)
    with tempfile.TemporaryDirectory(dir=given.workdir) as at:
        done = run(Path(at), *size)
    verdict = "held" if done.memory <= BAR else "missed"
    print(
        f"{size[0]:g} GB, rows of {size[1]} KiB: {done.fragments_before} fragments into {done.fragments_after} in "
        f"{done.runs} runs, {done.seconds:.0f} s; largest file {done.largest >> 20} MiB; memory "
        f"{done.memory >> 20} MiB (bar {BAR >> 20}: {verdict})"
    )
    return int(done.memory > BAR)


def _most_memory() -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.compaction_memory", description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="a tiny table")
    parser.add_argument("--gigabytes", type=float, default=GIGABYTES)
    parser.add_argument("--row-kib", type=int, default=ROW_KIB)
    parser.add_argument("--fragment-mib", type=int, default=FRAGMENT_MIB)
    parser.add_argument("--workdir", help="an existing directory on the disk to be used")
    parser.add_argument("--compact", metavar="URI", help="only compact the table at URI, and print the figures as JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main())
