"""How many of the newest rows were bad, and whether that is too many."""

from __future__ import annotations

from collections import deque


class BadRate:
    """The share of bad rows in the newest micro-batches that have `window` rows together; no share of fewer rows.

    Thread safety. One thread. A new process begins with no rows: a stream that was stopped for its bad rows goes on for
    `window` rows more before it is stopped again, but for a micro-batch that is too bad by itself.
    """

    def __init__(self, max_percent: int, window: int) -> None:
        self._max_percent, self._window = max_percent, window
        self._batches: deque[tuple[int, int]] = deque()
        self._rows = self._bad = 0

    def with_more(self, rows: int, bad: int) -> str | None:
        """Count a micro-batch of `rows`, `bad` of them bad; what is wrong in words where that makes too many."""
        self._batches.append((rows, bad))
        self._rows += rows
        self._bad += bad
        while self._rows - self._batches[0][0] >= self._window:
            old_rows, old_bad = self._batches.popleft()
            self._rows -= old_rows
            self._bad -= old_bad
        if self._rows < self._window or self._bad * 100 <= self._max_percent * self._rows:
            return None
        return f"{self._bad:,} of the last {self._rows:,} rows ({self._bad * 100 / self._rows:.1f} %) are bad"
