"""Schedule restarts of a process or job that keeps ending, with growing pauses."""

from __future__ import annotations

from memwal.wal import Clock
from memwal.wal.retries import Backoff

STEADY = 60.0
"""Seconds between two starts after which the pauses start over."""


class Restarts:
    """The minimum time between two starts: doubles until one ran for STEADY seconds.

    Thread safety. One thread.
    """

    def __init__(self, clock: Clock, first: float, longest: float) -> None:
        """Start with pauses of `first`, up to `longest` seconds."""
        self._clock, self._backoff = clock, Backoff(first, longest)
        self._started = self._due = clock.monotonic()

    def started(self) -> None:
        """Record a start now."""
        now = self._clock.monotonic()
        if now - self._started >= STEADY:
            self._backoff.reset()
        self._started, self._due = now, now + self._backoff.pause()

    @property
    def left(self) -> float:
        """Seconds until the next start is allowed; 0 if it is allowed now."""
        return max(0.0, self._due - self._clock.monotonic())
