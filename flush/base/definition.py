"""Check the definition of a table: its key, its version column, its routing. Pure; runs before any write."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from memwal.flush.base.row_hash import is_hashed
from memwal.flush.base.setup import Setup
from memwal.flush.base.ttl import check_ttl
from memwal.memtable import InvalidRows, MemTable, check_indexes, row_schema
from memwal.memtable.index_spec import nearest
from memwal.wal import WalFormat


def check_definition(schema: pa.Schema, key: Sequence[str], setup: Setup) -> None:
    """Raise InvalidRows, with the reason, if a table with the columns `schema` cannot have `key` and `setup`."""
    if setup.buckets < 1:
        raise InvalidRows(f"regions.count = {setup.buckets}: a table has at least 1 region")
    rows = row_schema(schema, key)
    check_indexes(schema, setup.indexes)
    MemTable(rows, key, setup.indexes, 0)  # rejects columns that no memtable can index
    _check_version(schema, key, setup)
    if setup.ttl is not None:
        check_ttl(schema, setup.ttl)
    if setup.append_by is not None:
        _check_append(schema, key, setup.append_by, setup.wal_format)
    else:
        _check_key(schema, key, setup.wal_format)


def is_version_type(kind: pa.DataType) -> bool:
    """Return whether values of this type order rows by age: any two of them compare, and none is NaN."""
    return bool(pa.types.is_integer(kind) or pa.types.is_timestamp(kind) or pa.types.is_date(kind))


def _check_key(schema: pa.Schema, key: Sequence[str], wal_format: WalFormat) -> None:
    if not key:
        raise InvalidRows(
            "the table has no key: name at least one key column, or choose append_only (in Python key=()): a table "
            "without a key keeps every row"
        )
    first = schema.field(key[0])
    if wal_format == "arrow" and (pa.types.is_binary(first.type) or pa.types.is_large_binary(first.type)):
        raise InvalidRows(
            f"key column {first.name!r} has the type {first.type}, and Lance cannot shard by it with "
            "wal.format = 'arrow': put another column first in the key, or choose wal.format = 'lance'",
            column=first.name,
        )


def _check_version(schema: pa.Schema, key: Sequence[str], setup: Setup) -> None:
    name = setup.rules.version
    if not name:
        return
    if name not in schema.names:
        raise InvalidRows(f"version column {name!r} is not in the table{nearest(name, schema.names)}", column=name)
    if not key or name in key:
        what = "is part of the key" if key else "needs a key, and the table has none"
        raise InvalidRows(f"version column {name!r} {what}: name a column outside the key, or none", column=name)
    if not is_version_type(kind := schema.field(name).type):
        raise InvalidRows(
            f"version column {name!r} has the type {kind}: name a column of integers, timestamps or dates", column=name
        )
    if setup.rules.upsert == "insert":
        raise InvalidRows(
            f"version column {name!r} decides which row replaces another, and upsert = 'insert' never replaces one: "
            "drop one of the two",
            column=name,
        )


def _check_append(schema: pa.Schema, key: Sequence[str], by: Sequence[str], wal_format: WalFormat) -> None:
    if key:
        raise InvalidRows(
            f"the key {', '.join(key)} is given for a table whose rows are only appended: drop one of the two"
        )
    if wal_format == "arrow":
        raise InvalidRows(
            "wal.format = 'arrow' needs a key: Lance's own writers refuse a log once the table's metadata changed, and "
            "every commit that appends changes it; choose wal.format = 'lance'"
        )
    for place, name in enumerate(by):
        if name not in schema.names:
            raise InvalidRows(
                f"regions.by: column {name!r} is not in the table{nearest(name, schema.names)}", column=name
            )
        if name in by[:place]:
            raise InvalidRows(f"regions.by names {name!r} twice: name it once", column=name)
        if not is_hashed(kind := schema.field(name).type):
            raise InvalidRows(
                f"regions.by: column {name!r} is of type {kind}; name columns of numbers, text, bytes or times",
                column=name,
            )
