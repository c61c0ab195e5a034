"""Run the work of all regions of a process on a bounded number of threads.

A lane is one kind of work of one region, such as serving its writes. A thread runs a lane's task when the lane is
ready, or when its timer has run out. Storage calls block threads, so each kind of work has a maximum of threads, and so
does each table within a kind: a table whose storage hangs leaves threads to the others.

1. Below the maxima, a thread runs a lane as soon as it is ready.
2. Otherwise the lane waits. A thread that has ended a task takes the most urgent kind that waits, and within it the
   table that has used the least seconds per weight (start-time fair queueing: a run counts from its beginning, with the
   seconds of the lane's last run; a table that was idle counts from the table that began to run last).
3. At the maximum of all kinds together, a kind without a thread still gets one, before the others, because kinds wait
   for each other: a durable put waits for an append of lingering rows.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from operator import attrgetter
from weakref import WeakValueDictionary

from sortedcontainers import SortedKeyList

from memwal.ingest.threads import CallThreads
from memwal.wal import Clock, SystemClock

_LOG = logging.getLogger("memwal.lanes")
_NEVER = float("inf")


class Kind(IntEnum):
    """The kinds of work, the most urgent first. `LOG`: storage calls that puts and reads may wait for."""

    SERVE = 0
    LOG = 1
    PUBLISH = 2
    INDEX = 3
    COMMIT = 4


CAPS: Mapping[Kind, int] = dict(zip(Kind, (128, 64, 16, os.cpu_count() or 1, 16), strict=True))
MOST = 160
"""The maximum number of threads of each kind, and of all kinds."""


@dataclass(slots=True)
class _Pool:
    """The threads of one kind. `time`: seconds per weight of the table that began to run last. `waiting`: the tables
    with lanes that wait, without those at their maximum."""

    cap: int
    running: int = 0
    time: float = 0.0
    waiting: SortedKeyList = field(default_factory=lambda: SortedKeyList(key=attrgetter("used")))


@dataclass(eq=False)
class _Share:
    """The part of one table in a pool. `used`: seconds per weight, not changed while the table `waits` in the pool."""

    pool: _Pool
    most: int
    weight: float
    used: float = 0.0
    running: int = 0
    waits: bool = False
    lanes: deque[Lane] = field(default_factory=deque)


class Lane:
    """A task that runs again each time the lane is made ready.

    Thread safety. Any thread; the task itself must not call `wait`.
    Invariants. (1) The task never runs in two threads at once. (2) After `ready` returns, the task begins at least once
    more, unless the lane has ended. (3) After `wait` returns, the task does not run any more.
    """

    def __init__(self, scheduler: Scheduler, share: _Share, task: Callable[[], object]) -> None:
        """See `Scheduler.lane`; the attributes are the scheduler's."""
        self.scheduler, self.share, self.task = scheduler, share, task
        self.wanted = self.running = self.ended = False
        self.due, self.cost = _NEVER, 0.001
        self.over = threading.Event()

    def ready(self) -> None:
        """Let the task run as soon as possible; if it runs now, once more."""
        if not self.wanted:  # reset before the task begins, which then sees what the caller did before this call
            with self.scheduler.lock:
                self.scheduler.admit(self)

    def seen(self) -> None:
        """Withdraw the calls of `ready` so far: the task, which calls this, has seen what came before them."""
        self.wanted = False

    def after(self, seconds: float) -> None:
        """Let the task run within `seconds` (plus 1 ms), or earlier if an earlier call asked for it."""
        due = self.scheduler.clock.monotonic() + seconds
        if due < self.due - 0.001:  # a timer for the same moment is computed again and again, with other roundings
            with self.scheduler.lock:
                if not self.ended:
                    self.scheduler.set_timer(self, min(due, self.due))

    def end(self) -> None:
        """Begin the task no more; does not wait for a running one."""
        with self.scheduler.lock:
            self.ended = True
            self.scheduler.set_timer(self, _NEVER)
            if not self.running:
                self.over.set()

    def wait(self) -> None:
        """Return when the lane has ended and the task does not run. The wait may be interrupted and repeated."""
        self.over.wait()


