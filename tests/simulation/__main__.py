"""Run one seed with its trace, or many seeds on all processors: `python -m tests.simulation`."""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Sequence

from tests.histories import simulated
from tests.simulation.coverage import Cells, table
from tests.simulation.many import KINDS, results
from tests.simulation.world import SeedFailed, simulate

_NEWS_EVERY = 8
_KINDS = {
    "cluster": "everything at once (the default)",
    "log": "the log of a few regions, with reads and commits",
    "append": "the same of a table without a key",
    "leases": "reads of owners that are deposed",
    "table": "flush, commit, collection and the base table",
    "rest": "the same with regions that are released at rest",
}
_LONG = 1000
"""Minimum number of seeds of a run that always prints the coverage at its end."""


os.environ.setdefault("LANCE_LOG", "critical")  # a compaction that lost a race is not worth a log line


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code: 1 if a seed failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    kinds = parser.add_mutually_exclusive_group()
    for kind, about in _KINDS.items():
        kinds.add_argument(f"--{kind}", action="store_const", dest="kind", const=kind, help=about)
    parser.add_argument("--seed", type=int, help="run this one seed")
    parser.add_argument("--trace", action="store_true", help="show every step of it")
    parser.add_argument("--start", type=int, default=1, help="first of many seeds")
    parser.add_argument("--seeds", type=int, default=300, help="how many")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--coverage", action="store_true", help="show which faults struck which steps, as Markdown")
    parser.add_argument(
        "--porcupine",
        action="store_true",
        help="judge the history of each seed by Porcupine too; all writes are durable",
    )
    asked = parser.parse_args(arguments)
    kind = asked.kind or "cluster"
    if asked.porcupine and kind not in simulated.KINDS:
        parser.error(f"--porcupine: the histories of --{kind} are not recorded")
    if asked.porcupine and asked.seed is not None:
        asked.start, asked.seeds = asked.seed, 1
    elif asked.seed is not None:
        return _one(asked.seed, trace=asked.trace, kind=kind)
    return _many(asked.start, asked.seeds, asked.workers, kind=kind, judged=asked.porcupine, coverage=asked.coverage)


def _one(seed: int, *, trace: bool, kind: str) -> int:
    try:
        outcome = simulate(seed, print if trace else None, KINDS[kind])
    except SeedFailed as error:
        if trace:
            traceback.print_exception(error.__cause__)
        print(error.reason if trace else error)
        return 1
    print(f"seed {seed}: {outcome.steps} steps, {outcome.acked} of {outcome.attempts} writes acked, {outcome.digest}")
    return 0


def _many(start: int, seeds: int, workers: int, *, kind: str, judged: bool, coverage: bool) -> int:
    began, failed, cells = time.monotonic(), list[str](), Cells()
    for done, result in enumerate(results(start, seeds, workers, kind=kind, judged=judged), 1):
        cells.update(result.cells)
        if result.said:
            failed.append(result.said)
            print(f"\r{result.said}", flush=True)
        rate = done / (time.monotonic() - began)
        if done % _NEWS_EVERY == 0 or done == seeds:
            print(f"\r{done} of {seeds} seeds, {len(failed)} failed, {rate:.1f} seeds/s ", end="", flush=True)
    print(f"\nseeds {start} to {start + seeds - 1}")
    if cells and (coverage or seeds >= _LONG):
        print(f"\n{table(cells)}\n")
    for said in failed:
        print(f"failed: {said}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
