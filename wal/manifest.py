"""Reading and writing a region's manifest versions.

Latest: start at the hint, probe forward until a version is missing. A stale hint costs probes, a missing or
broken one costs a listing; neither can make an old version look newest. While storage is unavailable a read is
tried again (`wal.patience`).

Write, in steps: (1) check the succession; (2) give the version a fresh edit id; (3) put-if-absent at
version+1 until the outcome is known; (4) write the hint, whose loss is harmless.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING
from uuid import UUID

from wal.clock import Clock, Ids, SystemClock, SystemIds
from wal.errors import Corrupt, OutcomeUnknown, StoreUnavailable, WalError
from wal.invariants import check_succession
from wal.layout import manifest_key, manifest_prefix, parse_manifest_key, version_hint_key
from wal.options import WalOptions
from wal.patience import patient
from wal.region_manifest import RegionManifest, RegionStatus, SsTable
from wal.slot import settle
from wal.store import ObjectStore, PutOutcome

if TYPE_CHECKING:
    from wal.fence import EpochGuard

__all__ = ["Change", "ManifestStore", "RegionManifest", "RegionStatus", "SsTable"]

Change = Callable[[RegionManifest], RegionManifest]

# Each lost race means that another edit got through; a thousand in a row is no race but a defect.
_MOST_CONFLICTS = 1000


class ManifestStore:
    """The manifest versions of one region.

    Thread safety. Any thread; any number of processes.
    Durability. A version returned as written survives a crash.
    Invariants. (1) Versions are consecutive and never change. (2) Every version follows the one before by
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
        self._reads = patient(store, self._clock, self._options)

    def latest(self, known: RegionManifest | None = None) -> RegionManifest | None:
        """The newest version, or None where the region has none; `known`: one that exists, from which to look on.

        Raises Corrupt, StoreUnavailable, StoreRefused.
        """
        newest = known or self._get(version := self._hinted() or self._listed() or 1)
        if newest is None and version > 1:
            # A hint that points at nothing, e.g. copied from elsewhere: the listing knows better.
            version = self._listed() or 1
            newest = self._get(version)
        while newest is not None and (following := self._get(newest.version + 1)) is not None:
            newest = following
        return newest

    def read(self, version: int) -> RegionManifest | None:
        """One version, or None where it does not exist."""
        return self._get(version)

    def put(self, current: RegionManifest | None, proposed: RegionManifest) -> PutOutcome:
        """Write `proposed` as the version after `current` (None: as the first).

        CREATED also where the answer to our own earlier attempt was lost; ALREADY_EXISTS where another writer
        took the version; UNAVAILABLE or OUTCOME_UNKNOWN after the retry budget. Raises InvariantViolation,
        StoreRefused.
        """
        try:
            written = self.create(current, proposed)
        except OutcomeUnknown:
            return PutOutcome.OUTCOME_UNKNOWN
        except StoreUnavailable:
            return PutOutcome.UNAVAILABLE
        return PutOutcome.ALREADY_EXISTS if written is None else PutOutcome.CREATED

    def create(
        self, current: RegionManifest | None, proposed: RegionManifest, *, hint: bool = True
    ) -> RegionManifest | None:
        """As `put`, returning the version as written, or None where another writer took it. `hint` False: the version
        after it, which follows at once, is to be the one that is hinted at.

        Raises InvariantViolation, OutcomeUnknown, StoreUnavailable, StoreRefused.
        """
        check_succession(current, proposed)
        written = replace(proposed, edit_id=self._ids.entry_id())
        key = manifest_key(self.region_id, written.version)
        if settle(self._store, key, written.encode(), clock=self._clock, options=self._options) is not None:
            return None
        if hint:
            self._write_hint(written.version)
        return written

    def owned(self, guard: EpochGuard, known: RegionManifest | None = None) -> RegionManifest:
        """The newest version, if `guard` still owns the region: the fence check. `known`: as for `latest`.

        Raises Fenced where its epoch is higher, Corrupt where it is lower or there is none, or where the version that
        `guard` claimed is another now.
        """
        guard.check()
        current = self._newest(known)
        if current.writer_epoch > guard.epoch:
            guard.fenced_by(current.writer_epoch)
        if current.writer_epoch < guard.epoch:
            raise Corrupt(
                f"region {self.region_id}: newest manifest version {current.version} has writer epoch "
                f"{current.writer_epoch}, but epoch {guard.epoch} was claimed; was a backup put over the table?"
            )
        if guard.claimed is not None:
            self._check_claimed(*guard.claimed)
        return current

    def edit(self, guard: EpochGuard, change: Change, known: RegionManifest | None = None) -> RegionManifest:
        """Apply `change` to the newest version as the owner `guard`, and return the version that holds it.

        `known`: the version that was the newest a moment ago, under the guard's epoch. It is not looked for again:
        where there is a newer one by now the place behind it is taken, and only then is that one read.

        `change` is called again with a newer version after a lost race (the committer prunes beside us); it need
        not set the version, and where it returns its argument unchanged nothing is written. After OutcomeUnknown
        call `edit` again: `change` may then find its own effect already there, and must return its argument then.
        Raises Fenced, InvariantViolation, OutcomeUnknown, StoreUnavailable, StoreRefused, and what `change` raises.
        """
        return self._edit(lambda: self.owned(guard), change, known)

    def edit_unowned(self, change: Change) -> RegionManifest:
        """As `edit`, for one who owns nothing (the committer): the writer epoch stays whatever is found."""
        return self._edit(self._newest, change)

    def _check_claimed(self, version: int, edit_id: str) -> None:
        claimed = self._get(version)
        if claimed is None or claimed.edit_id != edit_id:
            raise Corrupt(
                f"{manifest_key(self.region_id, version)}: not what this writer wrote when it claimed the region; "
                "the table was removed, or replaced by another, while it was in use: open the table again"
            )

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
        raise StoreUnavailable(f"region {self.region_id}: {_MOST_CONFLICTS} manifest edits in a row lost a race")

    def _newest(self, known: RegionManifest | None = None) -> RegionManifest:
        if (current := self.latest(known)) is None:
            raise Corrupt(f"region {self.region_id} has no manifest; claim the region first")
        return current

    def _get(self, version: int) -> RegionManifest | None:
        key = manifest_key(self.region_id, version)
        data = self._reads.get(key)
        if data is None:
            return None
        try:
            manifest = RegionManifest.decode(data)
        except Corrupt as error:
            raise Corrupt(f"{key}: {error}") from error
        if (manifest.version, manifest.region_id) != (version, self.region_id):
            raise Corrupt(f"{key}: holds version {manifest.version} of region {manifest.region_id}")
        return manifest

    def _hinted(self) -> int | None:
        data = self._reads.get(version_hint_key(self.region_id))
        try:
            version = json.loads(data or b"{}").get("version")
        except (ValueError, AttributeError):
            return None
        return version if isinstance(version, int) and version >= 1 else None

    def _listed(self) -> int | None:
        keys = map(parse_manifest_key, self._reads.list(manifest_prefix(self.region_id)))
        return max((key.version for key in keys if key), default=None)

    def _write_hint(self, version: int) -> None:
        try:
            self._store.put(version_hint_key(self.region_id), b'{"version":%d}' % version)
        except WalError:
            return  # The version itself is durable; readers without the hint list.
