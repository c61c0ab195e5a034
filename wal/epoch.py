"""The right of one claim to act for a region. It ends when a higher epoch is seen.

The guard is created by `wal.fence`. It has its own module below that one because manifests and replay need it too.
"""

from __future__ import annotations

import threading
from typing import NoReturn
from uuid import UUID

from memwal.wal.clock import NEVER, Instant
from memwal.wal.errors import Fenced


class EpochGuard:
    """One claim's right to act for a region, until a higher epoch is seen.

    Thread safety. Any thread.
    Invariants. (1) The epoch never changes. (2) Once fenced, the guard stays fenced.
    """

    def __init__(self, region_id: UUID, epoch: int, claimed: tuple[int, str] | None = None, log_id: str = "") -> None:
        """`claimed`: version and edit id of the manifest that this claim wrote. `log_id`: the id of the log, "" where
        unknown.

        Both distinguish this table from one that was deleted and recreated in its place, which the epoch alone does
        not.
        """
        self.region_id = region_id
        self.epoch = epoch
        self.claimed = claimed
        self.log_id = log_id
        self._lock = threading.Lock()
        self._theirs = 0
        self.proved: Instant = NEVER
        """Start of the newest manifest read that confirmed ownership after the claim's sentinel was put."""

    def confirm(self, begun: Instant) -> None:
        """Record that a manifest read begun at `begun`, after the sentinel was put, showed this epoch as the newest."""
        self.proved = max(self.proved, begun)

    @property
    def fenced(self) -> bool:
        """Whether a higher epoch has been seen."""
        return self._theirs > 0

    def check(self) -> None:
        """Raise Fenced if a higher epoch has been seen. Makes no request."""
        if self._theirs:
            raise Fenced(self.region_id, self.epoch, self._theirs)

    def fenced_by(self, theirs: int) -> NoReturn:
        """Record that epoch `theirs`, which is above this guard's, owns the region, and raise Fenced."""
        assert theirs > self.epoch, f"epoch {theirs} does not fence epoch {self.epoch}"
        with self._lock:
            self._theirs = max(self._theirs, theirs)
        raise Fenced(self.region_id, self.epoch, self._theirs)
