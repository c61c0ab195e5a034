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

import greenlet

START = 1_700_000_000.0
_STEPS_MAX = 1_000_000
_LINES_KEPT = 60


class Killed(BaseException):
    """The process of this actor has ended; not an Exception, so that nothing recovers from it."""


class Stuck(AssertionError):
    """The run does not end: a livelock, or a wait that nobody ends."""


@dataclass(eq=False)
class Host:
    """A process: what its actors share in life and death."""

    name: str
    dead: bool = False
    asleep_until: float = 0.0
    """Stopped until this moment, as by SIGSTOP or a suspended machine, then going on as if nothing had been."""


@dataclass(eq=False)
class Actor:
    """One greenlet; `wake`: the simulated moment from which it may run."""

    name: str
    host: Host
    run: greenlet.greenlet
    wake: float = 0.0
    background: bool = False
    """Ends with the others instead of being waited for."""


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

        actor = Actor(name, host, greenlet.greenlet(run, self._hub), self.elapsed, background)
        self._actors[actor.run] = actor
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
        self._hub.switch()
        self._check_alive(actor.host)

    def note(self, text: str) -> None:
        """Add a line to the trace in the name of the actor that runs."""
        actor = self.current
        self.trace.add(f"{self.elapsed:9.3f}  {actor.name if actor else '-':<14} {text}")

    def run(self) -> None:
        """Run until every actor that is waited for has ended. Raises what an actor raised; Stuck."""
        steps = 0
        while any(not actor.background for actor in self._actors.values()):
            steps += 1
            if steps > _STEPS_MAX:
                raise Stuck(f"{_STEPS_MAX} steps and no end; running: {[a.name for a in self._actors.values()]}")
            actor = self._next()
            actor.run.switch()
            if actor.run.dead:
                del self._actors[actor.run]

    def kill(self, host: Host) -> None:
        """End a process here and now; its actors unwind without being able to touch anything."""
        host.dead = True

    def end(self) -> None:
        """Unwind every actor that is left."""
        for actor in list(self._actors.values()):
            actor.host.dead = True
            while not actor.run.dead:
                actor.run.switch()
        self._actors.clear()

    def _next(self) -> Actor:
        """One of those whose time comes first, or has come already."""
        ready: list[Actor] = []
        soonest = float("inf")
        for actor in self._actors.values():
            host = actor.host
            due = actor.wake if host.dead else max(actor.wake, host.asleep_until)
            if due <= self.elapsed:
                due = self.elapsed
            if due < soonest:
                soonest, ready = due, [actor]
            elif due == soonest:
                ready.append(actor)
        self.elapsed = soonest
        return ready[0] if len(ready) == 1 else self.random.choice(ready)

    @staticmethod
    def _check_alive(host: Host) -> None:
        if host.dead:
            raise Killed


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
