"""Divide a feed into ranges that other processes read: the end of the next range, and its parts.

A range is (start, end], two positions. It has the same changes whenever and wherever it is read, as long as they are
kept. Within one routing, the changes of a key are in one region, so each region is a part that can be read in parallel.
A range that crosses a resize is one part, because a key may have moved.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from uuid import UUID

import pyarrow as pa

from memwal import wal
from memwal.flush import BaseTable
from memwal.ingest.engine.api.changes import ChangesRequest, Position
from memwal.ingest.engine.changes.reader import ChangesReader, covers, earliest, expect_same_table, gone_error, latest
from memwal.ingest.engine.changes.start import Gone, Starts
from memwal.memtable import TOMBSTONE
from memwal.wal.entry_reader import EntryReader

_AHEAD = 4
"""Entries that are counted at a time if storage is remote."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a range. Pickles.

    `ends`: the regions of the part, each with its last position; empty: all regions, up to `request.until`.
    """

    request: ChangesRequest
    ends: Mapping[UUID, int] = field(default_factory=dict)


class ChangeRanges:
    """The ranges of a table's feed.

    Thread safety. One thread. Errors. Invalid (`changes_gone`), Unavailable, wal and flush errors.
    """

    def __init__(self, base: BaseTable, store: wal.ObjectStore) -> None:
        """`base`: any version of the table."""
        self._base, self._store = base, store

    @property
    def uri(self) -> str:
        """Address of the table, absolute."""
        return self._base.uri

    @property
    def base(self) -> BaseTable:
        """The newest version of the table. Opened after `end`, it has every column of the entries up to that end."""
        self._base = self._base.latest()
        return self._base

    def position(self, at: str) -> Position:
        """Return the "earliest" or the "latest" position."""
        return (earliest if at == "earliest" else latest)(self._base, self._store)

    def end(self, start: Position, until: Position, most: int | None) -> Position:
        """Return the end of the range that begins at `start`: `until` or earlier; `start` if no change may follow.

        `until`: a position of the same table that was the latest at some time after `start` was. `most`: maximum log
        rows in the range, unless one entry has more; None: all up to `until`. With `most` this reads the entries of the
        range.
        """
        expect_same_table(self.base, start, "since")
        at, routing = dict(start.regions), start.routing
        try:
            if start.routing == until.routing:
                Starts(self._base, self._store).expect_reached(start.regions, until.regions)
            if covers(start, until) or most is None:
                return start if covers(start, until) else until
            while True:
                most = self._walk(at, self._ends(at, routing, until), most, start)
                if most <= 0 or routing == until.routing:
                    return Position(start.table, routing, at)
                routing += 1
        except Gone as gone:
            raise gone_error(self._base, self._store, gone, at) from None

    def parts(self, start: Position, end: Position, images: str, columns: tuple[str, ...] | None) -> list[Part]:
        """Return the parts of a range; an empty list for an empty range."""
        if start.routing != end.routing:
            return [Part(ChangesRequest(start, end, images, columns))]
        return [
            Part(ChangesRequest(_at(start, region), None, images, columns), {region: last})
            for region, last in sorted(end.regions.items())
            if last > start.regions.get(region, 0)
        ]

    def changes(self, part: Part) -> Iterator[pa.Table]:
        """Yield the changes of a part in order."""
        reader = ChangesReader(self._base, self._store, wal.SystemClock(), part.request, part.ends)
        while (piece := reader.next(part.request.until)).more:
            yield piece.rows

    # ---- inside --------------------------------------------------------------------------------------------------

    def _ends(self, at: Mapping[UUID, int], routing: int, until: Position) -> Mapping[UUID, int]:
        if routing == until.routing:
            return until.regions
        starts = Starts(self._base, self._store)
        regions = sorted({*at, *wal.regions(self._store)})
        return {region: starts.end_of_routing(region, routing, at.get(region, 0)) for region in regions}

    def _walk(self, at: dict[UUID, int], ends: Mapping[UUID, int], most: int, start: Position) -> int:
        """Move `at` towards `ends`, one entry of each region in turn; return how many rows are left, 0 if it stopped.

        The first entry after `start` is always included.
        """
        with ExitStack() as stack:
            turns = deque(
                (region, stack.enter_context(closing(self._counts(region, at.get(region, 0), end))))
                for region, end in sorted(ends.items())
                if end > at.get(region, 0)
            )
            while turns:
                region, counts = turns.popleft()
                if (count := next(counts, None)) is None:
                    continue
                if count > most and at != start.regions:
                    return 0
                at[region] = at.get(region, 0) + 1
                most -= count
                turns.append((region, counts))
        return max(most, 0)

    def _counts(self, region: UUID, after: int, end: int) -> Generator[int]:
        """Yield the number of rows of each entry."""
        codec = wal.codec_for(self._base.wal_format, pa.schema([self._base.shape.rows.field(TOMBSTONE)]))
        reader = EntryReader(self._store, region, codec, _AHEAD if self._store.remote else 1)
        with closing(reader.each(range(after + 1, end + 1))) as entries:
            for position, entry in enumerate(entries, after + 1):
                if entry is None:
                    raise Gone(region, position - 1)
                yield entry.rows.num_rows


def _at(position: Position, region: UUID) -> Position:
    return Position(position.table, position.routing, {region: position.regions.get(region, 0)})
