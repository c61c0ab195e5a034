"""Convert callers' rows in any form to Arrow tables, check them as their region will, and number their keys.

Rows are checked before they get to their region at the start of a put, in a client of several daemons, and in Spark's
tasks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from memwal.flush import WriteRules
from memwal.ingest.engine.api.arguments import brief, check_encoding, given_by
from memwal.ingest.engine.api.keys import NO_KEY
from memwal.ingest.engine.api.missing import Missing, keeps
from memwal.ingest.engine.api.python_values import NOT_TAKEN, column_of
from memwal.ingest.errors import Invalid
from memwal.memtable import TOMBSTONE, Checked, MemTable, tombstones, with_tombstone
from memwal.wal.errors import first_line

SURELY_SMALL = 1 << 20
"""Buffers up to this number of bytes count as the size of the rows, without an exact count."""
Deletes = bool | npt.NDArray[np.bool_]
Mask = npt.NDArray[np.bool_]
Places = npt.NDArray[np.int64]
ROWS_NAMED = 300
"""Maximum row numbers in an error: it travels as a response header of at most 8 KiB."""
_REPEATED = 'an earlier row of the same put has the key, which the table refuses (on_duplicate = "fail")'


def as_table(rows: Any, schema: pa.Schema, missing: Missing | None = "null") -> pa.Table:
    """Return `rows` as a `pa.Table`, without a copy if they are Arrow already.

    `rows`: pa.Table | RecordBatch | RecordBatchReader | anything with `__arrow_c_stream__` (pandas, polars, …) | list
    of dicts, whose values take the types of `schema` (the base schema) by name. `missing`: as in `missing_rule`; unless
    it is "null", all dicts must have the same names, because a missing name differs from a null. Arrow data is not
    validated.
    Raises: Invalid for another type, for rows that cannot be read, and, with the column, for a value that does not fit
    it.
    """
    try:
        table = given_by("rows", rows, partial(_as_arrow, schema=schema, missing=missing))
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise Invalid(f"rows: cannot read the {type(rows).__name__}: {first_line(error):.200}") from error
    if table is None:
        raise Invalid(
            f"rows: cannot read a {type(rows).__name__}; pass an Arrow table or batch, a pandas or polars frame, "
            "or a list of dicts"
        )
    return table


def _as_arrow(rows: Any, schema: pa.Schema, *, missing: Missing | None) -> pa.Table | None:
    if isinstance(rows, pa.Table):
        return rows
    kind = type(rows)
    is_pandas = kind.__name__ == "DataFrame" and kind.__module__.partition(".")[0] == "pandas"
    if is_pandas and rows.index.names == [None]:
        # After a filter or a sort, Arrow would add the index, which holds the old row numbers, as a column.
        return pa.Table.from_pandas(rows, preserve_index=False)
    if isinstance(rows, pa.RecordBatch):
        return pa.Table.from_batches([rows])
    if isinstance(rows, pa.RecordBatchReader):
        return rows.read_all()
    if hasattr(rows, "__arrow_c_stream__"):
        return _streamed(rows)
    if isinstance(rows, Sequence) and not rows:
        return schema.empty_table()
    if isinstance(rows, Sequence) and all(isinstance(row, Mapping) for row in rows):
        if missing != "null":
            _check_alike(rows, missing)
        names = list(dict.fromkeys(chain.from_iterable(rows)))
        return pa.table({name: _column(name, [row.get(name) for row in rows], schema) for name in names})
    return None


def _streamed(rows: Any) -> pa.Table | None:
    try:
        return pa.RecordBatchReader.from_stream(rows).read_all()
    except pa.ArrowInvalid:
        if isinstance(rows, pa.ChunkedArray) or type(rows).__name__ == "Series":
            return None  # a stream of values, not of rows; Arrow's reason would not name the accepted forms
        raise


def inferred(rows: pa.Table) -> pa.Table:
    """Return rows with the types of a new table: lists of numbers, as many in each row, are vectors of float32.

    Raises: Invalid for a column with nulls only.
    """
    for place, field in enumerate(rows.schema):
        kind, column = field.type, rows.column(place)
        if pa.types.is_null(kind):
            raise Invalid(f"data: column {field.name!r} has no value that shows its type; give schema=, or a value")
        is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
        if is_list and (pa.types.is_floating(kind.value_type) or pa.types.is_integer(kind.value_type)):
            lengths = pc.min_max(pc.list_value_length(column)).as_py()
            if lengths["min"] and lengths["min"] == lengths["max"]:
                vectors = column.cast(pa.list_(pa.float32())).cast(pa.list_(pa.float32(), lengths["min"]))
                rows = rows.set_column(place, field.name, vectors)
    return rows


def split_deletes(rows: pa.Table, key: Sequence[str]) -> tuple[pa.Table, Deletes]:
    """Return `rows` without the column `_tombstone`, and that column: which rows delete their key, False if none does.

    Raises: Invalid for a column that is not bool, and for a row that deletes in a table without a key.
    """
    if TOMBSTONE not in rows.column_names:
        return rows, False
    column = rows.column(TOMBSTONE)
    if not pa.types.is_boolean(column.type):
        raise Invalid(f"column {TOMBSTONE!r} is {column.type}; it must be bool: true in rows that delete their key")
    deletes = column.fill_null(False).to_numpy()
    if deletes.any() and not key:
        raise Invalid(f"row {int(np.argmax(deletes))} deletes, but {NO_KEY}")
    return rows.drop_columns(TOMBSTONE), deletes if deletes.any() else False


def _check_alike(rows: Sequence[Mapping[str, Any]], missing: Missing | None) -> None:
    names = rows[0].keys()
    for number, row in enumerate(rows):
        if row.keys() != names:
            odd = next(iter(row.keys() ^ names))
            here, there = ("lacks", "has") if odd in names else ("has", "lacks")
            remedy = 'write None for a null, or missing="null"' if missing is None else "write None for a null"
            raise Invalid(
                f"rows: row {number} {here} {brief(odd)}, row 0 {there} it; {remedy}; to keep stored values, put rows "
                'with other columns separately, with missing="keep"'
            )


def _column(name: str, values: list[Any], schema: pa.Schema) -> pa.Array:
    if schema.get_field_index(name) < 0:
        return pa.array(values)
    wanted = schema.field(name).type
    try:
        return column_of(values, wanted)
    except NOT_TAKEN as error:
        first = next(((row, why) for row, value in enumerate(values) if (why := _refusal(value, wanted))), None)
        where, why = ("", error) if first is None else (f", in row {first[0]}", first[1])
        raise Invalid(f"column '{name}', which is {wanted}{where}: {first_line(why):.300}") from None


def _refusal(value: Any, wanted: pa.DataType) -> Exception | None:
    """Return why a value does not fit a column of the type `wanted`; None if it does."""
    if pa.types.is_fixed_size_list(wanted) and isinstance(value, list | tuple) and len(value) != wanted.list_size:
        return ValueError(f"its length is {len(value)}; give {wanted.list_size} elements")
    try:
        column_of([value], wanted)
    except NOT_TAKEN as error:
        return error
    return None


def size_bound(rows: pa.Table) -> int:
    """Return an upper bound of the bytes of `rows`, nearly exact for many; the exact count is slow for small rows."""
    buffers = rows.get_total_buffer_size()
    return int(buffers if buffers <= SURELY_SMALL else rows.nbytes)


def key_codes(keys: pa.Table) -> Places:
    """Return one number per row, equal exactly for equal keys: int64 [n]. Requires: no nulls."""
    codes = _column_codes(keys.column(0))
    for column in keys.columns[1:]:
        # With dense numbering the product of both is below the square of the number of rows, whatever the values.
        _, first = np.unique(codes, return_inverse=True)
        _, second = np.unique(_column_codes(column), return_inverse=True)
        codes = first.astype(np.int64) * (int(second.max(initial=0)) + 1) + second
    return codes


class KeyRuns:
    """Rows sorted by key; rows of one key keep their order.

    Thread safety. Immutable. Shapes: n rows, m distinct keys; keys are numbered 0 to m - 1 in unspecified order.
    """

    def __init__(self, keys: pa.Table) -> None:
        """`keys`: the key columns of all rows, without nulls."""
        codes = key_codes(keys)
        self.order: Places = np.argsort(codes, kind="stable")
        """int64 [n]: the rows sorted by key."""
        self.begins: Mask = np.ones(len(codes), dtype=np.bool_)
        """bool [n], in sorted order: whether this is the first row of its key."""
        self.begins[1:] = codes[self.order][1:] != codes[self.order][:-1]
        self.first: Places = self.order[self.begins]
        """int64 [m]: the first row of each key."""


def _column_codes(column: pa.ChunkedArray) -> Places:
    if pa.types.is_integer(column.type):
        values: Places = column.to_numpy().astype(np.int64, copy=False)  # uint64: bit by bit
        return values
    encoded = column.dictionary_encode().unify_dictionaries()
    parts = [chunk.indices.to_numpy().astype(np.int64) for chunk in encoded.chunks]
    return np.concatenate([np.empty(0, np.int64), *parts])


def key_text(rows: pa.Table, key: Sequence[str], row: int) -> str:
    """Return the key of a row for a message: `a = 1, b = 'x'`."""
    return ", ".join(f"{name} = {rows.column(name)[row].as_py()!r:.80}" for name in key)


def first_of_each_key(rows: pa.Table, key: Sequence[str], deletes: Deletes = False, *, refuse: bool) -> Mask:
    """Return a mask of the rows of one put, bool [n].

    It is False for a row whose key an earlier row puts without a delete in between. `refuse`: raise Invalid instead,
    with the first such key and its two rows. Requires: key columns without nulls.
    """
    runs = KeyRuns(rows.select(list(key)))
    order, deleting = runs.order, np.broadcast_to(deletes, rows.num_rows)[runs.order]
    repeats = ~runs.begins[1:] & ~deleting[1:] & ~deleting[:-1]
    again = order[1:][repeats]
    once = np.ones(rows.num_rows, dtype=np.bool_)
    once[again] = False
    if refuse and len(again):
        second = int(again.min())
        first = int(order[:-1][repeats][again == second][0])
        text = key_text(rows, key, second)
        raise Invalid(
            f"the key {text} is in row {first} and in row {second} of one put; {len(again)} rows "
            'repeat a key, which the table refuses (on_duplicate = "fail"); put each key once',
            {"rows": np.sort(again)[:ROWS_NAMED].tolist(), "reason": _REPEATED},
        )
    return once


class RowChecker:
    """Convert rows to the form of a table's memtables, or reject rows that a memtable would reject.

    Thread safety. Any thread; immutable. Errors. InvalidRows or Invalid, with column and row.
    """

    def __init__(self, memtable: MemTable, required: Sequence[str], rules: WriteRules) -> None:
        """`memtable`: an empty one with all of the table's indexes.

        `required`: columns outside the key that may not be null.
        """
        self._memtable, self._required, self._rules = memtable, tuple(required), rules

    def whole(self, rows: pa.Table, deletes: Deletes = False) -> pa.Table:
        """Return `rows` with all columns of the table and `_tombstone`, set where `deletes` is a mask and true.

        Columns are checked, rows are not.
        """
        required = () if deletes is True else self._required
        if required and keeps(self._memtable.key, self._rules.upsert):  # missing columns but the version are kept
            required = tuple(name for name in required if name in rows.column_names or name == self._rules.version)
        among = None if isinstance(deletes, bool) else deletes
        return with_tombstone(rows, self._memtable.schema, required, among)

    def check(self, rows: pa.Table, deletes: Deletes = False) -> pa.Table:
        """Check every row; return `whole`."""
        check_encoding(rows)
        whole = self.whole(rows, deletes)
        self._memtable.check(whole)
        return whole

    def check_keys(self, keys: pa.Table) -> None:
        """Check the keys of a delete."""
        check_encoding(keys)
        self._memtable.check(tombstones(keys, self._memtable.schema))

    def checked(self, rows: pa.Table, size: int | None = None) -> Checked:
        """Check rows that already have all columns, except the encoding of texts. `size`: their bytes."""
        return self._memtable.check(rows, size)
