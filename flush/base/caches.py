"""Lance's caches of one table, shared by its views in a process and renewed before they hold too many dead segments.

A Lance session keeps decoded metadata and opened index segments, limited by size alone. A segment replaced by a merge
is never read again, takes a few kilobytes, and keeps one or two files open: a process that reads after every commit
would run out of file descriptors long before it ran out of memory. A session cannot drop single entries. So when more
than DEAD_MAX of the segments opened with a session are missing in the newest version, a new session begins. The files
of a session are closed with the last dataset opened with it; `BaseTable.latest` moves to the newest session.

Bound: twice the live segments and 2 * DEAD_MAX dead ones, unless a reader keeps an older view.
"""

from __future__ import annotations

import threading

import lance
from lance.lance import _Session as Session

__all__ = ["CACHE_BYTES", "LanceCaches", "Session"]

CACHE_BYTES = 1 << 30
"""Default size of both caches together, in bytes."""
METADATA_SHARE = 4
"""One part in METADATA_SHARE is for metadata: manifests, the columns of files, deletion vectors."""
DEAD_MAX = 32
"""Segments. A new session opens the live segments again: 1 to 15 ms for each segment searched."""


class LanceCaches:
    """The session used to open datasets of one table.

    Thread safety. Any thread.
    Invariants. (1) A session caches at most `size_max` bytes. (2) At most DEAD_MAX segments opened with the present
    session are missing in the version last opened.
    """

    def __init__(self, size_max: int = CACHE_BYTES) -> None:
        """`size_max`: bytes."""
        self._metadata = size_max // METADATA_SHARE
        self._index = size_max - self._metadata
        self._lock = threading.Lock()
        self._opened: set[str] = set()
        self._session = self._new()

    @property
    def session(self) -> Session:
        """The present session, to open a dataset with."""
        return self._session

    def opened(self, dataset: lance.LanceDataset) -> None:
        """Record that `dataset`, the newest version, was opened; begin a new session if too many segments are dead."""
        live = {str(segment.uuid) for index in dataset.describe_indices() for segment in index.segments}
        with self._lock:
            self._opened |= live
            if len(self._opened) - len(live) > DEAD_MAX:
                self._opened, self._session = live, self._new()

    def _new(self) -> Session:
        return Session(index_cache_size_bytes=self._index, metadata_cache_size_bytes=self._metadata)
