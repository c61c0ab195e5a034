"""The row schema, which every memtable batch, WAL entry and SST has, and the column types that a table can hold.

    base columns, in order        key columns as in the base table (not null), all others nullable; a table may have
                                  no key
    _tombstone: bool not null     true: this row deletes its key, every column outside the key is null

Source: "MemTable & WAL Specification" of the Lance documentation. All functions are pure.

Column types. A table can hold those that WAL entries, SSTs and the base table all return unchanged. The list names the
allowed types. Everything else is rejected before a row is acknowledged, at any depth: Lance accepts
more types than it returns unchanged, or can read at all. Measured with pylance 14.0.2:

    null                          Lance has no value to write; a list of them was unreadable after a flush
    map, decimal32, interval      Lance cannot write them in every file format
    view, dictionary, JSON        are returned as another type or another value
    a child that is not null      a null parent cannot be read, and a delete is a row of nulls
    binary of width 0             is written and cannot be read
    extension type in another     pyarrow cannot create an empty array of it
    list of fixed size            holds numbers, dates, times, bool, fixed-size binary, or lists of fixed size of these
    struct that begins with a list  cannot be read if two pages of a file differ in having null structs

Lance's projections parse dots and backticks in names.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np
import pyarrow as pa

from memwal.memtable.arrays import Mask
from memwal.memtable.conversion import convert
from memwal.memtable.errors import InvalidRows
from memwal.memtable.index_spec import is_key_type, nearest

TOMBSTONE = "_tombstone"
_FIXED_WIDTH = (
    pa.types.is_boolean,
    pa.types.is_integer,
    pa.types.is_floating,
    pa.types.is_decimal128,
    pa.types.is_decimal256,
    pa.types.is_date,
    pa.types.is_time,
    pa.types.is_timestamp,
    pa.types.is_duration,
)
_VARIABLE_WIDTH = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
_EXTENSIONS = ("arrow.uuid", "arrow.bool8")
_LANCES_LETTERS = (".", "`", "\x00")
LANCES_ROW_COLUMNS = ("_rowid", "_rowaddr", "_rowoffset", "_row_created_at_version", "_row_last_updated_at_version")
"""Names that Lance adds to rows by itself. It cannot scan a table with a column of this name."""
_LANCES_OWN = ("*", *LANCES_ROW_COLUMNS)
_REMEDY = "choose a number, text, binary, date, time, list or struct type"


def check_types(schema: pa.Schema) -> None:
    """Raise InvalidRows naming the first column whose name or type cannot be held."""
    for field in schema:
        if (reason := unsupported(field)) is not None:
            raise InvalidRows(reason, column=field.name)


def unsupported(field: pa.Field) -> str | None:
    """Return in one line, with the remedy, why a table cannot hold the column `field`; None if it can."""
    if field.name == TOMBSTONE:
        return f"column {TOMBSTONE!r} is reserved: rename it"
    if not field.name or field.name in _LANCES_OWN or any(letter in field.name for letter in _LANCES_LETTERS):
        return (
            f"column {field.name!r} has a name that Lance reads as something else: name it without dots, backticks "
            f"and NUL, and none of {', '.join(_LANCES_OWN)}"
        )
    return next(_problems(field.type, field.name), None)


def _problems(kind: pa.DataType, path: str, *, nested: bool = False) -> Iterator[str]:
    """Yield the properties that a column must not have, at any depth. `path`: of the value, such as 'doc.item'."""
    if isinstance(kind, pa.BaseExtensionType):
        allowed = kind.extension_name in _EXTENSIONS and not nested
    elif pa.types.is_fixed_size_list(kind):
        allowed = kind.list_size > 0 and _is_fixed_width(kind.value_type)
    else:
        allowed = _is_fixed_width(kind) or any(is_kind(kind) for is_kind in (*_VARIABLE_WIDTH, _is_list, _is_struct))
    if not allowed:
        yield f"column {path!r} has the type {kind}, which is not kept as it is: {_REMEDY}"
        return
    if _begins_with_list(kind):
        yield (
            f"column {path!r} is a struct whose first field is a list, which Lance cannot always read back: put "
            "another field first"
        )
    for child in _children(kind):
        inner = f"{path}.{child.name}"
        if not child.nullable:
            yield f"column {inner!r} is declared not null inside {path!r}: make it nullable"
        yield from _problems(child.type, inner, nested=True)


def _is_fixed_width(kind: pa.DataType) -> bool:
    if isinstance(kind, pa.BaseExtensionType):
        return False  # Lance writes no list of fixed size with an extension type
    if pa.types.is_fixed_size_binary(kind):
        return bool(kind.byte_width > 0)
    if pa.types.is_fixed_size_list(kind):
        return bool(kind.list_size > 0) and _is_fixed_width(kind.value_type)
    return any(is_kind(kind) for is_kind in _FIXED_WIDTH)


def _is_list(kind: pa.DataType) -> bool:
    """Return whether a type is a list of variable length."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _is_struct(kind: pa.DataType) -> bool:
    return bool(pa.types.is_struct(kind) and kind.num_fields)


