"""Commits the published SSTs of a table, one commit at a time, on demand and every `commit.interval`."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import flush
from ingest.errors import classify

_LOG = logging.getLogger("memwal.commit")


class CommitLoop:
    """One thread that commits at intervals, and a lock that makes every commit of this process wait its turn.

    Thread safety. All methods from any thread. A commit that fails at its interval is logged and tried at the next;
    `commit()` raises to its caller. Committers of other processes are kept apart on storage (`flush.commit_plan`); this
    lock only saves the threads of one process from getting in each other's way.
    """

    def __init__(self, commit: Callable[[], flush.CommitReport], interval: float) -> None:
        """`interval` in seconds; 0 commits on demand only."""
        self._commit = commit
        self._interval = interval
        self._one_at_a_time = threading.Lock()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin committing at intervals."""
        if self._interval > 0:
            self._thread = threading.Thread(target=self._run, name="committer", daemon=True)
            self._thread.start()

    def commit(self) -> flush.CommitReport:
        """Commit what is published now. Raises: flush and wal errors."""
        with self._one_at_a_time:
            return self._commit()

    def stop(self) -> None:
        """End the thread; a commit under way is finished first."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(self._interval):
            try:
                self.commit()
            except Exception as error:  # noqa: BLE001 - whatever it was: ending here would end all commits in silence
                _LOG.warning("commit failed, will try again in %g s: %s", self._interval, classify(error))
