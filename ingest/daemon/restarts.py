"""When a process, or a job, that keeps ending is started again: less and less often."""

from __future__ import annotations

from memwal.wal import Clock
from memwal.wal.retries import Backoff

STEADY = 60.0
"""Seconds between two starts after which the pauses start over."""


class Restarts:
    """The least time between two starts: doubling, until one ran for STEADY seconds.

    Thread safety. One thread.
    """

    def __init__(self, clock: Clock, first: float, longest: float) -> None:
        """`first`, `longest`: seconds between two starts."""
        self._clock, self._backoff = clock, Backoff(first, longest)
        self._started = self._due = clock.monotonic()

    def started(self) -> None:
        """Note that it starts now."""
        now = self._clock.monotonic()
        if now - self._started >= STEADY:
            self._backoff.reset()
        self._started, self._due = now, now + self._backoff.pause()

    @property
    def left(self) -> float:
        """Seconds until the next start may come, 0 where it may come now."""
        return max(0.0, self._due - self._clock.monotonic())
