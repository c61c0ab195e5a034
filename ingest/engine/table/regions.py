"""Own some regions of a table; acquire and release regions while the table is in use.

Steps to acquire a region (`acquire`):

1. List its SST directories, claim it, and replay its log. *Crash or failure: no process owns it, or the claim is
   unused; the next claim raises the epoch again.*
2. Add it to the set, in the table's present columns. From here on calls find it.
3. If much was replayed, flush it in the background, so that owners that die one after the other do not each replay
   more.

A call for a region that is being acquired waits for it, because its sender knows that no other process has it.

Steps to release a region (`release`), the first half of a planned hand-over:

1. If requested, or if the next owner would have much to read, flush it while it still serves. *Failure: it stays.*
2. Remove it from the set: later calls fail with `not_owner` and write nothing.
3. End its writer: queued writes are served and acked, lingering rows are appended, its threads end. The log stays.
4. Only then return. *From here on this writer acks nothing, whichever process claims the region next, and whenever. If
   it had paused through all of this, the epoch of the next claim would reject its append.*

Regions claimed at their first use (`claim` is set). A write, and a read that storage cannot answer, claims a region
that is missing and belongs to this process (`belongs`). A read first reads the newest manifest: a region at rest is
read from storage and stays unclaimed (`wal.lease`, Rest). Steps to rest (`rest`), for a region that was not used for a
while and whose rows are all in the base table:

1. Remove it from the set: later calls wait for the end of step 4, and then act as for any missing region.
2. End its writer: queued writes are served and acked. Writes that come later fail with `Rested`; their callers send
   them to the next claim.
3. Stop answering reads from memory. *Crash up to here: the next call claims the region and replays its log.*
4. Unless step 2 served a write with rows, record in the manifest that the region is at rest. *Outcome unknown: a read
   claims the region, or finds it at rest; both are right.*
5. Withdraw the owner's note. *Crash before: the note names a process that has ended, or does not have the region.*
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from uuid import UUID

from memwal import wal
from memwal.flush import BaseTable
from memwal.ingest.engine.read.levels import RegionView
from memwal.ingest.engine.region.context import RegionContext
from memwal.ingest.engine.region.writer import RegionWriter, Rested
from memwal.ingest.engine.table import owner_notes as owners
from memwal.ingest.engine.table.garbage import TableCollector
from memwal.ingest.errors import Invalid, MemWalError, Unavailable
from memwal.ingest.refusals import not_owner
from memwal.ingest.threads import SideTask
from memwal.wal.parallel_map import AT_ONCE, each

_LOG = logging.getLogger("memwal.regions")
REPLAYED_QUICKLY = 16 << 20
"""Bytes of memtables, including indexes, that are cheaper to replay than to flush before a region changes its owner."""
REPLAYED_ENTRIES, FLUSHED_ENTRIES = 50, 200
"""The first: the same limit in entries; an entry takes half a millisecond to read, however small. The second: a region
with more replayed entries is flushed in the background after its claim; fewer do not justify an SST.
"""
COMING_WITHIN = 2.0
"""Seconds that a call waits for a region that is being acquired; afterwards its caller tries another process."""
_BRIEFLY = wal.WalOptions(put_timeout=1.0, retry_budget=1.0)
"""Limits of the requests for a note, which is a hint."""


@dataclass(frozen=True, slots=True)
class BeforeClaim:
    """The state of a region before a claim. It may be read while another process still serves the region."""

    ssts: tuple[str, ...]
    """Directories of SSTs, published or not."""
    committed: int
    """Newest of its generations in the base table."""
    released: wal.Released | None = None
    """The note of the owner that has released the region to this process; None without one."""


class RegionSet:
    """The writers of the owned regions, by region.

    Thread safety. Every method from any thread; calls for the same region wait for each other, others do not.
    Invariants. (1) A writer that left the set is never returned again. (2) While `changing` is held, every writer of
    the set has the shape of `context`, and none joins.
    """

    def __init__(self, base: BaseTable, context: RegionContext) -> None:
        """Create a set without regions. `base`: any version of the table."""
        self.context = context
        self.changing = threading.RLock()
        self._changed = threading.Condition(self.changing)
        self.order = base.regions
        self.hint: Callable[[UUID], tuple[str, int] | None] = lambda _: None
        """Returns the endpoint that owns a region which is not here, and its epoch (0: it has yet to claim it); None if
        unknown."""
        self.assure: Callable[[], None] = lambda: None
        """Called before a read: if this process may have paused, releases regions that another process has claimed."""
        self.claim: Callable[[UUID, wal.Released | None], object] | None = None
        """Claims a missing region at its first use, with the note of its former owner; None: missing regions stay
        missing."""
        self.belongs: Callable[[UUID], bool] = lambda _: True
        """Returns whether this process may claim a missing region, or read it from storage."""
        self.ahead: Callable[[UUID], wal.ReadAhead | None] = lambda _: None
        """Removes and returns the entries of a region's log that this process has read before a claim."""
        self.sealed: float | None = None
        """Monotonic time (s) since which claims find that a resize has sealed a region; None: the last one did not."""
        self.draining = False
        self.coming: frozenset[UUID] = frozenset()
        """Regions that are being claimed or requested."""
        self.collector = TableCollector(context.store, context.codec, context.clock, base.regions, context.wal_options)
        self._buckets = {region: bucket for bucket, region in enumerate(base.regions)}
        self._turns: defaultdict[UUID, threading.Lock] = defaultdict(threading.Lock)
        self._held: Mapping[UUID, RegionWriter] = {}
        self._looked: dict[UUID, wal.RegionManifest] = {}
        """The newest manifests of missing regions as of the last looks, at which the next looks start."""
        self._endpoint = self._name = ""
        self._closed = False

    # ---- present regions -----------------------------------------------------------------------------------------

    @property
    def writers(self) -> Sequence[RegionWriter]:
        """The writers of the regions owned now, by bucket."""
        return list(self._held.values())

    @property
    def alive(self) -> Sequence[RegionWriter]:
        """The writers that have not failed."""
        return [writer for writer in self._held.values() if writer.failure is None]

    @property
    def epochs(self) -> dict[str, int]:
        """The epochs of this process's claims that are not known to be lost, by region id."""
        return {writer.name: writer.guard.epoch for writer in self.alive}

    @property
    def whole(self) -> bool:
        """Whether this process owns every region of the table."""
        return len(self._held) == len(self.order)

    def has(self, writer: RegionWriter) -> bool:
        """Return whether `writer` is still in the set."""
        return self._held.get(writer.region) is writer

    def ended(self, region: UUID) -> bool:
        """Return whether `region` is here with a writer that has failed."""
        held = self._held.get(region)
        return held is not None and held.failure is not None

    def writer(self, region: UUID) -> RegionWriter:
        """Return the writer of `region`. Raises: Unavailable (`not_owner`); Invalid if the table has no such region."""
        writer = self._held.get(region)
        if writer is None:
            raise self.missing(region)
        return writer

    def serving(self, region: UUID) -> RegionWriter:
        """Return the writer of `region`; wait for a region that is being acquired, or claim it.

        Raises: as `writer`; as `wal.claim`.
        """
        held = self._held.get(region)
        if held is not None and held.failure is None:
            return held
        if held is None and region in self.coming:
            with self._changed:
                self._changed.wait_for(lambda: region in self._held or region not in self.coming, COMING_WITHIN)
        if self.claim is not None and self.claimable(region):
            looked = self._looked.get(region)
            at_rest = looked is not None and looked.at_rest
            with self.expecting(region):
                self.claim(region, wal.Released(looked, looked.last_seen) if looked is not None and at_rest else None)
        return self.writer(region)

    def sources(self, regions: Iterable[UUID], at_once: int, *, flushed: bool) -> Sequence[RegionWriter | RegionView]:
        """Return where a read that begins now finds the rows of `regions`: writers, or the levels of regions at rest.

        `at_once`: regions looked up or claimed in parallel. `flushed`: rows in memtables are not wanted, so that the
        newest manifest suffices. Raises: as `serving`.
        """
        wanted = list(regions)
        missing = [region for region in wanted if self.claimable(region)]
        views = dict(zip(missing, each(partial(self._at_rest, flushed=flushed), missing, at_once), strict=True))
        return [views.get(region) or self.serving(region) for region in wanted]

    def of(self, regions: Iterable[UUID]) -> Sequence[RegionWriter]:
        """Return the writers of `regions`; on remote storage, several are claimed at once. Raises: as `serving`."""
        wanted, at_once = list(regions), AT_ONCE if self.context.store.remote else 1
        list(each(self.serving, filter(self.claimable, wanted), at_once))
        return [self.serving(region) for region in wanted]

    def claimable(self, region: UUID) -> bool:
        """Return whether `region` has no serving writer here, and the next call that needs it claims it here."""
        if self.claim is None or self.draining or region not in self._buckets:
            return False
        held = self._held.get(region)
        gone = region not in self.coming if held is None else held.failure is not None
        return gone and self.belongs(region)

    def missing(self, region: UUID) -> Invalid | Unavailable:
        """Return the error of a call that names `region`, which is not here."""
        if region not in self._buckets:
            return Invalid(f"{wal.named(region)} is not one of this table's {len(self.order)} regions")
        return not_owner(region, self.hint(region), reason="draining" if self.draining else "not_owner")

    # ---- coming and going ----------------------------------------------------------------------------------------

    def before_claim(self, region: UUID, committed: Callable[[], Mapping[UUID, int]]) -> BeforeClaim:
        """Read the state of `region` from before its claim. `committed`: returns the generations in the newest base
        version.

        Raises: Invalid if the table has no such region; wal and flush errors.
        """
        if region not in self._buckets:
            raise self.missing(region)
        generations = SideTask(committed, alone=not self.context.store.remote)  # each is a round trip
        try:
            return BeforeClaim(self.collector.names(region), generations.result().get(region, 0))
        finally:
            generations.end()

    def acquire(self, region: UUID, before: BeforeClaim) -> int:
        """Claim `region`, unless this process holds it already; return the epoch.

        Raises: as `wal.claim`; Invalid once closed.
        """
        if region not in self._buckets:
            raise self.missing(region)
        with self._turns[region]:
            held = self._held.get(region)
            if held is not None and held.failure is None:
                return held.guard.epoch
            if held is not None:
                self._leave(held)
            with self.expecting(region):
                context, ahead = self.context, self.ahead(region)
                entries = () if ahead is None else ahead.entries(context.codec)
                known = wal.Known(before.committed, before.released, entries)
                try:
                    writer = RegionWriter(context, region, self._buckets[region], known)
                except Exception as error:
                    if isinstance(error, wal.Sealed) and self.sealed is None:
                        self.sealed = context.clock.monotonic()
                    context.meters.of(region).erred("claim", error, context.clock.now())
                    raise
                self.collector.note_older_than_claim(region, before.ssts, writer.guard.epoch)
                self._join(writer, context)
            self._note(writer)
            writer.settle()
            if writer.unflushed_entries() > FLUSHED_ENTRIES:
                with suppress(MemWalError, wal.WalError):  # the writer's own limits meet the same error again
                    writer.freeze()
            return writer.guard.epoch

    @contextmanager
    def expecting(self, region: UUID) -> Iterator[None]:
        """Count `region` as being acquired for the duration of the context."""
        with self.changing:
            known = region in self.coming
            self.coming |= {region}
        try:
            yield
        finally:
            if not known:
                with self._changed:
                    self.coming -= {region}
                    self._changed.notify_all()

    def release(self, region: UUID, *, flush: bool | None = None) -> int:
        """Release `region`; return the epoch that was held.

        `flush`: first publish its memtables, while it still serves; None: only if they would take long to replay. The
        owner's note stays: the next owner overwrites it, and a daemon rejects a call that a stale note sent to it.
        Raises: Unavailable if the region is not here, or cannot be flushed (it stays then); the error that kept
        non-durable rows from the log, and the region is released even then.
        """
        return self._released(region, flush=flush, told=False)[0]

    def rest(self, region: UUID) -> bool:
        """Release `region` if all its rows are in the base table; return whether it is at rest now.

        Only with `claim`. Does nothing if the region is missing, has failed, or has other rows. See the module.
        """
        with self._turns[region]:
            writer = self._held.get(region)
            if self.claim is None or writer is None or not writer.at_rest:
                return False
            self._leave(writer, rest=True)
            if writer.rested is not None:
                self._looked[region] = writer.rested
            self._withdraw(writer)
            return writer.rested is not None

    def rest_idle(self, idle_after: float) -> int:
        """Release the regions at rest that were not used for `idle_after` seconds; return their number."""
        before = self.context.clock.monotonic() - idle_after
        return sum(self.rest(writer.region) for writer in self.alive if writer.idle_since <= before and writer.at_rest)

    def give(self, region: UUID, read: int = 0) -> tuple[int, wal.Released | None]:
        """As `release`, for a process that claims the region next and has read its log up to position `read`.

        Returns also the note for that process, which saves requests while no process serves the region.
        """
        return self._released(region, flush=None, told=True, read=read)

    def announce(self, endpoint: str, name: str = "") -> None:
        """Write `endpoint` into the owner's notes of these regions, and of those acquired later.

        `name`: of the table in a fleet.
        """
        self._endpoint, self._name = endpoint, name
        for writer in self.writers:
            self._note(writer)

    def renew_notes(self) -> None:
        """Write missing notes again; see `table.owner_notes`. Storage failures are ignored."""
        context = self.context
        for writer in self.alive:
            with suppress(wal.WalError):  # the note is a hint
                epoch, daemon = writer.guard.epoch, context.daemon
                owners.renew(context.store, writer.region, epoch, self._endpoint, daemon=daemon, name=self._name)

    def leave_all(self) -> None:
        """Release all regions, because their routing ends. Never raises: the log has all rows that are durable."""

        def leave(writer: RegionWriter) -> None:
            with self._turns[writer.region], suppress(Exception):  # the writer has failed, mostly by the seal
                self._leave(writer, rest=True)

        list(each(leave, self.writers, AT_ONCE))

    def adopt(self, base: BaseTable) -> None:
        """Let the set be of the regions of the routing of `base`. Requires: no writer is in it."""
        with self.changing:
            self.context = replace(self.context, routing=base.routing_version, route_into=base.route_into)
            self.order, self._looked = base.regions, {}
            self._buckets = {region: bucket for bucket, region in enumerate(base.regions)}
            self.collector.know(base.regions)

    def close(self) -> None:
        """Close all writers, even if one raises, and delete the notes. Raises: the error of a writer's `close`."""
        with self.changing:
            self._closed = True
        with ExitStack() as every:  # closes each, even if others raise
            for writer in self.writers:
                every.callback(self._withdraw, writer)
                every.callback(writer.close, rest=self.claim is not None)

    # ---- inside --------------------------------------------------------------------------------------------------

    def _released(
        self, region: UUID, *, flush: bool | None, told: bool, read: int = 0
    ) -> tuple[int, wal.Released | None]:
        with self._turns[region]:
            writer = self.writer(region)
            long = writer.memtable_bytes > REPLAYED_QUICKLY or writer.unflushed_entries(read) > REPLAYED_ENTRIES
            if writer.failure is None and (long if flush is None else flush):
                writer.freeze()()
            return writer.guard.epoch, self._leave(writer, told=told)

    def _join(self, writer: RegionWriter, context: RegionContext) -> None:
        try:
            with self.changing:
                if self._closed:
                    raise Invalid("the table is closed; open it again")
                if self.context is not context:
                    writer.reshape(self.context)
                self.sealed = None
                held = {**self._held, writer.region: writer}
                self._held = dict(sorted(held.items(), key=lambda item: self._buckets[item[0]]))
                self._changed.notify_all()
        except BaseException:
            writer.close()
            raise

    def _leave(self, writer: RegionWriter, *, told: bool = False, rest: bool = False) -> wal.Released | None:
        with self.changing:
            self._held = {region: each for region, each in self._held.items() if each is not writer}
        reason = Rested(f"{wal.named(writer.region)} was idle and is released") if rest else self.missing(writer.region)
        return writer.close(reason, told=told, rest=rest)

    def _at_rest(self, region: UUID, *, flushed: bool) -> RegionView | None:
        """Read the newest manifest of `region`, and return its SSTs if it is at rest or if `flushed`; else None."""
        newest = self.context.manifests(region).latest(self._looked.get(region))
        if newest is None:
            return None
        self._looked[region] = newest
        routing = self.context.routing
        return RegionView(region, (), newest.ssts, routing=routing) if flushed or newest.at_rest else None

    def _note(self, writer: RegionWriter) -> None:
        """Write the note of `writer`. Nothing depends on it, so a failure is only logged."""
        context, endpoint, epoch = self.context, self._endpoint, writer.guard.epoch
        try:
            owners.announce(context.store, writer.region, epoch, endpoint, daemon=context.daemon, name=self._name)
        except wal.WalError as error:
            _LOG.warning("%s: the note of its owner is not written: %s", wal.named(writer.region), error)

    def _withdraw(self, writer: RegionWriter) -> None:
        store, region, epoch = self.context.store, writer.region, writer.guard.epoch
        with suppress(wal.WalError):  # the note is a hint
            owners.withdraw(store, region, epoch, partial(self._newer_owner, writer), daemon=self.context.daemon)

    def _newer_owner(self, writer: RegionWriter) -> int | None:
        """Return the epoch of an owner that has claimed the region after `writer` and not released it, or None.

        Claims of a resize and of other programs, which leave no notes, give no leases.
        """
        manifest = self.context.manifests(writer.region, _BRIEFLY).latest()
        if manifest is None or not manifest.read_lease or manifest.status is not wal.RegionStatus.ACTIVE:
            return None
        return manifest.writer_epoch if manifest.writer_epoch > writer.guard.epoch else None


def prove(writers: Sequence[RegionWriter], at_once: int, *, anew: bool) -> None:
    """Ensure, before a read, that no other owner acknowledges writes of these regions (`wal.lease`).

    `at_once`: number of regions confirmed in parallel. Raises: Fenced; wal errors.
    """
    proofs = [proof for writer in writers if (proof := writer.unproven(anew=anew)) is not None]
    if proofs:  # usually none, because leases cover the reads
        list(each(lambda proof: proof(), proofs, at_once))
