"""The shape of a table: its columns with their field ids, and its indexes. Somebody may change it at any time.

Under MemWAL Lance lets a column be added (nullable, all null), dropped, or renamed. Rows on their way have the shape
that the table had when they were put. What they hold is found by field id, so a renamed column keeps its values, one
that was added is null in them, and one that was dropped is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import lance
import pyarrow as pa

from memwal.flush.base.field_ids import column_ids, with_field_ids
from memwal.memtable import IndexSpec, InvalidRows, check_indexes, row_schema
from memwal.wal.codec.columns import field_ids


@dataclass(frozen=True, eq=False)
class Shape:
    """What the rows of a table look like from one of its versions on.

    Thread safety. Immutable. Two shapes are equal where rows of one need nothing done to be rows of the other.
    """

    rows: pa.Schema
    """The row schema, every base field with its id; schema metadata is the base table's."""
    indexes: tuple[IndexSpec, ...]

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Shape):
            return NotImplemented
        return self.indexes == other.indexes and bool(self.rows.equals(other.rows, check_metadata=True))

    __hash__ = None  # type: ignore[assignment]

    @property
    def ids(self) -> dict[str, int]:
        """Field id of each base column."""
        return field_ids(self.rows)

    def gone(self, newer: Shape) -> dict[str, str | None]:
        """By column of this shape that `newer` does not have: what it is called there, None where it was dropped."""
        now = {number: name for name, number in newer.ids.items()}
        there = set(newer.rows.names)
        return {name: now.get(number) for name, number in self.ids.items() if name not in there}


def shape_of(dataset: lance.LanceDataset, key: Sequence[str], indexes: Sequence[IndexSpec]) -> Shape:
    """The shape of one version of a table with the key `key`."""
    schema = with_field_ids(pa.schema(list(dataset.schema)), dataset)
    return Shape(row_schema(schema, key).with_metadata(dataset.schema.metadata), tuple(indexes))


def present_indexes(
    dataset: lance.LanceDataset, declared: Sequence[IndexSpec], ids: Mapping[str, int]
) -> tuple[IndexSpec, ...]:
    """The indexes `declared` at the table's set-up, each on the column that it is on by now.

    `ids`: field ids of their columns then. A column that was dropped took its index with it. One that was renamed kept
    it, under the index's old name; an index that is not built yet is built under that too.
    """
    names = dataset.schema.names
    if all(spec.column in names for spec in declared):
        return tuple(declared)
    built = {index.name: list(index.field_names) for index in dataset.describe_indices()}
    now = {number: name for name, number in column_ids(dataset).items()}
    found = []
    for spec in declared:
        if spec.column in names:
            found.append(spec)
            continue
        columns = built.get(spec.name) or [now[number] for number in (ids.get(spec.column, -1),) if number in now]
        if len(columns) == 1 and _fits(new := replace(spec, column=columns[0], called=spec.name), dataset.schema):
            found.append(new)
    return tuple(found)


def _fits(spec: IndexSpec, schema: pa.Schema) -> bool:
    """Whether the column can have that index: an id that Lance gave anew may be of a column of any type."""
    try:
        check_indexes(schema, [spec])
    except InvalidRows:
        return False
    return True


def version_without(dataset: lance.LanceDataset, column: str, number: int, after: int) -> int:
    """The first version behind `after`, up to that of `dataset`, in which field `number` is not called `column`.

    `after`: a version that had it. Of versions that are cleaned up nothing is known: the oldest that is left counts.
    """
    low, high = after, dataset.version
    while high - low > 1:
        middle = (low + high) // 2
        try:
            fields = dataset.checkout_version(middle).lance_schema.fields()
        except (OSError, ValueError):
            low = middle
            continue
        there = any((field.name(), field.id()) == (column, number) for field in fields)
        low, high = (middle, high) if there else (low, middle)
    return int(high)
