"""Read the changes of a table from storage, piece by piece. The README has the protocol.

`StoredChanges` serves pieces to any number of callers in this process or in clients of a daemon. A request names its
start position, so no state is needed between two requests. But a reader that has just read up to this position knows
the stored rows of its keys; the last few readers are therefore kept, by request and position.

`ChangeRanges` divides a feed into ranges that other processes read: the end of the next range, and its parts. A range
is (start, end], two positions. It has the same changes whenever and wherever it is read, as long as they are kept.
Within one routing, the changes of a key are in one region, so each region is a part that can be read in parallel. A
range that crosses a resize is one part, because a key may have moved.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from uuid import UUID

import pyarrow as pa

from memwal import wal
from memwal.flush import BaseTable
from memwal.ingest.engine.api.changes import (
    CHANGE,
    CHANGES_GONE,
    POSITION,
    REGION,
    ROW,
    ChangesRequest,
    Piece,
    Position,
)
from memwal.ingest.engine.changes.region import Form, RegionChanges, StoredRows
from memwal.ingest.engine.changes.start import Gone, Starts
from memwal.ingest.engine.read.request import checked_columns
from memwal.ingest.errors import Invalid, Unavailable
from memwal.memtable import TOMBSTONE
from memwal.wal.entry_reader import EntryReader
from memwal.wal.layout import entry_key
from memwal.wal.panics import panics_as_errors
from memwal.wal.parallel_map import AT_ONCE, each
from memwal.wal.probing import newest_from

_LOOK_FOR_LOSS = 10.0
"""Seconds between two checks whether an awaited entry was deleted before it was read."""
_LONGEST = 20.0
"""Seconds after which a piece is returned as it is, even without rows. A client waits for a limited time, and its next
request restarts an abandoned piece: on a busy machine a feed after a resize would never progress.
"""
_ATTEMPTS = 5
_TOLD = 32
"""Maximum regions of a position in an error: the position travels as a response header of at most 8 KiB."""


class ChangesReader:
    """Read the changes of one request from storage.

    Thread safety. One thread at a time. After an error it cannot be used any more.
    Invariants. (1) `position` covers exactly the changes that were returned. (2) All changes of a routing come before
    those of the next.
    """

    def __init__(
        self,
        base: BaseTable,
        store: wal.ObjectStore,
        clock: wal.Clock,
        request: ChangesRequest,
        ends: Mapping[UUID, int] | None = None,
    ) -> None:
        """`base`: any version of the table.

        `ends`: the only regions to read, each with its last position, in the routing of `since`; without it the ends of
        all regions are read from storage.
        Raises: Invalid for a position of another table, or unknown columns.
        """
        self._store, self._clock, self._request = store, clock, request
        self._base = base.latest()
        expect_same_table(self._base, request.since, "since")
        if request.until is not None:
            expect_same_table(self._base, request.until, "until")
        self._routing = request.since.routing
        self._at: dict[UUID, int] = dict(request.since.regions)
        self._known, self._ends = bool(ends), dict(ends or {})
        self._open: dict[UUID, RegionChanges] = {}
        self._looked: dict[UUID, float] = {}
        self._at_once = AT_ONCE if store.remote else 1
        self._form = self._formed()
        self._starts = Starts(self._base, store)

    @property
    def position(self) -> Position:
        """The position of the last returned change."""
        return Position(self._base.table_id, self._routing, dict(self._at))

    def next(self, until: Position | None) -> Piece:
        """Return the next piece, at most up to `until`; None: up to now. It may have no rows even if more follow.

        Raises: Invalid (`changes_gone`).
        """
        late = self._clock.monotonic() + _LONGEST
        try:
            while True:
                for region in sorted(self._ends):
                    end = self._end(region, until)
                    while self._at.get(region, 0) < end:
                        rows = self._read(region, end)
                        if rows.num_rows or self._clock.monotonic() >= late:
                            return Piece(rows, self.position, more=True)
                more = self._look(until)
                if not more or self._clock.monotonic() >= late:
                    return Piece(self._form.schema.empty_table(), self.position, more)
        except Gone as gone:
            raise gone_error(self._base, self._store, gone, self._at) from None
        except wal.Overtaken:  # entries of another log than that of the position; a missing entry raises Gone
            raise _another_table(self._base, "since") from None

    def _read(self, region: UUID, end: int) -> pa.Table:
        at = self._at.get(region, 0)
        changes = self._open.get(region)
        if changes is None:
            try:
                changes = self._begun(region, at)
            except Gone:
                if (over := self._over_fences(region, at, end)) == at:
                    raise
                self._at[region] = over
                return self._form.schema.empty_table()
        elif changes.stored is not None and changes.stored.is_large:
            changes = self._renewed(region, changes, changes.stored, at)
        self._open[region] = changes
        rows = changes.read(end)
        self._at[region] = changes.at
        return rows

    def _begun(self, region: UUID, at: int) -> RegionChanges:
        try:
            return self._opened(region, at, self._starts)
        except Gone as gone:
            if gone.ahead:
                raise
            # A flush, a commit and a collection ran since the manifests were read; the objects they left give the same
            # changes.
            return self._opened(region, at, Starts(self._base.latest(), self._store))

    def _opened(self, region: UUID, at: int, starts: Starts) -> RegionChanges:
        return RegionChanges(self._store, region, self._form, starts.of(region, at, self._routing), at)

    def _over_fences(self, region: UUID, at: int, end: int) -> int:
        """Return the last position, at most `end`, such that all entries after `at` up to it are fences (sentinels).

        Returns `at` if no fence follows it directly. No stored row is needed to know that fences change nothing. A
        region that a resize is about to open has only fences in the previous routing, and an exact version for that
        routing may no longer exist.
        """
        with closing(EntryReader(self._store, region, self._form.codec).each(range(at + 1, end + 1))) as entries:
            for position, entry in enumerate(entries, at + 1):
                if entry is None or not entry.header.sentinel:
                    return position - 1
        return end

    def _renewed(self, region: UUID, changes: RegionChanges, stored: StoredRows, at: int) -> RegionChanges:
        """Return the region read from a newer base version, if one holds more of it, to limit the rows in memory."""
        newest = self._base.latest()
        if stored.base is None or newest.committed.get(region, 0) == stored.base.committed.get(region, 0):
            return changes
        try:
            return self._opened(region, at, Starts(newest, self._store))
        except Gone:
            return changes

    def _end(self, region: UUID, until: Position | None) -> int:
        """Return the position where the present read of `region` ends."""
        end = self._ends[region]
        if until is None or until.routing > self._routing:
            return end
        return min(end, until.regions.get(region, 0)) if until.routing == self._routing else 0

    def _look(self, until: Position | None) -> bool:
        """Update the end of the readable changes of each region; return whether there are any, or a next routing.

        The ends of the logs are read before the base table is opened, so entries up to there have no columns that this
        version lacks. If its routing is the one being read, it routed all of them.
        """
        if self._known:
            return False
        if until is not None and covers(self.position, until):
            if until.routing == self._routing:
                self._starts.expect_reached(self._at, until.regions)
            return False
        regions = sorted({*self._at, *self._base.regions, *wal.regions(self._store)})
        tips = dict(zip(regions, each(self._tip, regions, self._at_once), strict=True))
        base = self._base.latest()
        if base is not self._base:
            if base.shape != self._base.shape:
                self._open.clear()
            self._base = base
            self._form, self._starts = self._formed(), Starts(base, self._store)
        if base.routing_version == self._routing:
            self._ends = tips
            return any(self._at.get(region, 0) < self._end(region, until) for region in tips)
        self._ends = {
            region: self._starts.end_of_routing(region, self._routing, self._at.get(region, 0))
            for region in {*regions, *wal.regions(self._store)}
        }
        if any(self._at.get(region, 0) < self._end(region, until) for region in self._ends):
            return True
        if until is not None and until.routing <= self._routing:
            return False
        self._routing += 1
        self._ends, self._open = {}, {}
        return True

    def _tip(self, region: UUID) -> int:
        """Return the newest position of `region`: one request, more if entries are new or may have been lost."""
        at, suffix = self._at.get(region, 0), self._base.codec.suffix

        def exists(position: int) -> bool:
            return self._store.exists(entry_key(region, position, suffix))

        tip = newest_from(exists, at)
        if tip == at and self._clock.monotonic() >= self._looked.get(region, -1.0):
            self._looked[region] = self._clock.monotonic() + _LOOK_FOR_LOSS
            manifest = wal.ManifestStore(self._store, region, clock=self._clock).latest()
            known = 0 if manifest is None else max(manifest.replay_after, manifest.last_seen)
            if at > known and not exists(at):
                raise Gone(region, at, ahead=True)
            if known > at:
                tip = newest_from(exists, known)
        return tip

    def _formed(self) -> Form:
        base, request = self._base, self._request
        expect_names_free(base.schema)
        columns = {*checked_columns(request.columns, base.schema), *base.key}
        ordered = tuple(name for name in base.schema.names if name in columns)
        return Form(base.shape, base.key, ordered, request.images == "both", base.wal_format)


def covers(position: Position, until: Position) -> bool:
    """Return whether no change up to `until` comes after `position`."""
    if position.routing != until.routing:
        return position.routing > until.routing
    return all(position.regions.get(region, 0) >= end for region, end in until.regions.items())


def expect_names_free(schema: pa.Schema) -> None:
    """Raise Invalid if the table has a column with a name that changes need."""
    for name in (CHANGE, REGION, POSITION, ROW):
        if name in schema.names:
            raise Invalid(f"changes: the table has a column {name!r}, which changes need; rename it")


def expect_same_table(base: BaseTable, position: Position, name: str) -> None:
    """Raise Invalid if a position is of another table, or of a routing that the table does not have yet."""
    if position.table != base.table_id:
        raise _another_table(base, name)
    if position.routing > base.routing_version:
        raise Invalid(
            f"{name}: the position has routing version {position.routing}, {base.uri} has {base.routing_version}"
        )


def _another_table(base: BaseTable, name: str) -> Invalid:
    return Invalid(f"{name}: the position is of another table than {base.uri}, or of one that was replaced")


def gone_error(base: BaseTable, store: wal.ObjectStore, gone: Gone, at: Mapping[UUID, int]) -> Invalid:
    """Return the caller's error for `gone`. `at`: the position that each region was read to."""
    uri = base.uri
    if gone.ahead:
        return Invalid(
            f"{uri}: {wal.named(gone.region)}: the log does not reach position {gone.position}: the position is of "
            "another table, or the table was restored; begin again with since='earliest'"
        )
    asked = at.get(gone.region, 0)
    try:
        oldest = position_at(base, store, "earliest")
    except Unavailable:
        oldest = None
    kept = (
        "nothing can be read now"
        if oldest is None
        else f"the oldest that can be read is {oldest.regions.get(gone.region, 0)}"
    )
    return Invalid(
        f"{uri}: changes of {wal.named(gone.region)} after position {asked} are no longer kept; {kept}: begin again "
        "with since='earliest' and a new copy of the table, and raise gc.changes_age_min",
        {"reason": CHANGES_GONE, "oldest": oldest.to_json() if oldest and len(oldest.regions) <= _TOLD else None},
    )


