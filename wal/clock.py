"""Time, waiting and randomness: the only module that asks the operating system for them.

Everything else takes a `Clock` and an `Ids` as parameters, so that a test or a simulation decides what time
it is, and so that one seed gives one run. A house test bans the direct calls elsewhere.
"""

from __future__ import annotations

import random
import threading
import time
import uuid
from typing import Protocol
from uuid import UUID


class Clock(Protocol):
    """Time and waiting. Thread safety: any thread."""

    def now(self) -> float:
        """Unix time in seconds; for display and file ages only, never for ownership or visibility."""
        ...

    def monotonic(self) -> float:
        """Seconds since an arbitrary moment; never goes back."""
        ...

    def sleep(self, seconds: float) -> None:
        """Wait for `seconds`."""
        ...


class Ids(Protocol):
    """Fresh identifiers. Thread safety: any thread."""

    def entry_id(self) -> str:
        """32 lower-case hex digits (128 bits): identity of one entry or of one manifest version."""
        ...

    def token(self) -> str:
        """8 lower-case hex digits: the random part of a directory name."""
        ...

    def uuid(self) -> UUID:
        """A random (version 4) UUID."""
        ...


class SystemClock:
    """The machine's clock. Thread safety: any thread."""

    def now(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class SystemIds:
    """Identifiers from the operating system's random source. Thread safety: any thread."""

    def entry_id(self) -> str:
        return uuid.uuid4().hex

    def token(self) -> str:
        return uuid.uuid4().hex[:8]

    def uuid(self) -> UUID:
        return uuid.uuid4()


class FakeClock:
    """A clock that moves only when told to, or when somebody sleeps on it.

    Thread safety. Any thread.
    Invariants. `sleep(s)` returns at once and moves both readings by `s`; `slept` lists every sleep in order.
    """

    def __init__(self, start: float = 1_700_000_000.0) -> None:
        self._lock = threading.Lock()
        self._start = start
        self._elapsed = 0.0
        self.slept: list[float] = []

    def now(self) -> float:
        with self._lock:
            return self._start + self._elapsed

    def monotonic(self) -> float:
        with self._lock:
            return self._elapsed

    def sleep(self, seconds: float) -> None:
        with self._lock:
            self.slept.append(seconds)
            self._elapsed += seconds

    def advance(self, seconds: float) -> None:
        """Move time forward by `seconds` without anybody having slept."""
        with self._lock:
            self._elapsed += seconds


class SeededIds:
    """Identifiers from a seed: the same seed gives the same sequence. Thread safety: any thread."""

    def __init__(self, seed: int = 0) -> None:
        self._lock = threading.Lock()
        self._random = random.Random(seed)  # noqa: S311 -- repeatable is the point

    def _bits(self, count: int) -> int:
        with self._lock:
            return self._random.getrandbits(count)

    def entry_id(self) -> str:
        return f"{self._bits(128):032x}"

    def token(self) -> str:
        return f"{self._bits(32):08x}"

    def uuid(self) -> UUID:
        return UUID(int=self._bits(128), version=4)
