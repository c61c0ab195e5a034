"""Limit the log lines of a failure that repeats."""

from __future__ import annotations

from collections.abc import Callable

EVERY = 60.0
"""Seconds between two log lines about the same step."""


class LogLimit:
    """Passes the first failure of a step, and then at most one a minute.

    Thread safety. One thread for each step.
    """

    def __init__(self, monotonic: Callable[[], float]) -> None:
        """Limit by the clock `monotonic`, which returns seconds."""
        self._monotonic = monotonic
        self._due: dict[str, float] = {}
        self._left_out: dict[str, int] = {}

    def text(self, step: str, text: str) -> str | None:
        """Return `text`, with the number of failures of `step` since its last line; None if this failure is not
        logged."""
        now, left_out = self._monotonic(), self._left_out.get(step, 0)
        if now < self._due.get(step, now):
            self._left_out[step] = left_out + 1
            return None
        self._due[step], self._left_out[step] = now + EVERY, 0
        return f"{text} ({left_out + 1} failures since the last message)" if left_out else text
