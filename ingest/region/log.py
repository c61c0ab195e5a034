"""Write one region's WAL: rows that linger, entries in parts, the applied map with each entry."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

import pyarrow as pa

from memwal import wal
from memwal.ingest.region.context import RegionContext
from memwal.memtable import Checked
from memwal.wal.applied import AppliedMap


def joined(tables: Sequence[pa.Table]) -> pa.Table | None:
    """Return `tables` as one table without a copy, None if there are none."""
    return pa.concat_tables(tables) if len(tables) > 1 else next(iter(tables), None)


class RegionLog:
    """The rows of a region on their way to the WAL, in the order in which they become visible, and its applied map.

    Thread safety. The region's thread only; `position`, `lingers` and `applied` from any.
    Durability. `append` returns once its rows, and everything that lingered before them, are on storage.
    Invariants. (1) Rows that linger go first. (2) An entry that does not close its batch claims no token that was not
    durable before: replay drops its rows when the closing entry is missing, and must not remember their tokens.
    """

    def __init__(self, context: RegionContext, region: UUID, claim: wal.Claim, lease: wal.ReadLease) -> None:
        """`lease`: confirmed by every entry. An append of more than `entry_size_max` bytes is split."""
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
        self._ids, self._entry_size_max, self._lease = context.ids, context.limits.entry_size_max, lease
        self._clock, self._meter = context.clock, context.meters.of(region)
        self._waiting: list[pa.Table] = []
        self._waiting_size = 0
        self._durable_applied = claim.applied
        """The applied map of the newest entry."""
        self.applied: AppliedMap = claim.applied
        """The applied map of all visible rows."""
        self.lingers_since: float | None = None
        """Monotonic seconds at which the first row that lingers was applied, None when none lingers."""

    @property
    def position(self) -> int:
        """Newest WAL position, 0 if the log is empty."""
        return self._appender.next_position - 1

    @property
    def lingers(self) -> bool:
        """Whether visible rows wait for the next entry."""
        return self.lingers_since is not None

    def linger(self, checked: Checked | None, applied: AppliedMap) -> None:
        """Keep rows that become visible now for the next entry. `applied`: the map after them."""
        self.applied = applied
        if checked is None or not checked.num_rows:
            return
        if self.lingers_since is None:
            self.lingers_since = self._clock.monotonic()
        self._waiting.append(checked.rows)
        self._waiting_size += checked.size

    def recode(self, codec: wal.EntryCodec) -> None:
        """Write entries by another codec from now on. Requires: no row lingers."""
        self._appender.recode(codec)

    def append_lingering(self, generation: int) -> None:
        """Make lingering rows durable. Raises: as `append`."""
        if self.lingers:
            self.append(None, self.applied, generation=generation)

    def append(self, checked: Checked | None, applied: AppliedMap, *, generation: int, alone: bool = False) -> int:
        """Make what lingers and then the rows of `checked` durable; `applied` is the map once they are.

        Returns the position that closes them; the newest one when there are no rows to write. If the rows given came to
        nothing by what is stored, nobody had claimed the region by then. `alone`: write the map in an entry of its own
        even without rows. Raises: as `WalAppender.append`; what lingers is kept then.
        """
        begun, before = self._lease.begin(), self.position
        position = self._append(checked, applied, generation, alone=alone)
        if self.position > before:
            self._durable_applied = applied
            self._lease.confirm(begun)
        self.applied = applied
        return position

    def _append(self, checked: Checked | None, applied: AppliedMap, generation: int, *, alone: bool) -> int:
        together = joined([*self._waiting, *([] if checked is None else [checked.rows])])
        if together is None or not together.num_rows:
            if alone:
                return self._appender.append(None, generation=generation, applied=applied)
            if checked is not None:
                self._appender.expect_unfenced()
            return self.position
        size = self._waiting_size + (0 if checked is None else checked.size)
        began, before = self._clock.monotonic(), self.position
        if size <= self._entry_size_max or together.num_rows == 1:
            position = self._appender.append(together, generation=generation, applied=applied)
        else:
            step = max(1, together.num_rows * self._entry_size_max // size)
            position = self._append_in_parts(together, step, applied, generation)
        self._meter.appended(self._clock.monotonic() - began, size, position - before)
        self._waiting, self._waiting_size, self.lingers_since = [], 0, None
        return position

    def _append_in_parts(self, rows: pa.Table, step: int, applied: AppliedMap, generation: int) -> int:
        attempt, position = self._ids.entry_id(), 0
        for start in range(0, rows.num_rows, step):
            closes = start + step >= rows.num_rows
            position = self._appender.append(
                rows.slice(start, step),
                generation=generation,
                applied=applied if closes else self._durable_applied,
                part=wal.BatchPart(producer="", sequence=0, attempt=attempt, closes=closes),
            )
        return position
