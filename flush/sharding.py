"""Which bucket, and so which region, a row belongs to: a pure function of its key, or of the row where it has none.

The bucket hash of Lance's MemWAL sharding over the *first* key column; Lance itself evaluates it, so that the
regions are those its other users of the layout compute. Binary columns, which Lance's hash does not take, go
by SipHash-1-3. Rows without a key go by `flush.row_hash`, of the columns that `regions.by` names or of them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lance
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from lance.mem_wal import ShardingField, ShardingSpec, evaluate_sharding_spec

from flush.field_ids import column_ids
from flush.row_hash import row_hashes
from flush.siphash import siphash13

Buckets = npt.NDArray[np.int32]
_ROWS_AT_ONCE = 1 << 16


class BucketHash:
    """Rows to buckets 0 .. buckets-1 by one column. Thread safety: any thread; immutable."""

    def __init__(self, dataset: lance.LanceDataset, column: str, buckets: int) -> None:
        """`column` is a column of `dataset` whose rows are never null in it."""
        self.columns, self.whole = (column,), True
        """As of `RowHash`."""
        self._column = column
        self._buckets = buckets
        self._schema: Any = dataset.lance_schema
        kind = dataset.schema.field(column).type
        self._binary = pa.types.is_binary(kind) or pa.types.is_large_binary(kind)
        self._spec = _bucket_spec(self._schema, column, buckets)

    def __call__(self, rows: pa.Table | pa.RecordBatch) -> Buckets:
        """Bucket of every row, int32 in row order."""
        if not rows.num_rows or self._buckets == 1:
            return np.zeros(rows.num_rows, dtype=np.int32)
        column = rows.column(self._column)
        chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
        evaluate = self._by_siphash if self._binary else self._by_lance
        return np.concatenate([evaluate(chunk) for chunk in chunks if len(chunk)])

    def _by_lance(self, values: pa.Array) -> Buckets:
        batch = pa.RecordBatch.from_arrays([values], names=[self._column])
        evaluated = evaluate_sharding_spec(batch, self._spec, self._schema)
        return np.asarray(evaluated.column(0).to_numpy(zero_copy_only=False), dtype=np.int32)

    def _by_siphash(self, values: pa.Array) -> Buckets:
        return _scaled(siphash13(values.cast(pa.binary())), self._buckets)


class RowHash:
    """Rows to buckets 0 .. buckets-1 by several columns. Thread safety: any thread; immutable."""

    def __init__(self, dataset: lance.LanceDataset, ids: Sequence[int], buckets: int) -> None:
        """`ids`: field ids of columns; those that `dataset` has no more count as null."""
        names = {number: name for name, number in column_ids(dataset).items()}
        self._fields = [(number, names[number]) for number in ids if number in names]
        self._buckets = buckets
        self.whole = len(self._fields) == len(ids)
        """Whether all columns are still there; else a row may have been sent elsewhere while they were."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that count, as they are called now."""
        return tuple(name for _, name in self._fields)

    def __call__(self, rows: pa.Table | pa.RecordBatch) -> Buckets:
        """Bucket of every row, int32 in row order. A column that `rows` lacks counts as null."""
        found = np.zeros(rows.num_rows, dtype=np.int32)
        if self._buckets == 1 or not rows.num_rows:
            return found
        fields = [(number, name) for number, name in self._fields if name in rows.schema.names]
        named = rows.select([name for _, name in fields])
        batches, at = (named.to_batches(_ROWS_AT_ONCE) if isinstance(named, pa.Table) else _parts(named)), 0
        for batch in batches:
            columns = zip((number for number, _ in fields), batch.columns, strict=True)
            found[at : at + batch.num_rows] = _scaled(row_hashes(columns, batch.num_rows), self._buckets)
            at += batch.num_rows
        return found


def _parts(batch: pa.RecordBatch) -> list[pa.RecordBatch]:
    return [batch.slice(at, _ROWS_AT_ONCE) for at in range(0, batch.num_rows, _ROWS_AT_ONCE)]


def _scaled(hashes: npt.NDArray[np.uint64], buckets: int) -> Buckets:
    """Hashes to 0 .. buckets-1, by their upper half."""
    return (((hashes >> np.uint64(32)) * np.uint64(buckets)) >> np.uint64(32)).astype(np.int32)


def _bucket_spec(schema: Any, column: str, buckets: int) -> ShardingSpec:
    (source,) = (field.id() for field in schema.fields() if field.name() == column)
    transform = ShardingField("bucket", [source], "bucket", None, "int32", {"num_buckets": str(buckets)})
    return ShardingSpec(1, [transform])