def position_at(base: BaseTable, store: wal.ObjectStore, at: str) -> Position:
    """Return the "latest" position, after every change that was durable at the call, or the "earliest" readable one.

    Makes a few requests per region. Raises: Unavailable if no position is readable now, or during a resize.
    """

    def oldest(starts: Starts, region: UUID) -> int:
        position = starts.earliest(region)
        if position is None:
            raise Unavailable(
                f"{base.uri}: {wal.named(region)}: the log was collected up to a position that the base table has not "
                "reached: commit the table and try again, or set gc.changes_age_min"
            )
        return position

    at_once = AT_ONCE if at == "latest" and store.remote else 1  # `Starts.earliest` is for one thread
    for _ in range(_ATTEMPTS):
        newest = base.latest()
        starts = Starts(newest, store)
        regions = sorted({*newest.regions, *wal.regions(store)})
        find = starts.tip if at == "latest" else partial(oldest, starts)
        found = dict(zip(regions, each(find, regions, at_once), strict=True))
        if newest.latest().routing_version == newest.routing_version:
            return Position(newest.table_id, newest.routing_version, found)
    raise Unavailable(f"{base.uri}: the table is being resized; try again")


_KEPT = 4
"""Number of readers kept: a feed that a client abandoned holds its memory until this many others were read."""


