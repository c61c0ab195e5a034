"""Commits the published SSTs of a table, one commit at a time, on demand and every `commit.interval`."""

from __future__ import annotations

import threading
from collections.abc import Callable

import flush
from ingest.periodic import Periodic


class CommitLoop:
    """Commits at intervals, and a lock that makes every commit of this process wait its turn.

    Thread safety. All methods from any thread. A commit that fails at its interval is logged and tried at the next;
    `commit()` raises to its caller. Committers of other processes are kept apart on storage (`flush.commit_plan`); this
    lock only saves the threads of one process from getting in each other's way.
    """

    def __init__(self, commit: Callable[[], flush.CommitReport], interval: float) -> None:
        """`interval` in seconds; 0 commits on demand only."""
        self._commit = commit
        self._one_at_a_time = threading.Lock()
        self._periodic = Periodic("commit", self.commit, interval)

    def start(self) -> None:
        """Begin committing at intervals."""
        self._periodic.start()

    def commit(self) -> flush.CommitReport:
        """Commit what is published now. Raises: flush and wal errors."""
        with self._one_at_a_time:
            return self._commit()

    def stop(self) -> None:
        """End the thread; a commit under way is finished first."""
        self._periodic.stop()
