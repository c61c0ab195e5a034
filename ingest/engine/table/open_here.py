"""Track the tables open in this process: one handle per table may claim it, and the end of the program closes all.

A second `memwal.open` of a table would fence the first handle, whose lingering rows would be lost. It raises instead.
The table counts, not the spelling of its location: its id with the directory on the disk, or the url on an object
store. (A copy of a table has the same id at another location.)

The end of a program appends lingering rows and ends threads in order.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

from memwal.flush import BaseTable
from memwal.flush.base.fsync import local_root
from memwal.ingest.engine.table.live_owners import SERVED
from memwal.ingest.errors import MemWalError, Unavailable

_LOG = logging.getLogger("memwal.table")

Place = tuple[str, Any]
"""Id of a table, and its location."""


_OPEN: WeakSet[Any] = WeakSet()
_FENCED: WeakSet[Any] = WeakSet()
"""Tables whose regions a later handle of this process took over. Without a write they do not detect it."""
_CLAIMING: set[Place] = set()
_LOCK = threading.Lock()


def close_at_exit(table: Any) -> None:
    """Register `table`, an `embedded.Table`, so that the end of the program closes it if it still exists."""
    with _LOCK:
        _OPEN.add(table)


@contextmanager
def claiming(base: BaseTable, *, take_over: bool) -> Iterator[None]:
    """Mark the regions of `base` as being claimed by this thread, for the duration of the context.

    `take_over`: also from earlier handles of this process, which do not count as open once the context has ended
    without an error.
    Raises: Unavailable (reason "served") without `take_over`, if a handle of this process has the table open, or
    another thread opens it.
    """
    place = _place(base)
    with _LOCK:
        alive = [each for each in _OPEN if not each.closed and each not in _FENCED and each.regions.alive]
        serving = [each for each in alive if _place(each.base) == place]
        if not take_over and (place in _CLAIMING or serving):
            raise Unavailable(
                f"{base.uri}: this process has the table open already: use that handle, close it first, or "
                "take_over=True, which fences it",
                {"reason": SERVED, "endpoint": None},
            )
        _CLAIMING.add(place)
    try:
        yield
        _FENCED.update(serving)
    finally:
        with _LOCK:
            _CLAIMING.discard(place)


def _place(base: BaseTable) -> Place:
    root = local_root(base.dataset)
    if root is None:
        return base.table_id, base.uri.rstrip("/")
    found = root.stat()
    return base.table_id, (found.st_dev, found.st_ino)


def _forget() -> None:
    """Forget all tables in a forked process: they belong to the parent, whose threads do not exist here."""
    _OPEN.clear()
    _CLAIMING.clear()
    _LOCK.release()


# Held during the fork, so that no other thread holds it in the child.
os.register_at_fork(before=_LOCK.acquire, after_in_parent=_LOCK.release, after_in_child=_forget)


@atexit.register
def _close_all() -> None:
    for table in list(_OPEN):
        try:
            table.close()
        except MemWalError as error:  # the next table is closed nevertheless
            _LOG.warning("%s, at the end of the program: %s", table.base.uri, error)
