"""Handle, in a serving process, a resize of its table by another process (`flush.resizing.steps` has the protocol).

A resize starts by sealing the regions, which fences their writers. For callers this is a pause, unlike a fence by a
writer that keeps the region. Once the new routing is decided, the regions of this process are obsolete; it claims
regions of the new routing instead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from uuid import UUID

from memwal import wal
from memwal.flush.resizing.routing import decided
from memwal.ingest.engine.table.regions import RegionSet
from memwal.ingest.errors import FencedError, MemWalError
from memwal.ingest.refusals import being_resized, resized

_LOG = logging.getLogger("memwal.table")
LOOK_EVERY = 5.0
"""Seconds between two checks of storage while no region is fenced."""


class Resizing:
    """Check storage for a resize of the table of `regions`.

    Thread safety. Any thread.
    """

    def __init__(self, uri: str, regions: RegionSet, routing: int, met: Callable[[], int]) -> None:
        """`routing`: its version at the claims. `met`: returns its version in the base table opened last."""
        self._uri, self._regions, self._routing, self._met = uri, regions, routing, met
        self._looked = regions.context.clock.monotonic()
        self._told = False

    def done(self) -> str | None:
        """Return why these regions are obsolete if another routing was decided, else None.

        Reads one small object from storage every few seconds, and always if a region was fenced, or a read or commit
        found another routing. Raises: as a read.
        """
        now = self._regions.context.clock.monotonic()
        fenced = self._fenced()
        if not fenced and self._met() == self._routing and now - self._looked < LOOK_EVERY:
            return None
        self._looked = now
        following = decided(self._regions.context.store, self._routing + 1)
        return None if following is None else str(resized(self._uri, self._routing, following.routing))

    def under_way(self) -> str | None:
        """Return a message if a resize has sealed an owned region and has decided nothing yet, else None."""
        sealed = self._sealed()
        if sealed is None:
            return None
        return (
            f"{wal.named(sealed)} is sealed: the table is being resized; if that broke off, run `memwal regions "
            "resize` again, with the present number of regions to go back"
        )

    def told(self, error: MemWalError) -> MemWalError:
        """Return `error` in the form for the caller: a fence by a resize becomes a pause, which ends by itself."""
        if not isinstance(error, FencedError):
            return error
        # Only the decision removes a seal, so check for seals first.
        resizes = self._sealed() is not None or self.done() is not None
        return being_resized(self._uri) if resizes else error

    def look(self) -> None:
        """Log once that a resize holds owned regions."""
        said = self.under_way()
        if said is not None and not self._told:
            _LOG.warning("%s: %s", self._uri, said)
        self._told = said is not None

    def _fenced(self) -> list[UUID]:
        return [each.region for each in self._regions.writers if isinstance(each.failure, wal.Fenced)]

    def _sealed(self) -> UUID | None:
        store, clock = self._regions.context.store, self._regions.context.clock
        for region in self._fenced():
            manifest = wal.ManifestStore(store, region, clock=clock).latest()
            if manifest is not None and manifest.status is wal.RegionStatus.SEALED:
                return region
        return None
