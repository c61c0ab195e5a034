"""Attack a daemon with hostile requests, and print the requests that it did not survive: `python -m tests.fuzz`.

Each finding is printed with the command that repeats it.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from functools import partial

from tests.fuzz.planted import PLANTED
from tests.fuzz.search import Finding, Report, scene, search


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code: 1 if there is a finding."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="how long")
    parser.add_argument("--seed", type=int, default=1, help="decides the requests")
    parser.add_argument("--start", type=int, default=0, help="number of the first request")
    parser.add_argument("--number", type=int, nargs="+", help="send these requests only")
    parser.add_argument("--findings", type=int, default=20, help="end after so many")
    parser.add_argument("--fault", choices=PLANTED, default="-", help="plant a fault in the daemon")
    asked = parser.parse_args(arguments)
    numbers = iter(asked.number) if asked.number else itertools.count(asked.start)
    with scene(asked.fault) as at:
        told = partial(_print, asked.seed)
        report = search(at, asked.seed, numbers, asked.minutes * 60, most=asked.findings, tell=_tell, found=told)
        code = at.stop()
        wrong = [] if code is None else at.faults()
    _tell(report)
    print()
    for answer, count in report.answers.most_common():
        print(f"{count:8d}  {answer}")
    if code != 0:
        print(f"the daemon ended with exit code {code} after SIGTERM")
    print("".join(f"the table: {fault}\n" for fault in wrong), end="")
    return 1 if report.findings or wrong or code != 0 else 0


def _tell(report: Report) -> None:
    print(f"\r{report.sent} requests, {len(report.findings)} findings ", end="", flush=True)


def _print(seed: int, finding: Finding) -> None:
    print(f"\n{finding}\n    python -m tests.fuzz --seed {seed} --number {finding.number}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
