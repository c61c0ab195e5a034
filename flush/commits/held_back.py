"""Regions that a commit cannot take, and why; the other regions are committed without them.

An SST that cannot be read, a gap in the generations, a damaged plan, a key that stands twice in the base: each concerns
one region. Its SSTs stay published, so readers see its rows as before, and every later commit tries it again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from uuid import UUID

import pyarrow as pa

from memwal.flush.errors import FlushError
from memwal.wal import WalError
from memwal.wal.panics import is_panic

COMMON = (WalError, FlushError, OSError, RuntimeError, ValueError)


def is_failure(error: BaseException) -> bool:
    """Return whether `error` comes from storage, Lance or memwal, and does not end the process."""
    return isinstance(error, COMMON) or is_panic(error)


@dataclass
class HeldBack:
    """What the last commit could not take; a process that commits repeatedly keeps it from one commit to the next.

    Thread safety. One commit at a time writes; any thread reads `regions`, which is replaced as a whole.
    """

    regions: Mapping[UUID, BaseException] = field(default_factory=dict)
    """Why nothing of a region was committed; or the error about a key that stands twice and that no SST writes."""
    doubled: pa.Table | None = None
    """Keys that stood twice in the base; each commit looks them up until they no longer do."""

    def raise_first(self) -> None:
        """Raise the error of the first region, if any."""
        for error in self.regions.values():
            raise error
