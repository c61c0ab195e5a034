"""Convert rows to the columns of an open table, which other programs may change while it is open.

`region.admission` describes how a change reaches the regions. This module detects a change and converts rows of
the former columns to the present ones.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import pyarrow as pa

from memwal.flush import BaseTable
from memwal.flush.base.fsync import sync_table
from memwal.flush.base.shape import Shape
from memwal.ingest.engine.api.rows import Deletes
from memwal.ingest.engine.read.reader import Reader
from memwal.ingest.engine.region.admission import Admission, fitted, reshaped
from memwal.ingest.engine.table.regions import RegionSet
from memwal.ingest.errors import Invalid
from memwal.ingest.refusals import expect_routing
from memwal.memtable import TOMBSTONE, InvalidRows

_LOG = logging.getLogger("memwal.table")


class TableColumns:
    """The columns of a table and of its regions in this process, as of the newest adopted version.

    Thread safety. Any thread. Invariants. (1) `admission` is never newer than `base`: a caller with the new `admission`
    does not make rows for the old columns. (2) Every region of the set has the columns of the set's context.
    """

    def __init__(self, base: BaseTable, regions: RegionSet, reader: Reader, tell: Callable[[BaseTable], None]) -> None:
        """`base`: the version at opening, whose columns `regions` have.

        `tell`: called with every version whose columns are adopted, before rows are made for them.
        """
        self._regions, self._reader, self._tell = regions, reader, tell
        self._former = list[Shape]()
        self.base = base
        """The version whose columns are in use."""
        self.admission = Admission(regions.context)
        """Converts rows to these columns."""

    def adopt(self, base: BaseTable) -> None:
        """Adopt the routing and the columns of `base`. Requires: the set has no writers."""
        with self._regions.changing:
            self._regions.adopt(base)
            context = self._regions.context
            if context.shape not in (None, base.shape):
                context.models.read(base)
                self._former.append(context.shape)
                self._regions.context = reshaped(context, base)
            self.base = base
            self._tell(base)
            self.admission = Admission(self._regions.context)

    def take_over(self) -> list[Callable[[], None]]:
        """Do steps 1 and 2 of `region.admission`; return calls that wait for step 4. Raises: as a put."""
        with self._regions.changing:
            base, context = self._reader.base(), self._regions.context
            expect_routing(base.uri, self.base.routing_version, base.routing_version)
            if context.shape is None:
                return []
            before, changed = context.shape, base.shape != context.shape
            if changed:
                sync_table(base.dataset)  # acknowledged rows with the new columns depend on this version
                context.models.read(base)
                context = reshaped(context, base)
            waits = [writer.reshape(context) for writer in self._regions.alive]
            if changed:
                what = difference(before, base.shape)
                _LOG.info("%s: rows have the columns of version %d now: %s", base.uri, base.version, what)
                self._former.append(before)
                self.base = base
                self._tell(base)
                self._regions.context = context
                self.admission = Admission(context)
            return waits

    def conforming(self, given: pa.Table, deletes: Deletes = False) -> tuple[Admission, pa.Table]:
        """Return rows in the table's columns, and the `Admission` that converted them.

        Raises: InvalidRows; Invalid for a column that the table no longer has, and while it has one that memwal cannot
        hold.
        """
        if self.base.unsupported:
            self.take_over()  # the column may have just been dropped
            if (reason := self.base.puts_rejected) is not None:
                raise Invalid(f"{self.base.uri}: no rows are accepted: {reason}")
        admission = self.admission
        try:
            return admission, admission.conform(given, deletes)
        except InvalidRows:
            if set(given.column_names) <= set(admission.context.schema.names):
                raise
        self.take_over()  # an unknown column may have just been added
        for name in set(given.column_names).difference(self.base.schema.names):
            if (gone := self._reader.gone.get(name)) is not None:
                raise Invalid(f"{gone}: leave it out of the rows, or give it its new name")
        return self.admission, self.admission.conform(given, deletes)

    def brought_up(self, rows: pa.Table) -> pa.Table:
        """Convert rows of a stream that was opened when the table had other columns to the present ones."""
        names, now = rows.column_names, self._regions.context.shape
        if now is None or names == self.base.schema.names:
            return rows
        former = (shape for shape in reversed(self._former) if names == [n for n in shape.rows.names if n != TOMBSTONE])
        shape = next(former, None)
        return rows if shape is None else fitted(rows, shape, now, partly=self.admission.keeps)


def difference(old: Shape, new: Shape) -> str:
    """Return the changes from one shape to another in one line; "" if the columns are the same."""
    gone, before = old.gone(new), set(old.ids.values())
    parts = [f"dropped {name}" if now is None else f"renamed {name} to {now}" for name, now in gone.items()]
    parts += [f"added {name}" for name, number in new.ids.items() if number not in before]
    return ", ".join(parts)
