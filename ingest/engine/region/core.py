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

When a generation ends, its memtable is frozen, its last row is durable, and an empty memtable replaces it. Generations
in the log never decrease, also across claims. A generation ends:

1. between two groups of writes, at a limit of bytes, rows, age or WAL entries (`keep_limits`);
2. before a group that would exceed the maximum size of a generation in the log (arrow format only);
3. on request: a flush, or a change of the table's columns;
4. in a replay, where the next entry has a higher generation, and where the replayed rows fill a memtable.

Entries without rows (notes that carry only the applied map) belong to no generation. When the log contains only such
entries, `replay_after` moves past them without an SST.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any
from uuid import UUID

import pyarrow as pa

from memwal import flush as flush_package
from memwal import wal
from memwal.ingest import tracing
from memwal.ingest.engine.api.tokens import Applied
from memwal.ingest.engine.read.levels import RegionView
from memwal.ingest.engine.region.context import RegionContext
from memwal.ingest.engine.region.groups import Repeats, WriteGroup, WriteGroups
from memwal.ingest.engine.region.indexes import RegionIndexes
from memwal.ingest.engine.region.log import NOTHING_WRITTEN, Beside, RegionLog, lasting
from memwal.ingest.engine.region.state import Backlog, RegionLevels, RowAges
from memwal.ingest.engine.region.write_queue import Write
from memwal.memtable import Checked

NOT_ENCODED = (pa.ArrowException, ValueError, TypeError, RuntimeError)
"""Failures to encode rows, before the entry's slot is touched. The callers get them; the region continues."""

RETRY_FLUSH = (*NOTHING_WRITTEN, wal.OutcomeUnknown, flush_package.SstInvalid, OSError)
"""Failures of a flush that leave the region unchanged: call `publish_next` again; later generations wait."""

_TOGETHER, _TOGETHER_BYTES = 100, 1 << 20
"""Entries, and bytes of their rows, that a replay applies at once: applying one row takes as long as applying many."""

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

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None and not isinstance(error, self._survives):
            self._core.end(error)