class Scheduler:
    """The threads of a process that run lanes. Thread safety. `lane` from any thread; the rest belongs to lanes."""

    def __init__(self, clock: Clock | None = None, caps: Mapping[Kind, int] = CAPS, most: int = MOST) -> None:
        self.clock, self.lock = clock or SystemClock(), threading.Lock()
        self.calls = CallThreads("lane", most + len(Kind), keep=1)  # a later one may not be startable
        self._pools = [_Pool(caps[kind]) for kind in Kind]
        self._shares: WeakValueDictionary[tuple[Kind, str], _Share] = WeakValueDictionary()
        self._most, self._running, self._waiting = most, 0, 0
        self._timers: SortedKeyList = SortedKeyList(key=attrgetter("due"))
        self._timers_changed = threading.Condition(self.lock)

    def lane(
        self, kind: Kind, table: str, task: Callable[[], object], *, most: int | None = None, weight: float = 1.0
    ) -> Lane:
        """Return a lane of `table`, which runs nothing before it is made ready.

        `most`: the maximum number of threads of this table and kind. Raises: RuntimeError if no thread can be started.
        """
        with self.lock:
            if not self.calls.threads:
                threading.Thread(target=self._watch, name="lane-timers", daemon=True).start()
                self.calls.run(lambda: None)
            pool = self._pools[kind]
            share = self._shares.setdefault((kind, table), _Share(pool, most or pool.cap, weight))
            return Lane(self, share, task)

    # ---- for lanes; the lock is held -----------------------------------------------------------------------------

    def admit(self, lane: Lane) -> None:
        """Run a lane now, after its present run, or when it has waited for a thread."""
        share, free = lane.share, not (lane.running or lane.wanted or lane.ended)
        lane.wanted = True
        if free and share.running < share.most and self._has_room(share.pool):
            self._begin(lane, alone=True)
            self.calls.run(partial(self._run, lane))
        elif free:
            share.lanes.append(lane)
            self._wait(share)

    def set_timer(self, lane: Lane, due: float) -> None:
        """Replace the timer of a lane."""
        self._timers.discard(lane)
        lane.due = due
        if due != _NEVER:
            self._timers.add(lane)
            if self._timers[0] is lane:
                self._timers_changed.notify()

    # ---- inside --------------------------------------------------------------------------------------------------

    def _has_room(self, pool: _Pool) -> bool:
        return pool.running < pool.cap and (self._running < self._most or not pool.running)

    def _wait(self, share: _Share) -> None:
        """Let a table wait for a thread, if it has a lane that waits and is below its maximum."""
        if share.lanes and not share.waits and share.running < share.most:
            share.waits, self._waiting = True, self._waiting + 1
            share.pool.waiting.add(share)

    def _begin(self, lane: Lane, *, alone: bool = False) -> None:
        """Count a run. `alone`: no table waits, so none has a claim to the time of this run."""
        share, pool = lane.share, lane.share.pool
        began = max(share.used, pool.time)
        share.used = began + lane.cost / share.weight
        pool.time = share.used if alone else began
        lane.running = True
        self._running, pool.running, share.running = self._running + 1, pool.running + 1, share.running + 1

    def _run(self, begun: Lane) -> None:
        """Run a lane, and then those that wait."""
        lane: Lane | None = begun
        while lane is not None:
            began = self.clock.monotonic()
            lane.wanted = False
            if not lane.ended:
                try:
                    lane.task()
                except BaseException:  # noqa: BLE001 - the thread runs other lanes
                    lane.end()
                    _LOG.exception("a lane has ended")
            with self.lock:
                lane.cost = self.clock.monotonic() - began
                lane = self._next(lane)

    def _next(self, ended: Lane) -> Lane | None:
        """Record the end of a run; return the lane to run next."""
        share, pool = ended.share, ended.share.pool
        ended.running = False
        self._running, pool.running, share.running = self._running - 1, pool.running - 1, share.running - 1
        if ended.ended:
            ended.over.set()
        elif ended.wanted and not (self._waiting or share.lanes):
            self._begin(ended, alone=True)
            return ended
        elif ended.wanted:
            share.lanes.append(ended)
        if not pool.running and not pool.waiting:
            pool.time = max(pool.time, share.used)
        self._wait(share)
        waiting = self._waiting and [each for each in self._pools if each.waiting and self._has_room(each)]
        if not waiting:
            return None
        share = min(waiting, key=lambda each: each.running > 0).waiting.pop(0)
        share.waits, self._waiting = False, self._waiting - 1
        lane: Lane = share.lanes.popleft()
        self._begin(lane)
        self._wait(share)
        return lane

    def _watch(self) -> None:
        """Make lanes ready when their timers run out."""
        with self.lock:
            while True:
                now = self.clock.monotonic()
                while self._timers and self._timers[0].due <= now:
                    lane = self._timers[0]
                    self.set_timer(lane, _NEVER)
                    self.admit(lane)
                self._timers_changed.wait(self._timers[0].due - now if self._timers else None)


SCHEDULER = Scheduler()
"""The scheduler of this process."""
os.register_at_fork(after_in_child=partial(Scheduler.__init__, SCHEDULER))  # none of the parent's threads are here
