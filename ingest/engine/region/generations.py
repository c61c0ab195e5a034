"""Manage the generations of one region: apply rows to the active memtable, and freeze it for the flusher.

When a generation ends, its memtable is frozen, its last row is durable, and an empty memtable replaces it. A generation
ends:

1. between two groups of writes, at a limit of bytes, rows, age or WAL entries (`keep_limits`);
2. before a group that would exceed the maximum size of a generation in the log (`keep_small`, arrow format only);
3. on request: a flush, or a change of the table's columns;
4. in a replay, where the next entry has a higher generation, and where the replayed rows fill a memtable.

Entries without rows (notes that carry only the applied map) belong to no generation. When the log contains only such
entries, `replay_after` moves past them without an SST.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from uuid import UUID

import pyarrow as pa

from memwal import wal
from memwal.ingest.engine.region.context import RegionContext
from memwal.ingest.engine.region.indexes import RegionIndexes
from memwal.ingest.engine.region.log import RegionLog
from memwal.ingest.engine.region.state import RegionLevels
from memwal.memtable import Checked
from memwal.wal import Clock


class RowAges:
    """The time at which the first row of each generation was applied.

    Thread safety. `began` from the region's thread, the rest from any thread.
    """

    def __init__(self, clock: Clock) -> None:
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
        """Return the combined backlog of several regions: the largest number of SSTs, the sum of bytes, the oldest
        rows.
        """
        ages = [region.age for region in regions if region.age is not None]
        unflushed = [region.unflushed for region in regions if region.unflushed is not None]
        return Backlog(
            max((region.ssts for region in regions), default=0),
            sum(region.size for region in regions),
            max(ages, default=None),
            max(unflushed, default=None),
        )


_TOGETHER, _TOGETHER_BYTES = 100, 1 << 20
"""Entries, and bytes of their rows, that a replay applies at once: applying one row takes as long as applying many."""


class RegionGenerations:
    """Apply rows to a region's active memtable, and freeze it.

    Thread safety. The region's thread only; `waiting`, `unflushed_entries` and `forget_committed` from any,
    `indexes.step` from the indexer's.
    Invariants. (1) A frozen memtable ends at an entry that closes a batch, and every row in it is on storage.
    (2) Generations in the log never decrease, also across claims.
    """

    def __init__(
        self,
        context: RegionContext,
        region: UUID,
        claim: wal.Claim,
        levels: RegionLevels,
        log: RegionLog,
        manifests: wal.ManifestStore,
    ) -> None:
        """Apply the rows of the log that `claim` has read."""
        self._context, self._region, self._guard = context, region, claim.guard
        self._levels, self._log, self._manifests = levels, log, manifests
        self._active_since, self._ages = context.clock.monotonic(), RowAges(context.clock)
        self._frozen_to = claim.manifest.replay_after
        """WAL position whose row and all earlier ones are frozen or in an SST."""
        self.indexes = RegionIndexes(region, levels, context.log)
        self._index_at_once = False  # not while the log is replayed
        self._replay(claim.entries)
        self._index_at_once = context.index_at_once
        self._index()

    # ---- any thread ----------------------------------------------------------------------------------------------

    def unflushed_entries(self, behind: int = 0) -> int:
        """Return the number of WAL entries above position `behind` that the next claim must replay."""
        return max(0, self._log.position - max(behind, self._levels.manifest.replay_after))

    def waiting(self) -> Backlog:
        """Return the rows that are not in the base table; `refresh` detects commits of other processes."""
        memtables, ssts = self._levels.memtables(), self._levels.manifest.ssts
        unflushed = [table.generation for table in memtables if table.rows]
        age = self._ages.oldest([*unflushed, *(sst.generation for sst in ssts)])
        return Backlog(len(ssts), sum(sst.in_memory_bytes or 0 for sst in ssts), age, self._ages.oldest(unflushed))

    def forget_committed(self, manifest: wal.RegionManifest) -> None:
        """Forget the ages of generations that the committer has pruned from `manifest`."""
        self._ages.forget_below(min((sst.generation for sst in manifest.ssts), default=manifest.current_generation))

    # ---- the region's thread -------------------------------------------------------------------------------------

    def apply(self, rows: pa.Table | Checked) -> None:
        """Apply rows that the log holds or that linger for its next entry; index them if no indexer thread does."""
        self._apply(rows)
        self._index()

    def keep_limits(self) -> None:
        """Begin to append rows that have lingered long enough; freeze the memtable when it is full or old.

        Raises: the errors of an append, including one that ended in another thread, and of a manifest edit.
        """
        now, limits, log = self._context.clock.monotonic(), self._context.limits, self._log
        if log.finished:
            log.finish()
        if log.lingers_since is not None and now - log.lingers_since >= limits.linger_max:
            log.append_beside(self._levels.active.generation)
        many = log.position - self._frozen_to >= limits.entries_max
        if self._full() or many or (self._levels.active.rows and now - self._active_since >= limits.age_max):
            self.freeze()
        if many and log.position - self._frozen_to >= limits.entries_max:
            self._pass_over_notes()

    def next_duty(self) -> float | None:
        """Return the seconds until `keep_limits` has work; None if no row lingers or is in the memtable."""
        now, limits = self._context.clock.monotonic(), self._context.limits
        due = []
        if self._log.lingers_since is not None:
            due.append(self._log.lingers_since + limits.linger_max - now)
        if self._levels.active.rows:
            due.append(self._active_since + limits.age_max - now)
        return max(0.0, min(due)) if due else None

    def keep_small(self, checked: Checked | None) -> None:
        """Freeze first if the active generation plus `checked` exceeds the limits of one generation of the log.

        Raises: the errors of an append.
        """
        limits = self._context.limits
        if checked is None or limits.generation_rows is None or limits.generation_entries is None:
            return
        entries = self._log.position_then - self._frozen_to
        parts = 1 + checked.size // limits.entry_size_max
        rows = self._levels.active.rows + checked.num_rows
        if rows > limits.generation_rows or entries + parts > limits.generation_entries:
            self.freeze()

    def freeze(self, covers: int | None = None) -> None:
        """Swap in an empty memtable; the full one, durable to its last row, waits for the flusher.

        `covers`: WAL position of its last row, None for the newest. Raises: the errors of an append.
        """
        self._log.append_lingering(self._levels.active.generation)
        if self._levels.active.rows:
            self._frozen_to = self._log.position if covers is None else covers
            self._levels.freeze(self._frozen_to)
            self._index()

    def reshape(self, context: RegionContext) -> None:
        """End the active generation; accept entries and rows of the shape of `context` from now on.

        Raises: as `freeze`; then nothing is changed.
        """
        self.freeze()
        self._log.recode(context.codec)
        self._levels.reshape(context)
        self._context, self._index_at_once = context, context.index_at_once

    # ---- inside --------------------------------------------------------------------------------------------------

    def _apply(self, rows: pa.Table | Checked) -> None:
        if not rows.num_rows:
            return
        if not self._levels.active.rows:
            self._active_since = self._context.clock.monotonic()
            self._ages.began(self._levels.active.generation)
        active = self._levels.active
        active.apply(rows) if isinstance(rows, Checked) else active.restore(rows)
        self._levels.applied()

    def _index(self) -> None:
        if self._index_at_once:
            while self.indexes.step():
                pass

    def _replay(self, entries: Sequence[wal.Entry]) -> None:
        covers = done = 0
        # ShardWriter skips entries of a generation below the manifest's. If it may own the region next (arrow format),
        # a generation of the log must be published completely or not at all.
        limited = self._context.limits.generation_rows is not None
        for run in self._runs(entries):
            if run[0].header.generation > self._levels.active.generation:
                # Freeze where the original writer froze: generations in a log never decrease, also across claims.
                self.freeze(covers=covers)
            last, done = run[-1], done + len(run)
            covers = last.position
            self._apply(pa.concat_tables(entry.rows for entry in run))
            closed = last.header.part is None or last.header.part.closes
            if closed and self._full() and not limited:
                self.freeze(covers=covers)
            self._context.replayed(self._region, "applying", done, len(entries))

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
        return self._levels.active_bytes >= limits.size_max or self._levels.active.rows >= limits.rows_max

    def _pass_over_notes(self) -> None:
        """Move `replay_after` if all later entries are notes without rows, which no SST will cover.

        In that case no memtable, active or frozen, has rows, so every row up to the newest entry is in an SST.
        """
        position = self._log.position
        if self._levels.active.rows or self._levels.oldest_frozen() is not None or self._log.lingers:
            return

        def passed(current: wal.RegionManifest) -> wal.RegionManifest:
            return replace(
                current,
                replay_after=max(current.replay_after, position),
                last_seen=max(current.last_seen, position),
            )

        with suppress(wal.OutcomeUnknown):  # the edit may have been applied, or is made again
            self._levels.adopt(self._manifests.edit(self._guard, passed))
            self._frozen_to = position
