"""The memtable by itself: no WAL, no daemon, nothing on storage.

What it is compared with does more, ShardWriter's log above all, so these benchmarks say what the memtable costs and not
how fast memwal is; that is what the put path measures.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from memwal.ingest.region.context import IndexMode
from memwal.ingest.region.writer import REST, WORK
from memwal.memtable import IndexSpec, MemTable, Snapshot, VectorModel, row_schema, with_tombstone


@dataclass(frozen=True)
class Shape:
    """What a memtable is made of."""

    schema: pa.Schema
    key: Sequence[str]
    indexes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    mode: IndexMode = "async"

    @property
    def row_schema(self) -> pa.Schema:
        """Schema of the rows it takes."""
        return row_schema(self.schema, list(self.key))

    def specs(self) -> list[IndexSpec]:
        """The indexes as memtables want them."""
        return [
            IndexSpec(column, index["type"], {name: value for name, value in index.items() if name != "type"})
            for column, index in self.indexes.items()
        ]

    def settings(self) -> dict[str, Any]:
        """What a result says of it."""
        return {"index_mode": self.mode, "indexes": {column: dict(index) for column, index in self.indexes.items()}}


class BareMemTable:
    """A memtable and, in async mode, the thread that indexes beside it, as a region has one.

    Thread safety. One thread.
    """

    def __init__(
        self, shape: Shape, models: Mapping[str, VectorModel] | None = None, *, converting: bool = False
    ) -> None:
        """`converting`: puts take rows of the base schema and bring them to the row schema first."""
        self._schema, self._converting = shape.row_schema, converting
        self.table = MemTable(self._schema, list(shape.key), shape.specs(), 1, models=models or {})
        self._put, self._closed = threading.Event(), False
        self._indexer: threading.Thread | None = None
        if shape.mode == "async":
            self._indexer = threading.Thread(target=self._index, name="indexer")
            self._indexer.start()

    def put(self, rows: pa.Table) -> None:
        """Checked, then applied."""
        if self._converting:
            rows = with_tombstone(rows, self._schema)
        self.table.apply(self.table.check(rows))
        if self._indexer is None:
            self.indexed()
        else:
            self._put.set()

    def snapshot(self) -> Snapshot:
        """The state of now."""
        return self.table.snapshot()

    def rows(self) -> pa.Table:
        """Every live row."""
        snapshot = self.snapshot()
        return snapshot.take(np.flatnonzero(snapshot.live()))

    def indexed(self) -> None:
        """Returns when no row waits for an index."""
        while self.table.index_step():
            pass

    def close(self) -> None:
        """End the thread."""
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
