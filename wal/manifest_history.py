"""The kept manifest versions of one region, searched by values that never decrease from one version to the next.

`replay_after`, `current_generation` and `spec_id` never decrease (`wal.invariants`), so bisection finds with a few
reads when one of them reached a value. Together these versions determine the last WAL position of each generation:
every row at or below the `replay_after` of a version is in a generation below its `current_generation`, and every row
above it is in that generation or a later one.
"""

from __future__ import annotations

from collections.abc import Callable
from uuid import UUID

from memwal.wal.clock import Clock
from memwal.wal.layout import manifest_prefix, parse_manifest_key
from memwal.wal.manifest import ManifestStore, RegionManifest
from memwal.wal.store.port import ObjectStore

Reached = Callable[[RegionManifest], bool]
"""False for the older versions, and True for all from some version on."""


class ManifestHistory:
    """The versions of a region's manifest that storage had when this object was created.

    Thread safety. One thread. Errors. All methods raise Corrupt, StoreUnavailable, StoreRefused.
    """

    def __init__(self, store: ObjectStore, region_id: UUID, clock: Clock | None = None) -> None:
        self._manifests = ManifestStore(store, region_id, clock=clock)
        self.newest = self._manifests.latest()
        """None if the region was never claimed."""
        self._read = {} if self.newest is None else {self.newest.version: self.newest}
        self._oldest = 0 if self.newest is None else self._lowest(store, region_id, self.newest.version)

    def first(self, reached: Reached) -> RegionManifest | None:
        """Return the oldest kept version that satisfies `reached`; None without one."""
        return self._at(self._first(reached))

    def last_before(self, reached: Reached) -> RegionManifest | None:
        """Return the newest kept version that does not satisfy `reached`; None without one."""
        return self._at(self._first(reached) - 1)

    def is_whole(self) -> bool:
        """Return whether the first version of the region is kept, so that nothing happened before the oldest one."""
        return self._oldest == 1

    @staticmethod
    def _lowest(store: ObjectStore, region_id: UUID, newest: int) -> int:
        parsed = (parse_manifest_key(key) for key in store.list(manifest_prefix(region_id)))
        kept = {key.version for key in parsed if key is not None}
        low = newest
        while low - 1 in kept:
            low -= 1
        return low

    def _first(self, reached: Reached) -> int:
        """Return the lowest version that is reached; the number after the newest if none is."""
        if self.newest is None:
            return 1
        low, high = self._oldest, self.newest.version + 1
        while low < high:
            middle = (low + high) // 2
            manifest = self._at(middle)
            if manifest is None or not reached(manifest):  # None: pruned meanwhile, as only the oldest are
                low = middle + 1
            else:
                high = middle
        return low

    def _at(self, version: int) -> RegionManifest | None:
        if version not in self._read and self.newest is not None and self._oldest <= version < self.newest.version:
            manifest = self._manifests.read(version)
            if manifest is not None:
                self._read[version] = manifest
        return self._read.get(version)
