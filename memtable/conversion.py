"""Cast a caller's column to the table's type without loss, with errors that name the row."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from memwal.memtable.errors import InvalidRows
from memwal.memtable.exact_cast import exact, is_list, misfit


def convert(column: pa.ChunkedArray, field: pa.Field) -> pa.ChunkedArray:
    """Return `column` in the type of `field`, by the rules of `memtable.exact_cast`; `column` itself if it has that
    type.

    Raises InvalidRows naming the column, both types, and the first row at fault if a value is the cause.
    """
    if column.type == field.type:
        return column
    if reason := misfit(column.type, field.type):
        raise InvalidRows(
            f"column {field.name!r} has the type {column.type}, the table wants {field.type}: {reason}",
            column=field.name,
        )
    if pa.types.is_fixed_size_list(field.type):
        _check_width(column, field)
    try:
        return _exact(column, field.type)
    except _REFUSALS as error:
        raise _refused(column, field, error) from None


_REFUSALS = (pa.ArrowInvalid, pa.ArrowNotImplementedError)


def _exact(column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    return pa.chunked_array([exact(chunk, kind) for chunk in column.chunks], kind)


def _refused(column: pa.ChunkedArray, field: pa.Field, error: Exception) -> InvalidRows:
    row = _first_failing(column, field.type)
    where = f" in row {row}" if row is not None else ""
    reason = str(error).splitlines()[0].rstrip(".")
    return InvalidRows(
        f"column {field.name!r}{where} cannot become {field.type} ({reason}): correct the value",
        column=field.name,
        row=row,
    )


def _first_failing(column: pa.ChunkedArray, kind: pa.DataType) -> int | None:
    """Return the first row whose value cannot be cast, by bisection: log2(rows) casts, on the error path only."""
    low, high = 0, len(column)
    while low < high:
        middle = (low + high) // 2
        try:
            _exact(column.slice(low, middle - low + 1), kind)
            low = middle + 1
        except _REFUSALS:
            high = middle
    return low if low < len(column) else None


def _check_width(column: pa.ChunkedArray, field: pa.Field) -> None:
    """Refuse a list whose length is not the width of the vector column."""
    if not is_list(column.type):
        return
    lengths = pc.list_value_length(column)
    wrong = pc.fill_null(pc.not_equal(lengths, field.type.list_size), False).to_numpy()
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        raise InvalidRows(
            f"column {field.name!r} has {lengths[row].as_py()} numbers in row {row}, the table wants"
            f" {field.type.list_size}: give every vector that width",
            column=field.name,
            row=row,
        )
