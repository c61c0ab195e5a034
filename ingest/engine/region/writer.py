"""Run the lanes of a region (`ingest.lanes`): callers submit and wait, one lane serves, one flushes, one indexes.

The put path of a region, in order:

1. A caller's thread submits its write (`submit`) and waits for the answer.
2. The region's thread takes all gathered writes and serves them (`RegionCore.serve`): one WAL entry, applied to the
   memtable once it is durable, then an ack for every caller.
3. Between groups, it freezes the memtable when it is full or old; the flusher's thread publishes frozen memtables in
   generation order while writes continue.

Non-durable writes are applied and acknowledged first and go out with the next entry. After `wal.linger_max` another
thread appends them (`log`), while the region's thread continues to serve writes. With `wal.entry_interval`, durable
writes wait for one another in step 2 (`PacedQueue`).

The indexer's thread moves applied rows into the indexes, unless `memtable.index_mode` is "sync" and the table has
vector or text indexes. Only `close` waits for it, for the step in progress.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar
from uuid import UUID

from memwal import wal
from memwal.ingest import tracing
from memwal.ingest.caller import expect_waiting
from memwal.ingest.engine.api.tokens import Ack, Applied
from memwal.ingest.engine.read.levels import RegionView
from memwal.ingest.engine.region.context import RegionContext
from memwal.ingest.engine.region.core import RETRY_FLUSH, RegionCore
from memwal.ingest.engine.region.log import NOTHING_WRITTEN
from memwal.ingest.engine.region.state import Backlog
from memwal.ingest.engine.region.write_queue import Item, Request, Write, queue_of
from memwal.ingest.errors import MemWalError, Unavailable, classify
from memwal.ingest.lanes import Kind, Lane
from memwal.ingest.log_limit import LogLimit
from memwal.wal.retries import Backoff

T = TypeVar("T")

WORK, REST = 0.001, 0.005
"""Seconds that the indexer works (at least one step) and rests before each slice. A put during a slice takes longer."""
MANY, WORK_MANY, REST_MANY = 32_768, 0.004, 0.001
"""Slices used while at least `MANY` rows wait. Above 131,072 waiting rows puts index keys themselves: with these slices
6 million rows were put and flushed in 3.8 s instead of 4.2 s."""
FEW, REST_FEW, LAST_ROWS, LAST_FEW = 256, 0.02, 0.05, 1.0
"""A slice of few rows takes as long as one of many. Durable writes start a slice if `FEW` rows wait, `REST_FEW` seconds
after the last slice. Without further writes, rows are indexed after `LAST_ROWS` seconds, fewer than `FEW` after
`LAST_FEW`."""

_LONGEST_DELAY = 16
"""Longest pause between two attempts at one flush, in multiples of `flush.retry_delay`. With the defaults this is half
the time that a caller of `flush` waits."""

AT_ONCE, LOCAL_AT_ONCE = 32, 8
"""Maximum number of regions of a table that append at a time: on remote storage, and on a local disk, where threads
mostly wait for Python's lock: without the indexer a put to 64 regions took 75 ms with 8 threads, and 90 ms with 32."""
LOOK_EVERY = 0.25
"""Seconds after which a put that waits for room checks again whether another process has committed."""


class Rested(Unavailable):
    """The region was released at rest: claim it again. Callers of tables never see it."""


