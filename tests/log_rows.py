"""Rows of a small log, for tests of the log alone: a key and the tombstone; and a store whose reads fail."""

from __future__ import annotations

import pyarrow as pa

from memwal.wal import LanceCodec
from tests.support.memory_store import MemoryStore

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("_tombstone", pa.bool_(), nullable=False)])
CODEC = LanceCodec(SCHEMA)


def rows(*ids: int) -> pa.Table:
    """Rows of SCHEMA."""
    return pa.table({"id": ids, "_tombstone": [False] * len(ids)}, schema=SCHEMA)


class FailingReads(MemoryStore):
    """Calls `fail`, which may raise, before each read."""

    def fail(self) -> None:
        """Do nothing; tests replace it."""

    def get(self, key: str) -> bytes | None:
        self.fail()
        return super().get(key)

    def exists(self, key: str) -> bool:
        self.fail()
        return super().exists(key)

    def list(self, prefix: str) -> list[str]:
        self.fail()
        return super().list(prefix)
