"""Prune the old manifest versions of a region.

A version is a slot, and a claim, a publish and a prune rely on put-if-absent in it. A writer that read version V and
paused finds the slot V+1 empty again once V+1 was pruned, and its put returns CREATED. These rules make that harmless,
independent of any clock:

 1. Versions are deleted one by one, the oldest first: the deletion of V+1 is sent when that of V is done. Therefore, if
    V is in its place, V+1 was never deleted.
 2. After a writer has created a version, it reads the version before it (`ManifestStore.create`). If that is in its
    place with its edit id, the slot had never been filled, by rule 1, and the write is valid. Otherwise the write
    counts as a lost race: the writer reads the newest version and learns which epoch owns the region. The version that
    it leaves behind is false.
 3. No reader takes a false version for the newest. The hint carries the edit id of its version and is written only
    after rule 2, so it never names a false one. A reader probes for the next version first and then reads the one at
    which it started: if that is in its place with that edit id, nothing above it was pruned. Without a valid hint it
    starts at the highest version of one page of a listing. That is never a false one: false versions are below all kept
    ones and are deleted by the next collection, so a page does not consist of them alone. It lists again after the
    read: if the version is still the highest, it was not pruned and then filled by a false one before it was read.
 4. At least `_KEPT` newest versions are kept, and all from the first version on that a caller of `collect` needs.

Age only delays deletion: a version younger than the minimum, and all above it, are kept. The rules also hold with a
minimum age of zero, which the simulation uses.

Lance's own writer does not follow rule 2: it keeps the manifest that it wrote last and puts the next one after it,
however long it paused. Therefore nothing is pruned in a region of the `arrow` format, which Lance may own. Lance's
readers start at the hint and probe forward; without a hint, or with one below all kept versions, they start at version
1 and would find nothing. Therefore a collection writes the hint before it deletes, and deletes nothing if that fails.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice, takewhile
from uuid import UUID

from memwal.wal.clock import Clock
from memwal.wal.layout import manifest_prefix, parse_manifest_key, pruned_key
from memwal.wal.manifest import ManifestStore, RegionManifest, lowest_kept
from memwal.wal.store.port import ObjectInfo, ObjectStore

_KEPT = 64
"""Newest versions that are kept, so that a reader of a running region need not restart."""
_MOST = 2000
"""Maximum number of versions deleted by one collection, one after the other; the next collection continues."""

Needed = Callable[[RegionManifest], bool]
"""Whether this version, and then all above it, are still needed. False for a version means False for all below."""


@dataclass(frozen=True)
class ManifestGarbage:
    """The result of one collection of a region's manifest versions. Nothing was deleted if `dry_run`."""

    region: UUID
    versions: int = 0
    """Number of versions deleted."""
    bytes: int = 0
    """Bytes deleted."""
    kept: int = 0
    """Number of versions kept."""
    dry_run: bool = False


class ManifestCollector:
    """Prunes the manifest versions of one region, any number of times.

    Thread safety. Any thread; any number of collectors, in any number of processes.
    Invariants. See the module docstring.
    """

    def __init__(self, store: ObjectStore, region_id: UUID, clock: Clock, kept: int = _KEPT) -> None:
        """`kept`: newest versions to keep, at least 2."""
        self._store, self._region_id, self._clock = store, region_id, clock
        self._kept = max(kept, 2)
        self._manifests = ManifestStore(store, region_id, clock=clock)

    def collect(self, needed: Needed, min_age: float, *, dry_run: bool = False) -> ManifestGarbage:
        """Delete versions that are not needed and at least `min_age` seconds old, the oldest first.

        (model: Manifests!ListVersions, Manifests!LookForNewest, Manifests!HintBeforePruning, Manifests!Prune)

        Raises: Corrupt, StoreUnavailable, StoreRefused (versions deleted before the error stay deleted; collect again).
        """
        found = self._versions()
        newest = self._manifests.latest()
        if newest is None or newest.version not in found:
            return ManifestGarbage(self._region_id, kept=len(found), dry_run=dry_run)
        floor = self._floor(found, newest, needed)
        below = (found[version] for version in sorted(found) if version < floor)
        since = self._clock.now() - min_age  # no version is deleted before an older one
        gone = [*islice(takewhile(lambda info: info.modified <= since, below), _MOST)]
        if not dry_run and gone and not self._manifests.write_hint(newest):
            gone = []
        elif not dry_run and gone:
            self._store.put(pruned_key(self._region_id), json.dumps({"floor": floor}).encode())
            for each in gone:
                self._store.delete(each.key)
        return ManifestGarbage(
            self._region_id, len(gone), sum(each.size for each in gone), len(found) - len(gone), dry_run
        )

    def _versions(self) -> dict[int, ObjectInfo]:
        described = (
            (parse_manifest_key(each.key), each) for each in self._store.describe(manifest_prefix(self._region_id))
        )
        return {key.version: each for key, each in described if key is not None}

    def _floor(self, found: dict[int, ObjectInfo], newest: RegionManifest, needed: Needed) -> int:
        """Return the lowest version to keep, by bisection: the first needed one, or the first of the newest `kept`."""

        def is_needed(version: int) -> bool:
            manifest = self._manifests.read(version)
            return manifest is not None and needed(manifest)  # None: pruned by another collector, so below the floor

        low = lowest_kept(found, newest.version)
        high = max(newest.version - self._kept + 1, low)
        return low + bisect_left(range(low, high), True, key=is_needed)


def pruned_below(store: ObjectStore, region_id: UUID) -> int:
    """Return the lowest manifest version that the newest known collection kept; 1 without a collection.

    Checks treat versions below it as left over. Raises StoreUnavailable, StoreRefused.
    """
    try:
        floor = json.loads(store.get(pruned_key(region_id)) or b"{}").get("floor")
    except (ValueError, AttributeError):
        return 1
    return floor if isinstance(floor, int) and floor >= 1 else 1
