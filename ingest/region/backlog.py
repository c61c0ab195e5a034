"""How long the rows of a region have waited: when the first row of each generation was applied."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from memwal.wal import Clock


class RowAges:
    """The age of the oldest row of some generations.

    Thread safety. `began` from the region's thread, the rest from anybody.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._opened = clock.monotonic()
        self._since: dict[int, float] = {}

    def began(self, generation: int) -> None:
        """The first row of a generation was applied now."""
        self._since[generation] = self._clock.monotonic()

    def forget_below(self, generation: int) -> None:
        """Older generations are in the base table."""
        for each in [known for known in list(self._since) if known < generation]:
            self._since.pop(each, None)

    def oldest(self, generations: Iterable[int]) -> float | None:
        """Seconds; None of no generation. One that an earlier owner wrote counts from when the region was opened."""
        since = min((self._since.get(generation, self._opened) for generation in generations), default=None)
        return None if since is None else self._clock.monotonic() - since


@dataclass(frozen=True, slots=True)
class Waiting:
    """What one region holds that is not in the base table. Age in seconds, size in bytes."""

    ssts: int
    size: int
    """Of its SSTs."""
    age: float | None
    """Of the oldest row, in an SST or in a memtable; None where nothing waits."""
    unflushed: float | None = None
    """Of the oldest row in a memtable."""

    @staticmethod
    def of_all(regions: Sequence[Waiting]) -> Waiting:
        """What several regions hold, as if they were one: the most SSTs, all bytes, the oldest rows."""
        ages = [region.age for region in regions if region.age is not None]
        unflushed = [region.unflushed for region in regions if region.unflushed is not None]
        return Waiting(
            max((region.ssts for region in regions), default=0),
            sum(region.size for region in regions),
            max(ages, default=None),
            max(unflushed, default=None),
        )
