"""In the place of the key index where a table has no key: every row stays, none replaces another."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from memwal.memtable.arrays import Mask, Positions
from memwal.memtable.errors import InvalidRows


class NoKeys:
    """As KeyIndex, of rows that nothing tells apart.

    Thread safety. Any thread: it holds nothing.
    """

    bytes = 0

    def add(self, rows: pa.Table) -> None:
        """Nothing is noted."""

    def step(self) -> bool:
        """False: nothing waits."""
        return False

    def index(self, n: int) -> None:
        """Nothing is to do."""

    def newest(self, n: int) -> Mask:
        """All of the first n rows: bool [n]."""
        return np.ones(n, dtype=bool)

    def lookup(self, columns: Sequence[pa.ChunkedArray], n: int) -> Positions:  # noqa: ARG002 - as KeyIndex has it
        """Raises InvalidRows."""
        raise no_key()


def no_key() -> InvalidRows:
    """What to say to who asks for keys."""
    return InvalidRows("the table has no key: its rows cannot be looked up by one")
