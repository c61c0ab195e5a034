"""Reads the logs of the regions that this daemon would take over, so that a take-over has little left to read.

Reading an entry takes half a millisecond and more, however small it is, and a region may have a thousand: most of a
take-over would be spent on it. Rows that are read here are shown to nobody before the region is claimed. What it costs
is bounded: at most `MOST` entries of a region at each look, and `wal.read_ahead.BYTES_MAX` of memory.

A region that is asked for is looked at once more just before, so that its owner need not flush it first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from uuid import UUID

from memwal import wal
from memwal.ingest.table.embedded import Table
from memwal.ingest.threads import Periodic

_LOG = logging.getLogger("memwal.standby")
MOST = 500
"""Entries of a region that are read at a look. Where more come, a take-over reads what is left."""
MOST_BEFORE_ASKING = 64
"""The same just before the region is asked for. This must take less than `balancer.ASKED_WITHIN`, after which an ending
daemon waits no more to be asked. On S3 it takes about ten round trips; a log with more to read is flushed."""
PATIENCE_BEFORE_ASKING = 0.5
"""Seconds that such a look waits for a look of the standby's own."""


class Standby:
    """What was read of the logs of the regions that `regions` returns. Thread safety. Every method from any thread."""

    def __init__(self, table: Table, regions: Callable[[], Sequence[UUID]], every: float) -> None:
        """`every`: seconds between two looks; 0 reads nothing."""
        self._table, self._regions = table, regions
        self.read: dict[UUID, wal.ReadAhead] = {}
        """By region, as far as it was read."""
        self._looks = Periodic("read-ahead", self._look, every)

    def start(self) -> None:
        """Begin to read, after one interval."""
        self._looks.start()

    def stop(self) -> None:
        """End the thread; the region under way is finished first."""
        self._looks.stop()
        self.read.clear()

    def look(self, region: UUID, most: int = MOST, patience: float = -1) -> int:
        """Read now at most `most` new entries of `region`; return the position up to which its log was read.

        `patience`: as of `ReadAhead.look`.
        """
        context = self._table.regions.context
        known = self.read.get(region)
        if known is None or known.codec is not context.codec:
            known = wal.ReadAhead(
                context.store, region, context.codec, clock=context.clock, options=context.wal_options
            )
            self.read[region] = known
        try:
            known.look(most, patience)
        except Exception as error:  # noqa: BLE001 - a claim reads what is missing here
            _LOG.debug("region %s cannot be read ahead, will try again: %s", region, error)
        return known.position

    def take(self, region: UUID) -> wal.ReadAhead | None:
        """Return what was read of `region`, None if nothing was; it is forgotten here."""
        return self.read.pop(region, None)

    def _look(self) -> None:
        regions = self._regions()
        for region in [known for known in list(self.read) if known not in regions]:
            self.take(region)
        for region in regions:
            self.look(region)
