"""Which bucket, and so which region, a row belongs to: a pure function of its key.

The bucket hash of Lance's MemWAL sharding over the *first* key column; Lance itself evaluates it, so that the
regions are those its other users of the layout compute. Binary columns, which Lance's hash does not take, go
by SipHash-1-3.
"""

from __future__ import annotations

from typing import Any

import lance
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from lance.mem_wal import ShardingField, ShardingSpec, evaluate_sharding_spec

from flush.siphash import siphash13

Buckets = npt.NDArray[np.int32]


class BucketHash:
    """Rows to buckets 0 .. buckets-1 by one column. Thread safety: any thread; immutable."""

    def __init__(self, dataset: lance.LanceDataset, column: str, buckets: int) -> None:
        """`column` is a column of `dataset` whose rows are never null in it."""
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
        hashes = siphash13(values.cast(pa.binary())) >> np.uint64(32)
        return ((hashes * np.uint64(self._buckets)) >> np.uint64(32)).astype(np.int32)


def _bucket_spec(schema: Any, column: str, buckets: int) -> ShardingSpec:
    (source,) = (field.id() for field in schema.fields() if field.name() == column)
    transform = ShardingField("bucket", [source], "bucket", None, "int32", {"num_buckets": str(buckets)})
    return ShardingSpec(1, [transform])
