"""What a daemon that is alone does once another writer has taken regions of it: claims them again, or ends.

A fenced writer serves nothing any more, and nobody else may be there to. In steps:

1. **It is noticed** by the next write, by whoever asks /health/readyz, or by a look at the region manifests every
   `LOOK_EVERY` seconds. Readers of storage and clients are told meanwhile; /health/readyz says so.
2. **`daemon.claim_again` later** the owners' notes are asked who has the regions (`ingest.table.live_owners`). A writer
   that lives, or may live, keeps them: this daemon ends with exit code 1. One that ends is waited for.
3. **Its note says that it has gone**: the regions are claimed again, and their logs replayed. *What it was acked for is
   in the log; what we were not acked for is not.*
4. **It left no note** (Lance's own writers do not): its regions must have stood still for a whole pause, since one that
   still writes would be fenced in the middle of it. So it is waited for as long as it writes.

A resize fences regions too, and gives them back itself: that is no other writer (`ingest.table.resize`).
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
"""Seconds between two looks at the region manifests where nobody asks whether this daemon is ready. A look reads a few
small objects of each region and writes nothing."""
Seen = dict[UUID, tuple[int, int]]
"""Of each region: the version of its manifest and the newest position of its log."""


class ClaimsAgain:
    """Looks whether regions of a table that this daemon serves alone were taken, and takes them back.

    Thread safety. `notice` from any thread, `look` from one.
    """

    def __init__(self, table: Table, owners: LiveOwners, clock: wal.Clock, pause: float) -> None:
        """`pause`: seconds, `daemon.claim_again`."""
        self._table, self._owners, self._clock, self._pause = table, owners, clock, pause
        self._noticing = threading.Lock()
        self._noticed, self._since = clock.monotonic(), 0.0
        self._seen: Seen | None = None

    def notice(self, every: float = 0.0) -> None:
        """Look whether regions were taken, so that their writers fail; not again within `every` seconds."""
        with self._noticing:
            now = self._clock.monotonic()
            if now - self._noticed < every:
                return
            self._noticed = now
            for writer in self._table.regions.alive:
                with suppress(wal.WalError, MemWalError):  # the writer that was fenced says so from now on
                    writer.refresh()

    def look(self) -> FencedError | None:
        """One step of the module's text; why this daemon has to end, None while it does not. Raises: storage's errors,
        after which it is called again.
        """
        self.notice(LOOK_EVERY)
        fenced = [each for each in self._table.regions.writers if isinstance(each.failure, wal.Fenced)]
        if not fenced or self._table.resizing.under_way() is not None:
            self._seen = None
            return None
        now = self._clock.monotonic()
        if self._seen is None:
            _LOG.warning("%s; looking for who has it in %g s", fenced[0].failure, self._pause)
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
        """Whether one of these regions was taken by a writer of which no note tells."""
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
        "what was acknowledged is in the log"
    )
    return FencedError(text, {"ours": fence.ours, "theirs": fence.theirs})
