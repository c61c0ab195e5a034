"""Commit a table by its policy and on demand, one commit at a time, and do maintenance after each.

If several processes share the table one of them leads, the owner of its first region: it commits for all, by what its
peers say that they hold. The others publish their memtables in time for that, and learn what was committed. Correctness
does not need exactly one leader: with two, commits meet on storage and wait for each other.

1. Look at what the regions hold, in memory: no request while no row waits.
2. Decide (`ingest.table.commit_policy`), and flush or not; nothing is due while an operator has paused commits. If a
   load past the log asks for it, wait, but not for ever.
3. Commit. A region that cannot be flushed does not keep other regions' SSTs from the commit.
4. Maintenance, if something is due; it fails no commit. Expired rows are deleted also where nothing is committed: a
   table to which nobody writes any more has its rows for the longest.

Crash points: between any two steps. Every step is decided from what is on storage, so the process that opens the table
next goes on.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from memwal.flush import CommitReport
from memwal.ingest.errors import classify
from memwal.ingest.log_limit import LogLimit
from memwal.ingest.region.backlog import Backlog
from memwal.ingest.table.commit_policy import CommitLimits, Decision, decide, flush_due
from memwal.ingest.threads import Worker
from memwal.wal import Clock

_LOG = logging.getLogger("memwal.commit")
LOOK_EVERY, LOOKS = 1.0, 10
"""Most seconds between two looks, and least looks per interval."""
PAUSE_MAX = 5.0
"""Longest pause, in seconds, after a failure; the interval if that is shorter."""
GIVE_WAY_MAX = 300.0
"""Seconds for which commits by the policy wait for loads (`flush.commits.load_notes`) before one is made anyway."""
GIVE_WAY_LONGEST = 3600.0
"""The same for loads that take long: the wait doubles as long as one asks."""


class CommitSteps(Protocol):
    """The steps that the loop takes; see `ingest.table.upkeep`."""

    others: Callable[[], Sequence[Backlog]]

    def leads(self) -> bool:
        """Return whether this process commits for all."""
        ...

    def waiting(self) -> Sequence[Backlog]:
        """Return what the regions of this process hold."""
        ...

    def flush(self) -> None:
        """Publish the memtables of these regions."""
        ...

    def commit(self) -> CommitReport:
        """Commit all published SSTs."""
        ...

    def catch_up(self) -> None:
        """Learn what another process has committed."""
        ...

    def asked_to_wait(self) -> bool:
        """Return whether a load asks that no commit is made now."""
        ...

    def expire(self, paused: Callable[[], bool]) -> object:
        """Delete expired rows of the base table if that is due, unless commits are `paused`. Raises: as `paused`."""
        ...

    def maintain(self) -> object:
        """Do the maintenance that is due."""
        ...


class CommitLoop:
    """A thread that commits by the policy, and a lock that makes commits of this process run one at a time.

    Thread safety. All methods from any thread, except `step`, which is the loop's. A step that fails is logged and
    tried again; `commit()` raises to its caller. Committers of other processes are kept apart on storage
    (`flush.commits.plan`); this lock only saves the threads of one process from getting in each other's way, and a
    commit from meeting maintenance.
    """

    def __init__(
        self,
        steps: CommitSteps,
        limits: CommitLimits,
        clock: Clock,
        paused: Callable[[], bool] = lambda: False,
        table: str = "",
    ) -> None:
        """With `limits.interval` 0 it commits on demand only. `paused`: returns whether the policy is suspended; asked
        when something is due, so an idle table makes no request for it. `table`: its address, for log lines.
        """
        self._steps, self._limits, self._clock, self._paused = steps, limits, clock, paused
        self._look_every = min(LOOK_EVERY, limits.interval / LOOKS)
        self._table = table
        self._took, self._warnings = 0.0, LogLimit(clock.monotonic)
        self._waits_since: float | None = None
        self._gives_way_for = GIVE_WAY_MAX
        self._one_at_a_time = threading.Lock()
        self._newest: tuple[float, CommitReport] | None = None
        """When the newest commit that succeeded began, and its report."""
        self._stopped, self._wake = threading.Event(), threading.Event()
        self._worker: Worker | None = None

    def start(self) -> None:
        """Begin to commit by the policy."""
        if self._limits.interval > 0:
            self._worker = Worker("commit", self._run)

    def step(self) -> Decision:
        """Look, decide, and flush and commit as decided. Raises: flush and wal errors."""
        waiting = self._steps.waiting()
        if not self._steps.leads():
            return self._follow(waiting)
        decision = decide([*waiting, *self._steps.others()], self._limits, self._took + self._look_every)
        if decision == "nothing":
            with self._one_at_a_time:
                self._steps.expire(self._paused)
            return decision
        if self._paused() or self._gives_way():
            return "nothing"
        began = self._clock.monotonic()
        try:
            if decision == "flush":
                self._steps.flush()
        finally:
            with self._one_at_a_time:
                self._commit(began)
        return decision

    def commit(self) -> CommitReport:
        """Commit all SSTs published by now. Raises: flush and wal errors.

        Callers who wait for a commit under way share the next one: a client abandons an attempt that takes long and
        asks again, and would else wait behind each of its own attempts.
        """
        asked = self._clock.monotonic()
        with self._one_at_a_time:
            if self._newest is not None and self._newest[0] > asked:
                return self._newest[1]
            return self._commit(asked)

    def look(self) -> None:
        """Make the loop look now."""
        self._wake.set()

    def stop(self) -> None:
        """End the thread; a commit under way is finished first."""
        self._stopped.set()
        self._wake.set()
        if self._worker is not None:
            self._worker.wait()

    def _gives_way(self) -> bool:
        """Return whether to wait for a load."""
        now = self._clock.monotonic()
        if not self._steps.asked_to_wait():
            self._waits_since, self._gives_way_for = None, GIVE_WAY_MAX
            return False
        if self._waits_since is None:
            self._waits_since = now
            _LOG.info("a load asks commits to wait, for at most %g s", self._gives_way_for)
        if now - self._waits_since < self._gives_way_for:
            return True
        # A load that takes longer would meet a commit at the same place each time.
        self._gives_way_for = min(2 * self._gives_way_for, GIVE_WAY_LONGEST)
        return False

    def _follow(self, waiting: Sequence[Backlog]) -> Decision:
        """Take the step of a process that does not lead."""
        due = flush_due(waiting, self._limits) and not self._paused()
        if due:
            self._steps.flush()
        self._steps.catch_up()
        return "flush" if due else "nothing"

    def _commit(self, due: float) -> CommitReport:
        """Commit and maintain. `due`: when it was asked for. Requires: the lock."""
        began = self._clock.monotonic()
        report = self._steps.commit()
        self._newest = began, report
        self._waits_since = None
        self._took = self._clock.monotonic() - due
        self._steps.maintain()
        return report

    def _run(self) -> None:
        pause = self._look_every
        while True:
            self._wake.wait(pause)
            self._wake.clear()
            if self._stopped.is_set():
                return
            pause = self._look_every
            try:
                self.step()
            except BaseException as error:  # noqa: BLE001 - an error here would silently end all commits
                # BaseException: a panic of pylance's Rust code is no Exception.
                pause = min(self._limits.interval, PAUSE_MAX)
                text = f"{self._table}: commit failed, retrying in {pause:g} s: {classify(error)}"
                if (told := self._warnings.text("commit", text)) is not None:
                    _LOG.warning("%s", told)
