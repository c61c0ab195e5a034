"""Convert an entry's columns to the table's current row schema."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import pyarrow as pa

from memwal.wal.errors import Corrupt

TOMBSTONE = "_tombstone"
FIELD_ID = b"lance:field_id"
"""Key of the field metadata that holds a column's id, decimal, in the base table's schema."""


class EntryColumns:
    """The row schema, and the conversion of written columns to it.

    Thread safety. Any thread; immutable.
    Invariants. `conform` returns rows in exactly `schema`. Columns are matched by field id if both sides have ids, else
    by name (`sources`). Absent columns are null, an absent `_tombstone` is false, and other columns are ignored.
    """

    def __init__(self, row_schema: pa.Schema) -> None:
        """`row_schema`: the base columns, then `_tombstone`. Field ids are taken from metadata `lance:field_id`."""
        self.schema = row_schema.remove_metadata()
        self.ids = field_ids(row_schema)
        self.no_rows = self.schema.empty_table()

    def check(self, rows: pa.Table) -> None:
        """Raise ValueError, naming the first column that differs, if `rows` is not in the row schema."""
        if not rows.schema.equals(self.schema):
            raise ValueError(f"rows are not in the row schema: {_difference(rows.schema, self.schema)}")

    def conform(self, table: pa.Table, written: Mapping[str, int]) -> pa.Table:
        """Return `table` in the row schema. `written`: field id per column as known to its writer, {} if unknown.

        Raises Corrupt, naming the column.
        """
        if table.schema.equals(self.schema) and (written == self.ids or not written or not self.ids):
            return pa.Table.from_arrays(table.columns, schema=self.schema)
        found = sources(self.schema, self.ids, table.schema, written)
        columns = [self._column(table, field, found.get(field.name)) for field in self.schema]
        return pa.Table.from_arrays(columns, schema=self.schema)

    def _column(self, table: pa.Table, field: pa.Field, source: str | None) -> pa.ChunkedArray | pa.Array:
        if source is not None:
            return _cast(table[source], field)
        if field.name == TOMBSTONE:
            return pa.repeat(pa.scalar(False), table.num_rows)
        if not field.nullable:
            raise Corrupt(f"column {field.name!r} is missing and may not be null")
        return pa.nulls(table.num_rows, field.type)


def sources(wanted: pa.Schema, ids: Mapping[str, int], found: pa.Schema, written: Mapping[str, int]) -> dict[str, str]:
    """Return, for each column of `wanted`, the column of `found` that holds it; missing columns are omitted.

    `ids`, `written`: field ids per column of the two schemas, {} if the writer knew none; then columns are matched by
    name, as `_tombstone` always is. An id under another name is a renamed column. Lance reuses an id once no file of
    the table has it any more, so an id whose type differs too is another column: Lance changes no type under MemWAL.
    """
    by_id = {number: name for name, number in written.items() if name != TOMBSTONE}
    matches = {}
    for field in wanted:
        source = field.name
        if by_id and field.name in ids:
            source = by_id.get(ids[field.name], "")
        place = found.get_field_index(source)
        if place >= 0 and (source == field.name or found.field(place).type == field.type):
            matches[field.name] = source
    return matches


def field_ids(schema: pa.Schema) -> dict[str, int]:
    """Return the field id per base column, empty unless every column has one. Raises Corrupt if one is not a number.

    `_tombstone` is matched by name: its id is max+1 and moves when the base table gains a column, so the new column
    would be matched with the old entries' tombstones.
    """
    found = {}
    for field in schema:
        if field.name == TOMBSTONE:
            continue
        text = (field.metadata or {}).get(FIELD_ID)
        if text is None:
            return {}
        if not text.isdigit():
            raise Corrupt(f"column {field.name!r} has the field id {text!r}, which is no number")
        found[field.name] = int(text)
    return found


def _cast(column: pa.ChunkedArray, field: pa.Field) -> pa.ChunkedArray:
    try:
        return column if column.type == field.type else column.cast(field.type)
    except pa.ArrowException as error:
        raise Corrupt(f"column {field.name!r} is {column.type}, expected {field.type}: {error}") from error


def _difference(found: pa.Schema, expected: pa.Schema) -> str:
    for ours, theirs in itertools.zip_longest(expected, found):
        if ours is None or theirs is None or not ours.equals(theirs):
            return f"expected {ours or 'no more columns'}, found {theirs or 'no more columns'}"
    return "equal"
