"""Lance's field ids, which identify a column whatever its present name.

A table numbers its fields from 0, nested fields after their parent; a table that dropped or added columns has gaps. WAL
entries and SSTs carry the base table's ids, so that an old row is never matched with another column. `_tombstone` comes
last, with the highest id plus one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import lance
import pyarrow as pa

from memwal.wal.codec.columns import FIELD_ID


def row_field_ids(dataset: lance.LanceDataset, columns: Collection[str]) -> tuple[int, ...]:
    """Return the ids of all fields of an SST row: those of the base's `columns`, depth first, then `_tombstone`."""
    fields = dataset.lance_schema.fields()
    ids = tuple(_ids([field for field in fields if field.name() in columns]))
    return (*ids, max(_ids(fields)) + 1)


def field_id(dataset: lance.LanceDataset, column: str) -> int:
    """Return the id of a top-level column."""
    (number,) = (int(field.id()) for field in dataset.lance_schema.fields() if field.name() == column)
    return number


def column_ids(dataset: lance.LanceDataset) -> dict[str, int]:
    """Return the id of each top-level column."""
    return {field.name(): int(field.id()) for field in dataset.lance_schema.fields()}


def first_ids(schema: pa.Schema) -> dict[str, int]:
    """Return the id that Lance gives to each top-level column of a table that it creates with `schema`."""
    ids, free = {}, 0
    for field in schema:
        ids[field.name] = free
        free += _fields_of(field.type)
    return ids


def _fields_of(kind: pa.DataType) -> int:
    """Return the number of Lance fields of a column of this type, itself included."""
    if pa.types.is_struct(kind):
        return 1 + sum(_fields_of(kind.field(at).type) for at in range(kind.num_fields))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return 1 + _fields_of(kind.value_type)
    return 1


def with_field_ids(schema: pa.Schema, dataset: lance.LanceDataset) -> pa.Schema:
    """Return `schema` (base columns, then any others) with each base field's id in its metadata, also nested ones."""
    described = {field.name(): field for field in dataset.lance_schema.fields()}
    fields = [_marked(field, described[field.name]) if field.name in described else field for field in schema]
    return pa.schema(fields, metadata=schema.metadata)


def _marked(field: pa.Field, described: Any) -> pa.Field:
    kind, children = field.type, described.children()
    # In Lance the values of a fixed-size list are not a separate field.
    if children and pa.types.is_struct(kind):
        pairs = zip((kind.field(at) for at in range(kind.num_fields)), children, strict=True)
        kind = pa.struct([_marked(child, of_child) for child, of_child in pairs])
    elif children and (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        make = pa.list_ if pa.types.is_list(kind) else pa.large_list
        kind = make(_marked(kind.value_field, children[0]))
    return field.with_type(kind).with_metadata({**(field.metadata or {}), FIELD_ID: str(described.id()).encode()})


def _ids(fields: Sequence[Any]) -> Iterator[int]:
    for field in fields:
        yield int(field.id())
        yield from _ids(field.children())
