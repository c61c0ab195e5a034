"""Claim regions again after another writer has taken them from a single daemon, or end.

A fenced writer rejects all calls, and no other daemon can serve them. In steps:

1. **Detection**: by the next write, by a request to /health/readyz, or by a read of the region manifests every
   `LOOK_EVERY` seconds. Meanwhile calls fail with the fence, and /health/readyz reports it.
2. **After `daemon.claim_again`** the owner notes identify the current owner (`table.live_owners`). If that
   writer is or may be alive, it keeps the regions: this daemon ends with exit code 1. If it is about to end, this
   daemon waits.
3. **If its note shows that it has gone**, this daemon claims the regions again and replays their logs. *Rows that it
   acked are in the log; rows that it did not ack may be missing.*
4. **If it left no note** (Lance's own writers write none), its regions must not have changed for a whole pause, since
   a claim would fence a writer that is still working. This daemon waits as long as the writer writes.

A resize also fences regions. It ends by itself and does not count as another writer (`table.resize`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from uuid import UUID

from memwal import wal
from memwal.ingest.engine.region.writer import RegionWriter
from memwal.ingest.engine.table.embedded import Table
from memwal.ingest.engine.table.live_owners import LiveOwners
from memwal.ingest.errors import FencedError, MemWalError
from memwal.wal import named

_LOG = logging.getLogger("memwal.daemon")
LOOK_EVERY = 10.0
"""Seconds between two reads of the region manifests if no caller asks whether this daemon is ready. Each reads a few
small objects of every region and writes nothing."""
Seen = dict[UUID, tuple[int, int]]
"""By region: the version of its manifest and the newest position of its log."""


class ClaimsAgain:
    """Detects that another writer took regions of a table that this daemon serves alone, and claims them again.

    Thread safety. `notice` from any thread, `look` from one.
    """

    def __init__(self, table: Table, owners: Callable[[], LiveOwners], clock: wal.Clock, pause: float) -> None:
        """Prepare for `table`. `owners`: returns the check for its present regions. `pause`: `daemon.claim_again`."""
        self._table, self._owners, self._clock, self._pause = table, owners, clock, pause
        self._noticing = threading.Lock()
        self._noticed, self._since = clock.monotonic(), 0.0
        self._seen: Seen | None = None

    def notice(self, every: float = 0.0) -> None:
        """Read the region manifests, so that fenced writers fail; at most once in `every` seconds."""
        with self._noticing:
            now = self._clock.monotonic()
            if now - self._noticed < every:
                return
            self._noticed = now
            for writer in self._table.regions.alive:
                with suppress(wal.WalError, MemWalError):  # a fenced writer now has its failure set
                    writer.refresh()

    def look(self) -> FencedError | None:
        """Run one step of the module's protocol. Return why this daemon has to end; None if it continues.

        Raises: errors of storage; then call it again.
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
        found = [each for each in self._owners().find() if each.state != "free"]
        if self._pause == 0 or any(each.state in ("lives", "unknown") for each in found):
            return _ends(fenced[0], found)
        seen = self._state(fenced)
        if found or (seen != self._seen and self._left_no_note(fenced)):
            self._seen, self._since = seen, now
            return None
        for writer in fenced:
            epoch = self._table.acquire(writer.region)
            _LOG.warning("%s is served here again, with writer epoch %d", named(writer.region), epoch)
        self._seen = None
        return None

    def _left_no_note(self, fenced: Sequence[RegionWriter]) -> bool:
        """Return whether one of these regions was taken by a writer without a note."""
        epochs = self._owners().epochs()
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
        f"{named(writer.region)}: writer epoch {fence.ours} was fenced by epoch {fence.theirs}{by}; this daemon ends, "
        "acknowledged rows are in the log"
    )
    return FencedError(text, {"ours": fence.ours, "theirs": fence.theirs})
