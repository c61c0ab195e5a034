"""A bound on the bytes that the callers of one client have on their way at the same time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ingest.errors import Unavailable


class InFlight:
    """Room for so many bytes; who finds none waits. What is larger than all of it goes alone.

    Thread safety. Any thread.
    """

    def __init__(self, most: int) -> None:
        """`most`: bytes."""
        self._most, self._taken = most, 0
        self._freed = threading.Condition()

    @contextmanager
    def of(self, size: int, timeout: float) -> Iterator[None]:
        """Hold `size` bytes of room. Raises: Unavailable if there was none for `timeout` seconds; nothing was sent."""
        with self._freed:
            if not self._freed.wait_for(lambda: not self._taken or self._taken + size <= self._most, timeout):
                raise Unavailable(
                    f"{self._taken} bytes are on their way already, and none arrived for {timeout:g} s; retry"
                )
            self._taken += size
        try:
            yield
        finally:
            with self._freed:
                self._taken -= size
                self._freed.notify_all()
