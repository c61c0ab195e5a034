"""Limits of the log's storage calls."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WalOptions:
    """How long one write is tried.

    Invariants. `0 < put_timeout <= retry_budget`, checked when built (ValueError).
    """

    put_timeout: float = 10.0
    """Seconds one attempt may take. No attempt begins with less than this left of the budget."""
    retry_budget: float = 30.0
    """Seconds after which a write without an answer is given up as OutcomeUnknown."""

    def __post_init__(self) -> None:
        if not 0 < self.put_timeout <= self.retry_budget:
            raise ValueError(
                f"wal.put_timeout {self.put_timeout:g}s must be above 0 and at most "
                f"wal.retry_budget {self.retry_budget:g}s"
            )
