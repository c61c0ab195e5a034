"""Claim a region and fence its older writer.

A region belongs to the writer with the highest epoch in its manifest. Each claim creates one `EpochGuard`, which every
component of that writer (appender, flusher) shares. Only `claim` raises an epoch.

Steps of a claim:

 1. List one page of the WAL and read the newest manifest. If the page has an entry but the manifest is missing, read
    the manifest again: a writer creates a manifest before it writes an entry. Refuse entries of the other format;
    entries without a manifest (the manifests were lost); a SEALED region; a committed generation that the manifest has
    not published (the manifest is older than the base table). Nothing has been written so far. (model:
    Log!ReadManifest)
 2. Without a manifest, create version 1 with epoch 1 and the generation after the committed one. The generation is 1
    for a new table, and higher where the base table was cloned or the directory of its regions was lost: SSTs numbered
    from 1 would count as committed. Otherwise create version+1 with epoch+1. Both writes are put-if-absent; if the
    version is taken, return to step 1. (model: Log!RaiseEpoch)
 3. Find the WAL tip: the highest position listed or named in the manifest. A listing may not show the newest entry yet;
    step 4 detects that. If the page did not hold the whole log, probe forward from that position (`wal.probing`), and
    probe behind the tip for entries that prove a hole. (model: Log!ProbeTip)
 4. With epoch >= 2, put a sentinel at tip+1. It carries the applied map of the newest entry that has one (every entry
    written by memwal has one). If an older writer's entry takes the slot, probe forward until a position is missing,
    which gives the new tip, and repeat. If a newer epoch's entry takes it, this claim is fenced. From now on the older
    writer's next append finds its slot taken, so step 6 reads everything that it acknowledged. (model: Log!ReadMap,
    Log!SendSentinel, Log!FenceOlder)
 5. Record the sentinel's position as `last_seen` in another manifest version; a later claim searches for the tip from
    there. The write targets the slot after the version of step 2, without a read, and succeeds only if that slot was
    empty. It thereby proves that no newer claim preceded the sentinel; no append is acknowledged without that proof
    (`wal.appender`). An owner may serve the region before this step; its first append then reads the manifest. *Crash
    before this step: the next claim searches from an earlier position.* (model: Log!Prove)
 6. Replay from `replay_after`+1 to the entry before the sentinel. Entries that were read before the claim
    (`wal.read_ahead`) are not read again if the last of them still has the same id. (model: Log!Replay)
 7. If steps 5 and 6 took long, read the newest manifest; a higher epoch means that this claim is fenced.

Concurrency. On object storage the duration of a claim is determined by its sequential requests. These run concurrently:

 * The listing and the manifest read of step 1: neither needs the other's answer.
 * The first entries of step 6 and steps 2 to 4: a position is written once and never changes, and no collector deletes
   entries after the `replay_after` of the manifest that step 2 followed.
 * Steps 5 and 6: step 5 changes no entry.

A resize of the table (`flush.resizing.steps`) uses two other claims, so that no writer of an old routing can claim in
between:

 * `seal`: the manifest of step 2 is SEALED, whatever its status was. Because claim and seal are one write, only another
   resize can claim from then on. A region without a manifest is created sealed.
 * `opening`: claims a SEALED region of an older routing. The region stays SEALED through step 4, whose sentinel carries
   the map `opening` in place of the newest entry's. Step 5 sets it to ACTIVE with the spec id of the new routing. A
   writer that finds the region ACTIVE therefore finds that map.

Read leases. A claim keeps the read lease in the manifest, or raises it to its own, and returns the time until which the
older owner may answer reads (`wal.lease`). It need not wait for an owner that notified the claimer of its own end,
provided that the manifest before the claim's own has that owner's epoch.

After a release. An owner that releases the region to a claimer sends its newest manifest and the newest position of the
log (`wal.fence.Released`). Step 1 then makes no request, and step 3 begins at that position. This is safe:

 * Step 2 verifies the manifest: the put succeeds only if no version follows it, and that manifest is then read back and
   compared by its edit id. If this fails, the message is outdated: another claim, a commit's prune or a seal came in
   between, or the owner's last edit landed late. The claim then begins at step 1, as without a message. It does the
   same if the received manifest fails the checks of step 1.
 * While that manifest is the newest, no writer has claimed the region after the former owner, so no other writer has
   written to the log. The former owner's threads have ended, so it writes nothing either. Everything that it
   acknowledged lies at or below the received position; steps 4 and 6 read it from storage as usual, and an entry
   missing there is `Corrupt`.
 * An owner that was fenced or stopped itself may not know the state of storage and sends nothing. *If either process
   dies, the next claim reads storage.*

The spec id is the version of the routing: a claim with a lower one than the manifest's is `Resized`.

While storage is unavailable, each read (`wal.retries`) and each write (`wal.slot`) is retried within the retry budget.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar
from uuid import UUID

from memwal.wal.applied import AppliedMap, write_snapshot
from memwal.wal.clock import Clock, Ids, instant
from memwal.wal.codec.port import EntryCodec
from memwal.wal.entry_reader import EntryReader
from memwal.wal.errors import Corrupt, Overtaken, Resized, Sealed, WalError
from memwal.wal.layout import manifest_prefix, named, wal_prefix
from memwal.wal.manifest import EpochGuard, ManifestStore, RegionManifest, RegionStatus
from memwal.wal.records import Entry, EntryHeader
from memwal.wal.replay import Listed, Progress, list_tip, newest_applied, probe_tip, replay, tip_from
from memwal.wal.retries import CLOCK_RATE, RetriedReads, WalOptions, with_retried_reads
from memwal.wal.slot import put_until_known
from memwal.wal.store.port import ObjectStore

T = TypeVar("T")


class Beside:
    """A context whose calls run concurrently with the caller's thread.

    Thread safety. One thread begins the calls.
    Invariants. (1) With one worker no thread is started: `begin` runs the call. (2) No call outlives the context.
    """

    def __init__(self, workers: int) -> None:
        """`workers`: 1 starts no thread."""
        self._pool = ThreadPoolExecutor(workers, "beside") if workers > 1 else None

    def begin(self, call: Callable[[], T]) -> Future[T]:
        """Start `call` and return a future of its result or error. With one worker, `begin` raises the error."""
        if self._pool is not None:
            return self._pool.submit(call)
        done: Future[T] = Future()
        done.set_result(call())
        return done

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


@dataclass(frozen=True)
class Released:
    """What an owner sends to the claimer that it released the region to.

    The owner answers no reads and acknowledges nothing any more, and had waited for the leases of earlier owners.
    (model: Log!Release, Log!HearRelease, Lease!HearRelease)
    """

    manifest: RegionManifest
    """The newest manifest that the owner knows, of its own epoch."""
    position: int
    """The newest position of its log; 0 for none."""

    def to_json(self) -> dict[str, Any]:
        """Return the content of a message."""
        return {"manifest": self.manifest.encode().hex(), "position": self.position}

    @classmethod
    def of_json(cls, told: Mapping[str, Any]) -> Self:
        """Decode the content of a message; the inverse of `to_json`.

        Raises: Corrupt; ValueError, TypeError or KeyError if `told` is not such content.
        """
        return cls(RegionManifest.decode(bytes.fromhex(told["manifest"])), int(told["position"]))


@dataclass(frozen=True)
class Known:
    """What a claimer knows."""

    committed: int = 0
    """The highest generation of the region that the base table held at some earlier time."""
    released: Released | None = None
    """The former owner's message; None without one."""
    entries: Sequence[Entry] = ()
    """Consecutive entries of the region, beginning after some `replay_after`."""


