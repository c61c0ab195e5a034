"""Pauses between attempts (`Backoff`), and how long a storage call is retried: growing pauses within one budget.

The budget applies to writes and reads. A write that must be settled (`wal.slot`) counts its attempts itself, because
their outcomes decide which error it raises. `RetriedReads` retries a read and raises the last attempt's error. A
configuration that storage refuses (StoreRefused) is never retried.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from memwal.wal.clock import Clock, Ids
from memwal.wal.errors import StoreUnavailable
from memwal.wal.store.port import ObjectInfo, ObjectStore, PutOutcome

CLOCK_RATE = 1.1
"""Maximum ratio between the speeds of two machines' clocks; see `wal.lease`."""


@dataclass(frozen=True)
class WalOptions:
    """How long one storage call is retried, and how many entries are read concurrently.

    Invariants. `0 < put_timeout <= retry_budget` and `readers >= 1`, checked when built (ValueError).
    """

    put_timeout: float = 10.0
    """Seconds that one attempt may take. No attempt begins with less than this left of the budget."""
    retry_budget: float = 30.0
    """Seconds after which a write without an answer raises OutcomeUnknown, and a read StoreUnavailable."""
    readers: int = 1
    """Entries that replay reads and decodes concurrently. 1: in the caller's thread, one store call after another."""
    read_lease: float = 0.0
    """How long, in seconds, an owner answers reads from memory after a proof of ownership; see `wal.lease`."""

    def __post_init__(self) -> None:
        if not 0 < self.put_timeout <= self.retry_budget:
            raise ValueError(
                f"wal.put_timeout {self.put_timeout:g}s must be above 0 and at most "
                f"wal.retry_budget {self.retry_budget:g}s"
            )
        if self.readers < 1:
            raise ValueError(f"wal.readers {self.readers} must be at least 1")


_FIRST_PAUSE = 0.02
_LONGEST_PAUSE = 1.0

Answer = TypeVar("Answer")


class Backoff:
    """Doubling pauses between attempts.

    Thread safety. One thread.
    """

    def __init__(self, first: float, longest: float, jitter: Ids | None = None) -> None:
        """`first`, `longest`: seconds. `jitter`: multiplies each pause by a random factor from 0.5 to 1, for callers
        that fail together and would otherwise retry together.
        """
        self._first, self._longest, self._jitter = first, longest, jitter
        self.next = first
        """The next pause in seconds, without jitter."""

    def pause(self) -> float:
        """Return the seconds to wait after a failed attempt; the next pause is twice as long."""
        pause, self.next = self.next, min(2 * self.next, self._longest)
        return pause if self._jitter is None else pause * (0.5 + int(self._jitter.token(), 16) / 2**33)

    def reset(self) -> None:
        """Start again from the first pause, after a success."""
        self.next = self._first


class RetryBudget:
    """Pauses between the attempts at one call, doubling from 20 ms to 1 s.

    Thread safety. One thread.
    Invariants. No attempt begins with less than `options.put_timeout` left of `options.retry_budget`.
    """

    def __init__(self, clock: Clock, options: WalOptions) -> None:
        """Start the budget; create it when the first attempt has just failed."""
        self._clock, self._options = clock, options
        self._began, self._backoff = clock.monotonic(), Backoff(_FIRST_PAUSE, _LONGEST_PAUSE)
        self.seconds = 0.0
        """Seconds since the first attempt failed, as of the last `wait`."""

    def wait(self) -> bool:
        """Pause before the next attempt. Return False immediately if that attempt could not end within the budget."""
        self.seconds = self._clock.monotonic() - self._began
        if self.seconds + self._backoff.next + self._options.put_timeout > self._options.retry_budget:
            return False
        self._clock.sleep(self._backoff.pause())
        return True


class RetriedReads:
    """An object store whose reads are retried while it is unavailable.

    Thread safety. As the store's; each call has its own budget.
    Invariants. (1) Writes and deletions pass through, once. (2) A read ends within `options.retry_budget` of its first
    failure, as long as the store keeps its timeouts, and then raises StoreUnavailable. (3) StoreRefused is raised at
    once.
    """

    def __init__(self, store: ObjectStore, clock: Clock, options: WalOptions) -> None:
        self.storage_options, self.remote = store.storage_options, store.remote
        self._store, self._clock, self._options = store, clock, options

    def get(self, key: str) -> bytes | None:
        """Retry the store's `get`."""
        return self._retried(lambda: self._store.get(key))

    def exists(self, key: str) -> bool:
        """Retry the store's `exists`."""
        return self._retried(lambda: self._store.exists(key))

    def children(self, prefix: str) -> list[str]:
        """Retry the store's `children`."""
        return self._retried(lambda: self._store.children(prefix))

    def describe(self, prefix: str) -> list[ObjectInfo]:
        """Retry the store's `describe`."""
        return self._retried(lambda: self._store.describe(prefix))

    def leftovers(self, prefix: str) -> list[ObjectInfo]:
        """Retry the store's `leftovers`."""
        return self._retried(lambda: self._store.leftovers(prefix))

    def list_some(self, prefix: str, most: int) -> list[str]:
        """Retry the store's `list_some`."""
        return self._retried(lambda: self._store.list_some(prefix, most))

    def list(self, prefix: str) -> list[str]:
        """Retry the store's `list`."""
        return self._retried(lambda: self._store.list(prefix))

    def put_if_absent(self, key: str, data: bytes) -> PutOutcome:
        """Call the store once: `wal.slot.put_until_known` handles each outcome."""
        return self._store.put_if_absent(key, data)

    def put(self, key: str, data: bytes) -> None:
        """Call the store once: a hint may be lost."""
        self._store.put(key, data)

    def delete(self, key: str) -> None:
        """Call the store once."""
        self._store.delete(key)

    def remove_leftovers(self, prefix: str) -> None:
        """Call the store once."""
        self._store.remove_leftovers(prefix)

    def url(self, key: str) -> str:
        """Return the store's `url`."""
        return self._store.url(key)

    def _retried(self, read: Callable[[], Answer]) -> Answer:
        budget: RetryBudget | None = None
        attempts = 0
        while True:
            try:
                return read()
            except StoreUnavailable as error:
                attempts += 1
                budget = budget or RetryBudget(self._clock, self._options)
                if not budget.wait():
                    raise StoreUnavailable(f"{error} ({attempts} attempts in {budget.seconds:.1f}s)") from error


def with_retried_reads(store: ObjectStore, clock: Clock, options: WalOptions) -> RetriedReads:
    """Return `store` with retried reads; `store` itself if it has them, so that one budget is not spent twice."""
    return store if isinstance(store, RetriedReads) else RetriedReads(store, clock, options)
