"""Rows in whatever form a caller has them, as an Arrow table."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ingest.errors import Invalid
from ingest.keys import NO_KEY
from ingest.python_values import NOT_TAKEN, column_of
from memtable import TOMBSTONE


def as_table(rows: Any, schema: pa.Schema, *, alike: bool = False) -> pa.Table:
    """`rows` as a `pa.Table`, without a copy where it is Arrow already.

    `rows`: pa.Table | RecordBatch | RecordBatchReader | anything with `__arrow_c_stream__` (pandas, polars, …) |
    list of dicts, whose values take the types of `schema` (the base schema) by name. `alike`: all dicts must have the
    same names, because in a table whose upserts merge a name that is not there is something else than a null.
    Raises: Invalid when it is none of these, cannot be read, or naming the column whose value does not fit.
    """
    try:
        found = _as_arrow(rows, schema, alike=alike)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise Invalid(f"rows: cannot read the {type(rows).__name__}: {str(error).splitlines()[0]}") from error
    if found is None:
        raise Invalid(
            f"rows: cannot read a {type(rows).__name__}; pass an Arrow table or batch, a pandas or polars frame, "
            "or a list of dicts"
        )
    return found


def _as_arrow(rows: Any, schema: pa.Schema, *, alike: bool) -> pa.Table | None:
    if isinstance(rows, pa.Table):
        return rows
    if type(rows).__module__.partition(".")[0] == "pandas" and rows.index.names == [None]:
        # Arrow makes a column of what a filter or a sort left of the numbers of the rows.
        return pa.Table.from_pandas(rows, preserve_index=False)
    if isinstance(rows, pa.RecordBatch):
        return pa.Table.from_batches([rows])
    if isinstance(rows, pa.RecordBatchReader):
        return rows.read_all()
    if hasattr(rows, "__arrow_c_stream__"):
        return pa.RecordBatchReader.from_stream(rows).read_all()
    if isinstance(rows, Sequence) and not rows:
        return schema.empty_table()
    if isinstance(rows, Sequence) and all(isinstance(row, Mapping) for row in rows):
        if alike:
            _check_alike(rows)
        return _from_dicts(rows, schema)
    return None


def split_deletes(rows: pa.Table, key: Sequence[str]) -> tuple[pa.Table, bool | npt.NDArray[np.bool_]]:
    """`rows` without the column `_tombstone`, and what it says: which rows delete their key, False where none does.

    Raises: Invalid for a column that is not of bools, and for a row that deletes where there is no key.
    """
    if TOMBSTONE not in rows.column_names:
        return rows, False
    column = rows.column(TOMBSTONE)
    if not pa.types.is_boolean(column.type):
        raise Invalid(f"column {TOMBSTONE!r} is {column.type}; it says with true or false which rows delete their key")
    deletes = column.fill_null(False).to_numpy()
    if deletes.any() and not key:
        raise Invalid(f"row {int(np.argmax(deletes))} deletes, but {NO_KEY}")
    return rows.drop_columns(TOMBSTONE), deletes if deletes.any() else False


def check_encoding(rows: pa.Table) -> None:
    """Refuse what Arrow itself never looks at: text that is not UTF-8, offsets outside of their buffers.

    Such a value would be durable before the first reader fails on it. Raises: Invalid naming the column.
    """
    for name, column in zip(rows.column_names, rows.columns, strict=True):
        if reason := _fault(column):
            row = bisect_left(range(len(column)), True, key=lambda row: bool(_fault(column.slice(0, row + 1))))
            raise Invalid(f"column '{name}': row {row}: {reason}; mend the value, text must be UTF-8")


def _fault(column: pa.ChunkedArray) -> str:
    """What Arrow says is wrong with a column, without where; nothing for one that is sound."""
    try:
        column.validate(full=True)
    except pa.ArrowInvalid as error:
        return str(error).splitlines()[0].rpartition("Invalid: ")[2].partition(" at string index")[0]
    return ""


def _check_alike(rows: Sequence[Mapping[str, Any]]) -> None:
    names = rows[0].keys()
    for number, row in enumerate(rows):
        if row.keys() != names:
            odd = next(iter(row.keys() ^ names))
            here, there = ("lacks", "has") if odd in names else ("has", "lacks")
            raise Invalid(
                f"rows: row {number} {here} {odd!r}, row 0 {there} it; columns that a put does not have keep what is "
                "stored here, so put rows with other columns apart, or write None for a null"
            )


def _from_dicts(rows: Sequence[Mapping[str, Any]], schema: pa.Schema) -> pa.Table:
    names = list(dict.fromkeys(chain.from_iterable(rows)))
    return pa.table({name: _column(name, [row.get(name) for row in rows], schema) for name in names})


def _column(name: str, values: list[Any], schema: pa.Schema) -> pa.Array:
    if schema.get_field_index(name) < 0:
        return pa.array(values)
    wanted = schema.field(name).type
    try:
        return column_of(values, wanted)
    except NOT_TAKEN as error:
        first = next(((row, why) for row, value in enumerate(values) if (why := _refusal(value, wanted))), None)
        where, why = ("", error) if first is None else (f", in row {first[0]}", first[1])
        raise Invalid(f"column '{name}', which is {wanted}{where}: {str(why).splitlines()[0]}") from None


def _refusal(value: Any, wanted: pa.DataType) -> Exception | None:
    """Why a value cannot be in a column of the type `wanted`."""
    try:
        column_of([value], wanted)
    except NOT_TAKEN as error:
        return error
    return None
