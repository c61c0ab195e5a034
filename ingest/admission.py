"""Which rows a region takes, checked and copied once for all writes of a group.

A caller's thread does almost nothing (`conform` looks at the schema); the region's thread joins what has gathered,
checks it as a whole and copies it, so that a thousand callers of one row each cost one check and one copy. Where the
whole does not pass, each write is checked by itself, so that only the one at fault is refused, with its own row number.

Why copying so late is safe: the caller waits for its ack, and the copy is made before the ack, before the append even.
One that stops waiting (a timeout, an interrupt) first withdraws its write or lets the copy be made (`ingest.waiting`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from flush import WriteRules
from ingest.region_context import RegionContext
from ingest.rows import check_encoding
from ingest.write_queue import Deletes, Write
from memtable import TOMBSTONE, Checked, InvalidRows, emptied, with_tombstone

_PUT = pa.array(np.zeros(1 << 14, dtype=np.bool_))
"""The `_tombstone` column of most groups, made once."""
SURELY_SMALL = 1 << 20
"""Bytes of the buffers behind some rows that need no closer look."""


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


def given_required(required: Sequence[str], columns: Sequence[str], rules: WriteRules) -> tuple[str, ...]:
    """Those of the columns `required` that a put with `columns` must have and give a value: all, but where upserts
    merge those that it has, and always the version column.
    """
    if rules.upsert != "merge":
        return tuple(required)
    return tuple(name for name in required if name in columns or name == rules.version)


def size_bound(rows: pa.Table) -> int:
    """Bytes that `rows` take at most, nearly exact where they are many; the exact count is slow for small rows."""
    behind = rows.get_total_buffer_size()
    return int(behind if behind <= SURELY_SMALL else rows.nbytes)


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