class StoredChanges:
    """Changes of a table, read from storage.

    Thread safety. Any thread.
    """

    def __init__(self, base: BaseTable, store: wal.ObjectStore, clock: wal.Clock | None = None) -> None:
        """`base`: any version of the table."""
        self._base, self._store, self._clock = base, store, clock or wal.SystemClock()
        self._readers: OrderedDict[object, ChangesReader] = OrderedDict()
        self._lock = Lock()

    @panics_as_errors
    def piece(self, request: ChangesRequest) -> Piece:
        """See `ChangesSource`. Raises: Invalid, including `changes_gone`; wal and flush errors."""
        with self._lock:
            reader = self._readers.pop(_name(request, request.since), None)
        if reader is None:
            reader, piece = self._anew(request)
        else:
            try:
                piece = reader.next(request.until)
            except Invalid:
                raise
            except (OSError, ValueError, wal.Corrupt):  # its base version may have been cleaned up
                reader, piece = self._anew(request)
        with self._lock:
            self._readers[_name(request, piece.position)] = reader
            while len(self._readers) > _KEPT:
                self._readers.popitem(last=False)
        return piece

    @panics_as_errors
    def position(self, at: str) -> Position:
        """Return the "earliest" or the "latest" position."""
        return position_at(self._base, self._store, at)

    def _anew(self, request: ChangesRequest) -> tuple[ChangesReader, Piece]:
        reader = ChangesReader(self._base, self._store, self._clock, request)
        return reader, reader.next(request.until)


def _name(request: ChangesRequest, position: Position) -> object:
    regions = tuple(sorted(position.regions.items()))
    # A reader has checked that the positions belong to the table and to no later routing, so the table id and routing
    # suffice.
    until = request.until and (request.until.table, request.until.routing)
    return request.images, request.columns, position.table, position.routing, regions, until


_COUNTED_AHEAD = 4
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
        return position_at(self._base, self._store, at)

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
        reader = EntryReader(self._store, region, codec, _COUNTED_AHEAD if self._store.remote else 1)
        with closing(reader.each(range(after + 1, end + 1))) as entries:
            for position, entry in enumerate(entries, after + 1):
                if entry is None:
                    raise Gone(region, position - 1)
                yield entry.rows.num_rows


def _at(position: Position, region: UUID) -> Position:
    return Position(position.table, position.routing, {region: position.regions.get(region, 0)})