class RegionWriter:
    """The single writer of one region; `region.core` numbers its promises.

    Thread safety. Every method from any thread.
    Durability. A durable write is answered only after its entry exists on storage.
    Invariants. After a fence, or a storage failure that ends it, the writer accepts no more writes, and every waiter
    gets the reason.
    """

    def __init__(self, context: RegionContext, region: UUID, bucket: int, known: wal.Known | None = None) -> None:
        """Claim the region and replay its log; call `settle` once callers can find this writer.

        Raises: as `wal.claim`.
        """
        self.region, self.bucket, self.name = region, bucket, str(region)
        self._context, self._meter = context, context.meters.of(region)
        self._warnings = LogLimit(context.clock.monotonic)
        self.idle_since = context.clock.monotonic()
        """Monotonic time (s) of the last put, or of the last read from memory."""
        self.rested: wal.RegionManifest | None = None
        """The manifest that released the region at rest."""
        self.place = f"{context.store.url('')}: {wal.named(region)}"
        """Table and region, for messages."""
        began = context.clock.monotonic()
        self._server = self._lane(Kind.SERVE, partial(self._guarded, self._serve))
        self._flusher = self._lane(Kind.PUBLISH, partial(self._guarded, self._flush), context.flush_at_once)
        self._indexer = self._lane(Kind.INDEX, self._index)
        self._renewal = self._lane(Kind.LOG, self._renew)
        self._appender = self._renewal  # until the first append
        self._indexed_at, self._index_waits = began - REST_FEW, False
        first = context.limits.retry_delay
        self._backoff = Backoff(first, _LONGEST_DELAY * first, context.ids)
        self._core = RegionCore.open(context, region, known, settle=False, beside=self._beside)
        self.guard = self._core.guard
        self._claimed(context.clock.monotonic() - began)
        self._levels = self._core.levels
        self._levels.wake_flusher = self._flush_now
        self._queue = queue_of(context, self._server.ready, self._server.seen)
        self._looking, self._proving = threading.Lock(), threading.Lock()
        self._freezing: Request[int] | None = None
        self._server.ready()
        self._flusher.ready()

    # ---- callers' side -------------------------------------------------------------------------------------------

    def submit(self, write: Write, patience: float | None = None) -> None:
        """Queue a write; `write.done` will hold its `Ack`.

        Never raises, so that a caller of several regions can wait for all answers. In place of an `Ack`, the answer may
        be the error that ended this writer, or Unavailable if flushes or commits made no room within `wal.put_timeout`
        (or `patience` seconds).
        """
        write.since = self.idle_since = self._context.clock.monotonic()
        if tracing.on:
            write.trace = tracing.present()
        try:
            if not self._levels.has_room(self._context.limits):
                longest = self._context.wal_options.put_timeout
                self._wait_for_room(longest if patience is None else min(patience, longest))
            self._queue.submit(write)
        except Exception as error:  # noqa: BLE001 - passed to the caller with the answer
            write.done.set_exception(error)

    def view(self) -> RegionView:
        """Return the current levels above the base table. Raises: the error that ended this writer."""
        self.idle_since = self._context.clock.monotonic()
        return self._core.view()

    def unproven(self, *, anew: bool = False) -> Callable[[], None] | None:
        """Return None if this region is known to be owned for a read that begins now, else a call that asks storage.

        A read that the lease covers proceeds at once (`wal.lease`); any other read asks storage, and reads that wait at
        the same time share one answer. When half of the lease has passed, the next read starts its renewal in another
        thread, so reads of a continuously read region never wait for storage.
        `anew`: ask storage even if the lease covers the read. The returned call raises: Fenced, which ends the region;
        Corrupt, StoreUnavailable, StoreRefused.
        """
        lease, alone = self._core.lease, self._core.alone
        if not anew and alone and lease.fresh:
            return None
        ticket = lease.ticket()
        if anew or not alone or not lease.covers(ticket):
            return partial(self._prove, lease.proven if anew else lease.covers, ticket)
        if not self._proving.locked():
            self._renewal.ready()
        return None

    def _prove(self, enough: Callable[[int], bool], ticket: int) -> None:
        with self._proving:
            if self._core.alone and enough(ticket):
                return  # the proof of another read, which this one waited for, covers it
            try:
                self._core.prove()
            except wal.Fenced as error:
                self._queue.break_off(self._core.failure or error)
                raise

    def _renew(self) -> None:
        with suppress(wal.WalError):  # the next read that needs the proof raises this error
            self._prove(lambda _: self._core.lease.fresh, 0)

    def durable_view(self) -> RegionView:
        """Return the levels at a moment when every row in them is on storage; the region's thread captures them.

        Raises: the error that ended this writer; StoreUnavailable if lingering rows cannot be appended.
        """
        self.idle_since = self._context.clock.monotonic()
        return self._asked(self._core.durable_view)

    def freeze(self) -> Callable[[], None]:
        """Freeze the active memtable; return a call that waits until all rows put so far are published.

        Raises: the error that ended this writer, as does the returned call, which also raises Unavailable if a flush
        keeps failing for `wal.retry_budget`.
        """
        last = self._asked(self._core.freeze) - 1
        return partial(self._levels.wait_until_published, last, self._context.wal_options.retry_budget)

    def reshape(self, context: RegionContext) -> Callable[[], None]:
        """Accept rows of the shape of `context` from now on; return a call that waits until no memtable has another
        shape.

        Raises: as `freeze`.
        """
        last = self._asked(partial(self._core.reshape, context))
        return partial(self._levels.wait_until_published, last, self._context.wal_options.retry_budget)

    def _asked(self, call: Callable[[], T]) -> T:
        """Return the result of `call` in the region's thread. Raises: its error, or the one that ended this writer."""
        request = Request(call)
        self._queue.submit(request)
        return request.done.result()

    @property
    def failure(self) -> BaseException | None:
        """The error that ended this writer; None while it serves."""
        return self._core.failure

    @property
    def at_rest(self) -> bool:
        """Whether every row is in the base table, as of the last `refresh`, and no write waits."""
        return self._queue.oldest() is None and self._core.at_rest

    @property
    def memtable_bytes(self) -> int:
        """Bytes of the memtables, including indexes."""
        return self._levels.unflushed

    @property
    def held(self) -> tuple[int, int]:
        """Bytes of the active memtable (0 without rows), and of the frozen ones."""
        return self._levels.held

    def flush_soon(self) -> None:
        """Let the region's thread freeze the active memtable; does not wait, and never raises."""
        if self._freezing is None or self._freezing.done.done():
            self._freezing = Request(self._core.freeze)
            with suppress(Exception):  # the error that ended this writer
                self._queue.submit(self._freezing)

    def unflushed_entries(self, behind: int = 0) -> int:
        """Return the number of WAL entries above position `behind` that the next claim must replay."""
        return self._core.unflushed_entries(behind)

    @property
    def published(self) -> list[int]:
        """The generations of the uncommitted SSTs, as of the last `refresh`."""
        return [sst.generation for sst in self._levels.manifest.ssts]

    def waiting(self) -> Backlog:
        """Return the rows that are not in the base table; see `RegionCore.waiting`."""
        return self._core.waiting()

    def refresh(self) -> None:
        """Adopt a manifest that the committer pruned. Raises: Fenced, which ends the writer."""
        try:
            self._core.refresh()
        except BaseException:
            if self._core.failure is not None:
                self._queue.break_off(self._core.failure)
            raise

    def applied(self, producer: str, *, logged: bool = False) -> Applied:
        """See `RegionCore.applied`. With `logged`, lingering rows are made durable first. Raises: as `durable_view`."""
        if logged and self._core.lingers:
            self.durable_view()
        return self._core.applied(producer, logged=logged)

    def behind(self) -> dict[str, float]:
        """Return, by level, the age in seconds of the oldest row that has not reached it; 0 if all rows have."""
        waiting, oldest = self._core.waiting(), self._queue.oldest()
        latest = 0.0 if oldest is None else self._context.clock.monotonic() - oldest
        return {"latest": latest, "flushed": waiting.unflushed or 0.0, "committed": waiting.age or 0.0}

    def status(self) -> dict[str, Any]:
        """Return this region's part of `Table.status()`."""
        errors = self._meter.errors_told()
        told = {"bucket": self.bucket, "rows_put": self._meter.rows_put, **self._core.status()}
        return {**told, "behind": self.behind(), "last_errors": errors}

    def settle(self) -> None:
        """Do the work that the claim deferred. Errors are only logged: a flush does the same work."""
        try:
            self._core.settle()
        except wal.Fenced as error:
            self._queue.break_off(self._core.failure or error)
        except wal.WalError as error:
            self._context.log.warning("%s: the claim's position is not noted: %s", wal.named(self.region), error)

    def close(
        self, reason: MemWalError | None = None, *, told: bool = False, rest: bool = False
    ) -> wal.Released | None:
        """Append lingering rows and stop the threads. Nothing is flushed: the WAL has the rows.

        `reason`: the error of later calls. `told`: True if the caller passes the returned note on to the next owner
        (see `RegionCore.end_reads`); otherwise the note is written to the manifest for any next owner. `rest`: see
        `RegionCore.release`; `rested` then holds the manifest.
        Raises: the error that kept visible rows from the WAL; the threads have ended even then.
        """
        alive = self._core.failure is None
        self._queue.close(reason or Unavailable(f"{wal.named(self.region)} is closed; open the table again"))
        self._server.wait()
        self._levels.close()
        for step in (Lane.end, Lane.wait):
            for lane in (self._flusher, self._indexer, self._renewal, self._appender):
                step(lane)
        fields = {"event": "release", "region": self.name, "epoch": self.guard.epoch}
        self._context.log.info("%s: released by epoch %d", wal.named(self.region), self.guard.epoch, extra=fields)
        with self._proving:  # no proof is made from here on
            released = self._core.end_reads()
            if not told:
                self.rested = self._core.release(rest=rest)
        if alive and self._core.lingers and self._core.failure is not None:
            raise self._core.failure
        return released

    def _wait_for_room(self, patience: float) -> None:
        """Wait until there is room. A commit by another process also makes room: one of the waiters checks for it.

        Raises: Unavailable after `patience` seconds.
        """
        clock, limits = self._context.clock, self._context.limits
        with self._meter.waiting(clock):
            until = clock.monotonic() + patience
            while not self._levels.wait_for_room(limits, max(0.0, min(LOOK_EVERY, until - clock.monotonic()))):
                expect_waiting()
                commits = 0 < limits.pending_max <= len(self._levels.manifest.ssts)  # else this process makes room
                if commits and self._looking.acquire(blocking=False):
                    try:
                        self.refresh()
                    except NOTHING_WRITTEN:
                        pass  # storage does not answer; the next check may succeed
                    finally:
                        self._looking.release()
                if clock.monotonic() >= until and not self._levels.has_room(limits):
                    raise self._levels.no_room(limits)

    # ---- the region's thread -------------------------------------------------------------------------------------

    def _serve(self) -> None:
        if (items := self._queue.take()) is None:
            self._core.close()
            self._server.end()
            return
        stored = any(isinstance(item, Write) and item.durable for item in items)
        rested = self._index_waits and self._context.clock.monotonic() >= self._indexed_at + REST_FEW
        if stored and rested and self._core.unindexed >= FEW:
            self._indexer.ready()  # now: while the group is written to storage, Python's lock is free
        try:
            self._serve_items(items)
        except BaseException as error:
            for item in items:
                if not item.done.done():
                    item.done.set_exception(error)
            raise
        try:
            self._core.keep_limits()
        except NOTHING_WRITTEN as error:
            self._warn("append", f"append failed, retrying: {classify(error)}")
            self._context.clock.sleep(self._context.limits.retry_delay)
        self._queue.served()
        if not self._context.index_at_once:
            self._index_waits, few = True, self._core.unindexed < FEW
            self._indexer.after(LAST_FEW if few else LAST_ROWS if stored else REST)
        for due in (self._queue.due(), self._core.next_duty()):
            if due is not None:
                self._server.after(due)

    def _serve_items(self, items: Sequence[Item]) -> None:
        """Serve runs of writes together; a request between them sees all writes before it and none after."""
        writes: list[Write] = []
        for item in items:
            if isinstance(item, Write):
                writes.append(item)
            else:
                self._serve_writes(writes)
                writes = []
                try:
                    item.done.set_result(item.call())
                except NOTHING_WRITTEN as error:
                    item.done.set_exception(error)
        self._serve_writes(writes)

    def _serve_writes(self, writes: Sequence[Write]) -> None:
        if not writes:
            return
        try:
            self._core.serve(writes)
        finally:
            answered = [write for write in writes if write.done.done()]  # without the withdrawn ones
            acked = [_counted(write) for write in answered if write.done.exception() is None]
            seconds = self._context.clock.monotonic() - writes[0].since
            self._meter.served(seconds, acked, len(answered) - len(acked))

    def _beside(self, work: Callable[[], None]) -> Callable[[], object]:
        """Append lingering rows in a separate thread; see `RegionLog`."""

        def append() -> None:
            try:
                work()
            finally:
                lane.end()
                self._server.ready()

        self._appender = lane = self._lane(Kind.LOG, append)
        lane.ready()
        return lane.wait

    # ---- the flusher's thread ------------------------------------------------------------------------------------

    def _flush(self) -> None:
        if not self._levels.begin_flush():
            return
        try:
            self._publish_next()
            self._backoff.reset()
            self._flusher.ready()
        except RETRY_FLUSH as raised:
            error = classify(raised)
            self._meter.flush_failed(error, self._context.clock.now())
            generation = self._levels.manifest.current_generation
            self._warn("flush", f"flush of generation {generation} failed, retrying: {error}", self._of(generation))
            self._flusher.after(self._backoff.pause())
            self._levels.flush_failed(error)

    def _flush_now(self) -> None:
        """Flush without a pause after a failure, because a caller waits."""
        self._backoff.reset()
        self._flusher.ready()

    def _publish_next(self) -> None:
        frozen, began = self._levels.oldest_frozen(), self._context.clock.monotonic()
        if frozen is None or not self._core.publish_next():
            return
        seconds = self._context.clock.monotonic() - began
        generation, rows, size = frozen.memtable.generation, frozen.memtable.rows, frozen.memtable.bytes
        self._meter.flushed(seconds, rows, size)
        fields = self._of(generation) | {"rows": rows, "bytes": size, "seconds": seconds}
        text = "%s: flushed generation %d, %d rows in %.3f s"
        self._context.log.info(text, wal.named(self.region), generation, rows, seconds, extra=fields)

    # ---- the indexer's thread ------------------------------------------------------------------------------------

    def _index(self) -> None:
        clock = self._context.clock
        work, rest = (WORK, REST) if self._core.unindexed < MANY else (WORK_MANY, REST_MANY)
        began = clock.monotonic()
        if began < self._indexed_at + rest:  # a write of the last slice set the timer
            self._indexer.after(self._indexed_at + rest - began)
            return
        self._index_waits = False
        while (more := self._core.index_step()) and clock.monotonic() < began + work:
            pass
        self._indexed_at = clock.monotonic()
        if more:
            self._indexer.after(rest)

    def _warn(self, step: str, text: str, fields: Mapping[str, Any] | None = None) -> None:
        """Log a failure that is retried, at most once a minute for each step."""
        if (told := self._warnings.text(step, text)) is not None:
            self._context.log.warning("%s: %s", self.place, told, extra=fields)

    # ---- log events -----------------------------------------------------------------------------------------------

    def _of(self, generation: int) -> dict[str, Any]:
        return {"event": "flush", "region": self.name, "epoch": self.guard.epoch, "generation": generation}

    def _claimed(self, seconds: float) -> None:
        self._meter.claimed(seconds)
        epoch, rows = self.guard.epoch, sum(table.rows for table in self._core.levels.memtables())
        fields = {"event": "claim", "region": self.name, "epoch": epoch, "rows": rows, "seconds": seconds}
        text = "%s: claimed with epoch %d, %d rows replayed in %.3f s"
        self._context.log.info(text, wal.named(self.region), epoch, rows, seconds, extra=fields)

    # ---- lanes ---------------------------------------------------------------------------------------------------

    def _lane(self, kind: Kind, task: Callable[[], object], most: int | None = None) -> Lane:
        """Return a lane of this region. `most`: the threads of its table and kind; None: as for appends."""
        most = most or (AT_ONCE if self._context.store.remote else LOCAL_AT_ONCE)
        return self._context.lanes.lane(kind, self._context.store.url(""), task, most=most, weight=self._context.weight)

    def _guarded(self, work: Callable[[], None]) -> None:
        """Do a thread's work; an error in it ends the writer and wakes every waiter with the reason."""
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - passed to every waiter
            self._queue.break_off(self._core.end(error))
            self._server.end()
            self._flusher.end()


def _counted(write: Write) -> tuple[Ack, int]:
    """Return the ack of a write and how many keys it deleted, without those whose row did not pass its condition."""
    ack = write.done.result()
    if write.deletes is False:
        return ack, 0
    return ack, write.deleted - (0 if write.where is None else ack.skipped)
