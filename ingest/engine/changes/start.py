"""Find where the log of a region must be read from to report the changes after a position.

 1. The newest manifest version whose `replay_after` is at or below the position names the generations that end there.
 2. Of these, the base table holds some in a version that is exact for the region (`BaseVersions`).
 3. The log is replayed from the end of these generations up to the position. Its rows shadow that version.

A table without a key needs no stored rows: only step 1, whose `replay_after` never lies inside a batch of entries.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from uuid import UUID

from memwal.flush import BaseTable, FlushError, NotALanceTable
from memwal.flush.base.manifest import manifest_version
from memwal.wal import Corrupt, ManifestHistory, ManifestStore, ObjectStore, RegionManifest, named
from memwal.wal.layout import entry_key, parse_entry_key, wal_prefix
from memwal.wal.probing import newest_from

Progress = tuple[int, int]
"""Routing version and committed generation of a region; both never decrease from one version to the next."""
_NOT_SET_UP: Progress = (0, 0)
_APART = 3600.0
"""Seconds of rule 3."""


class VersionGone(Exception):
    """A version was cleaned up after it was listed: list again. Never leaves this package."""


class BaseVersions:
    """The versions of a base table on storage at the time of construction.

    They are searched for one that holds exactly a region's log up to some position.

    A version records the highest committed generation of each region, but it may hold more: a commit deletes rows in a
    separate version, before the version that records its progress (`flush.commits.committer`), and may crash in
    between. A version is *exact* for a region if it holds all rows of the region's committed generations and nothing of
    later ones. This is certain only if one of these rules applies:

     1. It is the first version with this progress of the region. A commit of later generations reads this progress
        before its first write.
     2. Nothing above the committed generation was published when it was opened: a commit takes only published
        generations.
     3. It is older than the first entry above the committed generations, by an hour and by the clock of the storage.
        Used only if rule 1 cannot be checked, because the previous version was cleaned up: the region was idle for
        days.

    The routing counts as part of the progress: after a resize a region has other keys, and the version of the switch is
    the first one that holds the rows which other regions had of these keys.

    Thread safety. One thread. Errors. All methods raise VersionGone, Corrupt, StoreUnavailable, StoreRefused.
    """

    def __init__(self, newest: BaseTable, store: ObjectStore) -> None:
        self.newest = newest
        self._written = {
            version: info.modified
            for info in store.describe("_versions/")
            if (version := manifest_version(info.key)) is not None and version <= newest.version
        }
        self._numbers = sorted(self._written)
        self._views: dict[int, BaseTable | None] = {newest.version: newest}

    def exact(
        self, region: UUID, routing: int, most: int, begun_after: Callable[[int], float | None]
    ) -> BaseTable | None:
        """Return the newest exact version of `routing` with at most generation `most` of `region` committed.

        `begun_after`: returns when the first entry above a generation was written, in seconds by the storage's clock;
        None if unknown. Returns None if no version is certain to be exact.
        """
        last = bisect_right(self._numbers, (routing, most), key=lambda number: self._progress(number, region)) - 1
        if last < 0 or (held := self._progress(self._numbers[last], region))[0] != routing:
            return None
        first = bisect_left(self._numbers, held, key=lambda number: self._progress(number, region))
        if self._is_first(first):
            return self._view(self._numbers[first])
        began = begun_after(held[1])
        if began is None:
            return None
        older = [number for number in self._numbers[first : last + 1] if self._written[number] <= began - _APART]
        return self._view(older[-1]) if older else None

    def first_exact(self, region: UUID, routing: int, least: int) -> BaseTable | None:
        """Return the oldest version that is exact by rule 1, with at least generation `least` committed."""
        at = bisect_left(self._numbers, (routing, least), key=lambda number: self._progress(number, region))
        if at < len(self._numbers) and not self._is_first(at):
            held = self._progress(self._numbers[at], region)
            at = bisect_right(self._numbers, held, key=lambda number: self._progress(number, region))
        if at == len(self._numbers) or self._progress(self._numbers[at], region)[0] != routing:
            return None
        return self._view(self._numbers[at])

    def _is_first(self, at: int) -> bool:
        """Return whether the version before the one at index `at` is kept, or never existed."""
        number = self._numbers[at]
        return number == 1 or (at > 0 and self._numbers[at - 1] == number - 1)

    def _progress(self, number: int, region: UUID) -> Progress:
        view = self._view(number)
        return _NOT_SET_UP if view is None else (view.routing_version, view.committed.get(region, 0))

    def _view(self, number: int) -> BaseTable | None:
        """Return the version; None for one from before the table was set up."""
        if number not in self._views:
            newest = self.newest
            try:
                self._views[number] = BaseTable.open(newest.uri, newest.storage_options, number)
            except (NotALanceTable, Corrupt) as error:
                raise VersionGone(f"{newest.uri}: version {number}") from error
            except FlushError:
                self._views[number] = None
        return self._views[number]


_LISTINGS = 5


class Gone(Exception):
    """Changes of `region` after `position` are no longer kept.

    `ahead`: the log does not reach `position` at all. Never leaves this package.
    """

    def __init__(self, region: UUID, position: int, *, ahead: bool = False) -> None:
        super().__init__(f"{named(region)}: position {position}")
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
        published = covering.current_generation - 1
        base = self._found(lambda versions: versions.first_exact(region, newest.routing_version, published))
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
        """Return whether rule 2 of `BaseVersions` applies to the newest version.

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

        return self._found(lambda versions: versions.exact(region, routing, published, begun_after))

    def _found(self, find: Callable[[BaseVersions], BaseTable | None]) -> BaseTable | None:
        """Return the result of `find`; list the versions again if one was cleaned up meanwhile."""
        for _ in range(_LISTINGS):
            try:
                self._versions = self._versions or BaseVersions(self._newest, self._store)
                return find(self._versions)
            except VersionGone:
                self._versions = None
        return None

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
