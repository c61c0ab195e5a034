"""Find where the log of a region must be read from to report the changes after a position.

 1. The newest manifest version whose `replay_after` is at or below the position names the generations that end there.
 2. Of these, the base table holds some in a version that is exact for the region (`base_versions`).
 3. The log is replayed from the end of these generations up to the position. Its rows shadow that version.

A table without a key needs no stored rows: only step 1, whose `replay_after` never lies inside a batch of entries.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from uuid import UUID

from memwal.flush import BaseTable
from memwal.ingest.engine.changes.base_versions import BaseVersions, VersionGone
from memwal.wal import ManifestStore, ObjectStore, RegionManifest
from memwal.wal.layout import entry_key, parse_entry_key, wal_prefix
from memwal.wal.manifest import ManifestHistory
from memwal.wal.probing import newest_from

_LISTINGS = 5


class Gone(Exception):
    """Changes of `region` after `position` are no longer kept.

    `ahead`: the log does not reach `position` at all. Never leaves this package.
    """

    def __init__(self, region: UUID, position: int, *, ahead: bool = False) -> None:
        super().__init__(f"region {region}: position {position}")
        self.region, self.position, self.ahead = region, position, ahead


@dataclass(frozen=True)
class Start:
    """The start for reading the log of a region."""

    after: int
    """Entries above this position are read."""
    base: BaseTable | None
    """The rows stored up to there; None in a table without a key."""
    log_id: str = ""
    """As for `wal.entry_reader.EntryReader`."""


class Starts:
    """Find where regions can be read from, in the present state of storage.

    Thread safety. One thread; `tip` any. Errors. All methods raise Corrupt, StoreUnavailable, StoreRefused.
    """

    def __init__(self, newest: BaseTable, store: ObjectStore) -> None:
        """`newest`: the newest version of the base table; manifests are read after it."""
        self._newest, self._store = newest, store
        self._suffix = newest.codec.suffix
        self._versions: BaseVersions | None = None

    def tip(self, region: UUID, known: int = 0) -> int:
        """Return the newest WAL position of `region`, 0 if the log is empty. `known`: a position that exists."""
        manifest = ManifestStore(self._store, region).latest()
        return 0 if manifest is None else self._tip(region, manifest, known)

    def expect_reached(self, since: Mapping[UUID, int], until: Mapping[UUID, int]) -> None:
        """Raise Gone if the log of a region never reached its position in `since`, which has the routing of `until`.

        `until`: positions that exist. Makes requests only for regions whose position in `since` is the later one: the
        table was restored, or the caller chose an earlier `until`.
        """
        for region, position in since.items():
            if position > until.get(region, 0):
                manifest = ManifestStore(self._store, region).latest()
                if manifest is None:
                    raise Gone(region, position, ahead=True)
                self._expect_reached(region, position, manifest)

    def end_of_routing(self, region: UUID, routing: int, position: int) -> int:
        """Return the last position of `region` whose rows were routed by `routing`, which has ended.

        Raises: Gone if the manifests that show it are no longer kept.
        """
        history = ManifestHistory(self._store, region)
        opened = history.first(lambda manifest: manifest.spec_id > routing)
        if history.newest is None:
            return position
        if opened is None:  # sealed permanently
            return self._tip(region, history.newest, position)
        before = history.last_before(lambda manifest: manifest.spec_id > routing)
        if before is None and not history.is_whole():
            raise Gone(region, position)
        # `routing` did not have the region, the next one has it again
        if before is not None and before.spec_id < routing:
            return position
        return max(position, opened.last_seen)  # the sentinel of the claim that opened it under the next routing

    def of(self, region: UUID, position: int, routing: int) -> Start:
        """Return where to start reading for the changes of `region` after `position`. Raises: Gone."""
        newest, history = self._newest, ManifestHistory(self._store, region)
        if history.newest is None:
            if position:
                raise Gone(region, position, ahead=True)
            return Start(0, newest if newest.key else None)
        self._expect_reached(region, position, history.newest)
        covering, log_id = history.last_before(lambda manifest: manifest.replay_after > position), history.newest.log_id
        if covering is None:
            raise Gone(region, position)
        if not newest.key:
            return Start(covering.replay_after, None, log_id)
        published = covering.current_generation - 1
        if newest.routing_version == routing and self._holds_all(region, history.newest, published):
            return Start(covering.replay_after, newest, log_id)
        base = self._exact(region, routing, published, history)
        after = None if base is None else _end_of(history, base.committed.get(region, 0))
        if base is None or after is None:
            raise Gone(region, position)
        return Start(min(after, position), base, log_id)

    def earliest(self, region: UUID) -> int | None:
        """Return the oldest position of the present routing whose changes can be read now, or None."""
        newest, history = self._newest, ManifestHistory(self._store, region)
        if history.newest is None:
            return 0
        kept = self._kept_after(region, self._tip(region, history.newest, 0))
        opened = history.first(lambda manifest: manifest.spec_id >= newest.routing_version)
        begins = 0 if opened is None or opened.version == 1 else opened.last_seen
        begins = begins if newest.routing_version > 1 else 0
        covering = history.first(lambda manifest: manifest.replay_after >= kept) or history.newest
        if not newest.key:
            return max(covering.replay_after, begins)
        for _ in range(_LISTINGS):
            try:
                base = self._base_versions().first_exact(
                    region, newest.routing_version, covering.current_generation - 1
                )
                break
            except VersionGone:
                self._versions = None
        else:
            base = None
        after = None if base is None else _end_of(history, base.committed.get(region, 0))
        if after is None and self._holds_all(region, history.newest, history.newest.current_generation - 1):
            after = history.newest.replay_after
        return None if after is None or after < kept else max(after, begins)

    # ---- inside --------------------------------------------------------------------------------------------------

    def _tip(self, region: UUID, manifest: RegionManifest, known: int) -> int:
        # All entries above `replay_after` are kept; `last_seen` existed.
        start = max(known, manifest.replay_after, manifest.last_seen)
        return newest_from(lambda position: self._store.exists(entry_key(region, position, self._suffix)), start)

    def _expect_reached(self, region: UUID, position: int, manifest: RegionManifest) -> None:
        """Raise Gone if the log of `region` never reached `position`. `manifest`: one that was the newest."""
        if position <= _reached(manifest) or self._store.exists(entry_key(region, position, self._suffix)):
            return
        # The entry may have been flushed and collected since `manifest` was read; a newer manifest shows it then.
        newest = ManifestStore(self._store, region).latest(manifest)
        if newest is None or position > _reached(newest):
            raise Gone(region, position, ahead=True)

    def _holds_all(self, region: UUID, manifest: RegionManifest, published: int) -> bool:
        """Return whether rule 2 of `base_versions` applies to the newest version.

        `manifest` was read after that version was opened.
        """
        return self._newest.committed.get(region, 0) == manifest.current_generation - 1 == published

    def _exact(self, region: UUID, routing: int, published: int, history: ManifestHistory) -> BaseTable | None:
        def begun_after(generation: int) -> float | None:
            after = _end_of(history, generation)
            if after is None:
                return None
            described = self._store.describe(entry_key(region, after + 1, self._suffix))
            return described[0].modified if described else None

        for _ in range(_LISTINGS):
            try:
                return self._base_versions().exact(region, routing, published, begun_after)
            except VersionGone:
                self._versions = None
        return None

    def _base_versions(self) -> BaseVersions:
        if self._versions is None:
            self._versions = BaseVersions(self._newest, self._store)
        return self._versions

    def _kept_after(self, region: UUID, tip: int) -> int:
        """Return the last position without an entry: every later entry up to `tip` is kept.

        Single fences below it stay too; an entry above `tip` is not part of this log.
        """
        parsed = (parse_entry_key(key) for key in self._store.list(wal_prefix(region)))
        kept = {key.position for key in parsed if key is not None}
        low = max((position for position in kept if position <= tip), default=0)
        while low in kept:
            low -= 1
        return low


def _reached(manifest: RegionManifest) -> int:
    """Return a position that the log has reached, by its manifest alone."""
    return max(manifest.replay_after, manifest.last_seen)


def _end_of(history: ManifestHistory, generation: int) -> int | None:
    """Return a position with all rows of `generation` at or below it, and those of later ones above it.

    Returns None if no kept manifest shows it.
    """
    manifest = history.last_before(lambda manifest: manifest.current_generation > generation + 1)
    return manifest.replay_after if manifest and manifest.current_generation == generation + 1 else None
