"""memwal's side: an embedded table with one region, because Lance's side has one shard with one writer."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

import memwal
from memwal.ingest.settings.load import load

DEFAULT: Mapping[str, Mapping[str, Any]] = {}
ARROW: Mapping[str, Mapping[str, Any]] = {"wal": {"format": "arrow"}}
"""WAL entries in the layout that Lance's own writers read and write."""
HOLD: Mapping[str, Mapping[str, Any]] = {"memtable": {"age_max": "1h"}, "commit": {"interval": "0s"}}
"""Keeps rows at the level that they were written to while queries are measured."""


class MemwalTable:
    """An embedded memwal table with one region.

    Thread safety. `put` from any thread; everything else from one thread.
    """

    def __init__(
        self,
        at: Path,
        base: pa.Table,
        key: str,
        indexes: Mapping[str, Mapping[str, Any]],
        *,
        durable: bool = True,
        settings: Mapping[str, Mapping[str, Any]] = DEFAULT,
    ) -> None:
        """Create the table and commit the rows of `base` into it. `durable`: applies to every later put."""
        self._durable = durable
        self.table = memwal.open(
            at / "table.lance",
            schema=base.schema,
            key=key,
            regions=1,
            indexes={column: dict(index) for column, index in indexes.items()},
            settings=settings,
        )
        if base.num_rows:
            self.table.put(base)
            self.table.flush()
            self.table.commit()

    def put(self, rows: pa.Table) -> None:
        """Put rows; returns when memwal has acknowledged them."""
        self.table.put(rows, durable=self._durable)

    def rows(self) -> pa.Table:
        """Return all rows of the base table, SSTs and memtable."""
        return self.table.scan().read_all()

    def flush(self) -> None:
        """Flush the memtable to an SST."""
        self.table.flush()

    def close(self) -> None:
        """Close the table and release its region."""
        self.table.close()


def resolved(settings: Mapping[str, Mapping[str, Any]], **more: Any) -> dict[str, Any]:
    """Return the resolved settings that control writes, in seconds and bytes."""
    loaded = load(settings, os.environ, {"table": {"uri": "unused"}})
    sections = {"wal": loaded.wal, "memtable": loaded.memtable, "flush": loaded.flush, "commit": loaded.commit}
    return {**{name: section.model_dump(mode="json") for name, section in sections.items()}, **more}
