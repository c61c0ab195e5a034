"""Write one region's WAL: lingering rows, entries in parts, the applied map in each entry.

Rows of non-durable writes linger in memory for `wal.linger_max`. Another thread then appends them while the region's
thread continues to serve writes, because encoding and syncing an entry takes as long as a hundred small puts. A write
that changes no row may linger too: only its token, which is in the applied map. Steps:

1. `append_beside` hands over the lingering rows and the map of everything visible at that moment. Rows that become
   visible later linger for the next append, until this append has ended or until they fill an entry.
2. Another thread writes the entry; it uses no other state of this object.
3. `finish` waits for that thread and records its result. Every operation that needs the log calls it first: a durable
   write, a freeze, a durable read, a change of columns, the next append, the end of the region. Only one thread at a
   time uses the appender, and entries have the order in which their rows became visible.

*Crash at any step: the rows were not acknowledged as durable; replay restores those whose entry exists.*

If nothing was written, the rows linger again, before the later ones. If the outcome is unknown, or a newer owner was
found, `finish` raises, and the region ends as after a failed append of its own. If the map needs a snapshot first, the
region's thread appends the entry itself: the snapshot changes the map, which the region's thread reads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from uuid import UUID

import pyarrow as pa

from memwal import wal
from memwal.ingest.engine.region.context import RegionContext
from memwal.memtable import Checked
from memwal.wal.applied import AppliedMap
from memwal.wal.clock import Instant

NOTHING_WRITTEN = (wal.StoreUnavailable, wal.StoreRefused)
"""Failures of an append that leave the log unchanged: the region continues, the callers may retry."""

Beside = Callable[[Callable[[], None]], Callable[[], object]]
"""Starts work in another thread and returns a call that waits until the work has ended. The work raises nothing."""


def lasting(error: BaseException, region: UUID) -> BaseException:
    """Return the error of later calls: an outcome is unknown only to callers with rows in the failed entry."""
    if isinstance(error, wal.FencedAfterWrite):
        return error.fence
    if isinstance(error, wal.OutcomeUnknown):
        return wal.Poisoned(f"{wal.named(region)}: the writer stopped itself: {error}; open the table again")
    return error


@dataclass(slots=True)
class _Lingering:
    """Visible rows that are not in the log, their bytes, and the monotonic time (s) at which the first was applied.

    Without rows but with `since`, a token lingers: it is in the applied map but not in the log.
    """

    rows: list[pa.Table] = field(default_factory=list)
    size: int = 0
    since: float | None = None

    def add(self, checked: Checked | None, now: float) -> None:
        if self.since is None:
            self.since = now
        if checked is not None and checked.num_rows:
            self.rows.append(checked.rows)
            self.size += checked.size

    def before(self, later: _Lingering) -> _Lingering:
        return _Lingering([*self.rows, *later.rows], self.size + later.size, self.since)


@dataclass(slots=True)
class _Append:
    """An append in another thread than the region's.

    `applied`: the applied map after it. `begun`: the instant of its start; success extends the lease from it. `before`:
    the position before it. `parts`: the number of entries that it writes. `ended` is set last; `wait` returns after it.
    """

    lingering: _Lingering
    applied: AppliedMap
    begun: Instant
    before: int
    parts: int
    seconds: float = 0.0
    error: BaseException | None = None
    ended: bool = False
    wait: Callable[[], object] = lambda: None


class RegionLog:
    """The rows of a region on their way to the WAL, ordered by visibility, and the applied map.

    Thread safety. The region's thread only; `position`, `lingers`, `logged` and `applied` from any.
    Durability. `append` returns after its rows, everything that lingered before them, and the given map are on storage.
    An answer based on that map (a repeat, a put that changes nothing) is therefore the same after any crash.
    Invariants. (1) Lingering rows go first. (2) An entry that does not close its batch adds no token to the durable
    map: replay drops its rows when the closing entry is missing, and must not remember their tokens.
    Requires. A map with the same tokens as the previous map is the same object.
    """

    def __init__(
        self,
        context: RegionContext,
        region: UUID,
        claim: wal.Claim,
        lease: wal.ReadLease,
        beside: Beside | None = None,
    ) -> None:
        """`lease`: confirmed by every entry. `beside`: None if the region's thread also appends lingering rows.

        An append of more than `entry_size_max` bytes is split.
        """
        self._appender = wal.WalAppender(
            context.store,
            region,
            claim.guard,
            context.codec,
            claim.next_position,
            context.ids,
            context.clock,
            context.wal_options,
            claim.applied.snapshot.name,
        )
        self._region = region
        self._ids, self._entry_size_max, self._lease = context.ids, context.limits.entry_size_max, lease
        self._clock, self._meter = context.clock, context.meters.of(region)
        self._lingering = _Lingering()
        self._beside = beside
        self._under_way: _Append | None = None
        self.logged: AppliedMap = claim.applied
        """The applied map of the newest entry. The next owner of the region knows these tokens."""
        self.applied: AppliedMap = claim.applied
        """The applied map of all visible rows."""

    @property
    def position(self) -> int:
        """Newest WAL position, 0 if the log is empty."""
        return self._appender.next_position - 1

    @property
    def lingers(self) -> bool:
        """Whether visible rows, or tokens of the map, are not known to be in the log."""
        return self._lingering.since is not None or self._under_way is not None

    @property
    def position_then(self) -> int:
        """The position after the append in progress; without one, equal to `position`."""
        append = self._under_way
        return self.position if append is None else max(self.position, append.before + append.parts)

    @property
    def lingers_since(self) -> float | None:
        """Monotonic time (s) at which the oldest row was applied that must be appended `wal.linger_max` later.

        None if no row lingers, and while rows linger behind an append in progress and do not fill an entry yet.
        """
        append, lingering = self._under_way, self._lingering
        behind = append is not None and not append.ended and lingering.size < self._entry_size_max
        return None if behind else lingering.since

    # ---- lingering rows ------------------------------------------------------------------------------------------

    def linger(self, checked: Checked | None, applied: AppliedMap) -> None:
        """Keep rows that become visible now, and new tokens, for the next entry. `applied`: the map after them."""
        if applied is not self.applied or (checked is not None and checked.num_rows):
            self._lingering.add(checked, self._clock.monotonic())
        self.applied = applied

    def append_lingering(self, generation: int) -> None:
        """Make lingering rows durable. Raises: as `append`."""
        if self.lingers:
            self.append(None, self.applied, generation=generation)

    def append_beside(self, generation: int) -> None:
        """Begin to make lingering rows durable in another thread, after the previous such append has ended.

        `finish` records the result. Raises: as `finish`, for the previous append.
        """
        self.finish()
        rows = sum(table.num_rows for table in self._lingering.rows)
        if self._beside is None or not rows or not self._appender.holds(self.applied):
            self.append_lingering(generation)
            return
        parts = -(-rows // self._step(rows, self._lingering.size))
        append = _Append(self._lingering, self.applied, self._lease.begin(), self.position, parts)
        self._lingering, self._under_way = _Lingering(), append
        append.wait = self._beside(partial(self._write_beside, append, self.logged, generation))

    @property
    def finished(self) -> bool:
        """Whether an append in another thread has ended, so that `finish` would not wait."""
        return self._under_way is not None and self._under_way.ended

    def finish(self) -> None:
        """Wait for the append in another thread and record its result; do nothing if no append is in progress.

        Raises: as `append`; if nothing was written, its rows linger again.
        """
        append = self._under_way
        if append is None:
            return
        append.wait()
        done, self._under_way = append.lingering, None
        # the append and its thread refer to each other, which must not keep the rows in memory
        append.lingering = _Lingering()
        if append.error is not None:
            self._lingering = done.before(self._lingering)
            self._failed(append.error)
            raise append.error
        self._appended(append.before, append.begun, append.applied)
        self._meter.appended(append.seconds, done.size, self.position - append.before)

    # ---- every append --------------------------------------------------------------------------------------------

    def append(self, checked: Checked | None, applied: AppliedMap, *, generation: int) -> int:
        """Append the lingering rows, then the rows of `checked`, with `applied`, the map after them.

        Returns, once all are durable, the position that closes them. Without rows the entry holds only the map; if the
        log already has that map, no entry is written and the newest position is returned. If the stored rows reduced
        `checked` to no rows, the method proves that no newer owner had claimed the region by then.
        Raises: as `WalAppender.append`; lingering rows are kept then. (model: Lease!SendEntry, Lease!Acknowledge)
        """
        self._finish_before()
        begun, before = self._lease.begin(), self.position
        try:
            position = self._append(checked, applied, generation)
        except BaseException as error:
            self._failed(error)
            raise
        self._appended(before, begun, applied)
        self.applied = applied
        return position

    def recode(self, codec: wal.EntryCodec) -> None:
        """Write entries with another codec from now on. Requires: no row lingers."""
        self._appender.recode(codec)

    def _finish_before(self) -> None:
        """Call `finish` before an append of other rows.

        Raises: Poisoned or Fenced if the outcome is unknown. It is the outcome of the earlier rows, not of the new
        ones.
        """
        try:
            self.finish()
        except NOTHING_WRITTEN:
            pass  # those rows linger again and are appended with the new ones
        except wal.OutcomeUnknown as error:
            raise lasting(error, self._region) from error

    # ---- inside --------------------------------------------------------------------------------------------------

    def _append(self, checked: Checked | None, applied: AppliedMap, generation: int) -> int:
        lingering = self._lingering
        tables = [*lingering.rows, *([] if checked is None else [checked.rows])]
        if any(table.num_rows for table in tables):
            together = tables[0] if len(tables) == 1 else pa.concat_tables(tables)
            size = lingering.size + (0 if checked is None else checked.size)
            began, before = self._clock.monotonic(), self.position
            position = self._write(together, size, (self.logged, applied), generation)
            self._meter.appended(self._clock.monotonic() - began, size, position - before)
        elif applied is not self.logged:
            position = self._appender.append(None, generation=generation, applied=applied)
        else:
            if checked is not None:
                self._appender.expect_unfenced()
            return self.position
        self._lingering = _Lingering()
        return position

    def _failed(self, error: BaseException) -> None:
        """Record a failed append in the meter. A fence is recorded when it ends the region."""
        if not isinstance(error, wal.Fenced):
            self._meter.erred("append", error, self._clock.now())

    def _write_beside(self, append: _Append, durable: AppliedMap, generation: int) -> None:
        """Do the work of the other thread. `durable`: the applied map of the previous entry."""
        began = self._clock.monotonic()
        try:
            rows = pa.concat_tables(append.lingering.rows)
            self._write(rows, append.lingering.size, (durable, append.applied), generation)
        except BaseException as error:  # noqa: BLE001 - `finish` raises it; a panic of Lance is only a BaseException
            append.error = error
        finally:
            append.seconds, append.ended = self._clock.monotonic() - began, True

    def _write(self, rows: pa.Table, size: int, maps: tuple[AppliedMap, AppliedMap], generation: int) -> int:
        """Append `rows` of `size` bytes. `maps`: the applied map that is durable, and the map after the append."""
        durable, applied = maps
        if size <= self._entry_size_max or rows.num_rows == 1:
            return self._appender.append(rows, generation=generation, applied=applied)
        step = self._step(rows.num_rows, size)
        attempt, position = self._ids.entry_id(), 0
        for start in range(0, rows.num_rows, step):
            closes = start + step >= rows.num_rows
            position = self._appender.append(
                rows.slice(start, step),
                generation=generation,
                applied=applied if closes else durable,
                part=wal.BatchPart(producer="", sequence=0, attempt=attempt, closes=closes),
            )
        return position

    def _step(self, rows: int, size: int) -> int:
        """Return the number of rows per entry for `rows` rows of `size` bytes."""
        return rows if size <= self._entry_size_max else max(1, rows * self._entry_size_max // size)

    def _appended(self, before: int, begun: Instant, applied: AppliedMap) -> None:
        """Record that the log has grown beyond position `before`, which proves that this process owns the region."""
        if self.position > before:
            self.logged = applied
            self._lease.confirm(begun)
