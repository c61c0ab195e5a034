"""The right of one claim to act for a region, which ends when a higher epoch is seen.

It is a module of its own below `wal.fence`, which creates it, since manifests and replay need it too.
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
    Invariants. (1) The epoch never changes. (2) Once fenced, fenced for ever.
    """

    def __init__(self, region_id: UUID, epoch: int, claimed: tuple[int, str] | None = None, log_id: str = "") -> None:
        """`claimed`: version and edit id of the manifest that this claim wrote. They tell this table from one that was
        made anew in its place, which the epoch alone does not; so does `log_id` for entries, "" where unknown."""
        self.region_id = region_id
        self.epoch = epoch
        self.claimed = claimed
        self.log_id = log_id
        self._lock = threading.Lock()
        self._theirs = 0
        self.proved: Instant = NEVER
        """When the newest look at the manifest began that found the region ours, once the claim had put its sentinel.
        """

    def confirm(self, begun: Instant) -> None:
        """The manifest named our epoch as the newest at a moment after `begun`, and our sentinel had been put."""
        self.proved = max(self.proved, begun)

    @property
    def fenced(self) -> bool:
        """Whether a higher epoch has been seen."""
        return self._theirs > 0

    def check(self) -> None:
        """Raise Fenced where a higher epoch has been seen. Asks no storage."""
        if self._theirs:
            raise Fenced(self.region_id, self.epoch, self._theirs)

    def fenced_by(self, theirs: int) -> NoReturn:
        """Record that epoch `theirs` (above ours) owns the region, and raise Fenced."""
        assert theirs > self.epoch, f"epoch {theirs} does not fence epoch {self.epoch}"
        with self._lock:
            self._theirs = max(self._theirs, theirs)
        raise Fenced(self.region_id, self.epoch, self._theirs)
