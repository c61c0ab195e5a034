"""Limit of consecutive conflicts that a commit tolerates."""

from __future__ import annotations

from memwal.flush.errors import CommitConflict
from memwal.wal import Clock
from memwal.wal.retries import Backoff

_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 2.0


class ConflictRetries:
    """Counts consecutive conflicts, waits longer after each, and raises after `retries`.

    Thread safety. One thread only.
    """

    def __init__(
        self, uri: str, clock: Clock, retries: int, remedy: str = "commit again, or raise commit.retries"
    ) -> None:
        """`remedy`: for the message of the error."""
        self._uri, self._clock, self._retries, self._remedy = uri, clock, retries, remedy
        self._backoff = Backoff(_FIRST_PAUSE, _LONGEST_PAUSE)
        self.conflicts = 0
        """Conflicts since the last successful round."""

    def reset(self) -> None:
        """Start a new count after a success."""
        self.conflicts = 0
        self._backoff.reset()

    def wait(self, cause: Exception) -> None:
        """Pause before the next attempt. Raises CommitConflict after more than `retries` consecutive conflicts."""
        self.conflicts += 1
        if self.conflicts > self._retries:
            raise CommitConflict(
                f"{self._uri}: {self.conflicts} attempts in a row conflicted with other writers; nothing is lost: "
                f"{self._remedy}"
            ) from cause
        self._clock.sleep(self._backoff.pause())
