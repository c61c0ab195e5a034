"""`python -m tests.simulation`: one seed with its trace, or many seeds on all processors."""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Sequence

from tests.simulation.many import KINDS, outcomes
from tests.simulation.world import SeedFailed, simulate

_NEWS_EVERY = 8


os.environ.setdefault("LANCE_LOG", "error")  # a compaction that lost a race is no news here


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 1 where a seed failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument(
        "--table", action="store_const", dest="kind", const="table", help="flush, commit, collection and the base table"
    )
    kinds.add_argument("--append", action="store_const", dest="kind", const="append", help="a table without a key")
    kinds.add_argument(
        "--leases", action="store_const", dest="kind", const="leases", help="reads of owners that are deposed"
    )
    kinds.add_argument(
        "--daemons", action="store_const", dest="kind", const="daemons", help="daemons, producers and resizes"
    )
    parser.add_argument("--seed", type=int, help="run this one seed")
    parser.add_argument("--trace", action="store_true", help="show every step of it")
    parser.add_argument("--start", type=int, default=1, help="first of many seeds")
    parser.add_argument("--seeds", type=int, default=300, help="how many")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes")
    asked = parser.parse_args(arguments)
    if asked.seed is not None:
        return _one(asked.seed, trace=asked.trace, kind=asked.kind or "log")
    return _many(asked.start, asked.seeds, asked.workers, kind=asked.kind or "log")


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


def _many(start: int, seeds: int, workers: int, *, kind: str) -> int:
    began, failed = time.monotonic(), list[str]()
    for done, said in enumerate(outcomes(start, seeds, workers, kind=kind), 1):
        if said:
            failed.append(said)
            print(f"\r{said}", flush=True)
        rate = done / (time.monotonic() - began)
        if done % _NEWS_EVERY == 0 or done == seeds:
            print(f"\r{done} of {seeds} seeds, {len(failed)} failed, {rate:.1f} seeds/s ", end="", flush=True)
    print(f"\nseeds {start} to {start + seeds - 1}")
    for said in failed:
        print(f"failed: {said}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
