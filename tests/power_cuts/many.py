"""Run many power cuts in several processes: recordings, shares, and results."""

from __future__ import annotations

import logging
import os
import pickle
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from tests.power_cuts.check import Lost, check
from tests.power_cuts.cuts import Cut, State, gone_back, sample, state_of
from tests.power_cuts.model import Recording
from tests.power_cuts.record import python, record

_AT_ONCE = 20
"""Cuts that a worker takes at once."""
LIMIT = "known limit, posix only: zeros in a data or index file that was not synced; set aside, all holds"
"""Not counted as a failure: `flush.base.torn` cannot detect it, and nothing depends on that version."""
MEMORY = Path("/dev/shm")


class Checked(NamedTuple):
    """The result of checking one cut."""

    cut: Cut
    remarks: list[str]
    failure: str
    """What the table has lost; "" for nothing."""
    lost: tuple[str, ...]
    """The operations that the cut lost, if the check failed."""


@dataclass
class Outcome:
    """The results of the cuts of one workload."""

    operations: int
    prefixes: int
    cuts: int = 0
    lines: set[int] = field(default_factory=set)
    """The prefixes that were cut."""
    losses: Counter[str] = field(default_factory=Counter)
    remarks: Counter[str] = field(default_factory=Counter)
    failures: dict[str, Checked] = field(default_factory=dict)

    def add(self, found: Checked) -> None:
        """Add the result of one cut."""
        self.cuts += 1
        self.lines.add(found.cut.line)
        self.losses[f"{found.cut.profile}, {found.cut.loss}"] += 1
        self.remarks.update(found.remarks)
        if found.failure:
            self.failures[str(found.cut)] = found


@contextmanager
def scratch() -> Iterator[Path]:
    """Yield a temporary directory, in memory if the system has a RAM disk, where an fsync costs nothing."""
    with tempfile.TemporaryDirectory(prefix="memwal-cuts-", dir=MEMORY if MEMORY.is_dir() else None) as place:
        yield Path(place)


def recorded(workload: str, fault: str = "") -> Recording:
    """Record a workload, optionally with one of the planted faults. Raises: NotRecorded."""
    with scratch() as place:
        return record(python("tests.power_cuts.workloads", workload, str(place), *filter(None, [fault])), place)


def shares(recordings: Mapping[str, Recording], cuts: int) -> dict[str, int]:
    """Divide `cuts` among the recordings, in proportion to their prefixes."""
    total = sum(len(recording.cuts) for recording in recordings.values())
    return {name: max(1, cuts * len(recording.cuts) // total) for name, recording in recordings.items()}


def checked(recording: Recording, cuts: Sequence[Cut], *, ended: bool = False) -> list[Checked]:
    """Check the state after each cut. `ended`: an earlier check of these cuts ended its process."""
    with scratch() as place:
        return [_checked(state_of(recording, cut), place, ended=ended) for cut in cuts]


def _checked(state: State, place: Path, *, ended: bool) -> Checked:
    try:
        if ended:
            raise Lost("the process that checked it was ended, by a signal or by itself")
        return Checked(state.cut, check(state, place / "disk"), "", ())
    except Lost as error:
        if state.zeroed:
            with suppress(Lost):
                return Checked(state.cut, [*check(gone_back(state), place / "disk"), LIMIT], "", ())
        return Checked(state.cut, [], str(error).replace(str(place), ""), state.lost)


class _Worker:
    """A process that checks cuts. It is replaced if a check ends it, as a panic in Lance's threads does."""

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        # Spawned, since a process that has used Lance's threads must not fork.
        self._process = ProcessPoolExecutor(1, mp_context=get_context("spawn"))

    def checked(self, path: Path, cuts: Sequence[Cut], *, ended: bool = False) -> list[Checked]:
        try:
            return self._process.submit(_checked_in_worker, path, cuts, ended=ended).result()
        except BrokenProcessPool:
            self._start()
        if len(cuts) > 1:
            return [found for cut in cuts for found in self.checked(path, [cut])]
        if ended:
            return [Checked(cuts[0], [], "the process that checked it was ended, twice", ())]
        return self.checked(path, cuts, ended=True)

    def close(self) -> None:
        self._process.shutdown()


def cut_many(recordings: Mapping[str, Path], seed: int, cuts: int, workers: int) -> Iterator[tuple[str, Outcome]]:
    """Yield the outcome so far of a workload whenever some of its cuts are checked.

    `recordings`: the file of each workload's recording (`keep`).
    """
    opened = {name: load(path) for name, path in recordings.items()}
    outcomes = {name: Outcome(len(each.operations), len(each.cuts)) for name, each in opened.items()}
    idle: SimpleQueue[_Worker] = SimpleQueue()

    def check_some(path: Path, some: Sequence[Cut]) -> list[Checked]:
        worker = idle.get()
        try:
            return worker.checked(path, some)
        finally:
            idle.put(worker)

    with ExitStack() as stack, ThreadPoolExecutor(workers) as threads:
        for _ in range(workers):
            idle.put(worker := _Worker())
            stack.callback(worker.close)
        running = {}
        for name, share in shares(opened, cuts).items():
            chosen = [state.cut for state in sample(opened[name], seed, share)]
            for first in range(0, len(chosen), _AT_ONCE):
                running[threads.submit(check_some, recordings[name], chosen[first : first + _AT_ONCE])] = name
        for done in as_completed(running):
            for found in done.result():
                outcomes[running[done]].add(found)
            yield running[done], outcomes[running[done]]


def _checked_in_worker(path: Path, cuts: Sequence[Cut], *, ended: bool) -> list[Checked]:
    os.environ["LANCE_LOG"] = "critical"
    logging.getLogger("memwal").setLevel(logging.ERROR)  # a version that is set aside is counted, see check
    return checked(load(path), cuts, ended=ended)


@cache
def load(path: Path) -> Recording:
    """Load a recording from a file."""
    found = pickle.loads(path.read_bytes())
    assert isinstance(found, Recording)
    return found


def keep(recording: Recording, path: Path) -> None:
    """Save a recording: another recording of the same workload has other names and another order of threads."""
    path.write_bytes(pickle.dumps(recording))
