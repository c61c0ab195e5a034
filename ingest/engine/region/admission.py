"""Check and copy the rows that a region accepts, once for all writes of a group.

A caller's thread validates Arrow data (`api.arguments`) and compares schemas (`conform`). The region's thread
concatenates the gathered writes, checks them together and copies them, so a thousand callers of one row each cost one
check and one copy. If the group fails, each write is checked alone, so only the faulty write is rejected, with its own
row number.

This late copy is safe: the caller waits for its ack, and the copy is made before the append. A caller that stops
waiting (timeout, interrupt) first withdraws its write or waits for the copy (`table.writes`).

Another program may change the columns of an open table with Lance. The regions follow in these steps:

1. The first operation that opens a newer base version (a read, a commit, a put with an unknown column) detects that its
   shape differs from the shape of the regions.
2. Each region's own thread ends its generation: it appends lingering rows in the old shape and freezes the memtable.
   Later entries, memtables and SSTs have the new shape. *Crash here: some regions have the new shape, others the old. A
   replay converts every entry to the table's current shape, so nothing depends on this.*
3. Rows that a caller converted to the old shape before the change, and that reach a region after it, are converted
   there by field ids.
4. The frozen memtables are flushed unchanged: the field ids of an SST identify its columns. A read that finds a frozen
   memtable of another shape waits for its flush, so no read sees two shapes at once.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa

from memwal.flush import BaseTable, FileOptions, InvalidFileOptions, SstFormat
from memwal.flush.base.shape import Shape
from memwal.ingest.engine.api.arguments import check_encoding
from memwal.ingest.engine.api.missing import keeps
from memwal.ingest.engine.api.rows import Deletes, RowChecker
from memwal.ingest.engine.region.context import RegionContext
from memwal.ingest.engine.region.write_queue import Write
from memwal.memtable import TOMBSTONE, Checked, InvalidRows, emptied
from memwal.wal.codec.columns import EntryColumns

_LOG = logging.getLogger("memwal.table")
_PUT = pa.array(np.zeros(1 << 14, dtype=np.bool_))
"""The `_tombstone` column of most groups, created once."""


class Admission:
    """Convert rows to the form of a region's log and memtable, or reject them.

    Thread safety. Any thread; immutable.
    """

    def __init__(self, context: RegionContext) -> None:
        self.context = context
        self.keeps = keeps(context.key, context.rules.upsert)
        """Whether a column that a write lacks keeps its stored values; otherwise it becomes null."""
        self._checker = RowChecker(context.memtable(0), context.required, context.rules)
        self.columns = pa.schema([field for field in context.schema if field.name != TOMBSTONE])
        """The row schema without `_tombstone`."""
        self._width = len(self.columns)
        self._tombstone = context.schema.field(TOMBSTONE)
        self._nothing = self.columns.empty_table()
        self._no_batch = pa.RecordBatch.from_pylist([], self.columns)

    def conform(self, given: pa.Table, deletes: Deletes = False) -> pa.Table:
        """Return a caller's rows in the table's columns, without a copy if they already have these columns.

        Columns that the caller omits are left out, even required ones, if their stored values are kept. For rows that
        `deletes` marks, only key and version are read and kept.
        Raises: InvalidRows, Invalid if the rows do not fit the columns; `check` finds all other faults.
        """
        among = None if isinstance(deletes, bool) else deletes
        if among is not None:
            given = emptied(given, (*self.context.key, self.context.rules.version), among)
        schema = given.schema
        if schema.equals(self.columns):
            return given
        if schema.names == self.columns.names and schema.types == self.columns.types:
            return pa.Table.from_arrays(given.columns, schema=self.columns)
        check_encoding(given)  # the cast reads the values
        whole = self._checker.whole(given, deletes if among is not None else False).drop_columns(TOMBSTONE)
        if self.keeps and given.num_columns < whole.num_columns:
            return whole.select([name for name in whole.column_names if name in given.column_names])
        return whole

    def with_nulls(self, rows: pa.Table, names: Collection[str]) -> pa.Table:
        """Return conforming rows with nulls in those columns of `names` that they lack; other names are ignored."""
        if not names or not self.is_partial(rows):
            return rows
        chosen = {*rows.column_names, *names}
        return self._whole(rows).select([name for name in self.columns.names if name in chosen])

    def is_partial(self, rows: pa.Table) -> bool:
        """Return whether conforming rows lack columns."""
        return bool(rows.num_columns < self._width)

    def keeps_some(self, write: Write) -> bool:
        """Return whether `write` lacks columns and keeps their stored values."""
        return bool(write.rows.num_columns < self._width and write.deletes is not True and self.keeps)

    def check(self, rows: pa.Table, *, deletes: Deletes) -> None:
        """Raise InvalidRows or Invalid, with column and row, for conforming rows that a memtable would reject."""
        self._checker.check(rows, deletes)

    def gather(self, writes: Sequence[Write]) -> Checked:
        """Return the rows of one or more `writes` as one checked table in memory that the region owns, in order.

        Raises: any exception if the group fails a check; `check` then finds the faulty write and the reason.
        """
        width = self._width
        whole = [each.rows if each.rows.num_columns == width else self._whole(each.rows) for each in writes]
        rows = whole[0] if len(whole) == 1 else pa.concat_tables(whole)
        rows.validate(full=True)  # before the copy, which trusts the offsets of strings and lists
        for name in self.context.required:
            if rows.column(name).null_count and any(_is_missing(write, name) for write in writes):
                raise InvalidRows(f"column {name!r} is null in a row: give it a value", column=name)
        owned = self._copied(rows, single=len(writes) == 1)
        size = owned.get_total_buffer_size() + len(rows)  # exact: the region owns the buffers, and they are cut to fit
        return self._checker.checked(owned.append_column(self._tombstone, _tombstones(writes)), size)

    def again(self, rows: pa.Table) -> Checked:
        """Check and copy rows of the row schema again after stored values were filled in.

        Raises: InvalidRows if a filled-in value fails a check.
        """
        owned = rows.combine_chunks()
        return self._checker.checked(owned, owned.get_total_buffer_size() + len(owned))

    def _whole(self, rows: pa.Table) -> pa.Table:
        """Return partial `rows` with all columns of the table; missing columns are null."""
        columns = [
            rows.column(field.name) if field.name in rows.column_names else pa.nulls(rows.num_rows, field.type)
            for field in self.columns
        ]
        return pa.Table.from_arrays(columns, schema=self.columns)

    def _copied(self, rows: pa.Table, *, single: bool) -> pa.Table:
        """Return `rows` in one new chunk. The empty first piece forces the copy: Arrow does not copy a single piece."""
        if single and len(batches := rows.to_batches()) == 1:  # most puts; takes two thirds of the time
            return pa.Table.from_batches([pa.concat_batches([self._no_batch, *batches])])
        return pa.concat_tables([self._nothing, rows]).combine_chunks()


def _is_missing(write: Write, name: str) -> bool:
    """Return whether a put row is null in a column that the write has."""
    if write.deletes is True or name not in write.rows.column_names or not write.rows.column(name).null_count:
        return False
    return bool((write.rows.column(name).is_null().to_numpy() & ~np.asarray(write.deletes)).any())


def _tombstones(writes: Sequence[Write]) -> pa.Array:
    rows = sum(write.rows.num_rows for write in writes)
    if rows <= len(_PUT) and all(write.deletes is False for write in writes):
        return _PUT.slice(0, rows)
    parts = [np.broadcast_to(np.asarray(write.deletes, dtype=np.bool_), write.rows.num_rows) for write in writes]
    return pa.array(np.concatenate(parts))


def reshaped(context: RegionContext, base: BaseTable) -> RegionContext:
    """Return `context` for rows of the shape of `base`."""
    indexes = context.sst_format.indexes.over(base.indexes)
    return replace(context, **context.of_shape(base), sst_format=SstFormat.of(base, _files(context, base), indexes))


def _files(context: RegionContext, base: BaseTable) -> FileOptions:
    """Return the SST writer's settings, without file format and compression if they do not fit a new column."""
    files = context.sst_format.files
    try:
        files.expect_fit(base.schema, base.storage_version)
    except InvalidFileOptions as error:
        _LOG.warning("%s: SSTs get the file format of the base table and no compression: [flush] %s", base.uri, error)
        return replace(files, storage_version=None, compression={})
    return files


def fitted(rows: pa.Table, of: Shape, to: Shape, *, partly: bool = False) -> pa.Table:
    """Convert conforming rows (no `_tombstone`) from one shape to another; renamed columns follow, new columns are
    null.

    `partly`: leave out columns that `rows` lacks, and new columns.
    Raises: Corrupt if a not-null column is missing.
    """
    whole = EntryColumns(to.rows).conform(rows, of.ids).drop_columns(TOMBSTONE)
    if not partly:
        return whole
    given = {of.ids[name] for name in rows.column_names}
    return whole.select([name for name in whole.column_names if to.ids[name] in given])
