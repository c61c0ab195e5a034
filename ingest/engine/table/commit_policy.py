"""Decide when a table commits by itself: a pure function of the backlog.

`commit.interval` bounds how long a durable row stays out of the base table, so the oldest waiting row decides, whether
it is in an SST or still in a memtable. Many waiting SSTs or bytes are committed earlier. If no row waits, nothing is
done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from memwal.ingest.engine.region.generations import Backlog

Decision = Literal["nothing", "commit", "flush"]
"""`flush`: publish the memtables, then commit; `commit`: commit the published SSTs."""


@dataclass(frozen=True, slots=True)
class CommitLimits:
    """Seconds, SSTs of one region, bytes of all regions. See the section [commit]; with `interval` 0 nothing is due."""

    interval: float
    ssts_max: int
    size_max: int


def flush_due(regions: Sequence[Backlog], limits: CommitLimits) -> bool:
    """Return whether to publish the memtables when another process commits.

    The flush is due after half of the interval, so that the other process finds the rows in an SST before they are due.
    """
    oldest = max((region.unflushed for region in regions if region.unflushed is not None), default=None)
    return oldest is not None and limits.interval > 0 and oldest >= limits.interval / 2


def decide(regions: Sequence[Backlog], limits: CommitLimits, lead: float) -> Decision:
    """Return the action to take now. `lead`: seconds that flush and commit will take, plus those until the next
    decision.

    A lead above half the interval counts as half: back-to-back commits would slow down slow storage further.
    """
    if limits.interval <= 0:
        return "nothing"
    oldest = max((region.age for region in regions if region.age is not None), default=None)
    if oldest is not None and oldest + min(lead, limits.interval / 2) >= limits.interval:
        return "flush"
    many = any(region.ssts >= limits.ssts_max for region in regions)
    return "commit" if many or sum(region.size for region in regions) >= limits.size_max else "nothing"
