"""Run independent requests to storage concurrently."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self, TypeVar

T = TypeVar("T")


class Beside:
    """A context whose calls run concurrently with the caller's thread.

    Thread safety. One thread begins the calls.
    Invariants. (1) With one worker no thread is started: `begin` runs the call. (2) No call outlives the context.
    """

    def __init__(self, workers: int) -> None:
        """`workers`: 1 starts no thread."""
        self._pool = ThreadPoolExecutor(workers, "beside") if workers > 1 else None

    def begin(self, call: Callable[[], T]) -> Future[T]:
        """Start `call` and return a future of its result or error. With one worker, `begin` raises the error."""
        if self._pool is not None:
            return self._pool.submit(call)
        done: Future[T] = Future()
        done.set_result(call())
        return done

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
