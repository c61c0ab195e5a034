"""Append to a region's WAL.

 1. Encode the entry with a fresh entry id.
 2. Put it at the next position, with the same slot and the same bytes, until the outcome is known.
 3. Only then advance to the next position.

A slot taken by other bytes holds a newer writer's sentinel (Fenced) or shows a broken log (Corrupt). The appender never
continues at the next slot: that would acknowledge rows that no replay can reach. Fenced means that the rows are
certainly not written. But if an earlier attempt had no answer and the newest manifest has passed the slot, the entry
may have been replayed and collected before the other one took the slot: then the outcome is unknown.
(model: Log!SendEntry, Log!Append, Log!Poison)

CREATED is sufficient proof because a newer claim puts its sentinel into the first slot that the older writer has not
filled, and sentinels are never deleted (`wal.garbage`). An operator or a lifecycle rule may delete them nevertheless;
therefore a writer that has not read the manifest for `_PROOF_LASTS` seconds reads it after its create and before its
ack.

The proof does not hold for a claimer that paused before it put its own sentinel: the older writer may have filled that
slot, a newer claim may have put its sentinel behind it, and the entries in between may have been flushed and collected.
A writer therefore acknowledges nothing until a manifest read after its sentinel has confirmed its epoch. Recording the
sentinel's position (`wal.fence`, step 5) also proves that, so usually no append makes this request. Epoch 1 has no
sentinel; its first slot is 1, where the next claim's sentinel stays.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import NoReturn
from uuid import UUID

import pyarrow as pa

from memwal.wal.applied import AppliedMap, write_snapshot
from memwal.wal.clock import Clock, Ids, since
from memwal.wal.codec.port import EntryCodec
from memwal.wal.errors import (
    AnotherLog,
    ConcurrentUse,
    Corrupt,
    Fenced,
    FencedAfterWrite,
    OutcomeUnknown,
    Poisoned,
    StoreRefused,
    StoreUnavailable,
)
from memwal.wal.layout import entry_key, named
from memwal.wal.manifest import EpochGuard, ManifestStore
from memwal.wal.records import BatchPart, EntryHeader
from memwal.wal.retries import WalOptions
from memwal.wal.slot import put_until_known
from memwal.wal.store.port import ObjectStore

_PROOF_LASTS = 5.0
"""Seconds after which an append reads the manifest again. A busy region reads it twelve times a minute, an idle one
never, and no collector or lifecycle rule has a minimum age this short.
"""


class WalAppender:
    """Appends entries to one region's WAL.

    Thread safety. One thread at a time; a second caller inside `append` raises ConcurrentUse.
    Durability. `append` returns only after the object exists and survives a crash.
    Invariants. (1) Positions are consecutive. (2) Entry N+1 never exists before N. (3) After a write with an unknown
    outcome, nothing more is written: the appender is poisoned.
    Requires. The caller claimed the region (`wal.fence.claim`), and passes the claim's guard and next position.
    """

    def __init__(
        self,
        store: ObjectStore,
        region_id: UUID,
        guard: EpochGuard,
        codec: EntryCodec,
        next_position: int,
        ids: Ids,
        clock: Clock,
        options: WalOptions | None = None,
        snapshot: str = "",
    ) -> None:
        """`snapshot`: name of the snapshot that the claim's applied map is relative to."""
        self.next_position = next_position
        self._store = store
        self._region_id = region_id
        self._guard = guard
        self._codec = codec
        self._ids = ids
        self._clock = clock
        self._options = options or WalOptions()
        self._snapshot = snapshot
        self._in_use = threading.Lock()
        self._poison: tuple[int, BaseException] | None = None
        self._manifests = ManifestStore(store, region_id, ids=ids, clock=clock, options=self._options)

    @property
    def poisoned(self) -> bool:
        """Whether the appender stopped itself; only a new claim can continue."""
        return self._poison is not None

    def holds(self, applied: AppliedMap) -> bool:
        """Return whether the next entry can hold `applied` as it is.

        If not, `append` first writes a snapshot of it and makes the map relative to that snapshot; no other thread may
        read the map meanwhile.
        """
        return applied.fits(self._snapshot)

    def append(
        self,
        rows: pa.Table | None,
        *,
        generation: int,
        applied: Mapping[str, int],
        part: BatchPart | None = None,
    ) -> int:
        """Append one entry and return its position once it is durable.

        `rows` has the row schema. None writes only the map, in the form of a sentinel, which every reader skips.
        `generation`: that of the memtable of these rows. `applied`: the whole map; it includes this entry's batch if
        and only if `part` is absent or closes the batch. If the map is long, a snapshot is written first, and an
        `AppliedMap` becomes relative to it.
        Raises: Fenced, Poisoned, ConcurrentUse; StoreUnavailable or StoreRefused (nothing written; the call may be
        retried); OutcomeUnknown or Corrupt (poisons); ValueError or pa.ArrowInvalid for rows not in the row schema.
        """
        if not self._in_use.acquire(blocking=False):
            raise ConcurrentUse(f"{named(self._region_id)}: two threads append at once; give each region one thread")
        try:
            self._check_alive()
            alone = rows is None
            applied = AppliedMap.of(applied)
            if not self.holds(applied):
                write_snapshot(
                    applied,
                    self._store,
                    self._region_id,
                    self.next_position,
                    ids=self._ids,
                    clock=self._clock,
                    options=self._options,
                )
            name = applied.snapshot.name
            unique = self._ids.entry_id()
            guard = self._guard
            header = EntryHeader(guard.epoch, generation, unique, applied.changes, part, alone, name, guard.log_id)
            position = self._put(self._codec.encode(header, self._codec.no_rows if rows is None else rows))
            self._snapshot = name
            return position
        finally:
            self._in_use.release()

    def expect_unfenced(self) -> None:
        """Return only if no newer claim had taken effect when this was called: its sentinel would be in the next slot.

        For acknowledgements that need no entry. (model: Log!AckRepeated)
        Raises: Fenced, Corrupt, Poisoned; StoreUnavailable or StoreRefused.
        """
        self._check_alive()
        key = entry_key(self._region_id, self.next_position, self._codec.suffix)
        found = self._store.get(key)
        if found is not None:
            self._taken(key, found)
        self._prove_ownership()

    def recode(self, codec: EntryCodec) -> None:
        """Use `codec` from the next entry on, after the table's columns changed. Call it in the appending thread."""
        self._codec = codec

    def _check_alive(self) -> None:
        self._guard.check()
        if self._poison is not None:
            position, cause = self._poison
            raise Poisoned(
                f"{named(self._region_id)}: the writer of epoch {self._guard.epoch} stopped itself at position "
                f"{position} ({cause}); open the region again to recover"
            )

    def _put(self, data: bytes) -> int:
        position = self.next_position
        key = entry_key(self._region_id, position, self._codec.suffix)
        doubts = list[None]()
        try:
            found = put_until_known(
                self._store,
                key,
                data,
                clock=self._clock,
                options=self._options,
                on_doubt=lambda: doubts.append(None),
            )
            if found is not None:
                self._refused(key, found, in_doubt=bool(doubts))
            self._prove_created(key)
        except (StoreUnavailable, StoreRefused):
            raise  # Nothing landed: the slot is still free.
        except BaseException as error:
            # Any other error, including an interrupt during the put: the slot's content is unknown.
            self._poison = position, error
            raise
        self.next_position = position + 1
        return position

    def _refused(self, key: str, found: bytes, *, in_doubt: bool) -> NoReturn:
        """Raise as `_taken`, or an unknown outcome.

        `in_doubt`: an earlier attempt of this call may have landed. If the slot may have been collected since, that
        entry may have been in it and replayed: then the outcome is unknown.

        Raises: FencedAfterWrite, OutcomeUnknown.
        """
        try:
            self._taken(key, found)
        except Fenced as error:
            if in_doubt and self._may_be_collected():
                raise FencedAfterWrite(error.region_id, error.ours, error.theirs) from error
            raise
        except (StoreUnavailable, StoreRefused) as error:
            if in_doubt:
                raise OutcomeUnknown(f"{key}: may have been written; the manifest cannot be read: {error}") from error
            raise

    def _may_be_collected(self) -> bool:
        try:
            newest = self._manifests.latest()
        except (StoreUnavailable, StoreRefused, Corrupt):
            return True
        return newest is None or newest.replay_after >= self.next_position

    def _taken(self, key: str, found: bytes) -> NoReturn:
        """Raise for another writer's entry in the next slot: Fenced if a newer epoch of this log wrote it or exists,
        else Corrupt.
        """
        try:
            header = self._codec.header(found)
        except Corrupt:
            header = None  # Not an entry of this codec: the manifest names the newest epoch.
        ours = self._guard.log_id
        theirs = "" if header is None or not ours else header.log_id
        if header is not None and theirs in ("", ours) and header.writer_epoch > self._guard.epoch:
            self._guard.fenced_by(header.writer_epoch)
        self._manifests.owned(self._guard)
        if theirs not in ("", ours):
            raise AnotherLog(key, theirs, ours)
        raise Corrupt(
            f"{key}: position {self.next_position} holds an entry that writer epoch {self._guard.epoch} did not write, "
            "and no newer epoch exists; find out which program wrote it before you write to this region"
        )

    def _prove_ownership(self) -> None:
        """Read the manifest to detect a newer epoch, unless it was read within `_PROOF_LASTS`."""
        if since(self._clock, self._guard.proved) >= _PROOF_LASTS:
            self._manifests.owned(self._guard)

    def _prove_created(self, key: str) -> None:
        """Do as `_prove_ownership`, for an entry that was created.

        Fenced would mean that the rows are certainly not applied, and its caller would send them to the newer writer,
        which may have replayed them. Therefore this raises FencedAfterWrite in its place, or OutcomeUnknown.
        """
        try:
            self._prove_ownership()
        except Fenced as error:
            raise FencedAfterWrite(error.region_id, error.ours, error.theirs) from error
        except (StoreUnavailable, StoreRefused) as error:
            raise OutcomeUnknown(
                f"{key}: written, but the manifest cannot be read to prove that the region is still ours: {error}"
            ) from error