def _expect_routing(region_id: UUID, current: RegionManifest, spec_id: int, *, seal: bool, opening: bool) -> None:
    if current.spec_id > spec_id or (opening and current.spec_id == spec_id):
        # (model: Resize!Claim)
        raise Resized(region_id, spec_id, current.spec_id)
    if current.status is RegionStatus.SEALED:
        if not seal and not opening:
            raise Sealed(
                f"{named(region_id)} is sealed and takes no new writer: the table is being resized; open it again in a "
                "moment, or, where that was broken off, run `memwal regions resize`; its rows stay readable"
            )
    elif current.spec_id != spec_id:
        raise Corrupt(
            f"{named(region_id)}: manifest version {current.version} belongs to routing version {current.spec_id}, "
            f"expected {spec_id}; restore the whole table from one backup"
        )


_AT_ONCE = 3
"""Maximum number of concurrent requests of a claim to remote storage, not counting reads of entries. Local files are
read faster than a thread starts."""
_FEW = 16
"""Maximum number of local entries that are read by the thread of the claim."""
_EARLY = 8
"""Entries per reader that are read concurrently with steps 2 to 4, which take three round trips. Step 6 reads the
others and reports progress.
"""
_LONG = 1.0
"""Seconds after which a claim reads the manifest again to detect a newer claim. Its first append would detect one as
well, by its sentinel or by the manifest.
"""


