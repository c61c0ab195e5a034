"""Values of rows in the output of commands: shortest floats, binary as hex, JSON that every parser accepts.

- A float32 is printed as the shortest decimal number that reads back to it: 76.1, not 76.0999984741211.
- Binary is printed as hexadecimal digits, two for each byte.
- JSON has no NaN and no infinity: they are the texts "NaN", "Infinity" and "-Infinity", as in protobuf's JSON.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa

from memwal.ingest.engine.api.results import python_values

_Convert = Callable[[Any], Any]


def shown_values(column: pa.ChunkedArray | pa.Array, form: str) -> list[Any]:
    """Return the values of a column for the output format `form`: those of `python_values`, converted by the rules
    above.

    For "table" binary stays bytes, which a cell cuts to its width.
    """
    values, convert = python_values(column), _converter(column.type, form)
    return values if convert is None else [None if value is None else convert(value) for value in values]


def shown_rows(rows: pa.Table, form: str) -> list[dict[str, Any]]:
    """Return `rows` as dicts of `shown_values`."""
    columns = [shown_values(column, form) for column in rows.columns]
    return [dict(zip(rows.column_names, values, strict=True)) for values in zip(*columns, strict=True)]


def _converter(kind: pa.DataType, form: str) -> _Convert | None:
    """Return the conversion of a type's values; None if they stay unchanged."""
    json = form in ("json", "ndjson")
    if pa.types.is_floating(kind):
        narrow = np.float32 if pa.types.is_float32(kind) else np.float16 if pa.types.is_float16(kind) else None
        return _number(narrow, json=json) if json or narrow is not None else None
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind):
        return None if form == "table" else bytes.hex
    if pa.types.is_dictionary(kind):
        return _converter(kind.value_type, form)
    if pa.types.is_struct(kind):
        return _struct({field.name: _converter(field.type, form) for field in kind})
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return _list(_converter(kind.value_type, form))
    return None


def _number(narrow: Any, *, json: bool) -> _Convert:
    def convert(value: float) -> float | str:
        if math.isfinite(value):
            return value if narrow is None else float(str(narrow(value)))
        if not json:
            return value
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"

    return convert


def _list(convert: _Convert | None) -> _Convert | None:
    if convert is None:
        return None
    return lambda values: (
        values  # a text where Python cannot represent a time
        if isinstance(values, str)
        else [None if value is None else convert(value) for value in values]
    )


def _struct(converters: dict[str, _Convert | None]) -> _Convert | None:
    wanted = {name: convert for name, convert in converters.items() if convert is not None}
    if not wanted:
        return None

    def convert(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {
            name: wanted[name](each) if name in wanted and each is not None else each for name, each in value.items()
        }

    return convert
