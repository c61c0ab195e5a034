"""Memtables in both index modes, without a region around them."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from memwal.memtable import Checked, MemTable


class IndexedAtOnce(MemTable):
    """What a region makes of a memtable where `memtable.index_mode` is "sync": rows are in all indexes when put."""

    def apply(self, rows: pa.Table | Checked) -> None:
        super().apply(rows)
        while self.index_step():
            pass


def memtable_in(mode: str, *given: Any, **options: Any) -> MemTable:
    """`MemTable(*given, **options)` for the mode; in "async" nobody takes a step unless the test does."""
    return (IndexedAtOnce if mode == "sync" else MemTable)(*given, **options)
