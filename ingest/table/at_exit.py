"""Closes the tables that a program leaves open at its end: lingering rows are appended, threads end in order."""

from __future__ import annotations

import atexit
import logging
from typing import Protocol
from weakref import WeakSet

from memwal.flush import BaseTable
from memwal.ingest.errors import MemWalError

_LOG = logging.getLogger("memwal.table")


class Closed(Protocol):
    """What is closed: a table."""

    base: BaseTable

    def close(self) -> None:
        """Close it. Raises: MemWalError."""


_OPEN: WeakSet[Closed] = WeakSet()


def close_at_exit(table: Closed) -> None:
    """Have `table` closed at the end of the program, unless it is gone by then."""
    _OPEN.add(table)


@atexit.register
def _close_all() -> None:
    for table in list(_OPEN):
        try:
            table.close()
        except MemWalError as error:  # the next table is closed all the same
            _LOG.warning("%s, at the end of the program: %s", table.base.uri, error)
