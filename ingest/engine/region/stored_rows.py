"""Look up the newest rows of keys for a write, in the region's own thread.

Only loads past the log (`conditions`) write the region beside its thread, so the result is still true when the write is
logged. Rows that a commit moves in between are in a level of the view, or in the base table, which is opened after the
view.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from uuid import UUID

import pyarrow as pa

from memwal import flush
from memwal.flush.base.shape import Shape
from memwal.flush.commits.load_notes import loads_in
from memwal.ingest.engine.read.levels import CaptureOvertaken, RegionView
from memwal.ingest.engine.read.local import ATTEMPTS
from memwal.ingest.engine.read.reader import Reader
from memwal.ingest.engine.region.context import RegionContext
from memwal.ingest.errors import Unavailable
from memwal.memtable import TOMBSTONE
from memwal.wal import ObjectStore
from memwal.wal.panics import RustPanic, panics_as_errors

View = Callable[[], RegionView]
"""Captures the levels of a region."""


class StoredRows:
    """The `Find` of a table: reads the levels of a view and the newest base table. Thread safety. Any thread."""

    def __init__(self, reader: Reader, store: ObjectStore) -> None:
        self._reader, self._store = reader, store

    def given_to(self, context: RegionContext) -> RegionContext:
        """Return `context` with everything that regions need for operations that depend on stored rows."""
        return replace(context, find=self, any_expired=self.any_expired, loads=self.loads, keep=self._reader.keep)

    def __call__(
        self, view: RegionView, keys: pa.Table, columns: Sequence[str], shape: Shape | None, above: int | None = None
    ) -> pa.Table:
        """Implement `Find`."""
        named = [name for name in columns if name != TOMBSTONE]
        try:
            with panics_as_errors:
                deletes = len(named) < len(columns)
                return self._reader.get([view], keys, named, shape, tombstones=deletes, above=above)
        except (pa.ArrowInvalid, OSError, RustPanic):
            self._reader.ask_storage()
            raise

    def loads(self) -> dict[UUID, int]:
        """Return the generations of the loads past the log that are in the newest base table.

        Raises: Unavailable while a load is in progress.
        """
        if flush.under_way(self._store, self._reader.base):
            raise Unavailable("a load into the table is under way; call the delete again when it has ended")
        committed = self._reader.base().committed
        return {id: committed[id] for id in loads_in(committed)}

    def any_expired(self, rows: pa.Table) -> bool:
        """Return whether one of a caller's `rows` has expired; True if that cannot be determined."""
        expiry = self._reader.expiry()
        if expiry is None or expiry.column not in rows.column_names:
            return False
        try:
            return bool(expiry.mask(rows.column(expiry.column)).any())
        except pa.ArrowInvalid:  # a value that the checks of the group will reject or convert
            return True


def look_up(
    context: RegionContext, keys: pa.Table, columns: Sequence[str], view: View, above: int | None = None
) -> pa.Table:
    """Return the rows of `keys` with `columns`, as `context.find`, from the levels that `view` captures.

    Raises: Unavailable if commits keep overtaking the lookup; the other errors of `context.find`.
    """
    if context.find is None:
        raise ValueError("the write depends on stored rows, but context.find, which looks them up, is None")
    for _ in range(ATTEMPTS):
        try:
            return context.find(view(), keys, columns, context.shape, above)
        except CaptureOvertaken:
            continue
    raise Unavailable(f"{ATTEMPTS} commits overtook the lookup of stored rows; retry with the same token")
