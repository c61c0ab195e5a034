"""Convert callers' keys in any form to an Arrow table of exactly the key columns.

For one key column: a scalar, a list or Arrow array of scalars, `{"name": value}`. For several: a tuple, a list of
tuples or dicts. For both: an Arrow table or batch, or a pandas or polars frame, with the key columns and no others.

A single string is rejected: `delete("price > 10")` passes a condition as a key, and would succeed and delete nothing.
In a list every string is a key.
"""

from __future__ import annotations

import csv
import datetime
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from memwal.ingest.engine.api.arguments import brief, check_encoding, elements, given_by, shown
from memwal.ingest.errors import Invalid
from memwal.ingest.suggest import suggestion
from memwal.ingest.values.values import cast_texts
from memwal.wal.errors import first_line

NO_KEY = "the table has no key (append_only), so no row can be looked up or deleted by key; scan with a filter"

# Families of column types: a key of an Arrow type or Python type of the same family is accepted.
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
# Subclasses that are rejected, because the conversion would lose information: a bool is an int, a datetime is a date.
_NEVER = {int: (bool,), datetime.date: (datetime.datetime,)}


def normalise_keys(keys: Any, schema: pa.Schema, key: Sequence[str]) -> pa.Table:
    """Return `keys` as a table with the columns `key`, in that order, with the types of `schema`.

    Order and repeats are kept. Text is parsed as the column's type ("17" for an integer, "2013-01-31" for a date), as
    the command line needs it.
    Raises: Invalid if a key cannot be read, with the column (and the row, from 0, of a null), and if the table has no
    key.
    """
    if not key:
        raise Invalid(NO_KEY)
    columns = _columns(keys, tuple(key))
    fields = [schema.field(name) for name in key]
    arrays = [_typed(column, field) for column, field in zip(columns, fields, strict=True)]
    for name, column in zip(key, arrays, strict=True):
        if column.null_count:
            row = column.is_null().index(True).as_py()
            raise Invalid(f"key column '{name}': row {row} is null; a key needs a value in every key column")
    return pa.table(arrays, names=list(key))


def repeatable(keys: Any) -> Any:
    """Return `keys` in a form that can be read several times: a stream gives its keys once, so it becomes a table."""
    if not hasattr(keys, "__arrow_c_stream__") or isinstance(keys, pa.ChunkedArray):
        return keys
    return given_by("keys", keys, _gathered)


def _gathered(keys: Any) -> pa.Table | pa.ChunkedArray:
    try:
        return pa.table(keys)
    except pa.ArrowInvalid:  # a stream of values, such as a Series of Polars
        return pa.chunked_array(keys)


def parse_key(text: str, key: Sequence[str]) -> tuple[str, ...]:
    """Parse one key of a command line: the text itself, or comma-separated values (CSV quoting) of several columns.

    Raises: Invalid if the number of values is not the number of key columns, and if the table has no key.
    """
    if not key:
        raise Invalid(NO_KEY)
    values: tuple[str, ...] = (text,)
    if len(key) > 1:
        try:
            lines = list(csv.reader(io.StringIO(text, newline=""), strict=True)) or [[]]
        except csv.Error:
            lines = []
        if len(lines) != 1:
            raise Invalid(f"key {brief(text)}: write a value with a comma, a quote or a line break in double quotes")
        values = tuple(lines[0])
    if len(values) != len(key):
        raise Invalid(f"key {brief(text)} has {len(values)} values; give {len(key)}: {','.join(key)}")
    return values


