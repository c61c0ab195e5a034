"""Regions that a commit cannot take, with their errors; the other regions are committed without them.

An unreadable SST, a gap in the generations, a damaged plan, or a key with two rows in the base concerns one region. Its
SSTs stay published, so readers see its rows as before, and every later commit tries it again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from uuid import UUID

import pyarrow as pa

from memwal.flush.errors import FlushError
from memwal.wal import WalError
from memwal.wal.panics import is_panic

_COMMON = (WalError, FlushError, OSError, RuntimeError, ValueError)


def is_failure(error: BaseException) -> bool:
    """Return whether `error` comes from storage, Lance or memwal, and does not end the process."""
    return isinstance(error, _COMMON) or is_panic(error)


@dataclass
class HeldBack:
    """What the last commit could not take. A process that commits repeatedly passes it from commit to commit.

    Thread safety. One commit at a time writes; any thread reads `regions`, which is replaced as a whole.
    """

    regions: Mapping[UUID, BaseException] = field(default_factory=dict)
    """The error that kept a region from being committed, or the error about a key that has two rows and is not
    written by an SST.
    """
    doubled: pa.Table | None = None
    """Keys that had two rows in the base; each commit looks them up until the duplicates are gone."""

    def raise_first(self) -> None:
        """Raise the error of the first region, if any."""
        for error in self.regions.values():
            raise error
