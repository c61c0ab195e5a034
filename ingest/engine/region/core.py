"""Implement the protocol of one region without threads: append, apply, ack; freeze; publish in order.

`region.writer` drives it with threads and a queue, a simulation with greenlets of one thread. Methods wait only
for storage and hold no lock while they wait, so several parties may run at once: one inside `serve`, one inside
`publish_next` and one inside `index_step`.

The core promises, whatever storage answers:

1. Rows enter the memtable in WAL order. The memtable holds only rows that the WAL holds or that linger for its next
   entry (visible, not yet durable).
2. A write becomes visible completely or not at all, and only after all its rows are checked and copied.
3. A durable write is acknowledged only after its closing entry is on storage. A repeat, or a put that changes nothing,
   is acknowledged only after an entry with its token is on storage.
4. A write is applied only if its sequence is above every applied sequence of its producer. The map of these sequences
   (the applied map) is in the same entry as the rows. If no row is to be written, the entry contains only the map.
5. Every write is answered: acknowledged, or failed with the error that kept it out.
6. A frozen memtable ends at an entry that closes a batch, and every row in it is on storage.
7. Generations are published in ascending order; a failed flush changes nothing and blocks the later ones.
8. After a fence, or a failure with an open outcome, the region writes, shows and acknowledges nothing more; `failure`
   holds the reason and never changes.
9. A read that begins after any owner acknowledged a write sees that write, or fails (`wal.lease`): before it takes a
   view, a read takes a ticket of `lease` and calls `prove` if the lease does not cover the ticket.
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
from memwal.ingest.engine.api.tokens import Applied
from memwal.ingest.engine.read.levels import RegionView
from memwal.ingest.engine.region.context import RegionContext
from memwal.ingest.engine.region.generations import Backlog, RegionGenerations
from memwal.ingest.engine.region.groups import Repeats, WriteGroup, WriteGroups
from memwal.ingest.engine.region.log import NOTHING_WRITTEN, Beside, RegionLog
from memwal.ingest.engine.region.state import RegionLevels
from memwal.ingest.engine.region.write_queue import Write

NOT_ENCODED = (pa.ArrowException, ValueError, TypeError, RuntimeError)
"""Failures to encode rows, before the entry's slot is touched. The callers get them; the region continues."""

RETRY_FLUSH = (*NOTHING_WRITTEN, wal.OutcomeUnknown, flush_package.SstInvalid, OSError)
"""Failures of a flush that leave the region unchanged: call `publish_next` again; later generations wait."""

_BRIEFLY = wal.WalOptions(put_timeout=1.0, retry_budget=1.0)
"""Limits of the last manifest edit of `release`, which nothing depends on."""


