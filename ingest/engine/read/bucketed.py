"""Read the base rows of some regions only, for a daemon that does not own all regions.

The base table is not sorted by region, so the bucket of each row is computed from its routing columns, and rows of
other buckets are dropped. Answers stay exact: the limit or the best k are taken afterwards, from as many rows as
needed. A daemon that owns all regions does not use this module.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from memwal.flush import BaseTable
from memwal.flush.base.ttl import Expiry
from memwal.ingest.engine.api.ordering import Order
from memwal.ingest.engine.read.base import BaseReads, Positions
from memwal.ingest.engine.read.request import VectorQuery
from memwal.memtable.text.columns import ColumnsQuery

MARGIN = 1.5
"""Factor for the rows of the first attempt, relative to an even spread over buckets."""


class BucketReads(BaseReads):
    """Read the rows of `buckets` in one version of the base table.

    Thread safety and invariants: as `BaseReads`. Costs: `count` and `scan` read the routing columns of every row that
    passes the filter; `search` and `match` fetch more rows than wanted, by the ratio of all buckets to `buckets`.
    """

    def __init__(self, base: BaseTable, buckets: Collection[int], expiry: Expiry | None = None) -> None:
        super().__init__(base, expiry)
        self._buckets = np.array(sorted(buckets), dtype=np.int32)
        self._routing = base.hashed
        self._factor = MARGIN * base.buckets / max(1, len(self._buckets))

    def get(self, keys: pa.Table, columns: Sequence[str]) -> tuple[pa.Table, Positions]:
        """As `BaseReads.get`; keys of other buckets are missing."""
        ours = np.flatnonzero(self._ours(keys))
        if not len(ours):
            schema = pa.schema([self._dataset.schema.field(name) for name in columns])
            return schema.empty_table(), ours
        rows, at = super().get(keys.take(pa.array(ours)), columns)
        return rows, ours[at]

    def count(self, filter: str | None) -> int:
        """Return the number of rows that pass `filter`."""
        return sum(rows.num_rows for rows in self.batches([], filter, None))

    def batches(self, columns: Sequence[str], filter: str | None, limit: int | None) -> Iterator[pa.Table]:
        """As `BaseReads.batches`; rows of other buckets do not count towards the limit."""
        left = limit
        for rows in super().batches(self._with_routing(columns), filter, None):
            kept = rows.filter(pa.array(self._ours(rows))).select(columns) if columns else self._bare(rows)
            kept = kept if left is None else kept.slice(0, left)
            left = None if left is None else left - kept.num_rows
            if kept.num_rows:
                yield kept
            if left == 0:
                return

    def ordered(self, order: Order, limit: int, filter: str | None, columns: Sequence[str]) -> pa.Table:
        """As `BaseReads.ordered`."""
        wanted = self._first(limit)
        while True:
            rows = super().ordered(order, wanted, filter, self._with_routing(columns))
            if (kept := self._best(rows, limit, wanted, columns)) is not None:
                return kept
            wanted *= 4

    def search(self, query: VectorQuery, k: int, filter: str | None, columns: Sequence[str]) -> pa.Table:
        """As `BaseReads.search`."""
        wanted = self._first(k)
        while True:
            rows = super().search(query, wanted, filter, self._with_routing(columns))
            if (kept := self._best(rows, k, wanted, columns)) is not None:
                return kept
            wanted *= 4

    def match(self, query: ColumnsQuery, k: int, filter: str | None, columns: Sequence[str]) -> pa.Table:
        """As `BaseReads.match`."""
        wanted = self._first(k)
        while True:
            rows = super().match(query, wanted, filter, self._with_routing(columns))
            if (kept := self._best(rows, k, wanted, columns)) is not None:
                return kept
            wanted *= 4

    # ---- inside --------------------------------------------------------------------------------------------------

    def _first(self, k: int) -> int:
        return int(k * self._factor) + 1

    def _best(self, found: pa.Table, k: int, asked: int, columns: Sequence[str]) -> pa.Table | None:
        """Return the first `k` rows in the wanted buckets; None if more rows than `found` must be fetched."""
        ours = np.flatnonzero(self._ours(found))
        if len(ours) < k and found.num_rows >= asked:
            return None
        last = found.column_names[-1]  # the score, or the row id
        return found.take(pa.array(ours[:k])).select([*columns, last])

    def _bare(self, rows: pa.Table) -> pa.Table:
        """Return the rows in the wanted buckets with any one column: only their number is used."""
        return rows.select(rows.column_names[:1]).filter(pa.array(self._ours(rows)))

    def _ours(self, rows: pa.Table) -> npt.NDArray[np.bool_]:
        return np.isin(self._base.route(rows), self._buckets)

    def _with_routing(self, columns: Sequence[str]) -> list[str]:
        return list(dict.fromkeys([*columns, *self._routing]))
