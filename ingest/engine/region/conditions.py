"""Delete those of some keys whose newest row passes a filter.

`delete(filter=...)` finds its keys with a scan and sends them to the regions later (`api.deletes`). Rows may
change in between, so the region's thread checks the newest row of each key in queue order and deletes only keys whose
row passes at that moment. A row that was changed and no longer passes stays. The log receives ordinary tombstones.

A load past the log writes the base table without the region. No piece is therefore checked while a load is in progress,
and the region's thread tests for loads before the lookup; `flush.commits.load_notes` explains why that suffices where
daemons own the regions. A load does not request a flush from a program that opened the table itself, so it may begin
and land after the first test: that program tests once more after the lookup.

Rows of the base table need no lookup while the base table has the version from before the scan. Looking 16,384 keys up
in a base table of 4 million rows without an index on the key takes 5 s, during which the region answers no put.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from uuid import UUID

import numpy as np
import pyarrow as pa

from memwal.ingest.engine.api.deletes import Where
from memwal.ingest.engine.api.rows import Mask
from memwal.ingest.engine.read.base import match_keys
from memwal.ingest.engine.read.levels import BaseChanged
from memwal.ingest.engine.region.admission import Admission
from memwal.ingest.engine.region.context import RegionContext
from memwal.ingest.engine.region.stored_rows import View, look_up
from memwal.ingest.engine.region.write_queue import Write
from memwal.ingest.errors import Unavailable
from memwal.memtable import TOMBSTONE, Checked
from memwal.memtable.filter.predicate import evaluate, plan


class Conditions:
    """Narrow deletes of one region to the keys whose newest row passes.

    Thread safety. The region's thread only. Invariants. Changes no state; a call that raised can be repeated.
    """

    def __init__(self, context: RegionContext, admission: Admission) -> None:
        self._context, self._admission = context, admission
        self._key = list(context.key)

    def resolve(self, writes: Sequence[Write], checked: Checked, view: View) -> tuple[Checked, Sequence[int]]:
        """Return the tombstones to log, and the number of keys that are not deleted.

        `writes`: one write with a condition, whose rows are `checked`. `view`: captures the region's levels. A key is
        not deleted if it has no row or its row does not pass; the sequence of numbers is empty if every key is deleted.
        Raises: Unavailable while a load is in progress; InvalidRows for a filter that is invalid or fails on a row; the
        error of the lookup.
        """
        (write,) = writes
        assert write.where is not None
        loads = self._loads()
        passing = self._passing(write.where, checked.rows.select(self._key), view)
        if not self._context.daemon and self._loads() != loads:
            raise Unavailable("a load has changed the table under the delete; call it again")
        if passing.all():
            return checked, ()
        kept = int(np.count_nonzero(~passing))
        return self._admission.again(checked.rows.filter(pa.array(passing))), [kept]

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
