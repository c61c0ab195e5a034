"""memwal's side: the embedded table with one region, so that one writer stands beside one."""

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
"""Entries in the layout that Lance's own writers read and write."""
HOLD: Mapping[str, Mapping[str, Any]] = {"memtable": {"age_max": "1h"}, "commit": {"interval": "0s"}}
"""Keeps rows at the level they were put to for as long as queries are measured."""


class MemwalTable:
    """An embedded memwal table of one region. Thread safety. `put` from any thread; the rest from one."""

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
        """Create the table, and commit the rows of `base` into it. `durable`: of every later put."""
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
        """Returns once memwal has acked."""
        self.table.put(rows, durable=self._durable)

    def rows(self) -> pa.Table:
        """Every row there is, base, SSTs and memtable."""
        return self.table.scan().read_all()

    def flush(self) -> None:
        """Memtable to SST."""
        self.table.flush()

    def close(self) -> None:
        """Release the region."""
        self.table.close()


def resolved(settings: Mapping[str, Mapping[str, Any]], **more: Any) -> dict[str, Any]:
    """The settings that decide how rows are written, defaults filled in, in seconds and bytes."""
    loaded = load(settings, os.environ, {"table": {"uri": "unused"}})
    sections = {"wal": loaded.wal, "memtable": loaded.memtable, "flush": loaded.flush, "commit": loaded.commit}
    return {**{name: section.model_dump(mode="json") for name, section in sections.items()}, **more}