def _columns(keys: Any, key: tuple[str, ...]) -> list[Any]:
    """Return one list or Arrow array per key column."""
    if isinstance(keys, str):
        text = brief(keys)
        raise Invalid(f"keys = {text}: write [{text}] for one key, or filter={text} in delete or scan for a condition")
    if isinstance(keys, pa.RecordBatch):
        keys = pa.Table.from_batches([keys])
    keys = repeatable(keys)
    if isinstance(keys, pa.Array | pa.ChunkedArray | np.ndarray):
        return _single(keys if not isinstance(keys, np.ndarray) else keys.tolist(), key)
    if isinstance(keys, pa.Table):
        return _of_table(keys, key)
    if isinstance(keys, Mapping) or (isinstance(keys, tuple) and len(key) > 1):
        keys = [keys]
    if isinstance(keys, bytes) or not isinstance(keys, Sequence | set | frozenset):
        keys = [keys]
    found = elements("keys", keys)
    if found is None:
        raise Invalid(f"keys = {shown(keys)}: write a key, or a list of keys")
    return _of_rows(found, key)


def _of_table(table: pa.Table, key: tuple[str, ...]) -> list[Any]:
    for name in table.column_names:
        if name not in key:
            raise Invalid(f"keys: column '{name:.200}' is not in the key{suggestion(name, key)}")
    for name in key:
        if name not in table.column_names:
            raise Invalid(f"keys: key column '{name}' is missing; give {', '.join(key)}")
    if len(table.column_names) != len(key):
        raise Invalid(f"keys: a column appears twice among {', '.join(table.column_names)}")
    return [table.column(name) for name in key]


def _of_rows(rows: list[Any], key: tuple[str, ...]) -> list[Any]:
    """Return the columns of a list of dicts, tuples or scalars."""
    if not rows:
        return [[] for _ in key]
    if all(isinstance(row, Mapping) for row in rows):
        odd = next((row for row in rows if set(row) != set(key)), None)
        if odd is not None:
            raise Invalid(f"keys: {brief(dict(odd))} does not name exactly the key columns {', '.join(key)}")
        return [[row[name] for row in rows] for name in key]
    if all(isinstance(row, tuple | list) for row in rows):
        odd = next((row for row in rows if len(row) != len(key)), None)
        if odd is not None:
            raise Invalid(f"keys: {brief(odd)} has {len(odd)} values; the key has {len(key)}: {', '.join(key)}")
        return [list(column) for column in zip(*rows, strict=True)]
    return _single(rows, key)


def _single(values: Any, key: tuple[str, ...]) -> list[Any]:
    if len(key) > 1:
        raise Invalid(f"keys: a key of this table has {len(key)} columns; give tuples of {', '.join(key)}")
    return [values]


def _typed(values: Any, field: pa.Field) -> pa.Array | pa.ChunkedArray:
    """Convert values to the key column's type, without any conversion that could give another key."""
    try:
        if isinstance(values, pa.Array | pa.ChunkedArray):
            check_encoding(pa.table([values], names=[field.name]))
            return _cast(values, field)
        if values and all(isinstance(value, str) for value in values):
            return cast_texts(pa.array(values, pa.string()), field.type)
        # Not pa.array alone: it converts 1.5 to the integer 1, and a number to a date.
        allowed = next((python for family, python in _FAMILIES if family(field.type)), ())
        refused = tuple(subclass for kind in allowed for subclass in _NEVER.get(kind, ()))
        for kind in set(map(type, values)) - {type(None)}:
            if not issubclass(kind, allowed) or issubclass(kind, refused):
                raise TypeError(f"a key of type {kind.__name__} does not fit; convert the keys")
        return pa.array(values, field.type)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        reason = first_line(error)
        raise Invalid(f"key column '{field.name}' is {field.type}: {reason:.300}") from None


def _cast(values: pa.Array | pa.ChunkedArray, field: pa.Field) -> pa.Array | pa.ChunkedArray:
    given = values.type.value_type if pa.types.is_dictionary(values.type) else values.type
    related = any(family(given) and family(field.type) for family, _ in _FAMILIES)
    if given != field.type and not related and not pa.types.is_null(given):
        raise TypeError(f"a key of type {given} does not fit; cast the keys")
    return values.cast(field.type)
