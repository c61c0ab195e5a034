"""A single daemon after another writer took regions of it: it claims them again, or ends.

A fenced writer serves no more calls, and no other daemon may do so either. In steps:

1. **It is noticed** by the next write, by a request of /health/readyz, or by a look at the region manifests every
   `LOOK_EVERY` seconds. Calls get the fence meanwhile, and /health/readyz reports it.
2. **`daemon.claim_again` later** the owners' notes tell who has the regions (`ingest.table.live_owners`). If that
   writer lives, or may live, it keeps them: this daemon ends with exit code 1. If it is about to end, we wait.
3. **Its note says that it has gone**: the regions are claimed again, and their logs replayed. *Rows that it acked are
   in the log; rows that we did not ack may be missing.*
4. **It left no note** (Lance's own writers do not): its regions must not have changed for a whole pause, since a claim
   would fence a writer in the middle of its work. So we wait as long as it writes.

A resize fences regions too, and ends by itself: it is not another writer (`ingest.table.resize`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from contextlib import suppress
from uuid import UUID

from memwal import wal
from memwal.ingest.errors import FencedError, MemWalError
from memwal.ingest.region.writer import RegionWriter
from memwal.ingest.table.embedded import Table
from memwal.ingest.table.live_owners import LiveOwners

_LOG = logging.getLogger("memwal.daemon")
LOOK_EVERY = 10.0
"""Seconds between two looks at the region manifests if nobody asks whether this daemon is ready. A look reads a few
small objects of each region and writes nothing."""
Seen = dict[UUID, tuple[int, int]]
"""By region: the version of its manifest and the newest position of its log."""


class ClaimsAgain:
    """Notices that another writer took regions of a table that this daemon serves alone, and claims them again.

    Thread safety. `notice` from any thread, `look` from one.
    """

    def __init__(self, table: Table, owners: LiveOwners, clock: wal.Clock, pause: float) -> None:
        """`pause`: seconds, `daemon.claim_again`."""
        self._table, self._owners, self._clock, self._pause = table, owners, clock, pause
        self._noticing = threading.Lock()
        self._noticed, self._since = clock.monotonic(), 0.0
        self._seen: Seen | None = None

    def notice(self, every: float = 0.0) -> None:
        """Look at the region manifests, so that fenced writers fail; at most once in `every` seconds."""
        with self._noticing:
            now = self._clock.monotonic()
            if now - self._noticed < every:
                return
            self._noticed = now
            for writer in self._table.regions.alive:
                with suppress(wal.WalError, MemWalError):  # a fenced writer has its failure set now
                    writer.refresh()

    def look(self) -> FencedError | None:
        """Take one step of the module's docstring; return why this daemon has to end, None if it goes on. Raises:
        errors of storage; then call it again.
        """
        self.notice(LOOK_EVERY)
        fenced = [each for each in self._table.regions.writers if isinstance(each.failure, wal.Fenced)]
        if not fenced or self._table.resizing.under_way() is not None:
            self._seen = None
            return None
        now = self._clock.monotonic()
        if self._seen is None:
            _LOG.warning("%s; looking for its owner in %g s", fenced[0].failure, self._pause)
            self._seen, self._since = self._state(fenced), now
        if now - self._since < self._pause:
            return None
        found = [each for each in self._owners.find() if each.state != "free"]
        if self._pause == 0 or any(each.state in ("lives", "unknown") for each in found):
            return _ends(fenced[0], found)
        seen = self._state(fenced)
        if found or (seen != self._seen and self._left_no_note(fenced)):
            self._seen, self._since = seen, now
            return None
        self._claim(fenced)
        return None

    def _claim(self, fenced: Sequence[RegionWriter]) -> None:
        for writer in fenced:
            epoch = self._table.acquire(writer.region)
            _LOG.warning("region %s is served here again, with writer epoch %d", writer.region, epoch)
        self._seen = None

    def _left_no_note(self, fenced: Sequence[RegionWriter]) -> bool:
        """Return whether one of these regions was taken by a writer that left no note."""
        epochs = self._owners.epochs()
        manifests = ((each.region, self._manifest(each.region)) for each in fenced)
        return any(found is not None and epochs.get(region, 0) < found.writer_epoch for region, found in manifests)

    def _state(self, fenced: Sequence[RegionWriter]) -> Seen:
        context, seen = self._table.regions.context, Seen()
        for region in (each.region for each in fenced):
            manifest = self._manifest(region)
            if manifest is not None:
                tip = wal.find_tip(context.store, region, context.codec.suffix, manifest.last_seen)
                seen[region] = (manifest.version, tip)
        return seen

    def _manifest(self, region: UUID) -> wal.RegionManifest | None:
        return wal.ManifestStore(self._table.regions.context.store, region, clock=self._clock).latest()


def _ends(writer: RegionWriter, found: Sequence[object]) -> FencedError:
    fence = writer.failure
    assert isinstance(fence, wal.Fenced)
    by = f", {'; '.join(map(str, found))}" if found else ""
    text = (
        f"region {writer.region}: writer epoch {fence.ours} was fenced by epoch {fence.theirs}{by}; this daemon ends, "
        "acknowledged rows are in the log"
    )
    return FencedError(text, {"ours": fence.ours, "theirs": fence.theirs})
