"""A store in this process's memory, for tests and simulation."""

from __future__ import annotations

import threading

from wal.store import PutOutcome


class MemoryStore:
    """Objects in a dict.

    Thread safety. Any thread; one lock.
    Durability. None: the objects end with the process.
    """

    def __init__(self) -> None:
        self.storage_options: dict[str, str] = {}
        self._objects: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def put_if_absent(self, key: str, data: bytes) -> PutOutcome:
        with self._lock:
            if key in self._objects:
                return PutOutcome.ALREADY_EXISTS
            self._objects[key] = bytes(data)
            return PutOutcome.CREATED

    def put(self, key: str, data: bytes) -> None:
        with self._lock:
            self._objects[key] = bytes(data)

    def get(self, key: str) -> bytes | None:
        with self._lock:
            return self._objects.get(key)

    def exists(self, key: str) -> bool:
        with self._lock:
            return key in self._objects

    def children(self, prefix: str) -> list[str]:
        below = (key[len(prefix) :].partition("/") for key in self.list(prefix))
        return sorted({name for name, slash, _ in below if slash})

    def list(self, prefix: str) -> list[str]:
        with self._lock:
            return [key for key in self._objects if key.startswith(prefix)]

    def delete(self, key: str) -> None:
        with self._lock:
            self._objects.pop(key, None)

    def url(self, key: str) -> str:
        """A name for messages; pylance has no access to this memory."""
        return f"memory://{key}"
