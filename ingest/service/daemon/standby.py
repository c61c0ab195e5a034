"""Read ahead the logs of the regions that this daemon would take over, so that a takeover has little left to read.

Reading an entry takes at least half a millisecond, however small it is, and a region may have a thousand: a takeover
would spend most of its time on them. Rows that are read here are visible to no reader before the region is claimed.
The cost is bounded: at most `MOST` entries of a region each time, and `wal.read_ahead.BYTES_MAX` of memory.

The log of a region is read once more just before this daemon requests the region, so that its owner need not flush
it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from memwal import wal
from memwal.ingest.engine.table.embedded import Table
from memwal.ingest.service.daemon.placement import TableRegion
from memwal.ingest.threads import Periodic

_LOG = logging.getLogger("memwal.standby")
MOST = 500
"""Maximum entries of a region that are read each time. A takeover reads what is left."""
MOST_BEFORE_ASKING = 64
"""The limit just before the region is requested. The read must take less than `balancer.ASKED_WITHIN`, after which an
ending daemon stops waiting for requests. On S3 it takes about ten round trips; the owner flushes a longer log."""
PATIENCE_BEFORE_ASKING = 0.5
"""Seconds that this read waits for a running periodic read."""


class Standby:
    """The entries read ahead of the regions that `regions` returns. Thread safety. Every method from any thread."""

    def __init__(self, tables: Mapping[str, Table], regions: Callable[[], Sequence[TableRegion]], every: float) -> None:
        """Prepare. `tables`: the open tables by name. `every`: seconds between two reads; 0 reads nothing."""
        self._tables, self._regions = tables, regions
        self.read: dict[TableRegion, wal.ReadAhead] = {}
        """By region, the entries read so far."""
        self._looks = Periodic("read-ahead", self._look, every)

    def start(self) -> None:
        """Start reading after one interval."""
        self._looks.start()

    def stop(self) -> None:
        """End the thread; the region being read is finished first."""
        self._looks.stop()
        self.read.clear()

    def look(self, region: TableRegion, most: int = MOST, patience: float = -1) -> int:
        """Read at most `most` new entries of `region` now; return the newest position read of its log.

        Reads nothing if its table is not open. `patience`: see `ReadAhead.look`.
        """
        if (table := self._tables.get(region.table)) is None:
            return 0
        context = table.regions.context
        known = self.read.get(region)
        if known is None or known.codec is not context.codec:
            known = wal.ReadAhead(
                context.store, region.id, context.codec, clock=context.clock, options=context.wal_options
            )
            self.read[region] = known
        try:
            known.look(most, patience)
        except Exception as error:  # noqa: BLE001 - a claim reads what is missing here
            _LOG.debug("%s cannot be read ahead, will try again: %s", region, error)
        return known.position

    def take(self, region: TableRegion) -> wal.ReadAhead | None:
        """Remove and return the entries read of `region`; None if nothing was read."""
        return self.read.pop(region, None)

    def _look(self) -> None:
        regions = self._regions()
        for region in [known for known in list(self.read) if known not in regions]:
            self.take(region)
        for region in regions:
            self.look(region)
