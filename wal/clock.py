"""Time, waiting and randomness: the only module that takes them from the operating system.

All other code takes a `Clock` and an `Ids` as parameters, so that a test or a simulation sets the time and one seed
gives one run. A house test bans the direct calls elsewhere.
"""

from __future__ import annotations

import time
import uuid
from typing import Protocol
from uuid import UUID


class Clock(Protocol):
    """Time and waiting. Thread safety: any thread."""

    def now(self) -> float:
        """Return the Unix time in seconds. For display and for the ages of files and of rows with a ttl; never for
        ownership.
        """

    def monotonic(self) -> float:
        """Return the seconds since an arbitrary moment; never decreases."""

    def sleep(self, seconds: float) -> None:
        """Wait for `seconds`."""


Instant = tuple[float, float]
"""The monotonic clock and the wall clock of a process at one moment, in seconds. Measuring the time since a moment
needs both: the monotonic clock stops while a machine is suspended, and the wall clock may be set back.
"""
NEVER: Instant = (float("-inf"), float("-inf"))


def instant(clock: Clock) -> Instant:
    """Return this moment."""
    return clock.monotonic(), clock.now()


def since(clock: Clock, then: Instant) -> float:
    """Return the seconds since `then`, by the clock that shows more."""
    return max(clock.monotonic() - then[0], clock.now() - then[1])


class Ids(Protocol):
    """Fresh identifiers. Thread safety: any thread."""

    def entry_id(self) -> str:
        """Return 32 lower-case hex digits (128 bits): identity of one entry or of one manifest version."""

    def token(self) -> str:
        """Return 8 lower-case hex digits: the random part of a directory name."""

    def uuid(self) -> UUID:
        """Return a random (version 4) UUID."""


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
