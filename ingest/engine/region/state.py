"""Hold the levels of one region above the base table: active memtable, frozen memtables, SSTs of the manifest.

Four parties share them: callers take views and wait, the region's thread applies and freezes, the flusher's thread
publishes, the indexer's thread indexes the memtables. Each change that a view shows is one assignment under one lock,
so a view never misses a row and never shows a partial change.

`Backlog` tells how long a region's rows have waited for the base table, and how many bytes wait.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal
from uuid import UUID

from memwal import wal
from memwal.flush import FlushAttempts
from memwal.ingest.engine.read.levels import RegionView
from memwal.ingest.engine.region.context import Limits, RegionContext
from memwal.ingest.engine.region.counters import Step
from memwal.ingest.errors import BUSY, FLUSH_FAILING, MEMORY_MAX, PENDING_MAX, UNFLUSHED_MAX, Unavailable
from memwal.ingest.settings.values import format_size
from memwal.memtable import MemTable

State = Literal["serving", "flush_failing", "fenced", "poisoned"]
"""The state of a region: serving; serving while flushes fail; ended by a newer writer; ended by a storage failure."""


class RowAges:
    """The time at which the first row of each generation was applied.

    Thread safety. `began` from the region's thread, the rest from any thread.
    """

    def __init__(self, clock: wal.Clock) -> None:
        self._clock = clock
        self._opened = clock.monotonic()
        self._since: dict[int, float] = {}

    def began(self, generation: int) -> None:
        """Record that the first row of a generation is applied now."""
        self._since[generation] = self._clock.monotonic()

    def forget_below(self, generation: int) -> None:
        """Forget all generations below `generation`: they are in the base table."""
        for committed in [known for known in list(self._since) if known < generation]:
            self._since.pop(committed, None)

    def oldest(self, generations: Iterable[int]) -> float | None:
        """Return the age of the oldest row of `generations` in seconds, None if `generations` is empty.

        A generation that an earlier owner wrote counts from the time at which the region was opened.
        """
        since = min((self._since.get(generation, self._opened) for generation in generations), default=None)
        return None if since is None else self._clock.monotonic() - since


@dataclass(frozen=True, slots=True)
class Backlog:
    """The rows of one region that are not in the base table. Ages in seconds, sizes in bytes."""

    ssts: int
    size: int
    """Total size of the SSTs."""
    age: float | None
    """Age of the oldest row in an SST or memtable; None if no row waits."""
    unflushed: float | None = None
    """Age of the oldest row in a memtable; None if the memtables are empty."""

    @staticmethod
    def of_all(regions: Sequence[Backlog]) -> Backlog:
        """Return the backlog of several regions together: the most SSTs, the sum of bytes, the oldest rows."""
        ages = [region.age for region in regions if region.age is not None]
        unflushed = [region.unflushed for region in regions if region.unflushed is not None]
        return Backlog(
            max((region.ssts for region in regions), default=0),
            sum(region.size for region in regions),
            max(ages, default=None),
            max(unflushed, default=None),
        )


def ssts_status(manifest: wal.RegionManifest) -> list[dict[str, Any]]:
    """Return the SSTs of a manifest as the status of a region reports them."""
    return [
        {"generation": sst.generation, "path": sst.path, "rows": sst.physical_rows, "bytes": sst.in_memory_bytes}
        for sst in manifest.ssts
    ]


@dataclass(frozen=True, slots=True)
class Frozen:
    """A memtable that accepts no more writes, the last WAL position of its rows, and the context of its rows."""

    memtable: MemTable
    covers: int
    context: RegionContext
    attempts: FlushAttempts = field(default_factory=FlushAttempts)
    """The objects that failed flush attempts have left on storage."""


class RegionLevels:
    """The levels of a region above the base table, and the error that ended the region.

    Thread safety. `active`, `applied` and `freeze` belong to the region's thread, `oldest_frozen`, `begin_flush`,
    `flush_failed` and `published` to the flusher's, everything else to any thread.
    Invariants. (1) Generations ascend from the manifest's SSTs over the frozen memtables to the active one. (2) Once
    `failure` is set, views, waits and later freezes raise it.
    """

    def __init__(self, region: UUID, manifest: wal.RegionManifest, context: RegionContext) -> None:
        """`context`: creates the memtable of a generation."""
        self._region, self._context = region, context
        self._meter = context.meters.of(region)
        self._changed = threading.Condition()
        self.wake_flusher: Callable[[], None] = lambda: None
        """Called when a memtable waits to be flushed, and when a caller waits for that."""
        self._frozen: list[Frozen] = []
        self._flush_error: Exception | None = None
        self._attempt = self._failed_attempt = 0
        """Number of flush attempts so far, including the running one, and the number of the last one that failed."""
        self._closing = False
        self.active = context.memtable(manifest.current_generation)
        self.manifest = manifest
        self.failure: BaseException | None = None
        self.active_bytes = 0
        self._frozen_bytes = 0

    # ---- any thread ----------------------------------------------------------------------------------------------

    def view(self) -> RegionView:
        """Return the current levels. Raises: the error that ended the region."""
        with self._changed:
            self._raise_failure()
            tables = [table for table in self._memtables() if table.rows]
            snapshots = tuple(table.snapshot() for table in tables)
            active = self.active.generation
            contexts = [self._context, *[frozen.context for frozen in self._frozen]]
            shapes = tuple([context.shape for context in contexts if context.shape is not None])
            routing = self._context.routing
            return RegionView(self._region, snapshots, self.manifest.ssts, None, shapes, active, routing=routing)

    def has_room(self, limits: Limits) -> bool:
        """Return whether unflushed bytes, uncommitted SSTs and the table's memory are below the limits of puts."""
        memory = self._context.memory
        if self.unflushed >= limits.unflushed_max or 0 < limits.pending_max <= len(self.manifest.ssts):
            return False
        return memory is None or memory.has_room()

    def wait_for_room(self, limits: Limits, timeout: float) -> bool:
        """Wait at most `timeout` seconds; return whether there is room or the region ended."""
        with self._changed:
            return self._changed.wait_for(lambda: self.failure is not None or self.has_room(limits), timeout)

    def no_room(self, limits: Limits) -> Unavailable:
        """Return the error of a put that found no room, and count it."""
        ssts, memory = len(self.manifest.ssts), self._context.memory
        if self.unflushed >= limits.unflushed_max:
            limit = UNFLUSHED_MAX
            why = f"{self.unflushed} bytes wait to be flushed, more than {limit} = {limits.unflushed_max}"
        elif memory is None or 0 < limits.pending_max <= ssts:
            limit = PENDING_MAX
            why = f"{ssts} SSTs wait to be committed, {limit} = {limits.pending_max}; commit them, or raise it"
        else:
            limit = MEMORY_MAX
            why = f"the table holds {memory.bytes} bytes in memory, {limit} = {format_size(memory.most)}; raise it"
        failing = limit != PENDING_MAX and self._flush_error is not None
        self._meter.refused()
        self._context.meters.refused(limit)
        details = {"reason": FLUSH_FAILING if failing else BUSY, "limit": limit, "region": str(self._region)}
        trouble = self._flush_trouble() if failing else ""
        return Unavailable(f"{self._name}: {why}{trouble}; retry with the same token", details)

    def wait_until_published(self, generation: int, timeout: float) -> None:
        """Return when `generation` and all earlier ones are SSTs. A failed flush is retried at once.

        Raises: the error that ended the region; Unavailable if nothing was published for `timeout` seconds and an
        attempt that began after this call has failed, or if the region is closed in between.
        """
        with self._changed:
            before = self._attempt
            self.wake_flusher()
            while (first := self.manifest.current_generation) <= generation and not self.ended:
                if self._changed.wait_for(partial(self._published_beyond, first), timeout):
                    continue
                self._changed.wait_for(partial(self._failed_or_published, before, first))
                if not self._published_beyond(first):
                    break
            self._raise_failure()
            if self.manifest.current_generation <= generation:
                raise Unavailable(f"{self._name}: not flushed{self._flush_trouble()}; try again")

    def adopt(self, manifest: wal.RegionManifest) -> None:
        """Adopt a newer manifest, which the committer pruned."""
        with self._changed:
            if manifest.version > self.manifest.version:
                self.manifest = manifest
                self._changed.notify_all()  # puts may have room now

    def fail(self, error: BaseException) -> BaseException:
        """End the region with `error`, unless it has already ended; return the error that ended it."""
        with self._changed:
            if self.failure is None:
                self.failure = error
                step: Step = "fence" if isinstance(error, wal.Fenced) else "poison"
                self._meter.failed(fenced=step == "fence")
                self._meter.erred(step, error, self._context.clock.now())
                fields: dict[str, Any] = {"event": step, "region": str(self._region)}
                if isinstance(error, wal.Fenced):
                    fields |= {"epoch": error.ours, "by": error.theirs}
                self._context.log.info("%s", error, extra=fields)
            self._changed.notify_all()
            return self.failure

    def close(self) -> None:
        """Begin no flush and no index step any more; frozen rows stay in the WAL."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    @property
    def ended(self) -> bool:
        """Whether the region is closed or failed."""
        return self._closing or self.failure is not None

    def memtables(self) -> list[MemTable]:
        """Return all memtables, newest first."""
        with self._changed:
            return self._memtables()

    def measure(self) -> None:
        """Recount the bytes of all memtables after their indexes have grown."""
        with self._changed:
            active, frozen = self.active, list(self._frozen)
        # Outside the lock: reading an index's size may wait for an index step in progress.
        active_bytes, frozen_bytes = active.bytes, sum(each.memtable.bytes for each in frozen)
        with self._changed:
            if self.active is active:
                self.active_bytes = active_bytes
            if self._frozen == frozen:
                self._frozen_bytes = frozen_bytes

    def status(self) -> dict[str, Any]:
        """Return the levels' part of a region's status."""
        with self._changed:
            tables = self._memtables()
            return {
                "replay_after": self.manifest.replay_after,
                "generation": self.active.generation,
                "memtable_rows": sum(table.rows for table in tables),
                "memtable_bytes": sum(table.bytes for table in tables),
                "state": self._state(),
                "failure": None if self.failure is None else str(self.failure),
                "flush_error": None if self._flush_error is None else str(self._flush_error),
                "ssts": ssts_status(self.manifest),
            }

    # ---- the region's thread -------------------------------------------------------------------------------------

    def applied(self) -> None:
        """Recount the bytes of the active memtable, which has new rows."""
        self.active_bytes = self.active.bytes

    def freeze(self, covers: int) -> None:
        """Swap in an empty memtable; the full one waits for the flusher. `covers`: WAL position of its last row."""
        frozen = Frozen(self.active, covers, self._context)
        frozen.memtable.freeze()
        fresh = self._context.memtable(frozen.memtable.generation + 1)
        with self._changed:
            self._frozen.append(frozen)
            self._frozen_bytes = sum(each.memtable.bytes for each in self._frozen)
            self.active = fresh
            self.active_bytes = self.active.bytes
            if len(self._frozen) == 1:  # otherwise the flusher works, or waits to try again
                self.wake_flusher()

    def reshape(self, context: RegionContext) -> None:
        """Use another context for later memtables, and replace the active one, which is empty."""
        fresh = context.memtable(self.active.generation)
        with self._changed:
            self._context, self.active = context, fresh
            self.active_bytes = fresh.bytes

    def last_unlike(self, context: RegionContext) -> int:
        """Return the newest generation that waits to be flushed in another shape than that of `context`, or 0."""
        with self._changed:
            unlike = (each.memtable.generation for each in self._frozen if each.context.shape != context.shape)
            return max(unlike, default=0)

    # ---- the flusher's thread ------------------------------------------------------------------------------------

    def oldest_frozen(self) -> Frozen | None:
        """Return the memtable to flush next, None if none is frozen."""
        with self._changed:
            return self._frozen[0] if self._frozen else None

    def begin_flush(self) -> bool:
        """Count an attempt to flush; return False if no memtable is frozen or the region has ended."""
        with self._changed:
            self._attempt += 1
            return bool(self._frozen) and not self.ended

    def published(self, manifest: wal.RegionManifest) -> None:
        """Drop the oldest frozen memtable, which is now an SST of `manifest`."""
        with self._changed:
            if manifest.version > self.manifest.version:
                self.manifest = manifest
            self._frozen.pop(0)
            self._frozen_bytes = sum(each.memtable.bytes for each in self._frozen)
            self._flush_error = None
            self._changed.notify_all()

    def flush_failed(self, error: Exception) -> None:
        """Record the error of an attempt, for the callers that wait for a flush."""
        with self._changed:
            self._flush_error, self._failed_attempt = error, self._attempt
            self._changed.notify_all()

    # ---- inside --------------------------------------------------------------------------------------------------

    def _published_beyond(self, generation: int) -> bool:
        return self.manifest.current_generation > generation or self.ended

    def _failed_or_published(self, attempt: int, generation: int) -> bool:
        return self._failed_attempt > attempt or self._published_beyond(generation)

    def _memtables(self) -> list[MemTable]:
        """Return all memtables, newest first. Requires: the lock is held."""
        return [self.active, *(frozen.memtable for frozen in reversed(self._frozen))]

    def _state(self) -> State:
        if self.failure is not None:
            return "fenced" if isinstance(self.failure, wal.Fenced) else "poisoned"
        return "serving" if self._flush_error is None else "flush_failing"

    @property
    def _name(self) -> str:
        return f"{self._context.store.url('')}: {wal.named(self._region)}"

    @property
    def unflushed(self) -> int:
        """Bytes of all memtables, including indexes."""
        return self.active_bytes + self._frozen_bytes

    @property
    def held(self) -> tuple[int, int]:
        """Bytes of the active memtable (0 without rows), and of the frozen ones."""
        return self.active_bytes if self.active.rows else 0, self._frozen_bytes

    def _flush_trouble(self) -> str:
        return "" if self._flush_error is None else f" (the last flush failed: {self._flush_error})"

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure
