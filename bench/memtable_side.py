"""The memtable alone: no WAL, no daemon, nothing on storage.

Its peers do more work, above all ShardWriter's log, so these benchmarks show the cost of the memtable, not the speed of
memwal; the benchmarks of the put path show that.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from memwal.ingest.engine.region.context import IndexMode
from memwal.ingest.engine.region.writer import REST, WORK
from memwal.memtable import IndexSpec, MemTable, Snapshot, VectorModel, row_schema, with_tombstone


@dataclass(frozen=True)
class Shape:
    """Schema, key, indexes and index mode of a memtable."""

    schema: pa.Schema
    key: Sequence[str]
    indexes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    mode: IndexMode = "async"

    @property
    def row_schema(self) -> pa.Schema:
        """Return the schema of the rows that the memtable takes."""
        return row_schema(self.schema, list(self.key))

    def specs(self) -> list[IndexSpec]:
        """Return the indexes in the form that MemTable takes."""
        return [
            IndexSpec(column, index["type"], {name: value for name, value in index.items() if name != "type"})
            for column, index in self.indexes.items()
        ]

    def settings(self) -> dict[str, Any]:
        """Return the settings for the result file."""
        return {"index_mode": self.mode, "indexes": {column: dict(index) for column, index in self.indexes.items()}}


class BareMemTable:
    """A memtable with, in async mode, the indexing thread that a region has.

    Thread safety. One thread.
    """

    def __init__(
        self, shape: Shape, models: Mapping[str, VectorModel] | None = None, *, converting: bool = False
    ) -> None:
        """Create the memtable. `converting`: puts take rows of the base schema and convert them to the row schema."""
        self._schema, self._converting = shape.row_schema, converting
        self.table = MemTable(self._schema, list(shape.key), shape.specs(), 1, models=models or {})
        self._put, self._closed = threading.Event(), False
        self._indexer: threading.Thread | None = None
        if shape.mode == "async":
            self._indexer = threading.Thread(target=self._index, name="indexer")
            self._indexer.start()

    def put(self, rows: pa.Table) -> None:
        """Check rows and apply them."""
        if self._converting:
            rows = with_tombstone(rows, self._schema)
        self.table.apply(self.table.check(rows))
        if self._indexer is None:
            self.indexed()
        else:
            self._put.set()

    def snapshot(self) -> Snapshot:
        """Return the current state."""
        return self.table.snapshot()

    def rows(self) -> pa.Table:
        """Return every live row."""
        snapshot = self.snapshot()
        return snapshot.take(np.flatnonzero(snapshot.live()))

    def indexed(self) -> None:
        """Return when no row waits for an index."""
        while self.table.index_step():
            pass

    def close(self) -> None:
        """Stop the thread."""
        self._closed = True
        self._put.set()
        if self._indexer is not None:
            self._indexer.join()

    def _index(self) -> None:
        while not self._closed:
            self._put.wait()
            self._put.clear()
            more = True
            while more and not self._closed:
                time.sleep(REST)
                until = time.monotonic() + WORK
                while (more := self.table.index_step()) and time.monotonic() < until:
                    pass
