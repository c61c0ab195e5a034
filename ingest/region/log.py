"""One region's WAL as its thread writes it: rows that linger, entries in parts, the applied map with each entry."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from memwal import wal
from memwal.ingest.ops.counters import RegionMeter
from memwal.ingest.region.context import RegionContext
from memwal.wal.applied import AppliedMap


def joined(tables: Sequence[pa.Table]) -> pa.Table | None:
    """One table of them all without a copy, None of none."""
    return pa.concat_tables(tables) if len(tables) > 1 else next(iter(tables), None)


class RegionLog:
    """Appends what a region takes, in the order in which it became or becomes visible.

    Thread safety. The region's thread only; `position` from any.
    Durability. `append` returns once its rows, and everything that lingered before them, are on storage.
    Invariants. (1) Rows that linger go first. (2) An entry that does not close its batch claims no token that was not
    durable before: replay drops its rows when the closing entry is missing, and must not remember their tokens.
    """

    def __init__(
        self, appender: wal.WalAppender, context: RegionContext, meter: RegionMeter, applied: AppliedMap
    ) -> None:
        """`applied`: the map of the newest entry. An append of more than `entry_size_max` bytes is split."""
        self._appender, self._ids, self._entry_size_max = appender, context.ids, context.limits.entry_size_max
        self._clock, self._meter = context.clock, meter
        self._applied = applied
        self._waiting: list[pa.Table] = []
        self._waiting_size = 0
        self.lingers_since: float | None = None

    @property
    def position(self) -> int:
        """Newest WAL position, 0 where there is none."""
        return self._appender.next_position - 1

    def linger(self, rows: pa.Table, size: int, now: float) -> None:
        """Keep rows that are visible but not durable for the next entry; `now`: monotonic seconds."""
        if not rows.num_rows:
            return
        if self.lingers_since is None:
            self.lingers_since = now
        self._waiting.append(rows)
        self._waiting_size += size

    def recode(self, codec: wal.EntryCodec) -> None:
        """Write entries by another codec from now on; nothing may linger."""
        self._appender.recode(codec)

    def append(
        self, rows: pa.Table | None, size: int, *, applied: AppliedMap, generation: int, alone: bool = False
    ) -> int:
        """Make what lingers and then `rows` (of `size` bytes) durable; `applied` is the map once they are.

        Returns the position that closes them, the newest one when there is nothing to write; where `rows` came to
        nothing by what is stored, nobody has claimed the region since. `alone`: of no rows the map is made durable all
        the same. Raises: as `WalAppender.append`; what lingers is kept then.
        """
        together = joined([*self._waiting, *([] if rows is None else [rows])])
        if together is None or not together.num_rows:
            if alone:
                position = self._appender.append(None, generation=generation, applied=applied)
                self._applied = applied
                return position
            if rows is not None:
                self._appender.expect_unfenced()
            return self.position
        size += self._waiting_size
        began, before = self._clock.monotonic(), self.position
        if size <= self._entry_size_max or together.num_rows == 1:
            position = self._appender.append(together, generation=generation, applied=applied)
        else:
            step = max(1, together.num_rows * self._entry_size_max // size)
            position = self._append_in_parts(together, step, applied, generation)
        self._meter.appended(self._clock.monotonic() - began, size, position - before)
        self._applied = applied
        self._waiting, self._waiting_size, self.lingers_since = [], 0, None
        return position

    def _append_in_parts(self, rows: pa.Table, step: int, applied: AppliedMap, generation: int) -> int:
        attempt, position = self._ids.entry_id(), 0
        for start in range(0, rows.num_rows, step):
            closes = start + step >= rows.num_rows
            position = self._appender.append(
                rows.slice(start, step),
                generation=generation,
                applied=applied if closes else self._applied,
                part=wal.BatchPart(producer="", sequence=0, attempt=attempt, closes=closes),
            )
        return position