def _begins_with_list(kind: pa.DataType) -> bool:
    return _is_struct(kind) and _is_list(kind.field(0).type)


def _children(kind: pa.DataType) -> Iterator[pa.Field]:
    if _is_list(kind) or pa.types.is_fixed_size_list(kind):
        yield kind.value_field
    elif _is_struct(kind):
        yield from (kind.field(at) for at in range(kind.num_fields))


PRIMARY_KEY = b"lance-schema:unenforced-primary-key"
PRIMARY_KEY_POSITION = b"lance-schema:unenforced-primary-key:position"
_KEY_TYPES = "an integer, bool, string or binary"


def key_columns(schema: pa.Schema) -> tuple[str, ...]:
    """Return the names of the key columns, from Lance's field metadata; () if the schema names none."""
    marked = [field for field in schema if (field.metadata or {}).get(PRIMARY_KEY) == b"true"]
    # Lance orders columns with a position by it, and others by the schema; sorted() is stable.
    return tuple(f.name for f in sorted(marked, key=lambda f: int(f.metadata.get(PRIMARY_KEY_POSITION, 0))))


def row_schema(base: pa.Schema, key: Sequence[str]) -> pa.Schema:
    """Return the row schema of a table with the base schema `base` and the key `key`, () if rows are only appended.

    Field metadata is kept, schema metadata is not. Raises InvalidRows if a key column is missing, repeated, nullable or
    of a type that cannot be a key, or if a column is called `_tombstone`.
    """
    _refuse_doubled(base.names, "schema")
    check_types(base)
    _refuse_doubled(key, "key")
    for name in key:
        _check_key_field(base, name)
    fields = [f if f.name in key else f.with_nullable(True) for f in base]
    return pa.schema([*fields, pa.field(TOMBSTONE, pa.bool_(), nullable=False)])


def required_columns(base: pa.Schema, key: Sequence[str]) -> tuple[str, ...]:
    """Return the columns outside the key that the base table declares not null; the row schema cannot express this."""
    return tuple(f.name for f in base if not f.nullable and f.name not in key)


def with_tombstone(
    rows: pa.Table, row_schema: pa.Schema, required: Collection[str] = (), deletes: Mask | None = None
) -> pa.Table:
    """Return a caller's rows in the row schema.

    Columns are reordered and cast, missing ones are null, and `_tombstone` is set to `deletes` (bool [rows]), or to
    false without it. `required`: columns outside the key that must be present and not null, except in rows that delete.
    Casts are lossless (see conversion.convert).
    Raises InvalidRows naming the column, and the row if a single one is at fault, for an unknown or repeated column, a
    missing key column, a null in a column that is not null, a wrong type, and a vector of another width.
    """
    wanted = [f for f in row_schema if f.name != TOMBSTONE]
    names = [f.name for f in wanted]
    _refuse_doubled(rows.column_names, "rows")
    for name in rows.column_names:
        if name not in names:
            raise InvalidRows(f"column {name!r:.200} is not in the table{nearest(name, names)}", column=name)
    columns = [_column(rows, f, required, deletes) for f in wanted]
    columns.append(pa.array(np.zeros(rows.num_rows, dtype=bool) if deletes is None else deletes))
    return pa.Table.from_arrays(columns, schema=row_schema)


