"""Complete a group of writes that depend on stored rows, before it is logged.

The log, the memtables, SSTs and the base table hold only whole rows, and the newest row of a key counts. Their readers
(Lance's own, a replay, a flush, a commit) therefore need no rules. Steps of `Resolver`:

1. Find the keys whose stored row matters: all except those whose first row in the group is a delete, or (unless upsert
   is "insert") has every column. In a table with a version: all except those whose first row is a delete without a
   version; stored tombstones matter too, because they keep their version.
2. Look these keys up in one read, first in the region's levels and then in the newest base table. The region has no
   other writer, so the result is still true when the group is logged. Rows that a commit moves in between are in a
   level of the view or in the base table, which is opened after the view.
3. Resolve the group (`write_rules`), and check the values that were filled in.

`Conditions` narrows a delete or an update to the keys whose newest row passes a filter. `delete(filter=...)` and
`update` find their keys with a scan and send them to the regions later (`api.filter_writes`). Rows may change in
between, so the region's thread checks the newest row of each key in queue order, and writes only keys whose row passes
at that moment. A row that was changed and no longer passes stays. The new values of an update are computed from that
newest row. The log receives ordinary tombstones, or whole rows.

A load past the log writes the base table without the region. No piece is therefore checked while a load is in progress,
and the region's thread tests for loads before the lookup; `flush.commits.load_notes` explains why that suffices where
daemons own the regions. A load does not request a flush from a program that opened the table itself, so it may begin
and land after the first test: that program tests once more after the lookup.

Rows of the base table need no lookup while the base table has the version from before the scan. Looking 16,384 keys up
in a base table of 4 million rows without an index on the key takes 5 s, during which the region answers no put.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from uuid import UUID

import numpy as np
import pyarrow as pa

from memwal import flush
from memwal.flush.base.shape import Shape
from memwal.flush.commits.load_notes import loads_in
from memwal.ingest.engine.api.filter_writes import Update, Where
from memwal.ingest.engine.api.rows import Mask, Places, key_text
from memwal.ingest.engine.read.base import match_keys
from memwal.ingest.engine.read.levels import BaseChanged, CaptureOvertaken, RegionView
from memwal.ingest.engine.read.local import ATTEMPTS
from memwal.ingest.engine.read.reader import Captured, Reader
from memwal.ingest.engine.region.admission import Admission
from memwal.ingest.engine.region.context import RegionContext
from memwal.ingest.engine.region.write_queue import Write
from memwal.ingest.engine.region.write_rules import NOWHERE, Group, inserted, merged, merged_from, timely
from memwal.ingest.errors import Unavailable
from memwal.memtable import TOMBSTONE, Checked, InvalidRows
from memwal.memtable.filter.predicate import computed, evaluate, plan
from memwal.wal import ObjectStore
from memwal.wal.panics import RustPanic, panics_as_errors

View = Callable[[], RegionView]
"""Captures the levels of a region."""


class StoredRows:
    """The `Find` of a table: reads the levels of a view and the newest base table. Thread safety. Any thread."""

    def __init__(self, reader: Reader, store: ObjectStore) -> None:
        self._reader, self._store = reader, store

    def __call__(
        self, view: RegionView, keys: pa.Table, columns: Sequence[str], shape: Shape | None, above: int | None
    ) -> pa.Table:
        """Implement `Find`."""
        named = [name for name in columns if name != TOMBSTONE]
        try:
            with panics_as_errors:
                levels, deletes = Captured([view]), len(named) < len(columns)
                return self._reader.get(levels, keys, named, shape, tombstones=deletes, above=above)
        except (pa.ArrowInvalid, OSError, RustPanic):
            self._reader.ask_storage()
            raise

    def loads(self) -> dict[UUID, int]:
        """Return the generations of the loads past the log that are in the newest base table.

        Raises: Unavailable while a load is in progress.
        """
        if flush.under_way(self._store, self._reader.base):
            raise Unavailable("a load into the table is under way; call it again when it has ended")
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
    assert context.find is not None
    for _ in range(ATTEMPTS):
        try:
            return context.find(view(), keys, columns, context.shape, above)
        except CaptureOvertaken:
            continue
    raise Unavailable(f"{ATTEMPTS} commits overtook the lookup of stored rows; retry with the same token")


class Refused(Exception):
    """Some writes of a group cannot be resolved. `errors`: by write number. Never leaves this package."""

    def __init__(self, errors: Mapping[int, InvalidRows]) -> None:
        super().__init__(f"{len(errors)} writes")
        self.errors = errors


class Resolver:
    """Complete the writes of one region to whole rows.

    Thread safety. The region's thread only. Invariants. Changes no state; a call that raised can be repeated.
    """

    def __init__(self, context: RegionContext, admission: Admission) -> None:
        self._context, self._admission = context, admission
        self._key, self._required = list(context.key), frozenset(context.required)
        self._columns = [name for name in context.schema.names if name not in (*self._key, TOMBSTONE)]
        self._inserts, self._version = context.rules.upsert == "insert", context.rules.version
        self._told = [self._version, TOMBSTONE] if self._version else []

    def resolve(self, writes: Sequence[Write], checked: Checked, view: View) -> tuple[Checked, Sequence[int]]:
        """Return the rows to log for `writes`, whose rows are `checked`, and the number of skipped rows of each write.

        The sequence of numbers is empty if no row was skipped. `view`: captures the region's levels.
        Raises: Refused for writes that lack a required column; the error of a lookup.
        """
        missing = [
            [] if write.deletes is True else [name for name in self._columns if name not in write.rows.column_names]
            for write in writes
        ]
        group = Group(
            checked.rows.select(self._key),
            [write.rows.num_rows for write in writes],
            checked.rows.column(TOMBSTONE).to_numpy(),
        )
        if self._inserts:
            if group.deletes.all():
                return checked, ()
            at, _ = self._stored(group, checked, ~group.deletes[group.first], self._key, view)
            taken = inserted(group, at != NOWHERE)
            if taken.all():
                return checked, ()
            left_out = np.bincount(group.writes[~taken], minlength=len(writes))
            return self._admission.again(checked.rows.filter(pa.array(taken))), left_out.tolist()
        names = [name for name in self._columns if any(name in each for each in missing)]
        if not self._version and (group.deletes.all() or not names):
            return checked, ()
        partial = np.array([bool(each) for each in missing])
        asked = self._asked(group, checked.rows, partial)
        at, stored = self._stored(group, checked, asked, [*self._key, *names, *self._told], view)
        skipped: Sequence[int] = ()
        if self._version:
            rows, group, at, skipped = self._timely(group, checked.rows, at, stored)
            checked = checked if not skipped else self._admission.again(rows)
        return self._merged(group, checked, missing, names, at, stored) if names else checked, skipped

    def _asked(self, group: Group, rows: pa.Table, partial: Mask) -> Mask:
        """Return the keys whose stored rows matter, bool [m]."""
        first = group.first
        if self._version:
            known: Mask = rows.column(self._version).is_valid().to_numpy()
            return known[first]
        return partial[group.writes[first]] & ~group.deletes[first]

    def _timely(
        self, group: Group, rows: pa.Table, at: Places, stored: pa.Table
    ) -> tuple[pa.Table, Group, Places, Sequence[int]]:
        """Return the rows that are not late, their group, and the place of each key's live stored row.

        The fourth value is the number of late rows of each write, empty if no row was late.
        """
        versions = rows.column(self._version)
        taken = timely(group, versions, stored.column(self._version).cast(versions.type), at)
        live = ~np.append(stored.column(TOMBSTONE).to_numpy(), False)
        at = np.where(live[at], at, NOWHERE)
        if taken.all():
            return rows, group, at, ()
        counts = np.bincount(group.writes[taken], minlength=group.count)
        rows = rows.filter(pa.array(taken))
        left = Group(rows.select(self._key), counts.tolist(), group.deletes[taken])
        of_row = np.empty(len(taken), dtype=np.int64)
        of_row[group.order] = at[group.key]
        skipped = np.bincount(group.writes[~taken], minlength=group.count)
        return rows, left, of_row[taken][left.first], skipped.tolist()

    def _merged(
        self,
        group: Group,
        checked: Checked,
        missing: Sequence[Sequence[str]],
        names: Sequence[str],
        at: Places,
        stored: pa.Table,
    ) -> Checked:
        """Return the rows of `group`, with the columns `names` filled in for the writes that lack them (`missing`)."""
        sources: dict[str, Places] = {}
        patterns: dict[bytes, Places] = {}  # many columns have few distinct combinations
        for name in names:
            given = np.array([name not in each for each in missing])
            pattern = given.tobytes()
            if pattern not in patterns:
                patterns[pattern] = merged_from(group, given, at)
            sources[name] = patterns[pattern]
        keys = checked.rows.select(self._key)
        self._refuse_incomplete(group, keys, sources)
        rows = merged(checked.rows, stored, sources)
        try:
            return self._admission.again(rows)
        except InvalidRows as error:
            if error.row is None:
                raise
            # A stored value that another program wrote may fail the checks of a put.
            key = key_text(keys, self._key, error.row)
            reason = (
                f"column {error.column!r} is not given for the key {key}, and its stored value "
                f"cannot be kept: put the column too ({error})"
            )
            raise Refused({int(group.writes[error.row]): InvalidRows(reason, column=error.column)}) from None

    def _refuse_incomplete(self, group: Group, keys: pa.Table, sources: Mapping[str, Places]) -> None:
        """Raise Refused for the first row of each write that has no value in a required column.

        The error names the key: a row number within one region's part of a put means nothing to the caller.
        """
        errors: dict[int, InvalidRows] = {}
        for name in self._required.intersection(sources):
            rows = np.flatnonzero((sources[name] == NOWHERE) & ~group.deletes)
            first = np.unique(group.writes[rows], return_index=True)[1]
            for row in rows[first].tolist():
                reason = (
                    f"required column {name!r} is missing, and the key {key_text(keys, self._key, row)} is not stored: "
                    "give new keys a value"
                )
                errors.setdefault(int(group.writes[row]), InvalidRows(reason, column=name))
        if errors:
            raise Refused(errors)

    def _stored(
        self, group: Group, checked: Checked, asked: Mask, columns: Sequence[str], view: View
    ) -> tuple[Places, pa.Table]:
        """Return the number of each key's stored row, or NOWHERE, and the stored rows.

        `asked`: the keys to look up, bool [m].
        """
        at = np.full(len(group.first), NOWHERE)
        wanted = np.flatnonzero(asked)
        if not len(wanted):
            return at, checked.rows.select(list(columns)).slice(0, 0)
        keys = checked.rows.select(self._key).take(pa.array(group.first[wanted]))
        stored = look_up(self._context, keys, columns, view)
        rows, places = match_keys(stored.select(self._key), keys)
        at[wanted[places]] = rows
        return at, stored


class Conditions:
    """Narrow deletes and updates of one region to the keys whose newest row passes.

    Thread safety. The region's thread only. Invariants. Changes no state; a call that raised can be repeated.
    """

    def __init__(self, context: RegionContext, admission: Admission) -> None:
        self._context, self._admission = context, admission
        self._key = list(context.key)

    def resolve(self, writes: Sequence[Write], checked: Checked, view: View) -> tuple[Checked, Sequence[int]]:
        """Return the tombstones or updated rows to log, and the number of keys that are not written.

        `writes`: one write with a condition, whose rows are `checked`. `view`: captures the region's levels. A key is
        not written if it has no row or its row does not pass; the sequence of numbers is empty if every key is written.
        Raises: Unavailable while a load is in progress; InvalidRows for a filter that is invalid or fails on a row; the
        error of the lookup.
        """
        (write,) = writes
        assert write.where is not None
        loads = self._loads()
        keys = checked.rows.select(self._key)
        if write.where.update is None:
            passing = self._passing(write.where, keys, view)
            rows = checked.rows if passing.all() else checked.rows.filter(pa.array(passing))
        else:
            rows = self._updated(write.where, write.where.update, keys, view)
        if not self._context.daemon and self._loads() != loads:
            raise Unavailable("a load has changed the table under the call; call it again")
        kept = keys.num_rows - rows.num_rows
        return checked if rows is checked.rows else self._admission.again(rows), [kept] if kept else ()

    def _loads(self) -> Mapping[UUID, int]:
        return {} if self._context.loads is None else self._context.loads()

    def _passing(self, where: Where, keys: pa.Table, view: View) -> Mask:
        """Return which of `keys` have a newest row that passes: bool [keys]."""
        planned = plan(where.filter, self._context.schema, ())
        named = [name for name in planned.columns if name not in self._key]
        columns, unchanged = [*self._key, *named, TOMBSTONE], True
        try:
            stored = look_up(self._context, keys, columns, view, above=where.version)
        except BaseChanged:
            stored, unchanged = look_up(self._context, keys, columns, view), False
        # The scan found each key with a passing row. If no level above the base table has the key, that row is in the
        # base table, which is unchanged.
        passing = np.full(keys.num_rows, unchanged)
        if stored.num_rows:
            live = np.flatnonzero(~stored.column(TOMBSTONE).to_numpy())
            asked = stored.select(planned.columns or self._key).take(pa.array(live))
            passed = evaluate(where.filter, planned.sql, asked, live, stored.num_rows)
            rows, at = match_keys(keys, stored.select(self._key))
            passing[rows] = passed[at]
        return passing

    def _updated(self, where: Where, update: Update, keys: pa.Table, view: View) -> pa.Table:
        """Return the newest rows of `keys` that pass, with their new values, as rows to log."""
        schema, version = self._context.schema, self._context.rules.version
        if version in (*update.expressions, *update.values.column_names):
            raise InvalidRows(f"column {version!r} orders the versions of a row and cannot be updated: put the rows")
        stored = look_up(self._context, keys, [name for name in schema.names if name != TOMBSTONE], view)
        if stored.num_rows:
            planned = plan(where.filter, schema, ())
            asked = stored.select(planned.columns or self._key)
            every = np.arange(stored.num_rows)
            stored = stored.filter(pa.array(evaluate(where.filter, planned.sql, asked, every, len(every))))
        rows = stored
        for name, expression in update.expressions.items():
            place, field = rows.schema.get_field_index(name), schema.field(name)
            rows = rows.set_column(place, field, computed(name, expression, stored, field.type))
        for name in update.values.column_names:
            place, field = rows.schema.get_field_index(name), schema.field(name)
            given = update.values.column(name).cast(field.type)
            rows = rows.set_column(place, field, given.take(pa.array(np.zeros(rows.num_rows, dtype=np.int64))))
        puts = pa.array(np.zeros(rows.num_rows, dtype=np.bool_))
        return rows.append_column(schema.field(TOMBSTONE), puts).select(schema.names).cast(schema)