class _Ending:
    """A context manager that ends the region if the block raises, except for the exceptions in `survives`.

    It is reusable and not a generator, because every put enters several.
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
    """One claimed region. The module docstring numbers its promises.

    Thread safety. Three parties: the serving party calls `serve`, `keep_limits`, `freeze`, `reshape`, `durable_view`
    and `close`, the publishing party `publish_next`, the indexing party `index_step` (index mode "async" only); the
    rest from any thread. Each party is one thread (or greenlet) at a time.
    Durability. `serve` acknowledges durable writes only after they are on storage.
    """

    def __init__(self, context: RegionContext, region: UUID, claim: wal.Claim, beside: Beside | None = None) -> None:
        """Take over `claim` and replay its entries; no other object may use that claim. `beside`: see `RegionLog`."""
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
        """Claim the region and replay its log. `settle`: False leaves `settle` to the caller. `beside`: see
        `RegionLog`.

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
        """The error that ended this region; None while it serves."""
        return self.levels.failure

    @property
    def lingers(self) -> bool:
        """Whether visible rows or tokens wait for the next entry."""
        return self._log.lingers

    def unflushed_entries(self, behind: int = 0) -> int:
        """Return the number of WAL entries above position `behind` that the next claim must replay."""
        return self._generations.unflushed_entries(behind)

    @property
    def unindexed(self) -> int:
        """Number of memtable rows that wait for the indexing party."""
        return self._generations.indexes.waiting()

    def view(self) -> RegionView:
        """Return the current levels above the base table. Raises: the error that ended this region."""
        return self.levels.view()

    def applied(self, producer: str, *, logged: bool = False) -> Applied:
        """Return two sequences of `producer`: the highest whose rows are all applied here, and the highest with any
        applied row.

        `logged`: count only sequences in the log, so that the answer holds for every later owner.
        """
        self._wait_for_others()
        applied = self._log.logged if logged else self._log.applied
        newest = applied.get(producer)
        left = newest is not None and self._repeats.half_applied(producer, applied)
        return Applied(newest - 1 if left and newest is not None else newest, newest)

    def refresh(self) -> None:
        """Adopt a manifest that the committer pruned. Raises: Fenced, which ends the region."""
        try:
            self.levels.adopt(manifest := self._manifests.owned(self.guard))
        except wal.Fenced as error:
            self.end(error)
            raise
        self._generations.forget_committed(manifest)

    @property
    def alone(self) -> bool:
        """Whether no older owner still answers reads. Until then this owner answers no reads either, because the older
        owner may not have acknowledged the rows that were replayed here.
        """
        return self._others_read_until <= 0 or self._context.clock.monotonic() >= self._others_read_until

    def settle(self) -> None:
        """Do the work that a claim may defer; see `wal.settle_claim`. Raises: Fenced, which ends the region; errors of
        storage.
        """
        try:
            manifest = wal.settle_claim(self._manifests, self.guard, self.levels.manifest, self._sentinel)
        except wal.Fenced as error:
            self.end(error)
            raise
        self.levels.adopt(manifest)

    def prove(self) -> None:
        """Confirm from storage that this process still owns the region, after waiting until it is `alone`.

        Raises: Fenced, which ends the region; errors of reading storage.
        """
        self._wait_for_others()
        try:
            self.lease.prove()
        except wal.Fenced as error:
            self.end(error)
            raise

    def waiting(self) -> Backlog:
        """Return the rows that are not in the base table, as of the last `refresh`, which detects commits of other
        processes.
        """
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
        """End the region with `error`, unless it has already ended; return the error that every later call raises."""
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
        """Begin to append rows that have lingered long enough; freeze the memtable when it is full or old.

        Call it again when an append that it began has ended.
        Raises: StoreUnavailable or StoreRefused, then call it again later; the error that ended the region.
        """
        with self._ending:
            self._generations.keep_limits()

    def next_duty(self) -> float | None:
        """Return the seconds until `keep_limits` has work; None if no row lingers or is in the memtable."""
        return self._generations.next_duty()

    def freeze(self) -> int:
        """Freeze the active memtable, durable to its last row; return the generation that is active afterwards.

        Raises: as `keep_limits`.
        """
        with self._ending:
            self._generations.freeze()
            return self.levels.active.generation

    def reshape(self, context: RegionContext) -> int:
        """Accept rows of the shape of `context` from now on; earlier rows keep their shape, in separate generations.

        Returns the newest generation that waits to be flushed in another shape, or 0. May be called again.
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
        """Append lingering rows to the WAL without flushing. Raises: the error that prevented the append."""
        with self._ending:
            self._log.append_lingering(self.levels.active.generation)

    def end_reads(self) -> wal.Released | None:
        """Stop answering reads from memory. Return the note that spares the next owner the wait for this lease.

        Returns None if the next owner must wait, or if storage may hold more than this owner knows. Call it last, as
        `release`.
        """
        self.lease.end()
        ended = self.failure is None and self.alone
        return wal.Released(self.levels.manifest, self._log.position) if ended else None

    def release(self) -> None:
        """Stop answering reads from memory, and record in the manifest that the next owner need not wait.

        If storage rejects the edit, the next owner waits.
        """
        if self.end_reads() and self.levels.manifest.read_lease:
            manifests = wal.ManifestStore(
                self._context.store, self.region, ids=self._context.ids, clock=self._context.clock, options=_BRIEFLY
            )
            with suppress(wal.WalError):
                manifests.edit(self.guard, lambda current: replace(current, read_lease=0), self.levels.manifest)

    # ---- the publishing party ------------------------------------------------------------------------------------

    def publish_next(self) -> bool:
        """Flush the oldest frozen memtable and publish its SST; return False if none is frozen.

        Raises: RETRY_FLUSH (nothing is published, call again), the error that ended the region.
        """
        with self._ending_flush:
            frozen = self.levels.oldest_frozen()
            if frozen is None:
                return False
            context = frozen.context  # the context of its rows: the table may have other columns by now
            memtable = frozen.memtable
            told: dict[str, Any] = {"generation": memtable.generation, "rows": memtable.rows, "bytes": memtable.bytes}
            span = tracing.span("memwal.region.flush", region=str(self.region), **told) if tracing.on else tracing.OFF
            with span:
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
        """Move one block of waiting rows into the indexes; return False if none waits or the region ended."""
        return not self.levels.ended and self._generations.indexes.step()

    # ---- inside --------------------------------------------------------------------------------------------------

    def _append_and_apply(self, group: WriteGroup) -> None:
        """Append, apply and acknowledge the group, or fail its writes with the error of the append."""
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
                raise  # with visible rows among them: they could never be appended
            group.fail(error)
            return
        if not group.durable:
            self._log.linger(group.rows, group.applied)
        if group.rows is not None:
            with self._steps("memwal.region.apply", group) if tracing.on else tracing.OFF:
                self._generations.apply(group.rows)
        group.acknowledge(position)

    def _steps(self, name: str, group: WriteGroup) -> AbstractContextManager[None]:
        """Open a span in the trace of each write of the group, with the rows and bytes of the whole group."""
        rows, size = (0, 0) if group.rows is None else (group.rows.num_rows, group.rows.size)
        told: dict[str, Any] = {"region": str(self.region), "rows": rows, "bytes": size, "writes": len(group.writes)}
        return tracing.steps(name, (write.trace for write in group.writes), **told)

    def _wait_for_others(self) -> None:
        """Wait until no older owner answers reads, which would miss the rows written here; see `wal.lease`."""
        if self.alone:
            self._others_read_until = 0.0
        else:
            self._context.clock.sleep(self._others_read_until - self._context.clock.monotonic())
