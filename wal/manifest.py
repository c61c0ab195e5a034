"""Read and write a region's manifest versions.

Versions have no gap from the oldest kept one to the newest. Older versions were pruned (`wal.manifest_garbage`), always
the oldest first. Therefore, if a version is in its place, none above it was pruned, and an empty slot above it was
never filled. A slot below may hold a false version, which a paused writer put into a pruned slot. Reads and writes
check for both.

Read the newest version:

 1. Read the hint, which names a version and its edit id.
 2. Probe forward until a version is missing (`wal.probing`).
 3. *Then* read the version of the hint. If it is in its place with that edit id, the highest version found is the
    newest.
 4. Otherwise start at the highest version of one page of a listing, which is never a false one. Its edit id is not
    known, so the page is listed again at the end: if the version is still the highest, it was not pruned and refilled.

A stale hint costs two probes per binary digit of its distance; a missing or broken hint costs two listed pages as well.
Neither makes an old version look newest. While storage is unavailable, reads are retried (`wal.retries`). (model:
Manifests!ReadHint, Manifests!ProbeVersion, Manifests!ReadTop, Manifests!ReadStart, Manifests!ListPage,
Manifests!ListAgain)

Write a version:

 1. Check the succession (`wal.invariants`).
 2. Give the version a fresh edit id.
 3. Put if absent at version+1 until the outcome is known.
 4. Read the version before it. If that is not in its place, the slot may have been pruned, and the write counts as a
    lost race.
 5. Write the hint, whose loss is harmless.

(model: Manifests!SendVersion, Manifests!PutVersion, Manifests!ReadBefore, Manifests!WriteHint)

Search the kept versions (`ManifestHistory`): `replay_after`, `current_generation` and `spec_id` never decrease
(`wal.invariants`), so bisection finds with a few reads when one of them reached a value. Together these versions
determine the last WAL position of each generation: every row at or below the `replay_after` of a version is in a
generation below its `current_generation`, and every row above it is in that generation or a later one.
"""

from __future__ import annotations

import json
import threading
from bisect import bisect_left
from collections.abc import Callable, Container
from dataclasses import replace
from typing import NoReturn
from uuid import UUID

from memwal.wal.clock import NEVER, Clock, Ids, Instant, SystemClock, SystemIds, instant
from memwal.wal.errors import AnotherLog, Corrupt, Fenced, OutcomeUnknown, StoreRefused, StoreUnavailable, WalError
from memwal.wal.invariants import check_succession
from memwal.wal.layout import manifest_key, manifest_prefix, named, parse_manifest_key, version_hint_key
from memwal.wal.probing import newest_from
from memwal.wal.region_manifest import RegionManifest, RegionStatus, SsTable
from memwal.wal.retries import WalOptions, with_retried_reads
from memwal.wal.slot import put_until_known
from memwal.wal.store.port import ObjectStore


class EpochGuard:
    """One claim's right to act for a region, until a higher epoch is seen.

    Thread safety. Any thread.
    Invariants. (1) The epoch never changes. (2) Once fenced, the guard stays fenced.
    """

    def __init__(self, region_id: UUID, epoch: int, claimed: tuple[int, str] | None = None, log_id: str = "") -> None:
        """`claimed`: version and edit id of the manifest that this claim wrote. `log_id`: the id of the log, "" where
        unknown.

        Both distinguish this table from one that was deleted and recreated in its place, which the epoch alone does
        not.
        """
        self.region_id = region_id
        self.epoch = epoch
        self.claimed = claimed
        self.log_id = log_id
        self._lock = threading.Lock()
        self._theirs = 0
        self.proved: Instant = NEVER
        """Start of the newest manifest read that confirmed ownership after the claim's sentinel was put."""

    def confirm(self, begun: Instant) -> None:
        """Record that a manifest read begun at `begun`, after the sentinel was put, showed this epoch as the newest."""
        self.proved = max(self.proved, begun)

    @property
    def fenced(self) -> bool:
        """Whether a higher epoch has been seen."""
        return self._theirs > 0

    def check(self) -> None:
        """Raise Fenced if a higher epoch has been seen. Makes no request."""
        if self._theirs:
            raise Fenced(self.region_id, self.epoch, self._theirs)

    def fenced_by(self, theirs: int) -> NoReturn:
        """Record that epoch `theirs`, which is above this guard's, owns the region, and raise Fenced."""
        assert theirs > self.epoch, f"epoch {theirs} does not fence epoch {self.epoch}"
        with self._lock:
            self._theirs = max(self._theirs, theirs)
        raise Fenced(self.region_id, self.epoch, self._theirs)


