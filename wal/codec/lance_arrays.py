"""Arrow rows in a form that Lance can import.

Lance imports Arrow arrays over Arrow's C interface. Its import (arrow-rs 58, pylance 14.0.2) panics, or fails with an
error about a null buffer, on some valid arrays:

    a struct with an offset at any depth           slices of a struct in a struct; of booleans in a struct
    a decimal whose buffer is not 16-byte aligned  IPC messages are 8-byte aligned, and so are the arrays read from them

Such arrays are copied. All others, and all columns without a struct or a decimal, are passed without a copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

_ALIGNMENT = 16


def delicate_columns(schema: pa.Schema) -> tuple[int, ...]:
    """Return the indexes of the columns that `importable` must check: those with a struct or a decimal at any depth."""
    return tuple(place for place, field in enumerate(schema) if has_struct(field.type) or _has_decimal(field.type))


def importable(batch: pa.RecordBatch, delicate: Sequence[int]) -> pa.RecordBatch:
    """Return `batch` with copies of the columns that Lance cannot import; `batch` itself if it can import all.

    `delicate`: `delicate_columns` of the schema. Thread safety: pure.
    """
    unsound = [place for place in delicate if not _is_sound(batch.column(place))]
    if not unsound:
        return batch
    columns = batch.columns
    for place in unsound:
        column = columns[place]
        columns[place] = pa.concat_arrays([column.slice(0, 0), column])  # a single piece would not be copied
    return pa.RecordBatch.from_arrays(columns, schema=batch.schema)


def importable_table(rows: pa.Table) -> pa.Table:
    """Apply `importable` to each batch of a table; return the table itself if no column is delicate."""
    delicate = delicate_columns(rows.schema)
    if not delicate:
        return rows
    return pa.Table.from_batches([importable(batch, delicate) for batch in rows.to_batches()], schema=rows.schema)


def _is_sound(column: pa.Array) -> bool:
    if has_struct(column.type) and _has_offset(column):
        return False
    if not _has_decimal(column.type):
        return True
    return all(buffer is None or buffer.address % _ALIGNMENT == 0 for buffer in column.buffers())


def _has_offset(array: pa.Array) -> bool:
    if array.offset:
        return True
    return any(_has_offset(child) for child in _child_arrays(array))


def _child_arrays(array: pa.Array) -> list[pa.Array]:
    if isinstance(array, pa.ExtensionArray):
        return [array.storage]
    if pa.types.is_struct(array.type):
        return [array.field(place) for place in range(array.type.num_fields)]
    return [array.values] if _is_list(array.type) else []


def has_struct(kind: pa.DataType) -> bool:
    """Return whether a type is or has a struct, at any depth."""
    return bool(pa.types.is_struct(kind)) or any(map(has_struct, _child_types(kind)))


def _has_decimal(kind: pa.DataType) -> bool:
    return bool(pa.types.is_decimal(kind)) or any(map(_has_decimal, _child_types(kind)))


def _child_types(kind: pa.DataType) -> list[pa.DataType]:
    if isinstance(kind, pa.BaseExtensionType):
        return [kind.storage_type]
    return [kind.field(place).type for place in range(kind.num_fields)]


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))
