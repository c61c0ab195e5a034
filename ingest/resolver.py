"""Writes to whole rows: what a table's write rules make of a group of writes, before it is logged.

The log, the memtables, SSTs and the base table only ever hold whole rows whose newest version counts, so nothing that
reads them (Lance's own readers, a replay, a flush, a commit) knows of the rules. In steps:

1. Find the keys whose stored row counts: those that the group does not begin with a delete of, nor (merge) with a row
   that has every column.
2. Look these up, all at once, in the region's levels and the newest base table. The region has no other writer, so what
   is found is still true when the group is logged. What a commit moves meanwhile is in a level of the view, or in the
   base, which is opened after it.
3. Resolve the group (`write_rules`), and check what was filled in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pyarrow as pa

from ingest.admission import Admission
from ingest.base_reads import match_keys
from ingest.errors import Unavailable
from ingest.level_reads import ATTEMPTS
from ingest.levels import OverTaken, RegionView
from ingest.region_context import RegionContext
from ingest.write_queue import Write
from ingest.write_rules import NOWHERE, Group, Mask, Places, inserted, merged, merged_from, named
from memtable import TOMBSTONE, Checked, InvalidRows

View = Callable[[], RegionView]


class Refused(Exception):
    """Some writes of a group cannot be resolved: `errors` by their number in it. Stays inside."""

    def __init__(self, errors: Mapping[int, InvalidRows]) -> None:
        super().__init__(f"{len(errors)} writes")
        self.errors = errors


class Resolver:
    """Makes whole rows of the writes of one region.

    Thread safety. The region's thread only. Invariants. Changes nothing; a call that raises can be made again.
    """

    def __init__(self, context: RegionContext, admission: Admission) -> None:
        """Requires: `context.find`, and rules that are not "replace"."""
        if context.find is None:
            raise ValueError("a table whose puts depend on what is stored needs a way to look that up")
        self._find, self._shape = context.find, context.shape
        self._admission = admission
        self._key, self._required = list(context.key), frozenset(context.required)
        self._columns = [name for name in context.schema.names if name not in (*self._key, TOMBSTONE)]
        self._merges = context.rules.upsert == "merge"

    def resolve(self, writes: Sequence[Write], checked: Checked, view: View) -> tuple[Checked, Sequence[int]]:
        """What `writes`, whose rows `checked` holds, come to: rows to log, and how many were skipped of each write.

        Nothing skipped may also be no numbers at all. `view`: captures the region's levels.
        Raises: Refused for writes that lack a column they need; the error of a lookup.
        """
        missing = [
            [] if write.deletes is True else [name for name in self._columns if name not in write.rows.column_names]
            for write in writes
        ]
        deletes = checked.rows.column(TOMBSTONE).to_numpy()
        if deletes.all() or (self._merges and not any(missing)):
            return checked, ()
        group = Group(checked.rows.select(self._key), [write.rows.num_rows for write in writes], deletes)
        if self._merges:
            return self._merge(group, checked, missing, view), ()
        return self._insert(group, checked, len(writes), view)

    def _insert(self, group: Group, checked: Checked, writes: int, view: View) -> tuple[Checked, Sequence[int]]:
        at, _ = self._stored(group, checked, ~group.deletes[group.first], self._key, view)
        taken = inserted(group, at != NOWHERE)
        if taken.all():
            return checked, ()
        skipped = np.bincount(group.writes[~taken], minlength=writes)
        return self._admission.again(checked.rows.filter(pa.array(taken))), skipped.tolist()

    def _merge(self, group: Group, checked: Checked, missing: Sequence[Sequence[str]], view: View) -> Checked:
        partial = np.array([bool(names) for names in missing])
        names = [name for name in self._columns if any(name in each for each in missing)]
        asked = partial[group.writes[group.first]] & ~group.deletes[group.first]
        at, stored = self._stored(group, checked, asked, [*self._key, *names], view)
        sources: dict[str, Places] = {}
        patterns: dict[bytes, Places] = {}  # many columns, few combinations of them
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
            # What another program put into the base table need not pass what a put must.
            reason = (
                f"column {error.column!r} is not given for the key {named(keys, self._key, error.row)}, and its stored "
                f"value cannot be kept: put the column too ({error})"
            )
            raise Refused({int(group.writes[error.row]): InvalidRows(reason, column=error.column)}) from None

    def _refuse_incomplete(self, group: Group, keys: pa.Table, sources: Mapping[str, Places]) -> None:
        """Raise for the first row of each write that leaves a column which must have a value without one.

        It is named by its key: the number of a row in a region's part of a put says nothing to who put it.
        """
        errors: dict[int, InvalidRows] = {}
        for name in self._required.intersection(sources):
            rows = np.flatnonzero((sources[name] == NOWHERE) & ~group.deletes)
            first = np.unique(group.writes[rows], return_index=True)[1]
            for row in rows[first].tolist():
                reason = (
                    f"required column {name!r} is missing, and the key {named(keys, self._key, row)} is not there yet: "
                    "give new keys a value"
                )
                errors.setdefault(int(group.writes[row]), InvalidRows(reason, column=name))
        if errors:
            raise Refused(errors)

    def _stored(
        self, group: Group, checked: Checked, asked: Mask, columns: Sequence[str], view: View
    ) -> tuple[Places, pa.Table]:
        """The stored rows of the keys that are `asked` for (bool [m]), and for each key the number of its row."""
        at = np.full(len(group.first), NOWHERE)
        wanted = np.flatnonzero(asked)
        if not len(wanted):
            return at, checked.rows.select(list(columns)).slice(0, 0)
        keys = checked.rows.select(self._key).take(pa.array(group.first[wanted]))
        stored = self._look_up(keys, columns, view)
        rows, places = match_keys(stored.select(self._key), keys)
        at[wanted[places]] = rows
        return at, stored

    def _look_up(self, keys: pa.Table, columns: Sequence[str], view: View) -> pa.Table:
        for _ in range(ATTEMPTS):
            try:
                return self._find(view(), keys, columns, self._shape)
            except OverTaken:
                continue
        raise Unavailable(f"{ATTEMPTS} commits overtook the look at what is stored; retry with the same token")


def resolver_of(context: RegionContext, admission: Admission) -> Resolver | None:
    """What resolves the writes of a region; None where a put just replaces what is there."""
    return None if context.rules.upsert == "replace" else Resolver(context, admission)