__all__ = ["Change", "ManifestStore", "RegionManifest", "RegionStatus", "SsTable"]

Change = Callable[[RegionManifest], RegionManifest]

_PAGE = 1000
"""Keys per page of an S3 listing."""
_LOOKS = 10
"""Attempts to find the newest version. Each new attempt means that the start version of the previous one was pruned."""
# Each lost race means that another edit succeeded; a thousand in a row indicate a defect, not a race.
_MOST_CONFLICTS = 1000


class ManifestStore:
    """Reads and writes the manifest versions of one region.

    Thread safety. Any thread; any number of processes.
    Durability. A version returned as written survives a crash.
    Invariants. (1) Versions are consecutive and never change. (2) Every version follows its predecessor by
    `wal.invariants.check_succession`.
    """

    def __init__(
        self,
        store: ObjectStore,
        region_id: UUID,
        *,
        ids: Ids | None = None,
        clock: Clock | None = None,
        options: WalOptions | None = None,
    ) -> None:
        """`ids` and `clock` default to the system's."""
        self.region_id = region_id
        self._store = store
        self._ids = ids or SystemIds()
        self._clock = clock or SystemClock()
        self._options = options or WalOptions()
        self._reads = with_retried_reads(store, self._clock, self._options)

    def latest(self, known: RegionManifest | None = None) -> RegionManifest | None:
        """Return the newest version, or None if the region has none.

        `known`: an existing version at which the search starts.
        Raises: Corrupt, StoreUnavailable, StoreRefused.
        """
        hint = (known.version, known.edit_id) if known is not None else self._hinted()
        if hint is not None and (newest := self._newest_above(*hint)) is not None:
            return newest
        # The hint names a version that does not exist, e.g. one copied from another region: list instead.
        listed = self._listed()
        for _ in range(_LOOKS):
            newest = self._newest_above(listed or 1)
            if listed is None:
                return newest
            again = self._listed()
            if newest is not None and again in (listed, newest.version):
                return newest
            listed = again
        raise StoreUnavailable(f"{manifest_prefix(self.region_id)}: {_LOOKS} times the newest version listed was gone")

    def create(
        self, current: RegionManifest | None, proposed: RegionManifest, *, hint: bool = True
    ) -> RegionManifest | None:
        """Write `proposed` as the version after `current` (None: as the first), and return it as written.

        The version is also returned if an earlier attempt wrote it and its answer was lost. Returns None if another
        writer took the version, or if `current` was pruned meanwhile, so that the free slot after it proves nothing.

        `hint` False: write no hint, because the caller writes the next version immediately.
        Raises: InvariantViolation, OutcomeUnknown, StoreUnavailable, StoreRefused.
        """
        check_succession(current, proposed)
        edit_id = self._ids.entry_id()
        claims = current is None or proposed.writer_epoch > current.writer_epoch
        claim_id, log_id = edit_id if claims else proposed.claim_id, edit_id if current is None else proposed.log_id
        written = replace(proposed, edit_id=edit_id, claim_id=claim_id, log_id=log_id)
        key = manifest_key(self.region_id, written.version)
        if put_until_known(self._store, key, written.encode(), clock=self._clock, options=self._options) is not None:
            return None
        try:
            follows = self._follows(current)
        except (StoreUnavailable, StoreRefused) as error:
            raise OutcomeUnknown(f"{key}: written, but the version before it cannot be read: {error}") from error
        if not follows:
            return None
        if hint:
            self.write_hint(written)
        return written

    def owned(self, guard: EpochGuard, known: RegionManifest | None = None) -> RegionManifest:
        """Check the fence: return the newest version if `guard` still owns the region. `known`: as for `latest`.

        Raises: Fenced if the newest epoch is higher; Corrupt if it is lower, if no version exists, or if the version
        that `guard` claimed was replaced by another.
        """
        guard.check()
        begun = instant(self._clock)
        current = self._newest(known)
        if current.writer_epoch > guard.epoch:
            guard.fenced_by(current.writer_epoch)
        if current.writer_epoch < guard.epoch:
            raise Corrupt(
                f"{named(self.region_id)}: newest manifest version {current.version} has writer epoch "
                f"{current.writer_epoch}, but epoch {guard.epoch} was claimed; was a backup put over the table?"
            )
        if guard.claimed is not None:
            version, edit_id = guard.claimed
            claimed_by = current.claim_id
            if not claimed_by:  # Lance's writer, which drops memwal's fields, wrote the newest version
                claimed = self.read(version)
                claimed_by = claimed.edit_id if claimed is not None else ""
            if claimed_by != edit_id:
                raise Corrupt(
                    f"{manifest_key(self.region_id, version)}: not what this writer wrote when it claimed the region; "
                    "the table was removed, or replaced by another, while it was in use: open the table again"
                )
        guard.confirm(begun)
        return current

    def edit(self, guard: EpochGuard, change: Change, known: RegionManifest | None = None) -> RegionManifest:
        """Apply `change` to the newest version as the owner `guard`, and return the version that holds it.

        `known`: a version that was recently the newest, under the guard's epoch. The first attempt uses it without a
        read; if a newer version exists, the slot after `known` is taken, and the newer version is read.

        `change` is called again with a newer version after a lost race (the committer prunes concurrently). It need not
        set the version; if it returns its argument unchanged, nothing is written. After OutcomeUnknown, call `edit`
        again: `change` may then find its own effect in place, and must return its argument.
        (model: Log!SendEdit, Log!Publish)

        Raises: Fenced, InvariantViolation, OutcomeUnknown, StoreUnavailable, StoreRefused, and what `change` raises.
        """
        begun = instant(self._clock)
        edited = self._edit(lambda: self.owned(guard), change, known)
        if known is None or edited.version > known.version:  # else no request was made
            guard.confirm(begun)
        return edited

    def edit_unowned(self, change: Change) -> RegionManifest:
        """Edit as a caller that does not own the region (the committer): as `edit`, but the writer epoch stays the
        same.
        """
        return self._edit(self._newest, change)

    def _edit(
        self, read: Callable[[], RegionManifest], change: Change, known: RegionManifest | None = None
    ) -> RegionManifest:
        for _ in range(_MOST_CONFLICTS):
            current, known = known or read(), None
            changed = change(current)
            if changed == current:
                return current
            proposed = replace(changed, version=current.version + 1, writer_epoch=current.writer_epoch)
            if (written := self.create(current, proposed)) is not None:
                return written
        raise StoreUnavailable(f"{named(self.region_id)}: {_MOST_CONFLICTS} manifest edits in a row lost a race")

    def _newest(self, known: RegionManifest | None = None) -> RegionManifest:
        if (current := self.latest(known)) is None:
            raise Corrupt(f"{named(self.region_id)} has no manifest; claim the region first")
        return current

    def read(self, version: int) -> RegionManifest | None:
        """Return one version, or None if it does not exist. Raises: Corrupt, StoreUnavailable, StoreRefused."""
        key = manifest_key(self.region_id, version)
        data = self._reads.get(key)
        if data is None:
            return None
        try:
            manifest = RegionManifest.decode(data)
        except Corrupt as error:
            raise Corrupt(f"{key}: {error}") from error
        if (manifest.version, manifest.region_id) != (version, self.region_id):
            raise Corrupt(f"{key}: holds version {manifest.version} of {named(manifest.region_id)}")
        return manifest

    def _newest_above(self, start: int, edit_id: str = "") -> RegionManifest | None:
        """Return the newest version, searched from `start`; None if `start` is not in its place or has another edit id.

        The probe precedes the read: if a version is in its place after the next one was found missing, nothing was
        pruned there.
        """
        top = newest_from(lambda version: self._reads.exists(manifest_key(self.region_id, version)), start)
        newest = self.read(top)
        first = newest if top == start else self.read(start)
        if newest is None or first is None or (edit_id and first.edit_id != edit_id):
            return None
        if newest.log_id and first.log_id and newest.log_id != first.log_id:
            raise AnotherLog(manifest_key(self.region_id, top), newest.log_id, first.log_id)
        return newest

    def _follows(self, current: RegionManifest | None) -> bool:
        """Return whether the slot of the version just created after `current` had never been filled before."""
        if current is None:
            return (self._listed() or 1) == 1
        before = self.read(current.version)
        return before is not None and before.edit_id == current.edit_id

    def _hinted(self) -> tuple[int, str] | None:
        data = self._reads.get(version_hint_key(self.region_id))
        try:
            hint = json.loads(data or b"{}")
            version, edit_id = hint.get("version"), hint.get("edit", "")
        except (ValueError, AttributeError):
            return None
        sound = isinstance(version, int) and version >= 1 and isinstance(edit_id, str)
        return (version, edit_id) if sound else None

    def _listed(self) -> int | None:
        keys = map(parse_manifest_key, self._reads.list_some(manifest_prefix(self.region_id), _PAGE))
        return max((key.version for key in keys if key), default=None)

    def write_hint(self, manifest: RegionManifest) -> bool:
        """Write the hint that lets readers begin at `manifest`; return False if storage failed, which is harmless."""
        try:
            self._store.put(version_hint_key(self.region_id), hint_of(manifest))
        except WalError:
            return False  # The version itself is durable; readers without the hint list.
        return True


