"""Columns as Python's values, those times included that Python has not: they become text.

Arrow and Lance hold times of any year, and nanoseconds; `datetime` has the years 1 to 9999 and microseconds. One such
value must not end a command that prints rows, or a task that writes a letter.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

_NOT_IN_PYTHON = (ValueError, OverflowError)


def python_values(column: pa.ChunkedArray | pa.Array) -> list[Any]:
    """The values of a column; of one with a time that Python has not, times are ISO 8601 (UTC where they have a zone).

    Raises: UnicodeDecodeError for text that is not UTF-8.
    """
    try:
        return list(column.to_pylist())
    except UnicodeDecodeError:
        raise
    except _NOT_IN_PYTHON:
        chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
        return [value for chunk in chunks for value in _texts(chunk)]


def python_rows(rows: pa.Table) -> list[dict[str, Any]]:
    """`rows` as dicts, by `python_values`."""
    columns = [python_values(column) for column in rows.columns]
    return [dict(zip(rows.column_names, values, strict=True)) for values in zip(*columns, strict=True)]


def _texts(values: pa.Array) -> list[str | None]:
    kind = values.type
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        unit = "D" if pa.types.is_date32(kind) else "ms" if pa.types.is_date64(kind) else kind.unit
        numbers = values.view(pa.int32() if pa.types.is_date32(kind) else pa.int64())
        times = numbers.fill_null(0).to_numpy(zero_copy_only=False).astype(f"datetime64[{unit}]")
        texts = np.datetime_as_string(times).tolist()
        zone = "Z" if getattr(kind, "tz", None) is not None else ""
        valid = values.is_valid().to_pylist()
        return [f"{text}{zone}" if here else None for text, here in zip(texts, valid, strict=True)]
    return [_arrows(values.slice(row, 1)) if values[row].is_valid else None for row in range(len(values))]


def _arrows(alone: pa.Array) -> str:
    """Arrow's own text of a list or struct that holds such a time, or of a span that is too long."""
    return " ".join(alone.to_string().split())[2:-2]
