"""Many power cuts in several processes: recordings, shares, and what was found."""

from __future__ import annotations

import logging
import os
import pickle
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from multiprocessing import get_context
from pathlib import Path

from tests.power_cuts.check import Lost, check
from tests.power_cuts.cuts import Cut, sample, state_of
from tests.power_cuts.model import Recording
from tests.power_cuts.record import python, record

_AT_ONCE = 20
"""Cuts that a worker takes at a time."""
LIMIT = "LIMIT, posix only: a file of the base that was not synced has blocks of zeros, and fails"
"""What `flush.base.torn` does not find. Not counted as a failure."""
MEMORY = Path("/dev/shm")


@dataclass
class Outcome:
    """What the cuts of one workload found."""

    operations: int
    prefixes: int
    cuts: int = 0
    lines: set[int] = field(default_factory=set)
    """The prefixes that were cut."""
    losses: Counter[str] = field(default_factory=Counter)
    remarks: Counter[str] = field(default_factory=Counter)
    failures: dict[str, tuple[str, tuple[str, ...]]] = field(default_factory=dict)
    """Cut -> what was lost of the table, and which operations the cut had lost."""


@contextmanager
def scratch() -> Iterator[Path]:
    """Hand out a directory, in memory where the system has a file system there: it takes no wear and no fsync."""
    with tempfile.TemporaryDirectory(prefix="memwal-cuts-", dir=MEMORY if MEMORY.is_dir() else None) as place:
        yield Path(place)


def recorded(workload: str, fault: str = "") -> Recording:
    """Record a workload, with one of the planted faults. Raises NotRecorded."""
    with scratch() as place:
        return record(python("tests.power_cuts.workloads", workload, str(place), *filter(None, [fault])), place)


def shares(recordings: Mapping[str, Recording], cuts: int) -> dict[str, int]:
    """Return the number of cuts for each recording, by its number of prefixes."""
    total = sum(len(recording.cuts) for recording in recordings.values())
    return {name: max(1, cuts * len(recording.cuts) // total) for name, recording in recordings.items()}


def checked(recording: Recording, cuts: Sequence[Cut]) -> list[tuple[Cut, list[str], str, tuple[str, ...]]]:
    """Return for each cut: the remarks, the failure or "", and the operations that were lost where it failed."""
    found = []
    with scratch() as place:
        for cut in cuts:
            state = state_of(recording, cut)
            try:
                found.append((cut, check(state, place / "disk"), "", ()))
            except Lost as error:
                if state.zeroed:
                    found.append((cut, [LIMIT], "", ()))
                else:
                    found.append((cut, [], str(error).replace(str(place), ""), state.lost))
    return found


def cut_many(recordings: Mapping[str, Path], seed: int, cuts: int, workers: int) -> Iterator[tuple[str, Outcome]]:
    """Yield the outcome so far of a workload whenever some of its cuts are checked.

    `recordings`: workload -> file of its recording (`keep`).
    """
    opened = {name: load(path) for name, path in recordings.items()}
    outcomes = {name: Outcome(len(each.operations), len(each.cuts)) for name, each in opened.items()}
    # Spawned: a process that has used Lance's threads must not fork.
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        running = {}
        for name, share in shares(opened, cuts).items():
            chosen = [state.cut for state in sample(opened[name], seed, share)]
            for first in range(0, len(chosen), _AT_ONCE):
                some = chosen[first : first + _AT_ONCE]
                running[pool.submit(_checked_in_worker, str(recordings[name]), some)] = name
        for done in as_completed(running):
            outcome = outcomes[running[done]]
            for cut, remarks, failure, lost in done.result():
                outcome.cuts += 1
                outcome.lines.add(cut.line)
                outcome.losses[f"{cut.profile}, {cut.loss}"] += 1
                outcome.remarks.update(remarks)
                if failure:
                    outcome.failures[str(cut)] = failure, lost
            yield running[done], outcome


def _checked_in_worker(path: str, cuts: Sequence[Cut]) -> list[tuple[Cut, list[str], str, tuple[str, ...]]]:
    os.environ["LANCE_LOG"] = "critical"
    logging.getLogger("memwal").setLevel(logging.ERROR)  # a version that is set aside is counted, see check
    return checked(load(Path(path)), cuts)


@cache
def load(path: Path) -> Recording:
    """Return a recording that was kept."""
    found = pickle.loads(path.read_bytes())
    assert isinstance(found, Recording)
    return found


def keep(recording: Recording, path: Path) -> None:
    """Keep a recording: another one of the same workload has other names and another order of threads."""
    path.write_bytes(pickle.dumps(recording))
