"""Commits a table by its policy and on demand, one commit at a time, and keeps the base table in shape after each.

1. Look at what the regions hold, in memory: no request while nothing waits.
2. Decide (`ingest.commit_policy`), and flush or not.
3. Commit. A region that cannot be flushed keeps nobody's SSTs from it.
4. Maintenance, where something is due; it fails no commit.

Crash points: between any two steps. Every step is decided from what is there, so whoever opens the table next goes on.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flush import CommitReport
from ingest.commit_policy import CommitLimits, Decision, Waiting, decide
from ingest.errors import classify
from ingest.worker import Worker
from wal import Clock

_LOG = logging.getLogger("memwal.commit")
LOOK_EVERY, LOOKS = 1.0, 10
"""Seconds between two looks at most, and looks per interval at least."""
PAUSE_MAX = 5.0
"""Longest pause, in seconds, after a failure; the interval where that is shorter."""


@dataclass(frozen=True, slots=True)
class CommitSteps:
    """What the loop does to its table."""

    waiting: Callable[[], Sequence[Waiting]]
    flush: Callable[[], None]
    commit: Callable[[], CommitReport]
    maintain: Callable[[], object]


class CommitLoop:
    """Commits by the policy, and a lock that makes every commit of this process wait its turn.

    Thread safety. All methods from any thread, but `step`, which is the loop's. A step that fails is logged and tried
    again; `commit()` raises to its caller. Committers of other processes are kept apart on storage
    (`flush.commit_plan`); this lock only saves the threads of one process from getting in each other's way, and a
    commit from meeting maintenance.
    """

    def __init__(self, steps: CommitSteps, limits: CommitLimits, clock: Clock) -> None:
        """With `limits.interval` 0 it commits on demand only."""
        self._steps, self._limits, self._clock = steps, limits, clock
        self._look_every = min(LOOK_EVERY, limits.interval / LOOKS)
        self._took = 0.0
        self._one_at_a_time = threading.Lock()
        self._stopped = threading.Event()
        self._worker: Worker | None = None

    def start(self) -> None:
        """Begin to commit by the policy."""
        if self._limits.interval > 0:
            self._worker = Worker("commit", self._run)

    def step(self) -> Decision:
        """Look, and do what is decided. Raises: flush and wal errors."""
        decision = decide(self._steps.waiting(), self._limits, self._took + self._look_every)
        if decision == "nothing":
            return decision
        began = self._clock.monotonic()
        try:
            if decision == "flush":
                self._steps.flush()
        finally:
            self._commit(began)
        return decision

    def commit(self) -> CommitReport:
        """Commit what is published now. Raises: flush and wal errors."""
        return self._commit(self._clock.monotonic())

    def stop(self) -> None:
        """End the thread; a commit under way is finished first."""
        self._stopped.set()
        if self._worker is not None:
            self._worker.wait()

    def _commit(self, began: float) -> CommitReport:
        with self._one_at_a_time:
            report = self._steps.commit()
            self._took = self._clock.monotonic() - began
            self._steps.maintain()
            return report

    def _run(self) -> None:
        pause = self._look_every
        while not self._stopped.wait(pause):
            pause = self._look_every
            try:
                self.step()
            except BaseException as error:  # noqa: BLE001 - ending here would end all commits in silence
                # A panic of pylance's Rust code is no Exception; nothing else that is none comes to this thread.
                pause = min(self._limits.interval, PAUSE_MAX)
                _LOG.warning("commit failed, will try again in %g s: %s", pause, classify(error))
