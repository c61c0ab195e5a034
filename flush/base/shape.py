"""The shape of a table: its columns with their field ids, and its indexes. Other programs may change it at any time.

Under MemWAL, Lance allows a column to be added (nullable, all null), dropped, or renamed. Uncommitted rows have the
shape that the table had when they were put. Their values are matched by field id: a renamed column keeps its values, an
added column is null in them, and a dropped column is omitted.

A field id identifies a column whatever its present name. A table numbers its fields from 0, nested fields after their
parent; a table that dropped or added columns has gaps. WAL entries and SSTs carry the base table's ids, so that an old
row is never matched with another column. `_tombstone` comes last, with the highest id plus one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import lance
import pyarrow as pa

from memwal.memtable import IndexSpec, InvalidRows, check_indexes, row_schema
from memwal.wal.codec.columns import FIELD_ID, field_ids


@dataclass(frozen=True, eq=False)
class Shape:
    """Columns and indexes of a table, as of one of its versions.

    Thread safety. Immutable. Two shapes are equal if rows of one are valid rows of the other without a change.
    """

    rows: pa.Schema
    """The row schema, every base field with its id; with the base table's schema metadata."""
    indexes: tuple[IndexSpec, ...]
    unsupported: Mapping[str, str] = field(default_factory=dict)
    """Columns that are missing in `rows` because memwal cannot hold them, with the reason. While any exist, puts are
    rejected.
    """

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Shape):
            return NotImplemented
        same = self.indexes == other.indexes and self.unsupported == other.unsupported
        return same and bool(self.rows.equals(other.rows, check_metadata=True))

    __hash__ = None  # type: ignore[assignment]

    @property
    def ids(self) -> dict[str, int]:
        """Field id of each base column."""
        return field_ids(self.rows)

    def gone(self, newer: Shape) -> dict[str, str | None]:
        """Return the columns of this shape that `newer` lacks -> their new name; None if dropped."""
        now = {number: name for name, number in newer.ids.items()}
        newer_names = set(newer.rows.names)
        return {name: now.get(number) for name, number in self.ids.items() if name not in newer_names}


def shape_of(
    dataset: lance.LanceDataset,
    schema: pa.Schema,
    key: Sequence[str],
    indexes: Sequence[IndexSpec],
    unsupported: Mapping[str, str],
) -> Shape:
    """Return the shape of the open version of a table with the key `key`. `schema`: without `unsupported` columns."""
    rows = row_schema(with_field_ids(schema, dataset), key)
    return Shape(rows.with_metadata(dataset.schema.metadata), tuple(indexes), unsupported)


def present_indexes(
    dataset: lance.LanceDataset, schema: pa.Schema, declared: Sequence[IndexSpec], ids: Mapping[str, int]
) -> tuple[IndexSpec, ...]:
    """Return the indexes `declared` at the table's set-up, each with the present name of its column.

    `schema`: the columns that memwal holds. `ids`: field ids of their columns at the set-up. A dropped column has lost
    its index. A renamed column keeps it under the index's old name; an index that is not built yet will be built under
    that name too.
    """
    names = schema.names
    if all(spec.column in names for spec in declared):
        return tuple(declared)
    built = {index.name: list(index.field_names) for index in dataset.describe_indices()}
    now = {number: name for name, number in column_ids(dataset).items()}
    present = []
    for spec in declared:
        if spec.column in names:
            present.append(spec)
            continue
        columns = built.get(spec.name) or [now[number] for number in (ids.get(spec.column, -1),) if number in now]
        if len(columns) == 1 and _fits(new := replace(spec, column=columns[0], called=spec.name), schema):
            present.append(new)
    return tuple(present)


def _fits(spec: IndexSpec, schema: pa.Schema) -> bool:
    """Return whether the column can have that index: Lance may have reused its id for a column of any type."""
    try:
        check_indexes(schema, [spec])
    except InvalidRows:
        return False
    return True


def version_without(dataset: lance.LanceDataset, column: str, number: int, after: int) -> int:
    """Return the first version after `after`, up to that of `dataset`, where field `number` is not named `column`.

    `after`: a version with that field name. Cleaned-up versions are unknown: the oldest remaining version counts
    instead.
    """

    def lacks(version: int) -> bool:
        try:
            fields = dataset.checkout_version(version).lance_schema.fields()
        except (OSError, ValueError):
            return False
        return all((field.name(), field.id()) != (column, number) for field in fields)

    last = int(dataset.version)
    return min(last, after + 1 + bisect_left(range(after + 1, last), True, key=lacks))


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
    for column in schema:
        ids[column.name] = free
        free += _fields_of(column.type)
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
    for each in fields:
        yield int(each.id())
        yield from _ids(each.children())
