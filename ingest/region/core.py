"""The protocol of one region, without threads: append, apply, ack; freeze; publish in order.

A driver calls it: `ingest.region.writer` with threads and a queue, a simulation with greenlets of one thread. No method
waits for anything but storage, and none holds a lock while it asks storage, so that several parties may be under way at
once, one inside `serve`, one inside `publish_next` and one inside `index_step`.

What the core promises, whatever storage answers:

1. Rows enter the memtable in WAL order, and only rows that the WAL holds or that linger for its next entry.
2. A write is visible as a whole or not at all, and not before all its rows are checked and copied.
3. A durable write is acknowledged only after the entry that closes it is on storage.
4. Of two writes of one producer only the one with the higher sequence is applied; the map that says so is in the same
   entry as the rows. A write of no rows has an entry of its own, which is nothing but the map.
5. Every write handed in is answered: acknowledged, or given the error that kept it out. Nothing is in between.
6. A frozen memtable ends at an entry that closes a batch, and every row in it is on storage.
7. Generations are published in ascending order; a failed flush changes nothing and blocks those behind it.
8. After a failure that leaves an outcome open, or a fence, nothing more is written, shown or acknowledged: `failure`
   says why, for good.
9. A read that begins after any owner's acknowledgement of a write sees it, or fails (`wal.lease`): a read takes a
   ticket of `lease`, and calls `prove` where that does not cover it, before it takes a view.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any
from uuid import UUID

import pyarrow as pa

from memwal import flush as flush_package
from memwal import wal
from memwal.ingest.api.tokens import Applied
from memwal.ingest.read.levels import RegionView
from memwal.ingest.region.backlog import Waiting
from memwal.ingest.region.context import RegionContext
from memwal.ingest.region.generations import RegionGenerations
from memwal.ingest.region.groups import Repeats, WriteGroup, WriteGroups, entry_sized
from memwal.ingest.region.log import RegionLog
from memwal.ingest.region.state import RegionLevels
from memwal.ingest.region.write_queue import Write

NOTHING_WRITTEN = (wal.StoreUnavailable, wal.StoreRefused)
"""Failures of an append that leave the log as it was: the region lives on, the callers may try again."""

NOT_ENCODED = (pa.ArrowException, ValueError, TypeError, RuntimeError)
"""Failures to make an entry of rows, before its slot is touched: the callers' affair, not the region's."""

RETRY_FLUSH = (*NOTHING_WRITTEN, wal.OutcomeUnknown, flush_package.SstInvalid, OSError)
"""Failures of a flush that leave the region as it was: `publish_next` may be called again, those behind it wait."""

_BRIEFLY = wal.WalOptions(put_timeout=1.0, retry_budget=1.0)
"""For a note at the end that nothing depends on."""


class _Ending:
    """A context: whatever breaks out of the block ends the region, except what leaves it as it was.

    Reusable, and no generator, since every put passes several.
    """

    def __init__(self, core: RegionCore, survives: tuple[type[Exception], ...]) -> None:
        self._core, self._survives = core, survives

    def __enter__(self) -> None:
        if self._core.levels.failure is not None:
            raise self._core.levels.failure

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is not None and not isinstance(error, self._survives):
            self._core.end(error)


class RegionCore:
    """One claimed region; its promises are numbered in the module's text.

    Thread safety. Three parties: the serving one calls `serve`, `keep_limits`, `freeze`, `durable_view` and `close`,
    the publishing one `publish_next`, the indexing one `index_step` (index mode "async" only); the rest from anybody.
    Each party is one thread (or greenlet) at a time.
    Durability. `serve` acknowledges durable writes only once they are on storage.
    """

    def __init__(self, context: RegionContext, region: UUID, claim: wal.Claim) -> None:
        """Take over `claim`, replay its entries; nothing else may use that claim."""
        self.region, self.guard = region, claim.guard
        self._context = context
        self._manifests = wal.ManifestStore(
            context.store, region, ids=context.ids, clock=context.clock, options=context.wal_options
        )
        self.lease = wal.ReadLease(claim.guard, self._manifests, claim.manifest, context.clock)
        self._others_read_until = claim.others_read_until
        self._log = RegionLog(context, region, claim, self.lease)
        self.levels = RegionLevels(region, claim.manifest, context)
        self._generations = RegionGenerations(context, region, claim, self.levels, self._log, self._manifests)
        self._repeats = Repeats(claim.applied)
        self._groups = WriteGroups(context, self._repeats, self.levels.view)
        self._ending, self._ending_flush = _Ending(self, NOTHING_WRITTEN), _Ending(self, RETRY_FLUSH)

    @classmethod
    def open(cls, context: RegionContext, region: UUID, committed: int = 0) -> RegionCore:
        """Claim the region and replay its log. `committed` and what it raises: as for `wal.claim`."""
        claim = wal.claim(
            context.store,
            region,
            spec_id=context.routing,
            codec=context.codec,
            ids=context.ids,
            clock=context.clock,
            committed=committed,
            on_progress=partial(context.replayed, region, "reading"),
            options=context.wal_options,
        )
        return cls(context, region, claim)

    # ---- anybody -------------------------------------------------------------------------------------------------

    @property
    def failure(self) -> BaseException | None:
        """What ended this region, None while it lives."""
        return self.levels.failure

    @property
    def lingers(self) -> bool:
        """Whether visible rows wait for the next entry."""
        return self._log.lingers

    @property
    def unflushed_entries(self) -> int:
        """Entries of the log that the next claim has to replay."""
        return self._generations.unflushed_entries

    def view(self) -> RegionView:
        """The levels above the base table at this moment. Raises: the error that ended this region."""
        return self.levels.view()

    def applied(self, producer: str) -> Applied:
        """The highest sequence of `producer` of which rows, and the highest of which all rows, were applied here."""
        self._wait_for_others()
        applied = self._log.applied
        newest = applied.get(producer)
        left = newest is not None and self._repeats.half_applied(producer, applied)
        return Applied(newest - 1 if left and newest is not None else newest, newest)

    def refresh(self) -> None:
        """Take over a manifest that the committer pruned. Raises: Fenced, which ends the region."""
        try:
            self.levels.adopt(manifest := self._manifests.owned(self.guard))
        except wal.Fenced as error:
            self.end(error)
            raise
        self._generations.forget_committed(manifest)

    @property
    def alone(self) -> bool:
        """Whether no older owner answers reads any more. Until then this one answers none either: what is replayed here
        may not have been acknowledged there."""
        return self._others_read_until <= 0 or self._context.clock.monotonic() >= self._others_read_until

    def prove(self) -> None:
        """Ask storage whether the region is still ours, once it is `alone`.

        Raises: Fenced, which ends the region; what reading storage does.
        """
        self._wait_for_others()
        try:
            self.lease.prove()
        except wal.Fenced as error:
            self.end(error)
            raise

    def waiting(self) -> Waiting:
        """What is not in the base table, as far as this writer knows: it learns of others' commits at `refresh`."""
        return self._generations.waiting()

    def status(self) -> dict[str, Any]:
        """This region's part of `Table.status()`; generations and positions as in the region manifest."""
        return {
            "id": str(self.region),
            "epoch": self.guard.epoch,
            "wal_position": self._log.position,
            **self.levels.status(),
            "unindexed_rows": self._generations.indexes.waiting() if self._context.has_indexes else 0,
        }

    def end(self, error: BaseException) -> BaseException:
        """End the region with `error`, unless it ended before; returns what those get who ask from now on."""
        if isinstance(error, wal.OutcomeUnknown):  # unknown only to those whose rows were in it
            error = wal.Poisoned(f"region {self.region}: the writer stopped itself: {error}; open the table again")
        return self.levels.fail(error)

    # ---- the serving party ---------------------------------------------------------------------------------------

    def serve(self, writes: Sequence[Write]) -> None:
        """Append, apply and answer `writes`, in order, in as few entries as `wal.entry_size_max` allows.

        Raises: what ended the region; every write is answered all the same.
        """
        try:
            with self._ending:
                for gathered in entry_sized(writes, self._context.limits.entry_size_max):
                    group = self._groups.group(gathered, self._log.applied)
                    if group is not None:
                        self._append_and_apply(group)
        except BaseException as error:
            for write in writes:
                if not write.done.done():
                    write.done.set_exception(error)
            raise

    def keep_limits(self) -> None:
        """Append rows that have lingered long enough, freeze the memtable when it is full or old.

        Raises: StoreUnavailable or StoreRefused, to be called again later; what ended the region.
        """
        with self._ending:
            self._generations.keep_limits()

    def next_duty(self) -> float | None:
        """Seconds until `keep_limits` has something to do; None while there is nothing to watch."""
        return self._generations.next_duty()

    def freeze(self) -> int:
        """Freeze what is there, durable to its last row; returns the generation that is active then.

        Raises: as `keep_limits`.
        """
        with self._ending:
            self._generations.freeze()
            return self.levels.active.generation

    def reshape(self, context: RegionContext) -> int:
        """Take rows of the shape of `context` from now on; what is there keeps its own, in generations of its own.

        Returns the newest generation that waits to be flushed in another shape, 0 where none does. May be called again.
        Raises: as `keep_limits`; then nothing is changed.
        """
        with self._ending:
            if context.shape != self._context.shape:
                self._generations.reshape(context)
                self._context = context
                self._groups = WriteGroups(context, self._repeats, self.levels.view)
            return self.levels.last_unlike(self._context)

    def durable_view(self) -> RegionView:
        """The levels at a moment when every row in them is on storage. Raises: as `keep_limits`."""
        with self._ending:
            self._log.append_lingering(self.levels.active.generation)
            return self.levels.view()

    def close(self) -> None:
        """Append what lingers. Nothing is flushed: the WAL holds it. Raises: what kept visible rows from the WAL."""
        with self._ending:
            self._log.append_lingering(self.levels.active.generation)

    def release(self) -> None:
        """Answer no more reads from memory alone, and tell the next owner that it need not wait for that.

        To be called last. Where storage does not take it the next owner waits.
        """
        self.lease.end()
        if self.failure is None and self.alone and self.levels.manifest.read_lease:
            manifests = wal.ManifestStore(
                self._context.store, self.region, ids=self._context.ids, clock=self._context.clock, options=_BRIEFLY
            )
            with suppress(wal.WalError):
                manifests.edit(self.guard, lambda current: replace(current, read_lease=0), self.levels.manifest)

    # ---- the publishing party ------------------------------------------------------------------------------------

    def publish_next(self) -> bool:
        """Flush the oldest frozen memtable and publish its SST; False when none is frozen.

        Raises: RETRY_FLUSH (nothing is published, call again), what ended the region.
        """
        with self._ending_flush:
            frozen = self.levels.oldest_frozen()
            if frozen is None:
                return False
            context = frozen.context  # its own: the table may have other columns by now
            manifest = flush_package.flush(
                context.store,
                self._manifests,
                self.guard,
                frozen.memtable.snapshot(),
                generation=frozen.memtable.generation,
                covers_position=frozen.covers,
                key=context.key,
                storage_version=context.storage_version,
                ids=context.ids,
                field_ids=context.field_ids,
                files=context.files,
                indexes=context.sst_indexes,
                attempts=frozen.attempts,
            )
            self.levels.published(manifest)
            return True

    # ---- the indexing party --------------------------------------------------------------------------------------

    def index_step(self) -> bool:
        """Move one block of waiting rows into vector and text indexes; False when none waits, or the region ended."""
        return not self.levels.ended and self._generations.indexes.step()

    # ---- inside --------------------------------------------------------------------------------------------------

    def _append_and_apply(self, group: WriteGroup) -> None:
        """Append, apply, and answer the group."""
        position = 0
        self._wait_for_others()
        try:
            self._generations.keep_small(group.rows)
            if group.durable:
                generation = self.levels.active.generation
                position = self._log.append(group.rows, group.applied, generation=generation, alone=group.is_note)
        except (*NOTHING_WRITTEN, *NOT_ENCODED) as error:
            if isinstance(error, NOT_ENCODED) and self.lingers:
                raise  # visible rows among them: they could never be appended
            group.fail(error)
            return
        if not group.durable:
            self._log.linger(group.rows, group.applied)
        if group.rows is not None:
            self._generations.apply(group.rows)
        group.acknowledge(position)

    def _wait_for_others(self) -> None:
        """Until no older owner answers reads without what is written here; see `wal.lease`."""
        if self.alone:
            self._others_read_until = 0.0
        else:
            self._context.clock.sleep(self._others_read_until - self._context.clock.monotonic())
