"""Counts of requests to storage, for the whole process, by category.

The counts are per process because a table has several stores that share the connections of an S3 client. They are taken
where requests are sent, because the client repeats requests below the store and every sent request is billed. A count
takes 0.2 µs, lock included, and a request at least half a millisecond; rows cost nothing.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from typing import Literal, NamedTuple

from memwal.wal.layout import Kind, kind_of

Operation = Literal["get", "put", "list", "delete", "head"]


class RequestKey(NamedTuple):
    """The properties that distinguish counted requests."""

    remote: bool
    """Whether the request went to an object store, which may charge for it; False: to local files."""
    kind: Kind
    operation: Operation


class RequestCounts:
    """Counts requests.

    Thread safety. Any thread.
    Invariants. A count never decreases; a forked child begins at 0.
    """

    def __init__(self) -> None:
        self.restart()

    def add(self, operation: Operation, key: str, *, remote: bool = False) -> None:
        """Count one request for `key`, a key or a prefix of the store, which may have anything before it."""
        counted = RequestKey(remote, kind_of(key), operation)
        with self._lock:
            self._counts[counted] += 1

    def counts(self) -> Counter[RequestKey]:
        """Return the current counts."""
        with self._lock:
            return self._counts.copy()

    def restart(self) -> None:
        """Reset all counts to 0."""
        self._lock = threading.Lock()
        self._counts: Counter[RequestKey] = Counter()


REQUESTS = RequestCounts()
"""The requests of this process."""

os.register_at_fork(after_in_child=REQUESTS.restart)  # another thread of the parent may have held the lock
