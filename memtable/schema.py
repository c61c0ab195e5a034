"""The row schema, which every memtable batch, WAL entry and SST has.

    base columns, in order        key columns as in the base table (not null), all others nullable; a table may have
                                  no key
    _tombstone: bool not null     true: this row deletes its key, every column outside the key is null

Source: "MemTable & WAL Specification" of the Lance documentation. All functions are pure.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import pyarrow as pa

from memwal.memtable.arrays import Mask
from memwal.memtable.column_types import TOMBSTONE, check_types
from memwal.memtable.conversion import convert
from memwal.memtable.errors import InvalidRows
from memwal.memtable.index_spec import nearest

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


def is_key_type(kind: pa.DataType) -> bool:
    """Return whether a column of this type may be part of a key."""
    types = pa.types
    return bool(
        types.is_integer(kind)
        or types.is_boolean(kind)
        or types.is_string(kind)
        or types.is_large_string(kind)
        or types.is_binary(kind)
        or types.is_large_binary(kind)
    )


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
