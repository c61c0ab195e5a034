"""Actors that take turns in one thread, and the time they live in.

An actor is a greenlet. Wherever real code would wait, for storage or for a clock, it calls `Scheduler.pause`; the
scheduler then lets any actor go on whose time has come, chosen by the seed. When there is none, time jumps.

A process is a set of actors that die together. A dead process executes nothing: `Killed` is raised where an actor of it
waits, and at every later call by which the unwinding code could still touch the world.
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
    """The process of this actor has ended; not an Exception, so that nothing recovers from it."""


class Stuck(AssertionError):
    """The run does not end: a livelock, or a wait that nobody ends."""


@dataclass
class Fate:
    """Where a process is to be killed: at the call within a part of the protocols before which it survived some."""

    part: str
    survives: int
    when: str
    """The fault: before or after the call takes effect."""


@dataclass(eq=False)
class Host:
    """A process: what its actors share in life and death."""

    name: str
    dead: bool = False
    asleep_until: float = 0.0
    """Stopped until this moment, as by SIGSTOP or a suspended machine, then going on as if nothing had been."""
    clock: SimulatedClock | None = None
    """That of its machine; None: the simulation's own."""
    ids: Any = None
    """Where its identifiers come from."""
    fate: Fate | None = None


@dataclass(eq=False)
class Actor:
    """One greenlet; `wake`: the simulated moment from which it may run."""

    name: str
    host: Host
    run: greenlet.greenlet
    wake: float = 0.0
    background: bool = False
    """Ends with the others instead of being waited for."""
    number: int = 0
    """In order of creation."""
    turn: int = 0
    """Of its entries in the queue of turns the one that counts."""


@dataclass
class Trace:
    """What happened, in order: a hash of everything, the last lines, and every line where `show` takes them."""

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
        """Identity of the whole run so far."""
        return self._hash.hexdigest()


class Scheduler:
    """Decides who runs next, by a seed.

    Thread safety. One thread. Invariants. The same seed and the same actors give the same run.
    """

    def __init__(self, seed: str, trace: Trace) -> None:
        self.random = random.Random(seed)
        self.trace = trace
        self.elapsed = 0.0
        self._actors: dict[greenlet.greenlet, Actor] = {}
        self._turns: list[tuple[float, int, int, Actor]] = []
        """A heap: when an actor may go on, its number, which of its entries this is."""
        self._numbers = count()
        self._foreground = 0
        self.coverage = Coverage(self)
        self.killed: list[Callable[[Host], None]] = []
        """Called when a process was killed."""
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
        """The actor that runs, None outside of the run: set-up and final checks happen at one moment."""
        return None if self._undisturbed else self._actors.get(greenlet.getcurrent())

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """What is done inside happens at one moment of the run: nobody else gets on, and nothing goes wrong."""
        self._undisturbed += 1
        try:
            yield
        finally:
            self._undisturbed -= 1

    def pause(self, seconds: float) -> None:
        """Let others run; come back `seconds` later or when chosen after that. Raises Killed."""
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
        """Let an actor that pauses go on now."""
        if actor.wake > self.elapsed:
            actor.wake = self.elapsed
            self._queue(actor, self.elapsed)

    def stop(self, host: Host, until: float) -> None:
        """Let a process stand still until then."""
        host.asleep_until = until
        self.coverage.struck(host, "stop")

    def note(self, text: str) -> None:
        """Add a line to the trace in the name of the actor that runs."""
        actor = self.current
        self.trace.add(f"{self.elapsed:9.3f}  {actor.name if actor else '-':<14} {text}")

    def run(self) -> None:
        """Run until every actor that is waited for has ended. Raises what an actor raised; Stuck."""
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
        """End a process here and now; its actors unwind without being able to touch anything."""
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
        """Unwind every actor that is left."""
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
        """One of those whose time comes first, or has come already. Raises: Stuck if nobody's ever comes."""
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
    """The `wal.Clock` of a run: sleeping lets others run. `skew`: seconds by which this machine's clock is off; `rate`:
    how fast it goes."""

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
