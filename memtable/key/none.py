"""The key index of a table without a key: every row stays, none replaces another."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from memwal.memtable.arrays import Mask, Positions
from memwal.memtable.errors import InvalidRows


class NoKeys:
    """The interface of KeyIndex, for rows without a key.

    Thread safety. Any thread: it has no state.
    """

    bytes = 0

    def add(self, rows: pa.Table) -> None:
        """Do nothing."""

    def step(self) -> bool:
        """Return False: nothing waits."""
        return False

    def index(self, n: int) -> None:
        """Do nothing."""

    def newest(self, n: int) -> Mask:
        """Return all of the first n rows: bool [n]."""
        return np.ones(n, dtype=bool)

    def lookup(self, columns: Sequence[pa.ChunkedArray], n: int) -> Positions:  # noqa: ARG002 - as in KeyIndex
        """Raise InvalidRows."""
        raise no_key()


def no_key() -> InvalidRows:
    """Return the error for a call that needs keys."""
    return InvalidRows("the table has no key: its rows cannot be looked up by one")