def passed_over(manifest: wal.RegionManifest, position: int) -> wal.RegionManifest:
    """Return `manifest` with replay after `position`; every row up to there is in an SST or in the base table."""
    after, seen = max(manifest.replay_after, position), max(manifest.last_seen, position)
    return replace(manifest, replay_after=after, last_seen=seen)


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
        self._manifests = context.manifests(region)
        self.lease = wal.ReadLease(claim.guard, self._manifests, claim.manifest, context.clock)
        self._others_read_until = claim.others_read_until
        self._sentinel = claim.next_position - 1
        self._log = RegionLog(context, region, claim, self.lease, beside)
        self.levels = RegionLevels(region, claim.manifest, context)
        self._active_since, self._ages = context.clock.monotonic(), RowAges(context.clock)
        self._frozen_to = claim.manifest.replay_after
        """WAL position whose row and all earlier ones are frozen or in an SST."""
        self._indexes = RegionIndexes(region, self.levels, context.log)
        self._index_at_once = False  # not while the log is replayed
        self._replay(claim.entries)
        self._index_at_once = context.index_at_once
        self._index()
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
        return max(0, self._log.position - max(behind, self.levels.manifest.replay_after))

    @property
    def unindexed(self) -> int:
        """Number of memtable rows that wait for the indexing party."""
        return self._indexes.waiting()

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
        with self._ended_by_fence():
            self.levels.adopt(manifest := self._manifests.owned(self.guard))
        self._ages.forget_below(min((sst.generation for sst in manifest.ssts), default=manifest.current_generation))

    @property
    def alone(self) -> bool:
        """Whether no older owner still answers reads. Until then this owner answers no reads either, because the older
        owner may not have acknowledged the rows that were replayed here.
        """
        return self._others_read_until <= 0 or self._context.clock.monotonic() >= self._others_read_until

    def settle(self) -> None:
        """Do the work that a claim may defer (`wal.settle_claim`). Raises: Fenced (it ends the region); wal errors."""
        with self._ended_by_fence():
            manifest = wal.settle_claim(self._manifests, self.guard, self.levels.manifest, self._sentinel)
        self.levels.adopt(manifest)

    def prove(self) -> None:
        """Confirm from storage that this process still owns the region, after waiting until it is `alone`.

        Raises: Fenced, which ends the region; errors of reading storage.
        """
        self._wait_for_others()
        with self._ended_by_fence():
            self.lease.prove()

    def waiting(self) -> Backlog:
        """Return the rows that the base table lacks, as of the last `refresh`, which detects foreign commits."""
        memtables, ssts = self.levels.memtables(), self.levels.manifest.ssts
        unflushed = [table.generation for table in memtables if table.rows]
        age = self._ages.oldest([*unflushed, *(sst.generation for sst in ssts)])
        return Backlog(len(ssts), sum(sst.in_memory_bytes or 0 for sst in ssts), age, self._ages.oldest(unflushed))

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
        return self.levels.fail(lasting(error, self.region))

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
            now, limits, log = self._context.clock.monotonic(), self._context.limits, self._log
            if log.finished:
                log.finish()
            # The sums are those of `next_duty`: differences may round to another moment, and `next_duty` to no time.
            if log.lingers_since is not None and log.lingers_since + limits.linger_max <= now:
                log.append_beside(self.levels.active.generation)
            many = log.position - self._frozen_to >= limits.entries_max
            if self._full() or many or (self.levels.active.rows and self._active_since + limits.age_max <= now):
                self._freeze()
            if many and log.position - self._frozen_to >= limits.entries_max:
                self._pass_over_notes()

    def next_duty(self) -> float | None:
        """Return the seconds until `keep_limits` has work; None if no row lingers or is in the memtable."""
        now, limits = self._context.clock.monotonic(), self._context.limits
        due = []
        if self._log.lingers_since is not None:
            due.append(self._log.lingers_since + limits.linger_max - now)
        if self.levels.active.rows:
            due.append(self._active_since + limits.age_max - now)
        return max(0.0, min(due)) if due else None

    def freeze(self) -> int:
        """Freeze the active memtable, durable to its last row; return the generation that is active afterwards.

        Raises: as `keep_limits`.
        """
        with self._ending:
            self._freeze()
            return self.levels.active.generation

    def reshape(self, context: RegionContext) -> int:
        """Accept rows of the shape of `context` from now on; earlier rows keep their shape, in separate generations.

        Returns the newest generation that waits to be flushed in another shape, or 0. May be called again.
        Raises: as `keep_limits`; then nothing is changed.
        """
        with self._ending:
            if context.shape != self._context.shape:
                self._freeze()
                self._log.recode(context.codec)
                self.levels.reshape(context)
                self._context, self._index_at_once = context, context.index_at_once
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

    @property
    def at_rest(self) -> bool:
        """Whether every row that this owner knows is in the base table, as of the last `refresh`, and it is `alone`."""
        levels = self.levels
        waits = self.lingers or levels.active.rows or levels.oldest_frozen() is not None or levels.manifest.ssts
        return self.failure is None and self.alone and not waits

    def end_reads(self) -> wal.Released | None:
        """Stop answering reads from memory. Return the note that spares the next owner the wait for this lease.

        Returns None if the next owner must wait, or if storage may hold more than this owner knows. Call it last, as
        `release`.
        """
        self.lease.end()
        ended = self.failure is None and self.alone
        return wal.Released(self.levels.manifest, self._log.position) if ended else None

    def release(self, *, rest: bool = False) -> wal.RegionManifest | None:
        """Stop answering reads from memory, and record in the manifest that the next owner need not wait.

        `rest`: also record that the region is at rest, if it is; return that manifest (`wal.lease`, step 2 of Rest).
        If storage rejects the edit, the next owner waits. (model: Lease!WriteRest, Log!Rest)
        """
        rest = rest and self.at_rest
        note, position, epoch = self.end_reads(), self._log.position, self.guard.epoch

        def released(current: wal.RegionManifest) -> wal.RegionManifest:
            return (
                replace(passed_over(current, position), read_lease=0, released=epoch)
                if rest
                else replace(current, read_lease=0)
            )

        if note is not None and (rest or note.manifest.read_lease):
            manifests = self._context.manifests(self.region, _BRIEFLY)
            with suppress(wal.WalError):
                written = manifests.edit(self.guard, released, note.manifest)
                return written if rest else None
        return None

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
                self._indexes.go_on(memtable)
            self.levels.published(manifest)
            return True

    # ---- the indexing party --------------------------------------------------------------------------------------

    def index_step(self) -> bool:
        """Move one block of waiting rows into the indexes; return False if none waits or the region ended."""
        return not self.levels.ended and self._indexes.step()

    # ---- generations ---------------------------------------------------------------------------------------------

    def _keep_small(self, checked: Checked | None) -> None:
        """Freeze first if the active generation plus `checked` exceeds the limits of one generation of the log.

        Raises: the errors of an append.
        """
        limits = self._context.limits
        if checked is None or limits.generation_rows is None or limits.generation_entries is None:
            return
        entries = self._log.position_then - self._frozen_to
        parts = 1 + checked.size // limits.entry_size_max
        rows = self.levels.active.rows + checked.num_rows
        if rows > limits.generation_rows or entries + parts > limits.generation_entries:
            self._freeze()

    def _freeze(self, covers: int | None = None) -> None:
        """Swap in an empty memtable; the full one, durable to its last row, waits for the flusher.

        `covers`: WAL position of its last row, None for the newest. Raises: the errors of an append.
        """
        self._log.append_lingering(self.levels.active.generation)
        if self.levels.active.rows:
            self._frozen_to = self._log.position if covers is None else covers
            self.levels.freeze(self._frozen_to)
            self._index()

    def _apply(self, rows: pa.Table | Checked) -> None:
        if not rows.num_rows:
            return
        if not self.levels.active.rows:
            self._active_since = self._context.clock.monotonic()
            self._ages.began(self.levels.active.generation)
        active = self.levels.active
        active.apply(rows) if isinstance(rows, Checked) else active.restore(rows)
        self.levels.applied()

    def _index(self) -> None:
        if self._index_at_once:
            while self._indexes.step():
                pass

    def _replay(self, entries: Sequence[wal.Entry]) -> None:
        covers = done = 0
        # ShardWriter skips entries of a generation below the manifest's. If it may own the region next (arrow format),
        # a generation of the log must be published completely or not at all.
        limited = self._context.limits.generation_rows is not None
        for run in self._runs(entries):
            if run[0].header.generation > self.levels.active.generation:
                # Freeze where the original writer froze: generations in a log never decrease, also across claims.
                self._freeze(covers=covers)
            last, done = run[-1], done + len(run)
            covers = last.position
            self._apply(pa.concat_tables(entry.rows for entry in run))
            closed = last.header.part is None or last.header.part.closes
            if closed and self._full() and not limited:
                self._freeze(covers=covers)
            self._context.replayed(self.region, "applying", done, len(entries))

    def _runs(self, entries: Sequence[wal.Entry]) -> Iterator[Sequence[wal.Entry]]:
        """Yield runs of consecutive entries of one generation, short enough that no memtable becomes much too large."""
        size_max, rows_max = min(_TOGETHER_BYTES, self._context.limits.size_max), self._context.limits.rows_max
        run, rows, size = list[wal.Entry](), 0, 0
        for entry in entries:
            other = bool(run) and entry.header.generation != run[-1].header.generation
            if other or len(run) >= _TOGETHER or rows >= rows_max or size >= size_max:
                yield run
                run, rows, size = [], 0, 0
            run.append(entry)
            rows, size = rows + entry.rows.num_rows, size + entry.rows.nbytes
        if run:
            yield run

    def _full(self) -> bool:
        limits = self._context.limits
        return self.levels.active_bytes >= limits.size_max or self.levels.active.rows >= limits.rows_max

    def _pass_over_notes(self) -> None:
        """Move `replay_after` if all later entries are notes without rows, which no SST will cover.

        In that case no memtable, active or frozen, has rows, so every row up to the newest entry is in an SST.
        """
        position = self._log.position
        if self.levels.active.rows or self.levels.oldest_frozen() is not None or self._log.lingers:
            return

        with suppress(wal.OutcomeUnknown):  # the edit may have been applied, or is made again
            self.levels.adopt(self._manifests.edit(self.guard, partial(passed_over, position=position)))
            self._frozen_to = position

    # ---- inside --------------------------------------------------------------------------------------------------

    @contextmanager
    def _ended_by_fence(self) -> Iterator[None]:
        try:
            yield
        except wal.Fenced as error:
            self.end(error)
            raise

    def _append_and_apply(self, group: WriteGroup) -> None:
        """Append, apply and acknowledge the group, or fail its writes with the error of the append."""
        position = 0
        self._wait_for_others()
        try:
            self._keep_small(group.rows)
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
                self._apply(group.rows)
                self._index()
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
