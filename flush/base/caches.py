"""Lance's caches of one table, shared by every view of it in a process, and let go before they hold too much dead.

A Lance session keeps decoded metadata and opened index segments by size alone. A segment that a merge has replaced is
never asked for again, weighs a few kilobytes, and keeps one or two files open: a process that reads after every commit
runs out of descriptors long before it runs out of room. A session cannot be told to forget, so a new one is begun once
the newest version no longer has DEAD_MAX of the segments that were met with the old one. The files of a session are
closed with the last dataset that was opened with it: `BaseTable.latest` moves on to the newest session.

Bound: the live segments twice over and 2 * DEAD_MAX dead ones, as long as no reader keeps an older view.
"""

from __future__ import annotations

import threading

import lance
from lance.lance import _Session as Session

__all__ = ["CACHE_BYTES", "LanceCaches", "Session"]

CACHE_BYTES = 1 << 30
"""Of both caches together, where nothing else is said."""
METADATA_SHARE = 4
"""One part in so many is for metadata: manifests, the columns of files, deletion vectors."""
DEAD_MAX = 32
"""Segments. A new session opens the live ones again: 1 to 15 ms for each that is searched."""


class LanceCaches:
    """The session that datasets of one table are opened with.

    Thread safety. Any thread. Invariants. (1) At most `size_max` bytes are cached by a session. (2) No session was
    used for more than DEAD_MAX segments that the version last opened does not have.
    """

    def __init__(self, size_max: int = CACHE_BYTES) -> None:
        """`size_max`: bytes."""
        self._metadata = size_max // METADATA_SHARE
        self._index = size_max - self._metadata
        self._lock = threading.Lock()
        self._met: set[str] = set()
        self._session = self._new()

    @property
    def session(self) -> Session:
        """The session to open a dataset with now."""
        return self._session

    def opened(self, dataset: lance.LanceDataset) -> None:
        """`dataset`, the newest version, was opened: a new session is begun where too much of this one is dead."""
        live = {str(segment.uuid) for index in dataset.describe_indices() for segment in index.segments}
        with self._lock:
            self._met |= live
            if len(self._met) - len(live) > DEAD_MAX:
                self._met, self._session = live, self._new()

    def _new(self) -> Session:
        return Session(index_cache_size_bytes=self._index, metadata_cache_size_bytes=self._metadata)
