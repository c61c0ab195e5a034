"""Check and copy the rows that a region takes, once for all writes of a group.

A caller's thread validates Arrow data (`api.encoding`) and looks at the schema (`conform`); the region's thread joins
what has gathered, checks it as a whole and copies it, so that a thousand callers of one row each cost one check and one
copy. If the whole does not pass, each write is checked by itself, so that only the one at fault is refused, with its
own row number.

Copying so late is safe: the caller waits for its ack, and the copy is made before the ack, even before the append.
A caller that stops waiting (a timeout, an interrupt) first withdraws its write or waits for the copy
(`ingest.table.writes`).

Somebody may change the columns of an open table with Lance. How the regions follow:

1. The first operation that opens a newer base version (a read, a commit, a put with an unknown column) notices that
   its shape is not that of the regions.
2. Each region's own thread ends its generation: lingering rows are appended as they were put, the memtable is frozen.
   From then on entries, memtables and SSTs have the new shape. *Crash here: some regions have it, others not; a replay
   brings every entry into the shape that the table has then, so nothing depends on it.*
3. Rows that were brought into the old shape before the change, and reach a region after it, are fitted there, by
   field ids.
4. The frozen memtables are flushed as they are: the field ids of an SST say which columns it holds. A read that meets
   a frozen memtable waits for its flush, so that no read ever looks at two shapes at once.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa

from memwal.flush import BaseTable, FileOptions, InvalidFileOptions, SstFormat
from memwal.flush.base.shape import Shape
from memwal.ingest.api.encoding import check_encoding
from memwal.ingest.api.missing import keeps
from memwal.ingest.api.row_checker import RowChecker
from memwal.ingest.api.rows import Deletes
from memwal.ingest.region.context import RegionContext
from memwal.ingest.region.write_queue import Write
from memwal.memtable import TOMBSTONE, Checked, InvalidRows, emptied, row_schema
from memwal.wal.codec.columns import EntryColumns

_LOG = logging.getLogger("memwal.table")
_PUT = pa.array(np.zeros(1 << 14, dtype=np.bool_))
"""The `_tombstone` column of most groups, made once."""


class Admission:
    """Brings rows into the form that a region's log and memtable take, or refuses them.

    Thread safety. Any thread; immutable.
    """

    def __init__(self, context: RegionContext) -> None:
        self._required = context.required
        self.context = context
        self.keeps = keeps(context.key, context.rules.upsert)
        """Whether a column that a write lacks keeps its stored values; else it is null."""
        self._checker = RowChecker(context.memtable(0), context.required, context.rules)
        self.columns = pa.schema([field for field in context.schema if field.name != TOMBSTONE])
        """The columns of rows."""
        self._width = len(self.columns)
        self._tombstone = context.schema.field(TOMBSTONE)
        self._nothing = self.columns.empty_table()
        self._no_batch = pa.RecordBatch.from_pylist([], self.columns)

    def conform(self, given: pa.Table, deletes: Deletes = False) -> pa.Table:
        """Return a caller's rows in the table's columns; nothing is copied if they have these columns already.

        Columns that the caller does not give are left out, required ones too, if their stored values are kept.
        Of rows that `deletes` marks only key and version are read and kept.
        Raises: InvalidRows, Invalid if the rows do not fit the columns; other faults are found by `check`.
        """
        among = None if isinstance(deletes, bool) else deletes
        if among is not None:
            given = emptied(given, (*self.context.key, self.context.rules.version), among)
        schema = given.schema
        if schema.equals(self.columns):
            return given
        if schema.names == self.columns.names and schema.types == self.columns.types:
            return pa.Table.from_arrays(given.columns, schema=self.columns)
        check_encoding(given)  # a cast reads the values
        whole = self._checker.whole(given, deletes if among is not None else False).drop_columns(TOMBSTONE)
        if self.keeps and given.num_columns < whole.num_columns:
            return whole.select([name for name in whole.column_names if name in given.column_names])
        return whole

    def with_nulls(self, rows: pa.Table, names: Collection[str]) -> pa.Table:
        """Return conforming rows with nulls in the columns `names` that they lack; other names are ignored."""
        if not names or not self.is_partial(rows):
            return rows
        chosen = {*rows.column_names, *names}
        return self._whole(rows).select([name for name in self.columns.names if name in chosen])

    def is_partial(self, rows: pa.Table) -> bool:
        """Return whether conforming rows lack columns."""
        return bool(rows.num_columns < self._width)

    def keeps_some(self, write: Write) -> bool:
        """Return whether `write` keeps stored values of columns that it lacks."""
        return bool(write.rows.num_columns < self._width and write.deletes is not True and self.keeps)

    def check(self, rows: pa.Table, *, deletes: Deletes) -> None:
        """Raise InvalidRows or Invalid, naming column and row, for conforming rows that a memtable would refuse."""
        self._checker.check(rows, deletes)

    def gather(self, writes: Sequence[Write]) -> Checked:
        """Return the rows of one or more `writes` as one table in our own memory, in order, checked.

        Raises: anything if they do not pass as a whole; `check` then finds the write at fault and the reason.
        """
        width = self._width
        whole = [each.rows if each.rows.num_columns == width else self._whole(each.rows) for each in writes]
        rows = whole[0] if len(whole) == 1 else pa.concat_tables(whole)
        rows.validate(full=True)  # before the copy, which trusts the offsets of texts and lists
        for name in self._required:
            if rows.column(name).null_count and any(_is_missing(write, name) for write in writes):
                raise InvalidRows(f"column {name!r} is null in a row: give it a value", column=name)
        owned = self._copied(rows, single=len(writes) == 1)
        size = owned.get_total_buffer_size() + len(rows)  # exact: the buffers are our own, cut to fit
        return self._checker.checked(owned.append_column(self._tombstone, _tombstones(writes)), size)

    def again(self, rows: pa.Table) -> Checked:
        """Check and copy rows of the row schema again, after values were filled in.

        Raises: InvalidRows if a filled-in value does not pass.
        """
        owned = rows.combine_chunks()
        return self._checker.checked(owned, owned.get_total_buffer_size() + len(owned))

    def _whole(self, rows: pa.Table) -> pa.Table:
        """Return `rows` with all columns of the table; missing ones are null."""
        if not self.is_partial(rows):
            return rows
        columns = [
            rows.column(field.name) if field.name in rows.column_names else pa.nulls(rows.num_rows, field.type)
            for field in self.columns
        ]
        return pa.Table.from_arrays(columns, schema=self.columns)

    def _copied(self, rows: pa.Table, *, single: bool) -> pa.Table:
        """Return `rows` in one chunk of our own memory. An empty piece goes first: Arrow would not copy one piece."""
        if single and len(batches := rows.to_batches()) == 1:  # most puts; takes two thirds of the time
            return pa.Table.from_batches([pa.concat_batches([self._no_batch, *batches])])
        return pa.concat_tables([self._nothing, rows]).combine_chunks()


def _is_missing(write: Write, name: str) -> bool:
    """Return whether a row that is put has no value in a column that the write has."""
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
    return replace(
        context,
        codec=base.codec,
        schema=row_schema(base.schema, base.key),
        key=base.key,
        indexes=base.indexes,
        required=base.required,
        rules=base.rules,
        sst_format=SstFormat.of(base, _files(context, base), context.sst_format.indexes.over(base.indexes)),
        shape=base.shape,
        route_into=base.route_into,
    )


def _files(context: RegionContext, base: BaseTable) -> FileOptions:
    """Return the settings of the SST writer; without format and compression where they do not fit a new column."""
    files = context.sst_format.files
    try:
        files.expect_fit(base.schema, base.storage_version)
    except InvalidFileOptions as error:
        _LOG.warning("%s: SSTs get the file format of the base table and no compression: [flush] %s", base.uri, error)
        return replace(files, storage_version=None, compression={})
    return files


def fitted(rows: pa.Table, of: Shape, to: Shape, *, partly: bool = False) -> pa.Table:
    """Bring conforming rows (no `_tombstone`) of one shape into another: renamed columns follow, new ones are null.

    `partly`: columns that `rows` lack, and new ones, are left out of the result.
    Raises: Corrupt if a column that may not be null is missing.
    """
    whole = EntryColumns(to.rows).conform(rows, of.ids).drop_columns(TOMBSTONE)
    if not partly:
        return whole
    given = {of.ids[name] for name in rows.column_names}
    return whole.select([name for name in whole.column_names if to.ids[name] in given])
