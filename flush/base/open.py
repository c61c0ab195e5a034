"""Open a Lance dataset, determine why one cannot be opened, and bound the caches that open datasets share.

pylance raises ValueError both for a missing table and for one that it cannot read: wrong credentials, an endpoint that
is down, a damaged manifest. Interpreted as "missing", a short storage failure would make memwal recreate the table.
Interpreted as damage, a single reset or refused GET would make an operator restore a backup. This module therefore
calls Lance several times with pauses, and also reads with memwal's own storage client, which has a distinct error for
each case. A dataset counts as damaged only if that client reads every byte of it and Lance still fails.

Caches (`LanceCaches`). A Lance session keeps decoded metadata and opened index segments, limited by size alone. A
segment replaced by a merge is never read again, takes a few kilobytes, and keeps one or two files open: a process that
reads after every commit would run out of file descriptors long before it ran out of memory. A session cannot drop
single entries. So when more than DEAD_MAX of the segments opened with a session are missing in the newest version, a
new session begins. The files of a session are closed with the last dataset opened with it; `BaseTable.latest` moves to
the newest session.

Bound: twice the live segments and 2 * DEAD_MAX dead ones, unless a reader keeps an older view.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import lance
from lance.lance import _Session as Session

from memwal.wal import Corrupt, ObjectStore, SystemClock
from memwal.wal.errors import first_line
from memwal.wal.panics import RustPanic, panics_as_errors

T = TypeVar("T")

PAUSES = (0.05, 0.2, 0.8)
"""Seconds between the attempts of one read. Lance itself retries after a 5xx answer, but not after a 403 or a truncated
body.
"""

_VERSIONS, _MANIFEST = "_versions/", ".manifest"


def open_dataset(
    store: ObjectStore, uri: str, version: int | None = None, session: Session | None = None
) -> lance.LanceDataset | None:
    """Open the dataset at `uri`, the root of `store`, at its newest version or at `version`; None if it is missing.

    `session`: the session whose caches it uses; None for separate caches.

    Raises StoreRefused, StoreUnavailable; Corrupt if versions are listed that Lance cannot read; OSError of storage.
    """
    opened = _try(store, uri, version, session)
    if isinstance(opened, lance.LanceDataset):
        return opened
    keys = [key for key in store.list(_VERSIONS) if key.endswith(_MANIFEST)]
    if version is not None or not keys:
        return None
    for pause in PAUSES:  # it may have been created, or storage may have recovered, just now
        opened = _try(store, uri, version, session)
        if isinstance(opened, lance.LanceDataset):
            return opened
        store.get(keys[0])  # raises if reading is not allowed
        SystemClock().sleep(pause)
    raise Corrupt(
        f"{uri}: Lance cannot read the newest of {len(keys)} versions ({opened}); after a power cut open it with "
        "`memwal serve`, `memwal run` or memwal.open, which goes back to the version before; else restore it from a "
        "backup"
    )


def _try(store: ObjectStore, uri: str, version: int | None, session: Session | None) -> lance.LanceDataset | str:
    """Return the dataset, or in one line the reason why Lance cannot open it."""
    try:
        with panics_as_errors:
            return lance.dataset(uri, version=version, storage_options=store.storage_options, session=session)
    except (ValueError, RustPanic) as error:
        return first_line(error)


def read_again(store: ObjectStore, prefix: str, read: Callable[[], T]) -> T:
    """Return `read()` of the dataset whose keys begin with `prefix`; retry while Lance fails and storage answers.

    Raises StoreRefused, StoreUnavailable if memwal's own client cannot read an object
    of the dataset; ValueError or RustPanic if Lance failed every time although the client reads all objects, so that
    some are damaged or missing; OSError of storage.
    """
    read = panics_as_errors(read)
    for pause in PAUSES:
        try:
            return read()
        except (ValueError, OSError, RustPanic):
            if not any(_VERSIONS in key for key in store.list(prefix)):
                return read()  # missing, or collected: a collection deletes the manifests first
            SystemClock().sleep(pause)
    try:
        return read()
    except (ValueError, RustPanic):
        for key in store.list(prefix):
            store.get(key)
        raise


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
        self.session = self._new()
        """The present session, to open a dataset with."""

    def opened(self, dataset: lance.LanceDataset) -> None:
        """Record that `dataset`, the newest version, was opened; begin a new session if too many segments are dead."""
        live = {str(segment.uuid) for index in dataset.describe_indices() for segment in index.segments}
        with self._lock:
            self._opened |= live
            if len(self._opened) - len(live) > DEAD_MAX:
                self._opened, self.session = live, self._new()

    def _new(self) -> Session:
        return Session(index_cache_size_bytes=self._index, metadata_cache_size_bytes=self._metadata)
