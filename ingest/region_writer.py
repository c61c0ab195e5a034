"""One region's writer: append, apply, ack; freeze; hand frozen memtables to the flusher.

The put path of a region, in order:

1. A caller's thread validates rows and submits them (`submit`); it waits on a future.
2. The region's thread takes all writes that have gathered, sets aside those whose token was applied before, and
   appends the others as one WAL entry (several, closed by the last, when they exceed `wal.entry_size_max`).
3. Once the entry is durable the rows are applied to the active memtable in one step, and every caller is acked.
4. Between groups, never inside one, the memtable is frozen when it is full or old; a second thread flushes frozen
   memtables in generation order while writes go on.

Writes that do not ask for durability are applied and acked first and ride with the next entry, at the latest after
`wal.linger_max`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any
from uuid import UUID

import pyarrow as pa

import flush as flush_package
import wal
from ingest.errors import Unavailable
from ingest.levels import RegionView
from ingest.region_context import RegionContext
from ingest.region_levels import Frozen, RegionLevels
from ingest.region_log import RegionLog, joined
from ingest.tokens import Token
from ingest.write_queue import Ack, DurableView, Freeze, Item, Write, WriteQueue

NOTHING_WRITTEN = (wal.StoreUnavailable, wal.StoreRefused)
"""Failures of an append that leave the log as it was: the writer lives on, the callers may try again."""

NOT_ENCODED = (pa.ArrowException, ValueError, TypeError, RuntimeError)
"""Failures to make an entry of rows, before its slot is touched: the callers' affair, not the region's."""

RETRY_FLUSH = (*NOTHING_WRITTEN, wal.OutcomeUnknown, flush_package.SstInvalid, OSError)
"""Failures of a flush that leave the region as it was; the flush is made again, those behind it wait."""


class RegionWriter:
    """The single writer of one region.

    Thread safety. `submit`, `view`, `flush`, `status`, `close` from any thread.
    Durability. A durable write's future resolves only after its entry exists on storage.
    Invariants. (1) Rows enter the memtable in WAL order. (2) A write is visible as a whole or not at all. (3) A frozen
    memtable ends at an entry that closes a batch. (4) Generations are flushed in order. (5) After any failure of
    storage or a fence the writer takes nothing more and every waiter gets the reason.
    """

    def __init__(self, context: RegionContext, region: UUID, bucket: int) -> None:
        """Claim the region and replay its log. Raises: wal errors of `wal.claim`."""
        self.region, self.bucket = region, bucket
        self._context = context
        claim = wal.claim(
            context.store,
            region,
            spec_id=1,
            codec=context.codec,
            ids=context.ids,
            clock=context.clock,
            options=context.wal_options,
        )
        self.guard = claim.guard
        self._manifests = wal.ManifestStore(
            context.store, region, ids=context.ids, clock=context.clock, options=context.wal_options
        )
        self._applied = dict(claim.applied)
        appender = wal.WalAppender(
            context.store,
            region,
            claim.guard,
            context.codec,
            claim.next_position,
            context.ids,
            context.clock,
            context.wal_options,
        )
        self._log = RegionLog(appender, context.ids, context.limits.entry_size_max, self._applied)
        self._queue = WriteQueue()
        self._levels = RegionLevels(region, claim.manifest, context.memtable)
        self._active_since = context.clock.monotonic()
        self._replay(claim.entries)
        self._threads = [
            self._thread(f"region-{bucket}", self._serve),
            self._thread(f"flusher-{bucket}", self._flush_in_order),
        ]

    def _thread(self, name: str, work: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=self._guarded, args=(work,), name=name, daemon=True)
        thread.start()
        return thread

    # ---- callers' side -------------------------------------------------------------------------------------------

    def submit(self, rows: pa.Table, *, durable: bool, token: Token | None) -> Future[Ack]:
        """Queue rows of the row schema, validated by the caller; the future resolves to their `Ack`.

        Never raises: the future carries the error that ended this writer, or Unavailable when flushing lags more than
        `wal.put_timeout` behind, so that a caller of several regions always has every answer to wait for.
        """
        write = Write(rows, rows.nbytes, durable, token)
        try:
            self._levels.wait_for_room(self._context.limits.unflushed_max, self._context.wal_options.put_timeout)
            self._queue.submit(write)
        except Exception as error:  # noqa: BLE001 - handed on through the future
            write.done.set_exception(error)
        return write.done

    def view(self) -> RegionView:
        """The levels above the base table at this moment. Raises: the error that ended this writer."""
        return self._levels.view()

    def durable_view(self) -> RegionView:
        """The levels at a moment when every row in them is on storage; only the region's own thread knows one.

        Raises: the error that ended this writer; StoreUnavailable when rows that linger cannot be appended.
        """
        request = DurableView()
        self._queue.submit(request)
        return request.done.result()

    def flush(self) -> None:
        """Freeze what is there and wait until all of it is published; what others put meanwhile is not waited for.

        Raises: the error that ended this writer; Unavailable when a flush keeps failing for `wal.retry_budget`.
        """
        request = Freeze()
        self._queue.submit(request)
        self._levels.wait_until_published(request.done.result() - 1, self._context.wal_options.retry_budget)

    @property
    def failure(self) -> BaseException | None:
        """What ended this writer, None while it lives."""
        return self._levels.failure

    def refresh(self) -> None:
        """Take over a manifest that the committer pruned. Raises: Fenced, which ends the writer."""
        try:
            self._levels.adopt(self._manifests.owned(self.guard))
        except wal.Fenced as error:
            self._end(error)
            raise

    def status(self) -> dict[str, Any]:
        """This region's part of `Table.status()`; generations and positions as in the region manifest."""
        return {
            "id": str(self.region),
            "bucket": self.bucket,
            "epoch": self.guard.epoch,
            "wal_position": self._log.position,
            **self._levels.status(),
        }

    def close(self) -> None:
        """Append what lingers, stop both threads. Nothing is flushed: the WAL holds it.

        Raises: the error that kept visible rows from the WAL; both threads have ended all the same.
        """
        alive = self._levels.failure is None
        self._queue.close(Unavailable(f"region {self.region} is closed; open the table again"))
        self._threads[0].join()
        self._levels.close()
        self._threads[1].join()
        if alive and self._log.lingers_since is not None and self._levels.failure is not None:
            raise self._levels.failure

    # ---- the region's thread -------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while (items := self._queue.take(self._until_next_duty())) is not None:
            try:
                self._serve_group(items)
            except BaseException as error:
                for item in items:
                    if not item.done.done():
                        item.done.set_exception(error)
                raise
        self._append_lingering()

    def _serve_group(self, items: Sequence[Item]) -> None:
        group: list[Write] = []
        size = 0
        for item in items:
            if not isinstance(item, Write) or size + item.size > self._context.limits.entry_size_max:
                self._write(group)
                group, size = [], 0
            if isinstance(item, Write):
                group.append(item)
                size += item.size
            else:
                self._answer(item)
        self._write(group)
        self._keep_limits()

    def _write(self, group: Sequence[Write]) -> None:
        """Steps 2 and 3 of the put path for one group."""
        if not group:
            return
        fresh, applied = self._set_repeats_aside(group)
        rows, size = joined([write.rows for write in fresh]), sum(write.size for write in fresh)
        position = 0
        if any(write.durable for write in group):
            try:
                position = self._append(rows, size, applied)
            except (*NOTHING_WRITTEN, *NOT_ENCODED) as error:
                if isinstance(error, NOT_ENCODED) and self._log.lingers_since is not None:
                    raise  # visible rows among them: they could never be appended
                for write in group:
                    write.done.set_exception(error)
                return
        elif rows is not None:
            self._log.linger(rows, size, self._context.clock.monotonic())
        self._applied = applied
        if rows is not None:
            self._apply(rows)
        first_time = {id(write) for write in fresh}
        for write in group:
            write.done.set_result(Ack(write.rows.num_rows, id(write) in first_time, position))

    def _set_repeats_aside(self, group: Sequence[Write]) -> tuple[list[Write], dict[str, int]]:
        """The writes that were not applied before, in order, and the applied map once they are."""
        fresh, applied = [], dict(self._applied)
        for write in group:
            token = write.token
            if token is not None:
                if applied.get(token.producer, -1) >= token.sequence:
                    continue
                applied[token.producer] = token.sequence
            fresh.append(write)
        return fresh, applied

    def _append(self, rows: pa.Table | None, size: int, applied: dict[str, int]) -> int:
        return self._log.append(rows, size, applied=applied, generation=self._levels.active.generation)

    def _append_lingering(self) -> None:
        if self._log.lingers_since is not None:
            self._append(None, 0, self._applied)

    def _apply(self, rows: pa.Table) -> None:
        if not rows.num_rows:
            return
        if not self._levels.active.rows:
            self._active_since = self._context.clock.monotonic()
        self._levels.active.apply(rows)
        self._levels.measure()

    # ---- freeze --------------------------------------------------------------------------------------------------

    def _replay(self, entries: Sequence[wal.Entry]) -> None:
        for entry in entries:
            self._apply(entry.rows)
            closed = entry.header.part is None or entry.header.part.closes
            if closed and self._full():
                self._freeze(covers=entry.position)

    def _keep_limits(self) -> None:
        now, limits = self._context.clock.monotonic(), self._context.limits
        try:
            if self._log.lingers_since is not None and now - self._log.lingers_since >= limits.linger_max:
                self._append_lingering()
            if self._full() or (self._levels.active.rows and now - self._active_since >= limits.age_max):
                self._freeze()
        except NOTHING_WRITTEN as error:
            self._context.log.warning("region %s: cannot append, will try again: %s", self.region, error)
            self._context.clock.sleep(limits.retry_delay)

    def _until_next_duty(self) -> float | None:
        """Seconds until rows must be appended or the memtable is too old; None when there is nothing to watch."""
        now, limits = self._context.clock.monotonic(), self._context.limits
        due = []
        if self._log.lingers_since is not None:
            due.append(self._log.lingers_since + limits.linger_max - now)
        if self._levels.active.rows:
            due.append(self._active_since + limits.age_max - now)
        return max(0.0, min(due)) if due else None

    def _full(self) -> bool:
        limits = self._context.limits
        return self._levels.active_bytes >= limits.size_max or self._levels.active.rows >= limits.rows_max

    def _freeze(self, covers: int | None = None) -> None:
        """Swap in an empty memtable; the full one waits for the flusher, durable to its last row."""
        self._append_lingering()
        if not self._levels.active.rows:
            return
        self._levels.freeze(self._log.position if covers is None else covers)

    def _answer(self, request: Freeze | DurableView) -> None:
        """Both begin by appending what lingers."""
        try:
            if isinstance(request, Freeze):
                self._freeze()
                request.done.set_result(self._levels.active.generation)
            else:
                self._append_lingering()
                request.done.set_result(self._levels.view())
        except NOTHING_WRITTEN as error:
            request.done.set_exception(error)

    # ---- the flusher's thread ------------------------------------------------------------------------------------

    def _flush_in_order(self) -> None:
        while (frozen := self._levels.next_frozen()) is not None:
            try:
                self._levels.published(self._publish(frozen))
            except RETRY_FLUSH as error:
                generation = frozen.memtable.generation
                self._context.log.warning("flush of generation %d failed, will retry: %s", generation, error)
                self._levels.flush_failed(error, self._context.limits.retry_delay)

    def _publish(self, frozen: Frozen) -> wal.RegionManifest:
        context = self._context
        return flush_package.flush(
            context.store,
            self._manifests,
            self.guard,
            frozen.memtable.snapshot(),
            generation=frozen.memtable.generation,
            covers_position=frozen.covers,
            key=context.key,
            storage_version=context.storage_version,
            ids=context.ids,
        )

    # ---- the end -------------------------------------------------------------------------------------------------

    def _guarded(self, work: Callable[[], None]) -> None:
        """Run a thread's work; whatever ends it early ends the writer and wakes every waiter with the reason."""
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - handed on to every waiter
            self._end(error)

    def _end(self, error: BaseException) -> None:
        self._queue.break_off(self._levels.fail(self._for_later_callers(error)))

    def _for_later_callers(self, error: BaseException) -> BaseException:
        """What those get who ask after the writer ended: an outcome is unknown only to those whose rows were in it."""
        if isinstance(error, wal.OutcomeUnknown):
            return wal.Poisoned(f"region {self.region}: the writer stopped itself: {error}; open the table again")
        return error
