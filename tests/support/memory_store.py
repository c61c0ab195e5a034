"""An object store in this process's memory."""

from __future__ import annotations

import threading
from collections.abc import Callable

from memwal.wal.store.port import ObjectInfo, PutOutcome


class MemoryStore:
    """Objects in a dict.

    Thread safety. Any thread; one lock.
    Durability. None: the objects end with the process.
    """

    remote = False

    def __init__(self, now: Callable[[], float] = float) -> None:
        """`now`: Unix seconds, for `describe`; without it every object is as old as the epoch."""
        self.storage_options: dict[str, str] = {}
        self._now = now
        self._objects: dict[str, bytes] = {}
        self._modified: dict[str, float] = {}
        self._lock = threading.Lock()

    def put_if_absent(self, key: str, data: bytes) -> PutOutcome:
        with self._lock:
            if key in self._objects:
                return PutOutcome.ALREADY_EXISTS
            self._keep(key, data)
            return PutOutcome.CREATED

    def put(self, key: str, data: bytes) -> None:
        with self._lock:
            self._keep(key, data)

    def get(self, key: str) -> bytes | None:
        with self._lock:
            return self._objects.get(key)

    def exists(self, key: str) -> bool:
        with self._lock:
            return key in self._objects

    def children(self, prefix: str) -> list[str]:
        below = (key[len(prefix) :].partition("/") for key in self.list(prefix))
        return sorted({name for name, slash, _ in below if slash})

    def describe(self, prefix: str) -> list[ObjectInfo]:
        with self._lock:
            found = [(key, data) for key, data in self._objects.items() if key.startswith(prefix)]
            return [ObjectInfo(key, len(data), self._modified[key]) for key, data in found]

    def leftovers(self, prefix: str) -> list[ObjectInfo]:
        return []

    def list_some(self, prefix: str, most: int) -> list[str]:
        return self.list(prefix)[:most]

    def list(self, prefix: str) -> list[str]:
        with self._lock:
            return [key for key in self._objects if key.startswith(prefix)]

    def delete(self, key: str) -> None:
        with self._lock:
            self._objects.pop(key, None)

    def remove_leftovers(self, prefix: str) -> None:
        """Do nothing: a put leaves nothing behind."""

    def url(self, key: str) -> str:
        """Return a name for messages; pylance has no access to this memory."""
        return f"memory://{key}"

    def _keep(self, key: str, data: bytes) -> None:
        self._objects[key], self._modified[key] = bytes(data), self._now()
