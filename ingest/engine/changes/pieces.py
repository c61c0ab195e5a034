"""Serve pieces of change feeds to any number of callers in this process or in clients of a daemon.

A request names its start position, so no state is needed between two requests. But a reader that has just read up to
this position knows the stored rows of its keys; the last few readers are therefore kept, by request and position.
"""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock

from memwal import wal
from memwal.flush import BaseTable
from memwal.ingest.engine.api.changes import ChangesRequest, Piece, Position
from memwal.ingest.engine.changes.reader import ChangesReader, earliest, latest
from memwal.ingest.errors import Invalid
from memwal.wal.panics import panics_as_errors

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
