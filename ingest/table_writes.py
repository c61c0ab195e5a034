"""One put or delete into the regions of this process: settled by key, split by region, written, answered once.

No region may write its part before all of them are fine, so what goes to several is checked as a whole before.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from ingest.admission import Admission
from ingest.errors import Invalid, UnknownOutcome
from ingest.levels import Reshaped
from ingest.receipts import Receipt
from ingest.region_set import RegionSet
from ingest.region_writer import RegionWriter
from ingest.table_columns import TableColumns
from ingest.tokens import Token, refuse_going_down
from ingest.waiting import written
from ingest.write_queue import Ack, Deletes, Write
from ingest.write_rules import first_of_each_key

_Parts = Sequence[tuple[RegionWriter, Write]]


class TableWrites:
    """Writes conforming rows of a table into its regions here. Thread safety. Any thread."""

    def __init__(self, columns: TableColumns, regions: RegionSet) -> None:
        self._columns, self._regions = columns, regions

    def write(
        self,
        admission: Admission,
        rows: pa.Table,
        token: Token | None,
        *,
        durable: bool,
        timeout: float | None,
        deletes: bool = False,
    ) -> Receipt:
        """Write rows that `admission` has brought into the table's columns. Raises: as `Table.put`."""
        if timeout is not None and not (isinstance(timeout, (int, float)) and timeout > 0):  # type: ignore[redundant-expr]
            raise Invalid(f"timeout = {timeout}: give seconds above 0, or None to wait for as long as it takes")
        split, shape = self._split(admission, rows, deletes), admission.context.shape
        if token is not None:
            refuse_going_down(token, {to.name: to.applied(token.producer).newest for to, _ in split})
        acks = self.acks([(to, Write(part, durable, token, deletes, shape=shape)) for to, part in split], timeout)
        return Receipt(
            rows.num_rows,
            any(ack.applied for ack in acks.values()) if acks else True,
            {region: ack.position for region, ack in acks.items()},
            sum(ack.skipped for ack in acks.values()),
            {region: ack.counts for region, ack in acks.items()},
        )

    def once_per_key(self, admission: Admission, rows: pa.Table, deletes: Deletes = False) -> tuple[pa.Table, Deletes]:
        """The rows of one put by the table's rule for equal keys among them. Raises: Invalid, InvalidRows."""
        rule = self._columns.base.rules.on_duplicate
        if rule == "last" or rows.num_rows < 2:
            return rows, deletes
        admission.check(rows, deletes=deletes)  # a null is no key, and its row is told by the caller's number
        once = first_of_each_key(rows, self._columns.base.key, deletes, refuse=rule == "fail")
        if once.all():
            return rows, deletes
        return rows.filter(pa.array(once)), deletes if isinstance(deletes, bool) else deletes[once]

    def acks(self, parts: _Parts, timeout: float | None = None) -> dict[str, Ack]:
        """See `ingest.waiting.written`. A region that looks up what is stored, and finds other columns there than it
        has, writes nothing; it takes these over, and is asked once more.
        """
        try:
            return self._written(parts, timeout)
        except Reshaped:
            self._follow()
        except UnknownOutcome as error:
            if isinstance(error.__cause__, Reshaped):
                self._follow()
            raise
        again = [
            (to, Write(each.rows, each.durable, each.token, each.deletes, shape=each.shape, repeated=each.repeated))
            for to, each in parts
        ]
        return self._written(again, timeout)

    def _written(self, parts: _Parts, timeout: float | None) -> dict[str, Ack]:
        try:
            return written(parts, within=timeout, clock=self._regions.context.clock)
        except UnknownOutcome as error:
            if "positions" in error.details:  # whoever sends the rest must know it by the routing that these are of
                error.details["routing"] = self._columns.base.routing_version
            raise

    def _follow(self) -> None:
        for published in self._columns.take_over():
            published()

    def _split(self, admission: Admission, rows: pa.Table, deletes: bool) -> list[tuple[RegionWriter, pa.Table]]:
        """Rows by region, order within a region kept. Raises: InvalidRows, Invalid where rows go to several."""
        if len(self._regions.order) == 1 or not rows.num_rows:
            return [(self._regions.of_bucket(0), rows)] if rows.num_rows else []
        admission.check(rows, deletes=deletes)  # one region checks what it is given; and routing reads the key
        buckets = self._columns.base.route(rows)
        order = np.argsort(buckets, kind="stable")
        present, starts = np.unique(buckets[order], return_index=True)
        sorted_rows = rows if len(present) == 1 else rows.take(pa.array(order))
        ends = [*starts[1:], rows.num_rows]
        return [
            (self._regions.of_bucket(bucket), sorted_rows.slice(start, end - start))
            for bucket, start, end in zip(present, starts, ends, strict=True)
        ]