def tombstones(keys: pa.Table, row_schema: pa.Schema) -> pa.Table:
    """Return one deleting row for each key: the key set, `_tombstone` true, everything else null.

    `keys` has exactly the key columns (those that are not nullable), in any order. Raises InvalidRows as with_tombstone
    does.
    """
    key = [f.name for f in row_schema if not f.nullable and f.name != TOMBSTONE]
    for name in keys.column_names:
        if name not in key:
            raise InvalidRows(
                f"column {name!r} is not part of the key: a delete takes only {', '.join(key)}", column=name
            )
    rows = with_tombstone(keys, row_schema)
    deleting = pa.array(np.ones(keys.num_rows, dtype=bool))
    return rows.set_column(rows.num_columns - 1, row_schema.field(TOMBSTONE), deleting)


def emptied(rows: pa.Table, kept: Collection[str], deletes: Mask) -> pa.Table:
    """Return `rows` with nulls in every column outside `kept` where `deletes` (bool [rows]) is set."""
    rest = [name for name in rows.column_names if name not in kept]
    # Not if_else: it does not support every type.
    nulled = rows.select(rest).take(pa.array(np.arange(rows.num_rows), mask=deletes))
    columns = [nulled.column(name) if name in rest else rows.column(name) for name in rows.column_names]
    fields = [field.with_nullable(True) if field.name in rest else field for field in rows.schema]
    return pa.Table.from_arrays(columns, schema=pa.schema(fields, metadata=rows.schema.metadata))


def _column(
    rows: pa.Table, field: pa.Field, required: Collection[str], deletes: Mask | None
) -> pa.ChunkedArray | pa.Array:
    """Return one column in the type of `field`; all null if the caller omitted it."""
    must = not field.nullable or (field.name in required and (deletes is None or not deletes.all()))
    if field.name not in rows.column_names:
        if must:
            what = "key column" if not field.nullable else "required column"
            raise InvalidRows(f"{what} {field.name!r} is missing: add it to the rows", column=field.name)
        return pa.nulls(rows.num_rows, field.type)
    column = convert(rows.column(field.name), field)
    if must and column.null_count:
        null = column.is_null().to_numpy(zero_copy_only=False)
        rows_of = np.flatnonzero(null & ~deletes if field.nullable and deletes is not None else null)
        if len(rows_of):
            row, what = int(rows_of[0]), "column" if field.nullable else "key column"
            reason = f"{what} {field.name!r} is null in row {row}: give it a value"
            raise InvalidRows(reason, column=field.name, row=row)
    return column


def _refuse_doubled(names: Sequence[str], where: str) -> None:
    doubled = [name for name in dict.fromkeys(names) if list(names).count(name) > 1]
    if doubled:
        raise InvalidRows(f"column {doubled[0]!r} appears twice in the {where}: keep one", column=doubled[0])


def _check_key_field(base: pa.Schema, name: str) -> None:
    if name not in base.names:
        raise InvalidRows(f"key column {name!r:.200} is not in the table{nearest(name, base.names)}", column=name)
    field = base.field(name)
    if not is_key_type(field.type):
        raise InvalidRows(f"key column {name!r} has the type {field.type}: a key must be {_KEY_TYPES}", column=name)
    if '"' in name:
        raise InvalidRows(
            f"key column {name!r} has a quotation mark in its name, which Lance's merge reads as its end: rename it",
            column=name,
        )
    if field.nullable:
        raise InvalidRows(f"key column {name!r} is nullable: declare it not null", column=name)
