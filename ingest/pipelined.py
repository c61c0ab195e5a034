"""Steps that are waited for in order while the next one is prepared: at most so many bytes of them at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Generic, Self, TypeVar

T = TypeVar("T")

_AT_ONCE = 8


class Pipelined(Generic[T]):
    """Runs steps beside its user, who gets their results in the order in which they were begun.

    Thread safety. One thread. Invariants. More than `most` bytes are under way only where one step alone has more. The
    context ends when every step has.
    """

    def __init__(self, most: int) -> None:
        """`most`: bytes."""
        self._most, self._size = most, 0
        self._under_way: deque[tuple[Future[T], int]] = deque()
        self._pool = ThreadPoolExecutor(_AT_ONCE, "pipelined")

    def begin(self, step: Callable[[], T], size: int) -> Iterator[T]:
        """Begin a step of `size` bytes; the results of those that had to end to make room. Raises: what a step does."""
        while self._under_way and (self._size + size > self._most or len(self._under_way) == _AT_ONCE):
            yield self._oldest()
        self._under_way.append((self._pool.submit(step), size))
        self._size += size

    def rest(self) -> Iterator[T]:
        """The results of all others. Raises: as `begin`."""
        while self._under_way:
            yield self._oldest()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._pool.shutdown(wait=True)

    def _oldest(self) -> T:
        step, size = self._under_way.popleft()
        self._size -= size
        return step.result()
