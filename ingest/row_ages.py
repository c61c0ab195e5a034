"""How long the rows of a region have waited: when the first row of each generation was applied."""

from __future__ import annotations

from collections.abc import Iterable

from wal import Clock


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
