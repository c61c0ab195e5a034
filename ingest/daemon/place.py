"""The place of a daemon among those of its table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from uuid import UUID

from memwal.wal import SystemIds


@dataclass
class Place:
    """A daemon's endpoint, and the endpoints of all daemons of its table, its own among them. Callbacks for a peer that
    looks at it (`heard`), wants to be looked at (`look`) or asks for a region (`gives` returns whether it gets it).
    """

    endpoint: str = ""
    endpoints: Sequence[str] = ()
    heard: Callable[[str], object] = lambda _: None
    look: Callable[[str], object] = lambda _: None
    gives: Callable[[UUID, str], bool] = lambda *_: True
    ends: Callable[[], bool] = lambda: False
    """Returns whether the daemon was told to end."""
    process: str = field(default_factory=lambda: SystemIds().entry_id())
    """Identity of this process: a daemon that is started again at the same endpoint has another one."""
