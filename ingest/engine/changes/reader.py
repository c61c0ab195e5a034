"""Read the changes of a table from storage, piece by piece. The README has the protocol.

`StoredChanges` serves pieces to any number of callers in this process or in clients of a daemon. A request names its
start position, so no state is needed between two requests. But a reader that has just read up to this position knows
the stored rows of its keys; the last few readers are therefore kept, by request and position.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import closing
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
        """Return the newest position of `region`. Makes one request, more only if entries are new or may have been
        lost.
        """
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
            f"{uri}: region {gone.region}: the log does not reach position {gone.position}: the position is of "
            "another table, or the table was restored; begin again with since='earliest'"
        )
    asked = at.get(gone.region, 0)
    try:
        oldest = earliest(base, store)
    except Unavailable:
        oldest = None
    kept = (
        "nothing can be read now"
        if oldest is None
        else (f"the oldest that can be read is {oldest.regions.get(gone.region, 0)}")
    )
    return Invalid(
        f"{uri}: changes of region {gone.region} after position {asked} are no longer kept; {kept}: begin again "
        "with since='earliest' and a new copy of the table, and raise gc.changes_age_min",
        {"reason": CHANGES_GONE, "oldest": oldest.to_json() if oldest and len(oldest.regions) <= _TOLD else None},
    )


def latest(base: BaseTable, store: wal.ObjectStore) -> Position:
    """Return the position after every change that was durable at the call. Makes a few requests per region."""
    at_once = AT_ONCE if store.remote else 1
    return _of_one_routing(base, store, lambda starts, region: starts.tip(region), at_once)


def earliest(base: BaseTable, store: wal.ObjectStore) -> Position:
    """Return the oldest readable position. Raises: Unavailable if no position is readable now."""

    def oldest(starts: Starts, region: UUID) -> int:
        position = starts.earliest(region)
        if position is None:
            raise Unavailable(
                f"{base.uri}: region {region}: the log was collected up to a position that the base table has not "
                "reached: commit the table and try again, or set gc.changes_age_min"
            )
        return position

    return _of_one_routing(base, store, oldest, 1)  # `Starts.earliest` is for one thread


def _of_one_routing(
    base: BaseTable, store: wal.ObjectStore, of: Callable[[Starts, UUID], int], at_once: int
) -> Position:
    for _ in range(_ATTEMPTS):
        base = base.latest()
        starts = Starts(base, store)
        regions = sorted({*base.regions, *wal.regions(store)})
        found = dict(zip(regions, each(lambda region: of(starts, region), regions, at_once), strict=True))  # noqa: B023
        if base.latest().routing_version == base.routing_version:
            return Position(base.table_id, base.routing_version, found)
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
        return (earliest if at == "earliest" else latest)(self._base, self._store)

    def _anew(self, request: ChangesRequest) -> tuple[ChangesReader, Piece]:
        reader = ChangesReader(self._base, self._store, self._clock, request)
        return reader, reader.next(request.until)


def _name(request: ChangesRequest, position: Position) -> object:
    regions = tuple(sorted(position.regions.items()))
    # A reader has checked that the positions belong to the table and to no later routing, so the table id and routing
    # suffice.
    until = request.until and (request.until.table, request.until.routing)
    return request.images, request.columns, position.table, position.routing, regions, until
