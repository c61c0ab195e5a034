"""Which rows a region takes, checked and copied once for all writes of a group.

A caller's thread does almost nothing (`conform` looks at the schema); the region's thread joins what has gathered,
checks it as a whole and copies it, so that a thousand callers of one row each cost one check and one copy. Where the
whole does not pass, each write is checked by itself, so that only the one at fault is refused, with its own row number.

Why copying so late is safe: the caller waits for its ack, and the copy is made before the ack, before the append even.
One that stops waiting (a timeout, an interrupt) first withdraws its write or lets the copy be made
(`ingest.table.writes`).

Following a table whose columns somebody changes with Lance while it is open.

1. Whoever opens a newer base version notices (a read, a commit, a put with a column that nobody knows): its shape is
   not that of the regions.
2. Each region's own thread ends its generation: what lingers is appended as it was put, the memtable is frozen. From
   there on entries, memtables and SSTs have the new shape. *Crash here: some regions have it, others not; a replay
   brings every entry into the shape of the table by then, so nothing depends on it.*
3. Rows that were brought into the old shape before, and come to a region after, are fitted there, by field ids.
4. The frozen memtables are flushed as they are: an SST says by its own field ids what it holds. A read that meets one
   waits for that, so that no read ever looks at two shapes at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa

from memwal.flush import BaseTable
from memwal.flush.base.shape import Shape
from memwal.ingest.api.rows import Deletes, check_encoding, given_required
from memwal.ingest.region.context import RegionContext
from memwal.ingest.region.write_queue import Write
from memwal.memtable import TOMBSTONE, Checked, InvalidRows, emptied, row_schema, with_tombstone
from memwal.wal.codec.columns import EntryColumns

_PUT = pa.array(np.zeros(1 << 14, dtype=np.bool_))
"""The `_tombstone` column of most groups, made once."""


class Admission:
    """Brings rows into the form that a region's log and memtable take, or refuses them.

    Thread safety. Any thread; immutable.
    """

    def __init__(self, context: RegionContext) -> None:
        self._schema, self._required = context.schema, context.required
        self.context = context
        self._partial = context.rules.upsert == "merge"
        self._checker = context.memtable(0)  # never holds rows: it knows what a memtable would refuse
        self._columns = pa.schema([field for field in context.schema if field.name != TOMBSTONE])
        self._tombstone = context.schema.field(TOMBSTONE)
        self._nothing = self._columns.empty_table()
        self._no_batch = pa.RecordBatch.from_pylist([], self._columns)

    def conform(self, given: pa.Table, deletes: Deletes = False) -> pa.Table:
        """A caller's rows in the table's columns, nothing copied where they are already.

        In a table whose upserts merge, columns that the caller does not give stay away, required ones too.
        Of rows that delete only key and version are looked at and kept, where `deletes` tells them from others.
        Raises: InvalidRows, Invalid where they cannot be brought there; other faults are found by `check`.
        """
        among = None if isinstance(deletes, bool) else deletes
        if among is not None:
            given = emptied(given, (*self.context.key, self.context.rules.version), among)
        schema = given.schema
        if schema.equals(self._columns):
            return given
        if schema.names == self._columns.names and schema.types == self._columns.types:
            return pa.Table.from_arrays(given.columns, schema=self._columns)
        check_encoding(given)  # a cast reads the values
        whole = with_tombstone(given, self._schema, self._required_of(given), among).drop_columns(TOMBSTONE)
        if self._partial and given.num_columns < whole.num_columns:
            return whole.select([name for name in whole.column_names if name in given.column_names])
        return whole

    def check(self, rows: pa.Table, *, deletes: Deletes) -> None:
        """Raise what is wrong with conforming rows: InvalidRows or Invalid, naming column and row."""
        check_encoding(rows)
        required = () if deletes is True else self._required_of(rows)
        among = None if isinstance(deletes, bool) else deletes
        self._checker.check(with_tombstone(rows, self._schema, required, among))

    def gather(self, writes: Sequence[Write]) -> Checked:
        """The rows of one or more `writes` as one table of our own memory, in order, checked.

        Raises: anything where they do not pass as a whole; which is at fault, and why, `check` says.
        """
        whole = [self._whole(write.rows) for write in writes] if self._partial else [write.rows for write in writes]
        rows = whole[0] if len(whole) == 1 else pa.concat_tables(whole)
        rows.validate(full=True)  # before the copy, which believes the offsets of texts and lists
        for name in self._required:
            if rows.column(name).null_count and any(_is_missing(write, name) for write in writes):
                raise InvalidRows(f"column {name!r} is null in a row: give it a value", column=name)
        owned = self._copied(rows, single=len(writes) == 1)
        size = owned.get_total_buffer_size() + len(rows)  # exact: the buffers are our own, cut to fit
        return self._checker.check(owned.append_column(self._tombstone, _tombstones(writes)), size)

    def again(self, rows: pa.Table) -> Checked:
        """Rows of the row schema that were checked before and changed since, in memory of our own.

        Raises: InvalidRows where a value that was put into them does not pass.
        """
        owned = rows.combine_chunks()
        return self._checker.check(owned, owned.get_total_buffer_size() + len(owned))

    def _required_of(self, rows: pa.Table) -> tuple[str, ...]:
        """The columns that must have a value in `rows`."""
        return given_required(self._required, rows.column_names, self.context.rules)

    def _whole(self, rows: pa.Table) -> pa.Table:
        """`rows` with all columns of the table, those that are missing null."""
        if rows.num_columns == len(self._columns):
            return rows
        columns = [
            rows.column(field.name) if field.name in rows.column_names else pa.nulls(rows.num_rows, field.type)
            for field in self._columns
        ]
        return pa.Table.from_arrays(columns, schema=self._columns)

    def _copied(self, rows: pa.Table, *, single: bool) -> pa.Table:
        """`rows` in one chunk of our own memory. Something empty goes in front: one piece alone would not be copied."""
        if single and len(batches := rows.to_batches()) == 1:  # most puts, and two thirds of the time of the other way
            return pa.Table.from_batches([pa.concat_batches([self._no_batch, *batches])])
        return pa.concat_tables([self._nothing, rows]).combine_chunks()


def _is_missing(write: Write, name: str) -> bool:
    """Whether a row that is put has no value in a column that the write has."""
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
    """`context` for rows of the shape of `base`."""
    return replace(
        context,
        codec=base.codec,
        schema=row_schema(base.schema, base.key),
        key=base.key,
        indexes=base.indexes,
        required=base.required,
        rules=base.rules,
        field_ids=base.row_field_ids,
        sst_indexes=context.sst_indexes.over(base.indexes),
        shape=base.shape,
        route_into=base.route_into,
    )


def fitted(rows: pa.Table, of: Shape, to: Shape, *, partly: bool = False) -> pa.Table:
    """Conforming rows (no `_tombstone`) of one shape in another: renamed columns follow, new ones are null.

    `partly`: `rows` may lack columns, which stay away, new ones too.
    Raises: Corrupt where a column that may not be null is missing.
    """
    whole = EntryColumns(to.rows).conform(rows, of.ids).drop_columns(TOMBSTONE)
    if not partly:
        return whole
    given = {of.ids[name] for name in rows.column_names}
    return whole.select([name for name in whole.column_names if to.ids[name] in given])
