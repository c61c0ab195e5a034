"""Rows of a small log, for tests of the log alone: a key and the tombstone."""

from __future__ import annotations

import pyarrow as pa

from memwal.wal import LanceCodec

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("_tombstone", pa.bool_(), nullable=False)])
CODEC = LanceCodec(SCHEMA)


def rows(*ids: int) -> pa.Table:
    """Rows of SCHEMA."""
    return pa.table({"id": ids, "_tombstone": [False] * len(ids)}, schema=SCHEMA)
