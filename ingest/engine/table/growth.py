"""Decide when a table with `regions.count = "auto"` gets twice as many regions.

The process that commits for the table decides, about once a second, by counters that it has anyway: the rows put into
its busiest region over `OVER` seconds, or the rows of the base table per region, exceed their limit. Nothing happens
for `regions.split_interval` after a split or the opening. The number never shrinks by itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from uuid import UUID

from memwal.ingest.engine.table.regions import RegionSet
from memwal.ingest.engine.table.upkeep import TableUpkeep
from memwal.ingest.settings.sections import RegionsSettings

OVER = 5.0
"""Seconds over which the rate of puts is measured, so that a burst splits no table."""


class Growth:
    """The growth of one table. Thread safety. One thread."""

    def __init__(self, regions: RegionSet, steps: TableUpkeep, limits: RegionsSettings) -> None:
        self._regions, self._steps, self.limits = regions, steps, limits
        self._since = regions.context.clock.monotonic()
        self._counted: deque[tuple[float, Mapping[UUID, int]]] = deque()

    def due(self) -> int | None:
        """Return the number of regions that the table should have from now on; None: the present one."""
        now, limits, number = self._regions.context.clock.monotonic(), self.limits, len(self._regions.order)
        grows = self._rate(now) > limits.split_rate or self._steps.rows > limits.split_rows * number
        if not grows or 2 * number > limits.count_max or now - self._since < limits.split_interval:
            return None
        if not self._steps.leading or self._steps.failures:  # a region that cannot be committed cannot be moved
            return None
        self._since = now
        return 2 * number

    def _rate(self, now: float) -> float:
        """Return the rows per second put into the busiest region here."""
        meters = {writer.region: self._regions.context.meters.of(writer.region) for writer in self._regions.alive}
        rows = {region: meter.rows_put + meter.rows_deleted for region, meter in meters.items()}
        self._counted.append((now, rows))
        while len(self._counted) > 1 and self._counted[1][0] <= now - OVER:
            self._counted.popleft()
        began, before = self._counted[0]
        put = max((rows[region] - before.get(region, rows[region]) for region in rows), default=0)
        return put / max(OVER, now - began)
