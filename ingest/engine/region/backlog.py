"""Measure how long a region's rows have waited for the base table, and how many bytes wait."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from memwal.wal import Clock


class RowAges:
    """The time at which the first row of each generation was applied.

    Thread safety. `began` from the region's thread, the rest from any thread.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._opened = clock.monotonic()
        self._since: dict[int, float] = {}

    def began(self, generation: int) -> None:
        """Record that the first row of a generation is applied now."""
        self._since[generation] = self._clock.monotonic()

    def forget_below(self, generation: int) -> None:
        """Forget all generations below `generation`: they are in the base table."""
        for committed in [known for known in list(self._since) if known < generation]:
            self._since.pop(committed, None)

    def oldest(self, generations: Iterable[int]) -> float | None:
        """Return the age of the oldest row of `generations` in seconds, None if `generations` is empty.

        A generation that an earlier owner wrote counts from the time at which the region was opened.
        """
        since = min((self._since.get(generation, self._opened) for generation in generations), default=None)
        return None if since is None else self._clock.monotonic() - since


@dataclass(frozen=True, slots=True)
class Backlog:
    """The rows of one region that are not in the base table. Ages in seconds, sizes in bytes."""

    ssts: int
    size: int
    """Total size of the SSTs."""
    age: float | None
    """Age of the oldest row in an SST or memtable; None if no row waits."""
    unflushed: float | None = None
    """Age of the oldest row in a memtable; None if the memtables are empty."""

    @staticmethod
    def of_all(regions: Sequence[Backlog]) -> Backlog:
        """Return the combined backlog of several regions: the largest number of SSTs, the sum of bytes, the oldest
        rows.
        """
        ages = [region.age for region in regions if region.age is not None]
        unflushed = [region.unflushed for region in regions if region.unflushed is not None]
        return Backlog(
            max((region.ssts for region in regions), default=0),
            sum(region.size for region in regions),
            max(ages, default=None),
            max(unflushed, default=None),
        )
