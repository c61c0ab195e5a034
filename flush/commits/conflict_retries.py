"""How long a commit puts up with other writers."""

from __future__ import annotations

from memwal.flush.errors import CommitConflict
from memwal.wal import Clock

_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 2.0


class ConflictRetries:
    """Counts conflicts in a row, waits longer after each, gives up after `retries`.

    Thread safety. One thread only.
    """

    def __init__(self, uri: str, clock: Clock, retries: int) -> None:
        self._uri = uri
        self._clock = clock
        self._retries = retries
        self.conflicts = 0
        """Conflicts since something last went through."""

    def reset(self) -> None:
        """Something went through."""
        self.conflicts = 0

    def wait(self, cause: Exception) -> None:
        """Raises CommitConflict where patience is spent."""
        self.conflicts += 1
        if self.conflicts > self._retries:
            raise CommitConflict(
                f"{self._uri}: {self.conflicts} commits in a row met changes by other writers; nothing is "
                "lost: commit again, or raise commit.retries"
            ) from cause
        self._clock.sleep(min(_FIRST_PAUSE * 2 ** (self.conflicts - 1), _LONGEST_PAUSE))
