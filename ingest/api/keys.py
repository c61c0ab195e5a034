"""Keys in whatever form a caller has them, as an Arrow table of exactly the key columns.

One key column: a scalar, a list or Arrow array of them, `{"name": value}`. Several: a tuple, a list of tuples
or dicts. Always: an Arrow table or batch, a pandas or polars frame, with the key columns and no others.
"""

from __future__ import annotations

import csv
import datetime
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from memwal.ingest.errors import Invalid
from memwal.ingest.suggest import suggestion
from memwal.wal.errors import first_line

NO_KEY = "the table has no key, its rows are only appended: none is looked up or deleted by one; scan with a filter"

# Which Arrow types, and which Python values, may name a key of which column type.
_FAMILIES: tuple[tuple[Callable[[pa.DataType], bool], tuple[type, ...]], ...] = (
    (pa.types.is_boolean, (bool, np.bool_)),
    (pa.types.is_integer, (int, np.integer)),
    (pa.types.is_date, (datetime.date,)),
    (
        lambda kind: pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind),
        (str,),
    ),
    (
        lambda kind: pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind),
        (bytes,),
    ),
)
# Subclasses that would lose something: a bool is an int, a datetime a date.
_NEVER = {int: (bool,), datetime.date: (datetime.datetime,)}


def normalise_keys(keys: Any, schema: pa.Schema, key: Sequence[str]) -> pa.Table:
    """`keys` as a table with the columns `key`, in that order and with the types of `schema`; order and
    repeats are kept.

    Text is read as the column's type ("17" for an integer, "2013-01-31" for a date), as a command line needs
    it. Raises: Invalid naming the column (and the row, counted from 0, of a null) when a key cannot be read, and where
    there is no key.
    """
    if not key:
        raise Invalid(NO_KEY)
    columns = _columns(keys, tuple(key))
    fields = [schema.field(name) for name in key]
    arrays = [_typed(column, field) for column, field in zip(columns, fields, strict=True)]
    for name, column in zip(key, arrays, strict=True):
        if column.null_count:
            row = column.is_null().index(True).as_py()
            raise Invalid(f"key column '{name}': row {row} is null; a key has a value in every key column")
    return pa.table(arrays, names=list(key))


def parse_key(text: str, key: Sequence[str]) -> tuple[str, ...]:
    """One key as typed on a command line: the text itself, or comma-separated values (CSV quoting) of several
    columns.

    Raises: Invalid when the number of values is not the number of key columns, or there are none.
    """
    if not key:
        raise Invalid(NO_KEY)
    values = (text,) if len(key) == 1 else tuple(next(csv.reader([text]), ()))
    if len(values) != len(key):
        raise Invalid(f"key '{text}' has {len(values)} values; give {len(key)}: {','.join(key)}")
    return values


def _columns(keys: Any, key: tuple[str, ...]) -> list[Any]:
    """One list or Arrow array per key column."""
    if isinstance(keys, pa.RecordBatch):
        keys = pa.Table.from_batches([keys])
    if isinstance(keys, pa.Array | pa.ChunkedArray | np.ndarray):
        return _single(keys if not isinstance(keys, np.ndarray) else keys.tolist(), key)
    if hasattr(keys, "__arrow_c_stream__"):
        return _of_table(keys if isinstance(keys, pa.Table) else pa.table(keys), key)
    if isinstance(keys, Mapping) or (isinstance(keys, tuple) and len(key) > 1):
        keys = [keys]
    if isinstance(keys, str | bytes) or not isinstance(keys, Sequence | set | frozenset):
        keys = [keys]
    return _of_rows(list(keys), key)


def _of_table(table: pa.Table, key: tuple[str, ...]) -> list[Any]:
    for name in table.column_names:
        if name not in key:
            raise Invalid(f"keys: column '{name}' is not in the key{suggestion(name, key)}")
    for name in key:
        if name not in table.column_names:
            raise Invalid(f"keys: key column '{name}' is missing; give {', '.join(key)}")
    if len(table.column_names) != len(key):
        raise Invalid(f"keys: a column appears twice among {', '.join(table.column_names)}")
    return [table.column(name) for name in key]


def _of_rows(rows: list[Any], key: tuple[str, ...]) -> list[Any]:
    """Columns of a list of dicts, tuples or scalars."""
    if rows and all(isinstance(row, Mapping) for row in rows):
        odd = next((row for row in rows if set(row) != set(key)), None)
        if odd is not None:
            raise Invalid(f"keys: {dict(odd)!r} does not name exactly the key columns {', '.join(key)}")
        return [[row[name] for row in rows] for name in key]
    if rows and all(isinstance(row, tuple | list) for row in rows):
        odd = next((row for row in rows if len(row) != len(key)), None)
        if odd is not None:
            raise Invalid(f"keys: {odd!r} has {len(odd)} values; the key has {len(key)}: {', '.join(key)}")
        return [list(column) for column in zip(*rows, strict=True)]
    if not rows:
        return [[] for _ in key]
    return _single(rows, key)


def _single(values: Any, key: tuple[str, ...]) -> list[Any]:
    if len(key) > 1:
        raise Invalid(f"keys: a key of this table has {len(key)} columns; give tuples of {', '.join(key)}")
    return [values]


def _typed(values: Any, field: pa.Field) -> pa.Array | pa.ChunkedArray:
    """Values as the key column's type; no conversion that could change which key is meant."""
    try:
        if isinstance(values, pa.Array | pa.ChunkedArray):
            return _cast(values, field)
        if values and all(isinstance(value, str) for value in values):
            return pa.array(values, pa.string()).cast(field.type)
        # Not pa.array alone: that takes 1.5 for an integer 1, and a number for a date.
        _check_types(values, field)
        return pa.array(values, field.type)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        reason = first_line(error)
        raise Invalid(f"key column '{field.name}' is {field.type}: {reason}") from None


def _check_types(values: list[Any], field: pa.Field) -> None:
    allowed = next((python for family, python in _FAMILIES if family(field.type)), ())
    refused = tuple(kind for each in allowed for kind in _NEVER.get(each, ()))
    for found in set(map(type, values)) - {type(None)}:
        if not issubclass(found, allowed) or issubclass(found, refused):
            raise TypeError(f"a key of type {found.__name__} cannot be in it; convert the keys")


def _cast(values: pa.Array | pa.ChunkedArray, field: pa.Field) -> pa.Array | pa.ChunkedArray:
    found = values.type.value_type if pa.types.is_dictionary(values.type) else values.type
    related = any(family(found) and family(field.type) for family, _ in _FAMILIES)
    if found != field.type and not related and not pa.types.is_null(found):
        raise TypeError(f"a key of type {found} cannot be in it; cast the keys")
    return values.cast(field.type)
