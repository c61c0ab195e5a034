"""Actors that take turns in one thread, and their simulated time.

An actor is a greenlet. Wherever real code would wait, for storage or for a clock, it calls `Scheduler.pause`. The
scheduler then continues one of the actors whose time has come, chosen by the seed. If no actor is ready, time jumps.

A process is a set of actors that die together. A dead process executes nothing: `Killed` is raised where its actors
wait, and at every later call that could still affect the world while they unwind.
"""

from __future__ import annotations

import hashlib
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Any

import greenlet

from tests.simulation.coverage import Coverage

START = 1_700_000_000.0
_STEPS_MAX = 1_000_000
_LINES_KEPT = 60
_NEVER = float("inf")


class Killed(BaseException):
    """The process of this actor has ended. Not an Exception, so that no handler recovers from it."""


class Stuck(AssertionError):
    """The run does not end: a livelock, or a wait that never ends."""


@dataclass
class Fate:
    """The place at which a process is killed: a call within a part of the protocols, after `survives` earlier ones."""

    part: str
    survives: int
    when: str
    """The fault: before or after the call takes effect."""


@dataclass(eq=False)
class Host:
    """A process: its actors live and die together."""

    name: str
    dead: bool = False
    asleep_until: float = 0.0
    """The moment until which it is stopped, as by SIGSTOP or a suspended machine; then it continues."""
    clock: SimulatedClock | None = None
    """The clock of its machine; None: the simulation's own."""
    ids: Any = None
    """The source of its identifiers."""
    fate: Fate | None = None


@dataclass(eq=False)
class Actor:
    """One greenlet. `wake`: the first simulated moment when it may run."""

    name: str
    host: Host
    run: greenlet.greenlet
    wake: float = 0.0
    background: bool = False
    """Whether the run ends without waiting for it."""
    number: int = 0
    """In order of creation."""
    turn: int = 0
    """The number of its valid entry in the queue of turns."""


@dataclass
class Trace:
    """The events of a run, in order: a hash of all, the last lines, and with `show` a call for every line."""

    show: Callable[[str], None] | None = None
    steps: int = 0
    last: deque[str] = field(default_factory=lambda: deque(maxlen=_LINES_KEPT))
    _hash: hashlib._Hash = field(default_factory=lambda: hashlib.blake2b(digest_size=16))

    def add(self, line: str) -> None:
        """Record one line."""
        self.steps += 1
        self._hash.update(line.encode())
        self.last.append(line)
        if self.show is not None:
            self.show(line)

    @property
    def digest(self) -> str:
        """Hash of the whole run so far."""
        return self._hash.hexdigest()


