"""What reading SSTs back costs a flush: the evidence for EVERY in flush/sst/read_back.py.

`python -m bench.micro.read_back` flushes the memtables of the benchmarks `flush_vectors` and `flush_packages` with and
without reading all rows back, in turn, and prints the mean over EVERY flushes. The bar is 5 %.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bench.benchmark import Benchmark, Watch
from bench.flush_path import BENCHMARKS, Flushes
from bench.rounds import emptied
from memwal.flush.sst.read_back import EVERY

ROUNDS, BAR = 9, 0.05


def seconds(benchmark: Benchmark, at: Path, rounds: int, *, smoke: bool) -> tuple[float, float]:
    """Return the median seconds of a flush that reads one column back, and of one that reads all rows back."""
    contender = benchmark.contenders(benchmark.values(smoke=smoke))[0]
    assert isinstance(contender, Flushes)
    contender.prepare(emptied(at / "prepared"))
    taken: dict[bool, list[float]] = {True: [], False: []}
    for number in range(rounds + 1):  # the first warms up
        for whole in (True, False):
            if whole:
                contender.read_back()
            watch = Watch()
            contender.round(emptied(at / "round"), watch)
            taken[whole] += [watch.seconds] if number else []
    return float(np.median(taken[False])), float(np.median(taken[True]))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns 1 above the bar."""
    parser = argparse.ArgumentParser(prog="python -m bench.micro.read_back", description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="small memtables")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="flushes of each kind")
    parser.add_argument("--workdir", help="an existing directory on the disk to be used")
    given = parser.parse_args(arguments)
    missed = False
    with tempfile.TemporaryDirectory(dir=given.workdir) as at:
        for each in BENCHMARKS:
            one, whole = seconds(each, Path(at), given.rounds, smoke=given.smoke)
            share = (whole - one) / one / EVERY
            print(f"{each.name}: {one * 1e3:.0f} ms, all rows read back {whole * 1e3:.0f} ms: {share:.1%} on average")
            missed |= share > BAR
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
