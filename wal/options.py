"""Limits of the log's storage calls."""

from __future__ import annotations

from dataclasses import dataclass

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