def hint_of(manifest: RegionManifest) -> bytes:
    """Return the bytes of the hint that names `manifest`."""
    edit = b',"edit":"%s"' % manifest.edit_id.encode() if manifest.edit_id else b""
    return b'{"version":%d%s}' % (manifest.version, edit)


def lowest_kept(kept: Container[int], newest: int) -> int:
    """Return the lowest version from which all versions up to `newest` are in `kept`."""
    while newest - 1 in kept:
        newest -= 1
    return newest


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
        keys = [] if self.newest is None else store.list(manifest_prefix(region_id))
        kept = {key.version for key in map(parse_manifest_key, keys) if key is not None}
        self._oldest = 0 if self.newest is None else lowest_kept(kept, self.newest.version)

    def first(self, reached: Reached) -> RegionManifest | None:
        """Return the oldest kept version that satisfies `reached`; None without one."""
        return self._at(self._first(reached))

    def last_before(self, reached: Reached) -> RegionManifest | None:
        """Return the newest kept version that does not satisfy `reached`; None without one."""
        return self._at(self._first(reached) - 1)

    def is_whole(self) -> bool:
        """Return whether the first version of the region is kept, so that nothing happened before the oldest one."""
        return self._oldest == 1

    def _first(self, reached: Reached) -> int:
        """Return the lowest version that is reached; the number after the newest if none is."""
        if self.newest is None:
            return 1

        def is_reached(version: int) -> bool:
            manifest = self._at(version)
            return manifest is not None and reached(manifest)  # None: pruned meanwhile, as only the oldest are

        return self._oldest + bisect_left(range(self._oldest, self.newest.version + 1), True, key=is_reached)

    def _at(self, version: int) -> RegionManifest | None:
        if version not in self._read and self.newest is not None and self._oldest <= version < self.newest.version:
            manifest = self._manifests.read(version)
            if manifest is not None:
                self._read[version] = manifest
        return self._read.get(version)
