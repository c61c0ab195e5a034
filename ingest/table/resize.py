"""What a process that serves a table sees of a resize of it, made by another (`flush.resizing.steps` tells the
protocol).

It begins by sealing the regions, which fences their writers: to a caller that is a pause, unlike a fence by somebody
who keeps the region. Once the new routing is decided the regions of this process are of no use any more; those of the
new routing are claimed in their place.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from uuid import UUID

from memwal import wal
from memwal.flush.resizing.routing import decided
from memwal.ingest.errors import FencedError, MemWalError
from memwal.ingest.refusals import coming_back, resized
from memwal.ingest.table.regions import RegionSet

_LOG = logging.getLogger("memwal.table")
LOOK_EVERY = 5.0
"""Seconds between two looks of a table whose regions nobody took."""


class Resizing:
    """Looks at storage for a resize of the table that `regions` are of.

    Thread safety. Any thread.
    """

    def __init__(self, uri: str, regions: RegionSet, routing: int, met: Callable[[], int]) -> None:
        """`routing`: the version by which the regions were claimed; `met`: that of the base that was opened last."""
        self._uri, self._regions, self._routing, self._met = uri, regions, routing, met
        self._looked = regions.context.clock.monotonic()
        self._told = False

    def done(self) -> str | None:
        """Why these regions are of no use any more, where another routing was decided; else None.

        Asks storage, for one small object, every few seconds, and always where a region was fenced, or a read or commit
        met another routing. Raises: as a read.
        """
        now = self._regions.context.clock.monotonic()
        fenced = self._fenced()
        if not fenced and self._met() == self._routing and now - self._looked < LOOK_EVERY:
            return None
        self._looked = now
        following = decided(self._regions.context.store, self._routing + 1)
        return None if following is None else str(resized(self._uri, self._routing, following.routing))

    def under_way(self) -> str | None:
        """What is to be said where a resize has sealed a region of ours and nothing is decided; else None."""
        sealed = self._sealed(self._fenced())
        if sealed is None:
            return None
        return (
            f"region {sealed} is sealed: the table is being resized; where that was broken off, run `memwal regions "
            "resize` again, with the number of regions that it has to go back"
        )

    def told(self, error: MemWalError) -> MemWalError:
        """`error` as a caller is to hear it: a fence that a resize brought about passes by itself."""
        if not isinstance(error, FencedError) or not self._takes(self._fenced()):
            return error
        return coming_back(self._uri)

    def look(self) -> None:
        """Say once, in the log, that a resize holds regions of ours."""
        said = self.under_way()
        if said is not None and not self._told:
            _LOG.warning("%s: %s", self._uri, said)
        self._told = said is not None

    def _fenced(self) -> list[UUID]:
        return [each.region for each in self._regions.writers if isinstance(each.failure, wal.Fenced)]

    def _takes(self, fenced: Iterable[UUID]) -> bool:
        # A seal is only ever broken by what was decided, so it is looked at first.
        return self._sealed(fenced) is not None or self.done() is not None

    def _sealed(self, regions: Iterable[UUID]) -> UUID | None:
        store, clock = self._regions.context.store, self._regions.context.clock
        for region in regions:
            manifest = wal.ManifestStore(store, region, clock=clock).latest()
            if manifest is not None and manifest.status is wal.RegionStatus.SEALED:
                return region
        return None
