"""Requests to storage, counted for the whole process by what they are for.

For the whole process, because a table has several stores, which share the connections of an S3 client, and because the
client repeats requests by itself below the store: what is billed is counted where it is sent. A count takes 0.2 µs,
lock included, and a request half a millisecond at least; rows cost nothing.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from typing import Literal, NamedTuple

from memwal.wal.layout import Kind, kind_of

Operation = Literal["get", "put", "list", "delete", "head"]


class RequestKey(NamedTuple):
    """What is counted apart from each other."""

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
        """Count one request for `key`, a key or a prefix of the store, with anything in front of it."""
        counted = RequestKey(remote, kind_of(key), operation)
        with self._lock:
            self._counts[counted] += 1

    def counts(self) -> Counter[RequestKey]:
        """Return the counts as of now."""
        with self._lock:
            return self._counts.copy()

    def restart(self) -> None:
        """Begin at 0."""
        self._lock = threading.Lock()
        self._counts: Counter[RequestKey] = Counter()


REQUESTS = RequestCounts()
"""The requests of this process."""

os.register_at_fork(after_in_child=REQUESTS.restart)  # another thread of the parent may have held the lock
