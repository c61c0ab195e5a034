"""Memtables in both index modes, without a region."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from memwal.memtable import Checked, MemTable


class IndexedAtOnce(MemTable):
    """A memtable as in a region with `memtable.index_mode` "sync": a put adds rows to all indexes."""

    def apply(self, rows: pa.Table | Checked) -> None:
        super().apply(rows)
        while self.index_step():
            pass


def memtable_in(mode: str, *given: Any, **options: Any) -> MemTable:
    """Return `MemTable(*given, **options)` for the mode; in "async" only the test takes index steps."""
    return (IndexedAtOnce if mode == "sync" else MemTable)(*given, **options)
