"""Deletes with a condition: of some keys, delete those whose newest row passes a filter.

`delete(filter=...)` finds its keys with a scan and sends them here later (`ingest.api.deletes`). Rows may change in
between, so the region's thread looks at the newest row of each key, in the order of its queue, and deletes only those
that pass now: a row that was changed so that it no longer passes stays. The log gets plain tombstones.

A load past the log writes the base table without the region. So no piece is looked at while one is under way, which is
asked for before the look; `flush.commits.load_notes` says why that is enough where daemons own the regions. A program
that has opened the table itself is not asked for a flush by a load, so a load may begin behind its first question, and
land: it asks once more behind the look.

Rows of the base table need no look while it has the version that it had before the scan. That matters: looking 16,384
keys up in a base of 4 million rows without an index on the key takes 5 s, in which no put of the region is answered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from uuid import UUID

import numpy as np
import pyarrow as pa

from memwal.ingest.api.deletes import Where
from memwal.ingest.api.rows import Mask
from memwal.ingest.errors import Unavailable
from memwal.ingest.read.base import match_keys
from memwal.ingest.read.levels import BaseChanged
from memwal.ingest.region.admission import Admission
from memwal.ingest.region.context import RegionContext
from memwal.ingest.region.stored_rows import View, look_up
from memwal.ingest.region.write_queue import Write
from memwal.memtable import TOMBSTONE, Checked
from memwal.memtable.filter.plan import plan
from memwal.memtable.filter.predicate import evaluate


class Conditions:
    """Narrows deletes of one region to the keys whose newest row passes.

    Thread safety. The region's thread only. Invariants. Changes nothing; a call that raises can be made again.
    """

    def __init__(self, context: RegionContext, admission: Admission) -> None:
        self._context, self._admission = context, admission
        self._key = list(context.key)

    def resolve(self, writes: Sequence[Write], checked: Checked, view: View) -> tuple[Checked, Sequence[int]]:
        """Return the tombstones to log for the one write in `writes`, whose rows are `checked`, and the number of its
        keys that stay, because they have no row or one that does not pass; no number if all are deleted.

        Requires: the write has a condition. `view`: captures the region's levels.
        Raises: Unavailable while a load is under way; InvalidRows for a filter that is not valid, or fails on a row;
        the error of the lookup.
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
        # The scan found each key with a row that passes. If no level above the base has the key, that row is in the
        # base, which is as it was.
        passing = np.full(keys.num_rows, unchanged)
        if stored.num_rows:
            live = np.flatnonzero(~stored.column(TOMBSTONE).to_numpy())
            asked = stored.select(planned.columns or self._key).take(pa.array(live))
            passed = evaluate(where.filter, planned.sql, asked, live, stored.num_rows)
            rows, at = match_keys(keys, stored.select(self._key))
            passing[rows] = passed[at]
        return passing
