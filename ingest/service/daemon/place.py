"""The position of a daemon among the daemons of its table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from uuid import UUID

from memwal.wal import SystemIds


@dataclass
class Place:
    """A daemon's endpoint, and the endpoints of all daemons of its table, including its own.

    The callbacks handle calls of peers: `heard` for a peer that checks this daemon, `look` for one that asks to be
    checked, `gives` for one that requests a region (returns whether to release it).
    """

    endpoint: str = ""
    endpoints: Sequence[str] = ()
    heard: Callable[[str], object] = lambda _: None
    look: Callable[[str], object] = lambda _: None
    gives: Callable[[UUID, str], bool] = lambda *_: True
    ends: Callable[[], bool] = lambda: False
    """Returns whether the daemon is stopping."""
    process: str = field(default_factory=lambda: SystemIds().entry_id())
    """Identity of this process. A daemon that is restarted at the same endpoint has another identity."""
