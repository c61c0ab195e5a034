"""The protocol of one region, without threads: append, apply, ack; freeze; publish in order.

`ingest.region.writer` drives it with threads and a queue, a simulation with greenlets of one thread. A method waits for
storage only, and holds no lock while it does, so several parties may run at once, one inside `serve`, one inside
`publish_next` and one inside `index_step`.

What the core promises, whatever storage answers:

1. Rows enter the memtable in WAL order, and only rows that the WAL holds or that linger for its next entry (visible,
   not durable yet).
2. A write is visible as a whole or not at all, and not before all its rows are checked and copied.
3. A durable write is acknowledged only after the entry that closes it is on storage, a repeat or a put that changes
   nothing only after an entry with its token is.
4. A write is applied only if its sequence is above all that its producer had applied; the map of these sequences (the
   applied map) is in the same entry as the rows. Where no row is to be written, an entry has nothing but the map.
5. Every write is answered: acknowledged, or given the error that kept it out.
6. A frozen memtable ends at an entry that closes a batch, and every row in it is on storage.
7. Generations are published in ascending order; a failed flush changes nothing and blocks those behind it.
8. After a fence, or a failure that leaves an outcome open, nothing more is written, shown or acknowledged; `failure`
   holds the reason and never changes.
9. A read that begins after any owner's acknowledgement of a write sees it, or fails (`wal.lease`): a read takes a
   ticket of `lease`, and calls `prove` where that does not cover it, before it takes a view.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any
from uuid import UUID

import pyarrow as pa

from memwal import flush as flush_package
from memwal import wal
from memwal.ingest import tracing
from memwal.ingest.api.tokens import Applied
from memwal.ingest.read.levels import RegionView
from memwal.ingest.region.backlog import Backlog
from memwal.ingest.region.context import RegionContext
from memwal.ingest.region.generations import RegionGenerations
from memwal.ingest.region.groups import Repeats, WriteGroup, WriteGroups
from memwal.ingest.region.log import NOTHING_WRITTEN, Beside, RegionLog
from memwal.ingest.region.state import RegionLevels
from memwal.ingest.region.write_queue import Write
from memwal.memtable import MemTable

NOT_ENCODED = (pa.ArrowException, ValueError, TypeError, RuntimeError)
"""Failures to encode rows as an entry, before its slot is touched: the callers get them, the region lives on."""

RETRY_FLUSH = (*NOTHING_WRITTEN, wal.OutcomeUnknown, flush_package.SstInvalid, OSError)
"""Failures of a flush that leave the region unchanged: call `publish_next` again; later generations wait."""

_BRIEFLY = wal.WalOptions(put_timeout=1.0, retry_budget=1.0)
"""Limits of the last manifest edit of `release`, which nothing depends on."""


class _Ending:
    """A context manager: an exception out of the block ends the region, unless it is one of `survives`.

    Reusable, and no generator, because every put enters several.
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
    """One claimed region; its promises are numbered in the module's docstring.

    Thread safety. Three parties: the serving one calls `serve`, `keep_limits`, `freeze`, `reshape`, `durable_view` and
    `close`, the publishing one `publish_next`, the indexing one `index_step` (index mode "async" only); the rest from
    any thread. Each party is one thread (or greenlet) at a time.
    Durability. `serve` acknowledges durable writes only once they are on storage.
    """

    def __init__(self, context: RegionContext, region: UUID, claim: wal.Claim, beside: Beside | None = None) -> None:
        """Take over `claim`, replay its entries; nothing else may use that claim. `beside`: as of `RegionLog`."""
        self.region, self.guard = region, claim.guard
        self._context = context
        self._manifests = wal.ManifestStore(
            context.store, region, ids=context.ids, clock=context.clock, options=context.wal_options
        )
        self.lease = wal.ReadLease(claim.guard, self._manifests, claim.manifest, context.clock)
        self._others_read_until = claim.others_read_until
        self._sentinel = claim.next_position - 1
        self._log = RegionLog(context, region, claim, self.lease, beside)
        self.levels = RegionLevels(region, claim.manifest, context)
        self._generations = RegionGenerations(context, region, claim, self.levels, self._log, self._manifests)
        self._repeats = Repeats(claim.applied)
        self._groups = WriteGroups(context, self._repeats, self.levels.view)
        self._ending, self._ending_flush = _Ending(self, NOTHING_WRITTEN), _Ending(self, RETRY_FLUSH)

    @classmethod
    def open(
        cls,
        context: RegionContext,
        region: UUID,
        known: wal.Known | None = None,
        *,
        settle: bool = True,
        beside: Beside | None = None,
    ) -> RegionCore:
        """Claim the region and replay its log. `settle`: False leaves that to the caller. `beside`: as of `RegionLog`.

        Raises: as `wal.claim`.
        """
        claim = wal.claim(
            context.store,
            region,
            spec_id=context.routing,
            codec=context.codec,
            ids=context.ids,
            clock=context.clock,
            known=known,
            on_progress=partial(context.replayed, region, "reading"),
            options=context.wal_options,
            settle=settle,
        )
        return cls(context, region, claim, beside)

    # ---- any thread ----------------------------------------------------------------------------------------------

    @property
    def failure(self) -> BaseException | None:
        """The error that ended this region, None while it lives."""
        return self.levels.failure

    @property
    def lingers(self) -> bool:
        """Whether visible rows wait for the next entry."""
        return self._log.lingers

    def unflushed_entries(self, behind: int = 0) -> int:
        """Entries of the log that the next claim has to replay; only those behind position `behind`."""
        return self._generations.unflushed_entries(behind)

    @property
    def unindexed(self) -> int:
        """Rows in memtables that wait for the indexing party."""
        return self._generations.indexes.waiting()

    def view(self) -> RegionView:
        """Return the levels above the base table as of now. Raises: the error that ended this region."""
        return self.levels.view()

    def applied(self, producer: str, *, logged: bool = False) -> Applied:
        """Return two sequences of `producer`: the highest with all rows applied here, and the highest with any.

        `logged`: only of what the log has, so that the answer is true of every later owner.
        """
        self._wait_for_others()
        applied = self._log.logged if logged else self._log.applied
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
        """Whether no older owner answers reads any more. Until then this one answers none either: the older owner may
        not have acknowledged the rows that were replayed here."""
        return self._others_read_until <= 0 or self._context.clock.monotonic() >= self._others_read_until

    def settle(self) -> None:
        """Do what a claim may leave for later; see `wal.settle_claim`. Raises: Fenced, which ends the region; errors of
        storage."""
        try:
            manifest = wal.settle_claim(self._manifests, self.guard, self.levels.manifest, self._sentinel)
        except wal.Fenced as error:
            self.end(error)
            raise
        self.levels.adopt(manifest)

    def prove(self) -> None:
        """Ask storage whether the region is still ours, once it is `alone`.

        Raises: Fenced, which ends the region; errors of reading storage.
        """
        self._wait_for_others()
        try:
            self.lease.prove()
        except wal.Fenced as error:
            self.end(error)
            raise

    def waiting(self) -> Backlog:
        """Return what is not in the base table, as of the last `refresh`, which learns of other processes' commits."""
        return self._generations.waiting()

    def status(self) -> dict[str, Any]:
        """Return this region's part of `Table.status()`; generations and positions as in the region manifest."""
        return {
            "id": str(self.region),
            "epoch": self.guard.epoch,
            "wal_position": self._log.position,
            **self.levels.status(),
            "unindexed_rows": self.unindexed if self._context.has_indexes else 0,
        }

    def end(self, error: BaseException) -> BaseException:
        """End the region with `error`, unless it ended before; return the error that every later call gets."""
        if isinstance(error, wal.FencedAfterWrite):
            error = error.fence
        if isinstance(error, wal.OutcomeUnknown):  # unknown only to the callers whose rows were in that entry
            error = wal.Poisoned(f"region {self.region}: the writer stopped itself: {error}; open the table again")
        return self.levels.fail(error)

    # ---- the serving party ---------------------------------------------------------------------------------------

    def serve(self, writes: Sequence[Write]) -> None:
        """Append, apply and answer `writes`, in order, in as few entries as `wal.entry_size_max` allows.

        Raises: the error that ended the region; every write is answered even then.
        """
        try:
            with self._ending:
                for gathered in self._groups.runs(writes, self._context.limits.entry_size_max):
                    group = self._groups.group(gathered, self._log.applied)
                    if group is not None:
                        self._append_and_apply(group)
        except BaseException as error:
            for write in writes:
                if not write.done.done():
                    write.done.set_exception(error)
            raise

    def keep_limits(self) -> None:
        """Begin to append rows that have lingered long enough, freeze the memtable when it is full or old.

        Call it again when an append that it began has ended.

        Raises: StoreUnavailable or StoreRefused, then call again later; the error that ended the region.
        """
        with self._ending:
            self._generations.keep_limits()

    def next_duty(self) -> float | None:
        """Return the seconds until `keep_limits` has something to do; None if no row lingers or is in the memtable."""
        return self._generations.next_duty()

    def freeze(self) -> int:
        """Freeze the active memtable, durable to its last row; return the generation that is active then.

        Raises: as `keep_limits`.
        """
        with self._ending:
            self._generations.freeze()
            return self.levels.active.generation

    def reshape(self, context: RegionContext) -> int:
        """Take rows of the shape of `context` from now on; earlier rows keep theirs, in generations of their own.

        Returns the newest generation that waits to be flushed in another shape, 0 if none does. May be called again.
        Raises: as `keep_limits`; then nothing is changed.
        """
        with self._ending:
            if context.shape != self._context.shape:
                self._generations.reshape(context)
                self._context = context
                self._groups = WriteGroups(context, self._repeats, self.levels.view)
            return self.levels.last_unlike(self._context)

    def durable_view(self) -> RegionView:
        """Return the levels at a moment when every row in them is on storage. Raises: as `keep_limits`."""
        with self._ending:
            self._log.append_lingering(self.levels.active.generation)
            return self.levels.view()

    def close(self) -> None:
        """Append lingering rows; the WAL has them, nothing is flushed. Raises: the error that kept them from it."""
        with self._ending:
            self._log.append_lingering(self.levels.active.generation)

    def end_reads(self) -> wal.Released | None:
        """Stop answering reads from memory. Return what to tell the next owner, so that it need not wait for that; None
        if it must, or if storage may have more than this one knows.

        Call it last, as `release`.
        """
        self.lease.end()
        ended = self.failure is None and self.alone
        return wal.Released(self.levels.manifest, self._log.position) if ended else None

    def release(self) -> None:
        """Stop answering reads from memory, and write in the manifest that the next owner need not wait for that.

        If storage does not take the edit, the next owner waits.
        """
        if self.end_reads() and self.levels.manifest.read_lease:
            manifests = wal.ManifestStore(
                self._context.store, self.region, ids=self._context.ids, clock=self._context.clock, options=_BRIEFLY
            )
            with suppress(wal.WalError):
                manifests.edit(self.guard, lambda current: replace(current, read_lease=0), self.levels.manifest)

    # ---- the publishing party ------------------------------------------------------------------------------------

    def publish_next(self) -> bool:
        """Flush the oldest frozen memtable and publish its SST; False when none is frozen.

        Raises: RETRY_FLUSH (nothing is published, call again), the error that ended the region.
        """
        with self._ending_flush:
            frozen = self.levels.oldest_frozen()
            if frozen is None:
                return False
            context = frozen.context  # that of its rows: the table may have other columns by now
            memtable = frozen.memtable
            with self._span_of_flush(memtable) if tracing.on else tracing.OFF:
                manifest = flush_package.flush(
                    context.store,
                    self._manifests,
                    self.guard,
                    memtable.snapshot(),
                    context.sst_format,
                    generation=memtable.generation,
                    covers_position=frozen.covers,
                    ids=context.ids,
                    attempts=frozen.attempts,
                )
            published = next((sst for sst in manifest.ssts if sst.generation == memtable.generation), None)
            if context.keep is not None and published is not None:
                context.keep(self.region, published, memtable, context.shape)
                self._generations.indexes.go_on(memtable)
            self.levels.published(manifest)
            return True

    # ---- the indexing party --------------------------------------------------------------------------------------

    def index_step(self) -> bool:
        """Move one block of waiting rows into the indexes; return False when none waits, or the region ended."""
        return not self.levels.ended and self._generations.indexes.step()

    # ---- inside --------------------------------------------------------------------------------------------------

    def _append_and_apply(self, group: WriteGroup) -> None:
        """Append, apply and acknowledge the group, or give its writes the error of the append."""
        position = 0
        self._wait_for_others()
        try:
            self._generations.keep_small(group.rows)
            if group.durable:
                generation = self.levels.active.generation
                with self._steps("memwal.region.append", group) if tracing.on else tracing.OFF:
                    position = self._log.append(group.rows, group.applied, generation=generation)
        except (*NOTHING_WRITTEN, *NOT_ENCODED) as error:
            if isinstance(error, NOT_ENCODED) and self.lingers:
                raise  # visible rows among them: they could never be appended
            group.fail(error)
            return
        if not group.durable:
            self._log.linger(group.rows, group.applied)
        if group.rows is not None:
            with self._steps("memwal.region.apply", group) if tracing.on else tracing.OFF:
                self._generations.apply(group.rows)
        group.acknowledge(position)

    def _steps(self, name: str, group: WriteGroup) -> AbstractContextManager[None]:
        """A span in the trace of each write of the group; it tells the rows and bytes of the whole group."""
        rows, size = (0, 0) if group.rows is None else (group.rows.num_rows, group.rows.size)
        told: dict[str, Any] = {"region": str(self.region), "rows": rows, "bytes": size, "writes": len(group.writes)}
        return tracing.steps(name, (write.trace for write in group.writes), **told)

    def _span_of_flush(self, memtable: MemTable) -> AbstractContextManager[Any]:
        told: dict[str, Any] = {"generation": memtable.generation, "rows": memtable.rows, "bytes": memtable.bytes}
        return tracing.span("memwal.region.flush", region=str(self.region), **told)

    def _wait_for_others(self) -> None:
        """Wait until no older owner answers reads, which would miss the rows written here; see `wal.lease`."""
        if self.alone:
            self._others_read_until = 0.0
        else:
            self._context.clock.sleep(self._others_read_until - self._context.clock.monotonic())
