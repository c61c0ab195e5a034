"""Commit a table by its policy and on demand, one commit at a time, with maintenance after each.

If several processes share the table, the owner of its first region leads: it commits for all, using the backlogs that
its peers report. The others publish their memtables in time, and detect what was committed. Correctness does not
require exactly one leader: the commits of two leaders meet on storage and wait for each other.

1. Check the regions' backlog in memory: no request while no row waits.
2. Decide (`upkeep.decide`) whether to commit and flush. Nothing is due while an operator has paused
   commits. If a load past the log asks for it, wait, but not indefinitely.
3. Commit. A region that cannot be flushed does not keep other regions' SSTs from the commit.
4. Run due maintenance; its failure fails no commit. Expired rows are deleted even if nothing is committed, because a
   table without new writes holds its rows longest.

Crash points: between any two steps. Every step depends only on the state of storage, so the next process that opens the
table continues.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from memwal.flush import CommitReport
from memwal.ingest.engine.region.state import Backlog
from memwal.ingest.engine.table.upkeep import Decision, TableUpkeep, decide, flush_due
from memwal.ingest.errors import classify
from memwal.ingest.lanes import SCHEDULER, Kind, Scheduler
from memwal.ingest.log_limit import LogLimit
from memwal.ingest.settings.sections import CommitSettings
from memwal.wal import Clock

_LOG = logging.getLogger("memwal.commit")
LOOK_EVERY, LOOKS = 1.0, 10
"""Maximum seconds between two checks, and minimum number of checks per interval."""
TURN_EVERY = 0.1
"""Seconds until a table that has no turn checks again."""
PAUSE_MAX = 5.0
"""Longest pause, in seconds, after a failure; the interval if that is shorter."""
GIVE_WAY_MAX = 300.0
"""Maximum seconds that commits by the policy wait for loads (`flush.commits.load_notes`); then one is made anyway."""
GIVE_WAY_LONGEST = 3600.0
"""Maximum of that wait for long loads: it doubles as long as a load asks for it."""


class CommitLoop:
    """A lane that commits by the policy, and a lock that makes commits of this process run one at a time.

    Thread safety. All methods from any thread, except `step`, which is the loop's. A failed step is logged and retried;
    `commit()` raises to its caller. Storage serializes the committers of different processes (`flush.commits.plan`);
    this lock only prevents conflicts between threads of one process, and between a commit and maintenance.
    """

    def __init__(
        self,
        steps: TableUpkeep,
        limits: CommitSettings,
        clock: Clock,
        paused: Callable[[], bool] = lambda: False,
        table: str = "",
        turn: threading.Semaphore | None = None,
        lanes: Scheduler = SCHEDULER,
        weight: float = 1.0,
    ) -> None:
        """Create a loop; with `limits.interval` 0 it commits on demand only.

        `paused`: returns whether the policy is suspended; called only when something is due, so an idle table makes no
        request for it. `table`: its address, for log lines. `turn`: limits how many tables of this process flush and
        commit at a time by the policy. A table that has waited for half of the interval commits without it, so that
        a table whose storage hangs does not block the others. `lanes`, `weight`: see `RegionContext`.
        """
        self._steps, self._limits, self._clock, self._paused = steps, limits, clock, paused
        self._look_every = min(LOOK_EVERY, limits.interval / LOOKS)
        self._table, self._turn = table, turn
        self._took, self._warnings = 0.0, LogLimit(clock.monotonic)
        self._waits_since: float | None = None
        self._gives_way_for = GIVE_WAY_MAX
        self.alone = threading.Lock()
        """Held during a commit of this process, and by a resize."""
        self._newest: tuple[float, CommitReport] | None = None
        """The start time of the newest successful commit, and its report."""
        self._turn_since: float | None = None
        self._lane = lanes.lane(Kind.COMMIT, table, self._run, weight=weight)
        self.grow: Callable[[], object] = lambda: None
        """Called after each check."""

    def start(self) -> None:
        """Begin to commit by the policy."""
        if self._limits.interval > 0:
            self._lane.after(self._look_every)

    def step(self) -> Decision:
        """Check, decide, then flush and commit as decided. Raises: flush and wal errors."""
        since, self._turn_since = self._turn_since, None
        waiting = self._steps.waiting()
        if not self._steps.leads():
            return self._follow(waiting)
        decision = decide([*waiting, *self._steps.others()], self._limits, self._took + self._look_every)
        if decision == "nothing":
            with self.alone:
                self._steps.expire(self._paused)
            return decision
        if self._paused() or self._gives_way():
            return "nothing"
        if (turn := self._take_turn(since)) is None:
            return "nothing"
        with turn:
            began = self._clock.monotonic()
            try:
                if decision == "flush":
                    self._steps.flush()
            finally:
                with self.alone:
                    self._commit(began)
        return decision

    def commit(self) -> CommitReport:
        """Commit all SSTs published by now. Raises: flush and wal errors.

        Callers that wait for a running commit share the next one. A client abandons a slow attempt and retries; without
        sharing it would wait behind each of its own attempts.
        """
        asked = self._clock.monotonic()
        with self.alone:
            if self._newest is not None and self._newest[0] > asked:
                return self._newest[1]
            return self._commit(asked)

    def look(self) -> None:
        """Make the loop check now."""
        if self._limits.interval > 0:
            self._lane.ready()

    def stop(self) -> None:
        """Return after the running commit, if any; no other begins by the policy."""
        self._lane.end()
        self._lane.wait()

    def _take_turn(self, since: float | None) -> ExitStack | None:
        """Return the context of this table's turn; None if it has none, and has not waited for half of the interval.

        `since`: monotonic time (s) at which it began to wait for its turn; None if it did not.
        """
        turn, held, now = self._turn, ExitStack(), self._clock.monotonic()
        since = now if since is None else since
        if turn is not None and turn.acquire(blocking=False):
            held.callback(turn.release)
        elif turn is not None and now - since < self._limits.interval / 2:
            self._turn_since = since
            return None
        return held

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
        # Without the doubling, a longer load would meet a commit at the same point each time.
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
        """Commit and maintain. `due`: when the commit was requested. Requires: the lock."""
        began = self._clock.monotonic()
        report = self._steps.commit()
        self._newest = began, report
        self._waits_since = None
        self._took = self._clock.monotonic() - due
        self._steps.maintain()
        return report

    def _run(self) -> None:
        pause = self._look_every
        for what, call in (("commit", self.step), ("change of the number of regions", self.grow)):
            try:
                call()
            except BaseException as error:  # noqa: BLE001 - an error here would silently end all commits
                # Not Exception: a panic of pylance's Rust code is only a BaseException.
                pause = min(self._limits.interval, PAUSE_MAX)
                text = f"{self._table}: {what} failed, retrying in {pause:g} s: {classify(error)}"
                if (told := self._warnings.text(what, text)) is not None:
                    _LOG.warning("%s", told)
        self._lane.after(pause if self._turn_since is None else TURN_EVERY)