class Scheduler:
    """Decides which actor runs next, by a seed.

    Thread safety. One thread. Invariants. The same seed and the same actors give the same run.
    """

    def __init__(self, seed: str, trace: Trace) -> None:
        self.random = random.Random(seed)
        self.trace = trace
        self.elapsed = 0.0
        self._actors: dict[greenlet.greenlet, Actor] = {}
        self._turns: list[tuple[float, int, int, Actor]] = []
        """A heap of (first moment when an actor may run, its number, number of this entry, actor)."""
        self._numbers = count()
        self._foreground = 0
        self.coverage = Coverage(self)
        self.killed: list[Callable[[Host], None]] = []
        """Callbacks, called when a process was killed."""
        self._hub = greenlet.getcurrent()
        self._thread = threading.get_ident()
        self._undisturbed = 0

    def spawn(self, name: str, work: Callable[[], None], host: Host, *, background: bool = False) -> Actor:
        """Add an actor; it begins when the scheduler chooses it. An error that it raises ends the run."""

        def run() -> None:
            try:
                self._check_alive(host)
                work()
            except Killed:
                self.note("killed")

        made = greenlet.greenlet(run, self._hub)
        actor = Actor(name, host, made, self.elapsed, background, next(self._numbers))
        self._actors[actor.run] = actor
        self._foreground += not background
        self._queue(actor, self.elapsed)
        return actor

    @property
    def current(self) -> Actor | None:
        """The running actor; None outside of the run, where set-up and final checks take no simulated time."""
        return None if self._undisturbed else self._actors.get(greenlet.getcurrent())

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Run the body at one moment of the run: no other actor runs, and no fault strikes."""
        self._undisturbed += 1
        try:
            yield
        finally:
            self._undisturbed -= 1

    def pause(self, seconds: float) -> None:
        """Let other actors run; return `seconds` later, or when chosen after that. Raises: Killed."""
        if threading.get_ident() != self._thread:
            raise AssertionError("a second thread: one seed would give many runs")
        actor = self.current
        if actor is None:
            self.elapsed += seconds
            return
        self._check_alive(actor.host)
        actor.wake = self.elapsed + seconds
        self._queue(actor, actor.wake)
        self._hub.switch()
        self._check_alive(actor.host)

    def wake(self, actor: Actor) -> None:
        """Let a pausing actor continue now."""
        if actor.wake > self.elapsed:
            actor.wake = self.elapsed
            self._queue(actor, self.elapsed)

    def stop(self, host: Host, until: float) -> None:
        """Stop a process until a moment."""
        host.asleep_until = until
        self.coverage.struck(host, "stop")

    def note(self, text: str) -> None:
        """Add a line to the trace in the name of the running actor."""
        actor = self.current
        self.trace.add(f"{self.elapsed:9.3f}  {actor.name if actor else '-':<14} {text}")

    def run(self) -> None:
        """Run until every foreground actor has ended. Raises: what an actor raised; Stuck."""
        steps = 0
        while self._foreground:
            steps += 1
            if steps > _STEPS_MAX:
                raise Stuck(f"{_STEPS_MAX} steps and no end; running: {[a.name for a in self._actors.values()]}")
            actor = self._next()
            actor.run.switch()
            if actor.run.dead:
                del self._actors[actor.run]
                self._foreground -= not actor.background

    def kill(self, host: Host) -> None:
        """Kill a process now; its actors unwind without being able to affect anything."""
        host.dead = True
        self.coverage.struck(host, "kill")
        for actor in self._actors.values():
            if actor.host is host:
                if actor.wake == _NEVER:
                    actor.wake = self.elapsed
                self._queue(actor, actor.wake)
        for told in self.killed:
            told(host)

    def end(self) -> None:
        """Unwind every remaining actor."""
        for actor in list(self._actors.values()):
            actor.host.dead = True
            while not actor.run.dead:
                actor.run.switch()
        self._actors.clear()

    def _queue(self, actor: Actor, wake: float) -> None:
        actor.turn += 1
        if wake != _NEVER:
            heappush(self._turns, (wake, actor.number, actor.turn, actor))

    def _next(self) -> Actor:
        """Return one of the actors whose time comes first, or has come. Raises: Stuck if no actor can ever run."""
        turns, ready = self._turns, list[Actor]()
        soonest = _NEVER
        while turns and turns[0][0] <= soonest:
            wake, _, turn, actor = heappop(turns)
            if turn != actor.turn or actor.run.dead:
                continue
            host = actor.host
            if not host.dead and host.asleep_until > max(wake, self.elapsed):
                self._queue(actor, host.asleep_until)
                continue
            soonest = max(wake, self.elapsed)
            ready.append(actor)
        if not ready:
            raise Stuck(f"everybody waits for somebody else: {[a.name for a in self._actors.values()]}")
        self.elapsed = soonest
        chosen = ready[0] if len(ready) == 1 else self.random.choice(sorted(ready, key=_number))
        for actor in ready:
            if actor is not chosen:
                self._queue(actor, soonest)
        return chosen

    @staticmethod
    def _check_alive(host: Host) -> None:
        if host.dead:
            raise Killed


def _number(actor: Actor) -> int:
    return actor.number


class SimulatedClock:
    """The `wal.Clock` of a run: sleeping lets other actors run. `skew`: error of this clock in seconds; `rate`: its
    speed."""

    def __init__(self, scheduler: Scheduler, skew: float = 0.0, rate: float = 1.0) -> None:
        self._scheduler = scheduler
        self._skew, self._rate = skew, rate

    def now(self) -> float:
        return START + self._skew + self._scheduler.elapsed * self._rate

    def monotonic(self) -> float:
        return self._scheduler.elapsed * self._rate

    def sleep(self, seconds: float) -> None:
        self._scheduler.note(f"sleep {seconds:.3f}")
        self._scheduler.pause(seconds / self._rate)
