"""An answer that one thread gives and another waits for."""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

T = TypeVar("T")


class Pending(Generic[T]):
    """A value, or the error in its place, that comes once.

    Why not `concurrent.futures.Future`: it makes a condition, a lock and two lists for each, and waiting costs as much
    again; this is one lock used as a latch. With thousands of callers it counts.
    Thread safety. `set_result` or `set_exception` once, by whoever answers; the rest from any thread.
    """

    __slots__ = ("_answered", "_error", "_latch", "_value")

    def __init__(self) -> None:
        self._latch = threading.Lock()
        self._latch.acquire()
        self._answered = False
        self._value: T | None = None
        self._error: BaseException | None = None

    def set_result(self, value: T) -> None:
        """Answer with a value; wakes whoever waits."""
        self._value = value
        self._answered = True
        self._latch.release()

    def set_exception(self, error: BaseException) -> None:
        """Answer with an error; wakes whoever waits."""
        self._error = error
        self._answered = True
        self._latch.release()

    def done(self) -> bool:
        """Whether the answer is there."""
        return self._answered

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The error, None where the answer is a value. Raises: TimeoutError when none came in `timeout` seconds."""
        if not self._answered:
            if not self._latch.acquire(
                timeout=-1 if timeout is None else max(0.0, min(timeout, threading.TIMEOUT_MAX))
            ):
                raise TimeoutError(f"no answer within {timeout} s")
            self._latch.release()  # for the next that waits
        return self._error

    def result(self, timeout: float | None = None) -> T:
        """The value. Raises: the error in its place, TimeoutError when neither came in `timeout` seconds."""
        error = self.exception(timeout)
        if error is not None:
            raise error
        return self._value  # type: ignore[return-value]  # answered, and not with an error
