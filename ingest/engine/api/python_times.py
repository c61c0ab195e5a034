"""Convert columns to Python values; times that Python cannot hold become text.

Arrow and Lance hold times of any year, and nanoseconds; `datetime` has the years 1 to 9999 and microseconds. A time
outside this range must not end a command that prints rows, or a task that writes a dead letter.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

_NOT_IN_PYTHON = (ValueError, OverflowError)


def python_values(column: pa.ChunkedArray | pa.Array) -> list[Any]:
    """Return the values of a column; if Python cannot hold one of its times, all are ISO 8601 text (UTC if zoned).

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
    """Return `rows` as dicts of `python_values`."""
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
        return [f"{text}{zone}" if given else None for text, given in zip(texts, valid, strict=True)]
    return [_arrows(values.slice(row, 1)) if values[row].is_valid else None for row in range(len(values))]


def _arrows(alone: pa.Array) -> str:
    """Return Arrow's text for a list or struct with a time that Python cannot hold, or for a duration that is too
    long.
    """
    return " ".join(alone.to_string().split())[2:-2]
