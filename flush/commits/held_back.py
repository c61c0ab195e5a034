"""What a commit cannot take, region by region: the others are committed without it.

An SST that cannot be read, a gap in the generations, a plan that is damaged, a key that stands twice in the base: each
is one region's. Its SSTs stay published, so readers see its rows as before, and every later commit tries it again.
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
    """Whether `error` is an answer of storage, of Lance or of ours, and not the end of the process."""
    return isinstance(error, COMMON) or is_panic(error)


@dataclass
class HeldBack:
    """What the last commit could not take, kept by who commits again and again.

    Thread safety. One commit at a time writes; any thread reads `regions`, which is replaced as a whole.
    """

    regions: Mapping[UUID, BaseException] = field(default_factory=dict)
    """Why nothing of a region is committed, or, where a key that it does not write stands twice, what is wrong."""
    doubled: pa.Table | None = None
    """Keys that stood twice in the base: looked for by each commit until they no longer do."""

    def raise_first(self) -> None:
        """Raise what is wrong with one region, if any is held back."""
        for error in self.regions.values():
            raise error