@dataclass
class Claim:
    """A claimed region, and the state to restore before it takes writes."""

    guard: EpochGuard
    manifest: RegionManifest
    next_position: int
    applied: AppliedMap
    """Highest sequence applied, per producer."""
    entries: list[Entry]
    """Entries after `manifest.replay_after` in the order of visibility; see `wal.replay.replay`."""
    others_read_until: float = 0.0
    """Monotonic time until which an older owner may answer reads without a request to storage; see `wal.lease`."""


def claim(
    store: ObjectStore,
    region_id: UUID,
    *,
    spec_id: int,
    codec: EntryCodec,
    ids: Ids,
    clock: Clock,
    known: Known | None = None,
    seal: bool = False,
    opening: Mapping[str, int] | None = None,
    on_progress: Progress | None = None,
    options: WalOptions | None = None,
    settle: bool = True,
) -> Claim:
    """Claim the region: raise its epoch, fence the older writer, and read back the entries that it left.

    The module docstring has the steps. `spec_id`: the version of the caller's routing, 1 in a table that was never
    resized. `seal`, `opening`: the claims of a resize, see the module docstring. `on_progress(read, total)` is called
    in this thread while entries are replayed. `settle`: do step 5; if False, the caller calls `settle_claim` once it
    serves the region.

    Thread safety. Any number of threads and processes may claim one region: the last one to raise the epoch owns it.
    Durability. When it returns, no older writer's append can be acknowledged any more.
    Raises: Sealed; Resized; Fenced (a newer claim overtook this one); Corrupt; StoreUnavailable; StoreRefused;
    OutcomeUnknown (harmless: claim again).
    """
    options = options or WalOptions()
    reads, begun = with_retried_reads(store, clock, options), instant(clock)
    with Beside(min(options.readers, _AT_ONCE) if store.remote else 1) as beside:
        claimer = _Claimer(
            store=store,
            reads=reads,
            region_id=region_id,
            spec_id=spec_id,
            known=known or Known(),
            seal=seal,
            opening=opening,
            codec=codec,
            ids=ids,
            clock=clock,
            options=options,
            manifests=ManifestStore(store, region_id, ids=ids, clock=clock, options=options),
            reader=EntryReader(reads, region_id, codec),
            beside=beside,
        )
        raised = claimer.raise_epoch()
        manifest = raised.manifest
        guard = raised.guard()
        tip, applied = claimer.put_sentinel(guard, raised)
        if guard.epoch == 1:
            guard.confirm(begun)  # epoch 1 has no sentinel and may append at once (`wal.appender`)
        fenced_at = clock.monotonic()
        record = partial(claimer.record, guard, manifest, tip)
        recording = beside.begin(record) if settle or opening is not None else None
        entries = claimer.replayed(guard, raised, tip, on_progress)
        manifest = manifest if recording is None else recording.result()
    if clock.monotonic() - fenced_at > _LONG:
        manifest = claimer.manifests.owned(guard, manifest)
    return Claim(guard, manifest, tip + 1, applied, entries, fenced_at + CLOCK_RATE * raised.lease_before / 1000)


def settle_claim(manifests: ManifestStore, guard: EpochGuard, manifest: RegionManifest, tip: int) -> RegionManifest:
    """Do step 5 of a claim, and return the newest manifest.

    `manifest`: the newest that the caller knows; `tip`: the position of its sentinel, 0 for none.

    Raises: as `ManifestStore.edit`.
    """
    if not tip:
        return manifest
    return manifests.edit(guard, lambda current: replace(current, last_seen=max(current.last_seen, tip)), manifest)


@dataclass(frozen=True)
class _Raised:
    """The result of steps 1 and 2.

    `lease_before`: the read lease of the manifest before this claim's, in milliseconds. `known`: the first entries to
    replay, by position; they are being read concurrently.
    """

    manifest: RegionManifest
    listed: Listed
    lease_before: int
    known: Future[dict[int, Entry]]

    def guard(self) -> EpochGuard:
        """Return the guard of the claim that wrote the manifest."""
        wrote = self.manifest
        return EpochGuard(wrote.region_id, wrote.writer_epoch, (wrote.version, wrote.edit_id), wrote.log_id)


