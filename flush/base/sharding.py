"""Compute the bucket, and so the region, of a row: a pure function of its key, or of the row in a table without a key.

`Routing` holds everything that the function depends on. A client that never reads storage gets it from a daemon and
routes alike.

- A key of one column: the bucket hash of Lance's MemWAL sharding. Lance itself evaluates it, so other users of the
  layout compute the same regions. Binary columns, which Lance's hash does not accept: SipHash-1-3.
- A key of several columns: `flush.base.row_hash` of all of them, by field id. If a sharding spec is published (arrow
  format), and in tables without `memwal:routed_by`: the hash above, of the first key column.
- No key: `flush.base.row_hash` of the columns in `regions.by`, or of all columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple
from uuid import UUID

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from lance.mem_wal import ShardingField, ShardingSpec, evaluate_sharding_spec
from lance.schema import LanceSchema

from memwal.flush.base.row_hash import row_hashes
from memwal.flush.base.siphash import siphash13
from memwal.flush.errors import UnsupportedTable
from memwal.wal import bucket_region
from memwal.wal.layout import UNSHARDED_REGION

Buckets = npt.NDArray[np.int32]
_ROWS_AT_ONCE = 1 << 16


class Routing(NamedTuple):
    """Everything that determines the bucket of a row, serialisable as JSON."""

    buckets: int
    column: str | None
    """The first key column if it alone is hashed, else None."""
    by: tuple[tuple[int, str], ...] = ()
    """Otherwise: field id and present name of each hashed column."""

    @staticmethod
    def by_columns(ids: Sequence[int], columns: Mapping[str, int], buckets: int) -> Routing:
        """Return the routing by the columns with the field ids `ids`; ids missing in `columns` count as null."""
        names = {number: name for name, number in columns.items()}
        return Routing(buckets, None, tuple((number, names[number]) for number in ids if number in names))

    @staticmethod
    def parse(described: Mapping[str, Any]) -> Routing:
        """Return the routing encoded by `_asdict` and JSON."""
        by = tuple((int(number), str(name)) for number, name in described["by"])
        return Routing(int(described["buckets"]), described["column"], by)

    def hash(self, schema: pa.Schema) -> BucketHash | RowHash:
        """Return the bucket function for rows with the columns of `schema`."""
        if self.column is None:
            return RowHash(self.by, self.buckets)
        return BucketHash(schema.field(self.column), self.buckets)


class BucketHash:
    """Maps rows to buckets 0 .. buckets-1 by one column. Thread safety: any thread; immutable."""

    def __init__(self, field: pa.Field, buckets: int) -> None:
        """`field`: a column that is never null."""
        self.columns: tuple[str, ...] = (field.name,)
        """The hashed columns."""
        self._column = field.name
        self._buckets = buckets
        # Only the column itself: its values alone are hashed, not its id and not other columns.
        self._schema: Any = LanceSchema.from_pyarrow(pa.schema([pa.field(field.name, field.type, nullable=False)]))
        self._binary = pa.types.is_binary(field.type) or pa.types.is_large_binary(field.type)
        (source,) = (column.id() for column in self._schema.fields() if column.name() == field.name)
        transform = ShardingField("bucket", [source], "bucket", None, "int32", {"num_buckets": str(buckets)})
        # Otherwise Lance makes the dict at every call: half the time for one key.
        self._spec: Mapping[str, Any] = asdict(ShardingSpec(1, [transform]))

    def __call__(self, rows: pa.Table | pa.RecordBatch) -> Buckets:
        """Return the bucket of every row, int32 in row order."""
        if not rows.num_rows or self._buckets == 1:
            return np.zeros(rows.num_rows, dtype=np.int32)
        column = rows.column(self._column)
        chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
        return np.concatenate([self._of(chunk) for chunk in chunks if len(chunk)])

    def _of(self, values: pa.Array) -> Buckets:
        if self._binary:
            return _scaled(siphash13(values.cast(pa.binary())), self._buckets)
        batch = pa.RecordBatch.from_arrays([values], names=[self._column])
        evaluated = evaluate_sharding_spec(batch, self._spec, self._schema)
        return np.asarray(evaluated.column(0).to_numpy(zero_copy_only=False), dtype=np.int32)


class RowHash:
    """Maps rows to buckets 0 .. buckets-1 by a hash of several columns. Thread safety: any thread; immutable."""

    def __init__(self, by: Sequence[tuple[int, str]], buckets: int) -> None:
        """`by`: field id and name of each hashed column."""
        self._fields, self._buckets = by, buckets

    @property
    def columns(self) -> tuple[str, ...]:
        """The hashed columns by their present names."""
        return tuple(name for _, name in self._fields)

    def __call__(self, rows: pa.Table | pa.RecordBatch) -> Buckets:
        """Return the bucket of every row, int32 in row order. A column missing in `rows` counts as null."""
        buckets = np.zeros(rows.num_rows, dtype=np.int32)
        if self._buckets == 1 or not rows.num_rows:
            return buckets
        fields = [(number, name) for number, name in self._fields if name in rows.schema.names]
        named = rows.select([name for _, name in fields])
        batches, at = (named.to_batches(_ROWS_AT_ONCE) if isinstance(named, pa.Table) else _parts(named)), 0
        for batch in batches:
            columns = zip((number for number, _ in fields), batch.columns, strict=True)
            buckets[at : at + batch.num_rows] = _scaled(row_hashes(columns, batch.num_rows), self._buckets)
            at += batch.num_rows
        return buckets


def _parts(batch: pa.RecordBatch) -> list[pa.RecordBatch]:
    return [batch.slice(at, _ROWS_AT_ONCE) for at in range(0, batch.num_rows, _ROWS_AT_ONCE)]


def _scaled(hashes: npt.NDArray[np.uint64], buckets: int) -> Buckets:
    """Map hashes to 0 .. buckets-1 by their upper half."""
    return (((hashes >> np.uint64(32)) * np.uint64(buckets)) >> np.uint64(32)).astype(np.int32)


Regions = tuple[UUID, ...]
"""Ids of a table's regions: bucket n at index n."""


def bucket_regions(buckets: int) -> Regions:
    """Return the regions of `buckets` buckets of the first key column."""
    return tuple(map(bucket_region, range(buckets)))


def published_regions(uri: str, details: Mapping[str, Any], key: str, key_field_id: int) -> Regions:
    """Return the regions of the table at `uri` by the sharding spec in the `details` of its MemWAL index.

    `key`: its first key column, with the field id `key_field_id`. Raises UnsupportedTable unless rows are unsharded or
    sharded by buckets of that column.
    """
    specs = details["sharding_specs"]
    if len(specs) != 1 or len(specs[0]["fields"]) != 1:
        raise _unsupported(uri, f"has {len(specs)} sharding specs", key)
    (field,) = specs[0]["fields"]
    if field["transform"] == "unsharded":
        return (UNSHARDED_REGION,)
    if field["transform"] != "bucket":
        raise _unsupported(uri, f"is sharded by {field['transform'] or 'an expression'}", key)
    if field["source_ids"] != [key_field_id]:
        raise _unsupported(uri, f"is sharded by the columns with the field ids {field['source_ids']}", key)
    return bucket_regions(int(field["parameters"]["num_buckets"]))


def _unsupported(uri: str, what: str, key: str) -> UnsupportedTable:
    return UnsupportedTable(
        f"{uri}: its MemWAL was initialised by another program and {what}; memwal needs buckets of the first key "
        f"column {key!r}, or no sharding: copy the rows into a new table"
    )
