"""Record the workloads, cut the power many times, and check what is left: `python -m tests.power_cuts`.

A failed cut is printed with the command that repeats it. The command needs the recording, which is kept.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.power_cuts.again import first_cuts, recorded_again
from tests.power_cuts.cuts import Cut, state_of, volatile_for_ever
from tests.power_cuts.many import Outcome, checked, cut_many, keep, load, recorded, scratch
from tests.power_cuts.model import Recording
from tests.power_cuts.planted import PLANTED
from tests.power_cuts.record import NotRecorded
from tests.power_cuts.workloads import WORKLOADS

os.environ["LANCE_LOG"] = "critical"
_SHOWN = 5
_AT_ONCE = 3
"""Processes for each processor: a check mostly waits, for threads to end and for retries."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code: 1 if a table broke a promise."""
    parser = argparse.ArgumentParser(prog="python -m tests.power_cuts", description=__doc__)
    parser.add_argument("--cuts", type=int, default=1000, help="how many, over all workloads")
    parser.add_argument("--seed", type=int, default=1, help="decides which cuts of the recordings are made")
    parser.add_argument("--workers", type=int, default=_AT_ONCE * (os.cpu_count() or 1), help="processes")
    parser.add_argument("--workload", choices=WORKLOADS, nargs="+", default=list(WORKLOADS), help="which to record")
    parser.add_argument("--again", type=int, default=2, help="cuts of each recording whose recovery is cut, too")
    parser.add_argument("--times", type=int, default=2, help="how often the power fails, at most")
    parser.add_argument("--fault", choices=PLANTED, default="", help="plant a fault in the code that is recorded")
    parser.add_argument("--recordings", type=Path, help="directory of kept recordings, to cut those again")
    parser.add_argument("--cut", help="check this one cut of --recordings: WORKLOAD:LINE:PROFILE:LOSS:SEED")
    asked = parser.parse_args(arguments)
    if asked.cut is not None:
        return _one(asked.recordings, asked.cut)
    began = time.monotonic()
    place, broken = asked.recordings, list[str]()
    if place is None:
        place, broken = _record(asked)
    files = {path.stem: path for path in sorted(place.glob("*.recording")) if path.name.split(".")[0] in asked.workload}
    outcomes: dict[str, Outcome] = {}
    for name, outcome in cut_many(files, asked.seed, asked.cuts, asked.workers):
        outcomes[name] = outcome
        done, failed = (sum(counts) for counts in zip(*map(_counts, outcomes.values()), strict=True))
        print(f"\r{done} of {asked.cuts} cuts, {failed} failed, {done / (time.monotonic() - began):.1f}/s ", end="")
    print()
    _report(outcomes, place, time.monotonic() - began)
    print("".join(f"\nfailed: {each}\n" for each in broken), end="")
    return 1 if broken or any(outcome.failures for outcome in outcomes.values()) else 0


def _record(asked: argparse.Namespace) -> tuple[Path, list[str]]:
    """Record the workloads; return the directory of the recordings, and the recoveries that ended with an error."""
    place, broken = Path(tempfile.mkdtemp(prefix="memwal-recordings-")), list[str]()
    for name in asked.workload:
        recording = recorded(name, asked.fault)
        _keep(recording, place, name)
        if not asked.fault:
            broken += _record_again(recording, place, name, asked, 2)
    return place, broken


def _record_again(recording: Recording, place: Path, name: str, asked: argparse.Namespace, times: int) -> list[str]:
    """Record the recoveries after `times` power cuts; return the recoveries that ended with an error."""
    broken = list[str]()
    for number, first in enumerate(first_cuts(recording, asked.seed, asked.again) if times <= asked.times else (), 1):
        of = f"after {first.cut} of {name}"
        with scratch() as disk:
            try:
                recovery = recorded_again(first, disk)
            except NotRecorded as error:
                broken.append(f"recovery {of}: {error}")
                continue
        _keep(recovery, place, again := f"{name}.again{number}", of)
        broken += _record_again(recovery, place, again, asked, times + 1)
    return broken


def _keep(recording: Recording, place: Path, name: str, of: str = "") -> None:
    keep(recording, place / f"{name}.recording")
    print(f"recorded {name} {of}: {len(recording.operations)} operations, {len(recording.cuts)} prefixes", flush=True)


def _counts(outcome: Outcome) -> tuple[int, int]:
    return outcome.cuts, len(outcome.failures)


def _report(outcomes: Mapping[str, Outcome], place: Path, seconds: float) -> None:
    print(f"{'workload':16} {'operations':>10} {'prefixes':>8} {'cut':>6} {'states':>6} {'failed':>6}")
    for name, outcome in outcomes.items():
        numbers = outcome.operations, outcome.prefixes, len(outcome.lines), outcome.cuts, len(outcome.failures)
        print(f"{name:16} {numbers[0]:10} {numbers[1]:8} {numbers[2]:6} {numbers[3]:6} {numbers[4]:6}")
    losses = sum((outcome.losses for outcome in outcomes.values()), Counter[str]())
    print("states by profile and loss:", ", ".join(f"{what}: {count}" for what, count in sorted(losses.items())))
    for remark, count in sum((outcome.remarks for outcome in outcomes.values()), Counter[str]()).most_common():
        print(f"{count} times: {remark}")
    for name, outcome in outcomes.items():
        for cut, found in list(outcome.failures.items())[:_SHOWN]:
            print(f"\nfailed: {name}, {found.failure}")
            print("".join(f"    {each}\n" for each in found.lost[-_SHOWN:]), end="")
            print(f"    again: python -m tests.power_cuts --recordings {place} --cut {name}:{cut}")
    print(f"{sum(outcome.cuts for outcome in outcomes.values())} cuts in {seconds:.0f} s")


def _one(recordings: Path, asked: str) -> int:
    name, _, rest = asked.partition(":")
    recording, cut = load(recordings / f"{name}.recording"), Cut.parse(rest)
    state = state_of(recording, cut)
    print(*state.lost, sep="\n")
    print(*state.marks[-_SHOWN:], sep="\n")
    print("never synced:", *volatile_for_ever(recording, cut.profile), sep="\n  ")
    (found,) = checked(recording, [cut])
    print(found.failure or "holds", *found.remarks, sep="\n")
    return 1 if found.failure else 0


if __name__ == "__main__":
    sys.exit(main())
