"""A clock that only the test moves, and ids from a seed, which replace the system's."""

from __future__ import annotations

import random
import threading
from uuid import UUID


class FakeClock:
    """A clock that moves only by `advance` or `sleep`.

    Thread safety. Any thread.
    Invariants. `sleep(s)` returns at once and moves both readings by `s`; `slept` lists every sleep in order.
    """

    def __init__(self, start: float = 1_700_000_000.0) -> None:
        self._lock = threading.Lock()
        self.start = start
        """Unix seconds at the beginning. A test that changes it moves the wall clock alone."""
        self._elapsed = 0.0
        self.slept: list[float] = []

    def now(self) -> float:
        with self._lock:
            return self.start + self._elapsed

    def monotonic(self) -> float:
        with self._lock:
            return self._elapsed

    def sleep(self, seconds: float) -> None:
        with self._lock:
            self.slept.append(seconds)
            self._elapsed += seconds

    def advance(self, seconds: float) -> None:
        """Move time forward by `seconds` without a sleep."""
        with self._lock:
            self._elapsed += seconds


class SeededIds:
    """Identifiers from a seed: the same seed gives the same sequence. Thread safety: any thread."""

    def __init__(self, seed: int = 0) -> None:
        self._lock = threading.Lock()
        self._random = random.Random(seed)

    def _bits(self, count: int) -> int:
        with self._lock:
            return self._random.getrandbits(count)

    def entry_id(self) -> str:
        return f"{self._bits(128):032x}"

    def token(self) -> str:
        return f"{self._bits(32):08x}"

    def uuid(self) -> UUID:
        return UUID(int=self._bits(128), version=4)