@dataclass(frozen=True)
class _Claimer:
    """The steps of one claim and their inputs. `reads` is `store` with retried reads; `reader` reads one entry at a
    time.
    """

    store: ObjectStore
    reads: RetriedReads
    region_id: UUID
    spec_id: int
    known: Known
    seal: bool
    opening: Mapping[str, int] | None
    codec: EntryCodec
    ids: Ids
    clock: Clock
    options: WalOptions
    manifests: ManifestStore
    reader: EntryReader
    beside: Beside

    def raise_epoch(self) -> _Raised:
        """Do steps 1 and 2. Each conflict means that another writer made progress, so the loop ends."""
        raised = self._as_told()
        while raised is None:
            looking = self.beside.begin(self._look)
            current = self.manifests.latest()
            listed = looking.result()
            if current is None and listed.tip:
                current = self.manifests.latest()
            self._expect_claimable(current, listed.tip)
            raised = self._raised(current, listed)
        return raised

    def _as_told(self) -> _Raised | None:
        """Do step 2 with the former owner's message in place of step 1; return None if that is not the newest state."""
        if (told := self.known.released) is None:
            return None
        try:
            self._expect_claimable(told.manifest, told.position)
        except WalError:
            return None
        listed = Listed(told.position, whole=True)
        reading = self.beside.begin(partial(self._remember, listed))
        raised = self._raised(told.manifest, listed)
        reading.result()
        return raised

    def _raised(self, current: RegionManifest | None, listed: Listed) -> _Raised | None:
        """Do step 2; return None if `current` is not the newest version any more."""
        known = self.beside.begin(partial(self._early, current, listed))
        if (written := self.manifests.create(current, self._next(current), hint=current is None)) is None:
            return None
        return _Raised(written, listed, current.read_lease if current and self._answers(current) else 0, known)

    def _answers(self, current: RegionManifest) -> bool:
        """Return whether the owner of `current` may answer reads."""
        told = self.known.released
        return told is None or current.writer_epoch != told.manifest.writer_epoch

    def put_sentinel(self, guard: EpochGuard, raised: _Raised) -> tuple[int, AppliedMap]:
        """Do steps 3 and 4. Return the tip, which is the sentinel's position, and the applied map.

        Epoch 1 has no older writer to fence and puts no sentinel: its tip is 0.
        """
        reader, manifest, listed = self.reader, raised.manifest, raised.listed
        reader.log_id = guard.log_id
        tip = max(listed.tip, manifest.last_seen, manifest.replay_after)
        if guard.epoch == 1:
            tip = self._probed(tip)
        elif not listed.whole:
            tip = tip_from(self.reads, self.region_id, self.codec.suffix, tip, listed, self.options.readers, guard)
        while True:
            applied = newest_applied(reader, tip, manifest.replay_after, guard)
            if guard.epoch == 1:
                self._expect_no_entries(tip)
                return 0, AppliedMap()
            applied = AppliedMap.of(applied if self.opening is None else self.opening).copy()
            header = self._sentinel(guard, manifest, applied, tip + 1)
            key, data = reader.key(tip + 1), self.codec.encode(header, self.codec.no_rows)
            if put_until_known(self.store, key, data, clock=self.clock, options=self.options) is None:
                return tip + 1, applied
            tip = self._probed(tip + 1)

    def _sentinel(self, guard: EpochGuard, manifest: RegionManifest, applied: AppliedMap, position: int) -> EntryHeader:
        """Return the header of a sentinel for `position`. If `applied` is long, write a snapshot of it first."""
        ids = self.ids
        if not applied.fits(applied.snapshot.name):
            write_snapshot(
                applied, self.store, self.region_id, position, ids=ids, clock=self.clock, options=self.options
            )
        generation, name, changes = manifest.current_generation, applied.snapshot.name, applied.changes
        return EntryHeader(guard.epoch, generation, ids.entry_id(), changes, None, True, name, guard.log_id)

    def record(self, guard: EpochGuard, manifest: RegionManifest, tip: int) -> RegionManifest:
        """Do step 5."""
        if self.opening is None:
            return settle_claim(self.manifests, guard, manifest, tip)

        def opened(current: RegionManifest) -> RegionManifest:
            # The resize waited for all leases before it decided the routing, and a sealed region gives none.
            return replace(
                current,
                last_seen=max(current.last_seen, tip),
                status=RegionStatus.ACTIVE,
                spec_id=self.spec_id,
                read_lease=0,
            )

        return manifest if guard.epoch == 1 else self.manifests.edit(guard, opened, manifest)

    def replayed(self, guard: EpochGuard, raised: _Raised, tip: int, on_progress: Progress | None) -> list[Entry]:
        """Do step 6. `tip`: the position of the sentinel, which has no rows and ends only batches that replay drops."""
        return replay(
            self.reads,
            self.region_id,
            self.codec,
            raised.manifest.replay_after,
            tip - 1,
            guard=guard,
            on_progress=on_progress,
            readers=self._readers(raised.manifest.replay_after, tip),
            known=raised.known.result(),
        )

    def _readers(self, first: int, last: int) -> int:
        """Return how many threads read the entries from `first` to `last`."""
        return self.options.readers if self.store.remote or last - first > _FEW else 1

    def _look(self) -> Listed:
        """Do the listing of step 1."""
        listed = list_tip(self.reads, self.region_id, self.codec.suffix)
        self._remember(listed)
        return listed

    def _remember(self, listed: Listed) -> None:
        """Read the header that step 4 most likely needs, so that the reader caches it."""
        if listed.whole and listed.tip:
            with suppress(Corrupt):  # it may be an old fence that step 4 does not need
                self.reader.header_of_any(listed.tip)

    def _early(self, current: RegionManifest | None, listed: Listed) -> dict[int, Entry]:
        """Return the known entries and the first ones after them, by position, above those that `current` has flushed.

        The last known entry is read again. If it differs, the log is another one, and the result is empty.
        """
        after, log_id = (current.replay_after, current.log_id) if current else (0, "")
        known = {entry.position: entry for entry in self.known.entries if entry.position > after}
        start, last = max(known, default=after + 1), max(known, default=after)
        if listed.whole:
            last = max(last, min(listed.tip, start + _EARLY * self.options.readers))
        reader = EntryReader(self.reads, self.region_id, self.codec, self._readers(start, last), log_id=log_id)
        read = dict[int, Entry]()
        with suppress(Corrupt, Overtaken), closing(reader.each(range(start, last + 1))) as entries:  # step 6 raises it
            for position, entry in enumerate(entries, start):
                if entry is None:
                    break
                read[position] = entry
        is_same = start in read and (start not in known or read[start].is_again(known[start]))
        return known | read if is_same else {}

    def _next(self, current: RegionManifest | None) -> RegionManifest:
        if current is None:
            first, status = self.known.committed + 1, RegionStatus.SEALED if self.seal else RegionStatus.ACTIVE
            return RegionManifest(
                1, 1, self.region_id, self.spec_id, current_generation=first, status=status, read_lease=self._lease
            )
        status = RegionStatus.SEALED if self.seal else current.status
        return replace(
            current,
            version=current.version + 1,
            writer_epoch=current.writer_epoch + 1,
            status=status,
            read_lease=max(current.read_lease, self._lease),
            released=0,
        )

    @property
    def _lease(self) -> int:
        """Milliseconds of this claim's read lease; 0 in the arrow format, because Lance's writer does not wait for
        leases.
        """
        serves = not self.seal and self.opening is None and self.codec.suffix != "arrow"
        return round(1000 * self.options.read_lease) if serves else 0

    def _expect_claimable(self, current: RegionManifest | None, tip: int) -> None:
        """Return if the region may be claimed whose newest manifest is `current` and whose log has entries up to `tip`.

        Raises: Sealed; Resized; Corrupt.
        """
        region_id, opening, committed = self.region_id, self.opening is not None, self.known.committed
        if current is None:
            self._expect_no_entries(tip)
            if opening:
                raise Corrupt(f"{manifest_prefix(region_id)}: empty, though a resize sealed it; restore a backup")
            return
        _expect_routing(region_id, current, self.spec_id, seal=self.seal, opening=opening)
        if current.current_generation <= committed:
            raise Corrupt(
                f"{named(region_id)}: generation {committed} is committed, but manifest version {current.version} "
                f"publishes {current.current_generation} next: it is older than the base table; restore the whole "
                "table from one backup"
            )

    def _expect_no_entries(self, tip: int) -> None:
        """Raise Corrupt if the log has an entry: without a manifest, it would have been written without a claim."""
        if tip:
            raise Corrupt(
                f"{named(self.region_id)} has WAL entries up to position {tip} but had no manifest; restore "
                f"{manifest_prefix(self.region_id)} from a backup, or move {wal_prefix(self.region_id)} away to start "
                "empty"
            )

    def _probed(self, tip: int) -> int:
        return probe_tip(self.reads, self.region_id, self.codec.suffix, tip)
