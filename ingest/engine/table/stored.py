"""Read a table from storage without a claim.

Used by `open(uri, read_only=True)`, `connect(uri, fallback="durable")`, and commands if no owner answers. `latest` then
means `durable`: base table, SSTs and the WAL's tail. Rows that an owner holds only in memory (non-durable, at most
`wal.linger_max` old) are missing.
"""

from __future__ import annotations

from typing import Any

from memwal import flush, wal
from memwal.ingest.engine.api.operations import Operations
from memwal.ingest.engine.api.reads import Level
from memwal.ingest.engine.changes.reader import StoredChanges
from memwal.ingest.engine.read.levels import RegionView
from memwal.ingest.engine.read.local import LevelReads
from memwal.ingest.engine.read.reader import Reader
from memwal.ingest.engine.read.stored import StoredLevels
from memwal.ingest.engine.table import owner_notes as owners
from memwal.ingest.engine.table.stored_status import status_from_storage
from memwal.ingest.errors import translate_errors


class StoredTable(LevelReads, Operations):
    """Reads of one table from storage; the methods that write raise Invalid.

    Thread safety. Any thread. Errors. Only `ingest.errors` kinds.
    Invariants. Writes nothing and claims nothing, whoever serves the table.
    """

    def __init__(self, base: flush.BaseTable, store: wal.ObjectStore, clock: wal.Clock | None = None) -> None:
        """`base`: any version; every read opens the newest. `clock`: None for the system's."""
        super().__init__(base, Reader(base, store, clock=clock))
        self._store, self._levels = store, StoredLevels(store)
        self._changes = StoredChanges(base, store, clock)

    @translate_errors
    def status(self) -> dict[str, Any]:
        """Return the status in the form of `Table.status()`, regions without owners.

        Also `served_last_by`: the endpoints of daemons in the owners' notes, which may still serve.
        """
        self.follow()
        notes = owners.find(self._store, self.base.regions)
        return status_from_storage(self.base, self._store) | {"served_last_by": list(notes.endpoints if notes else ())}

    def close(self) -> None:
        """Release the log rows that reads keep in memory; later reads read them again."""
        self._levels.forget()

    def _views(self, level: Level, keys: Any, *, again: bool) -> list[RegionView]:
        del keys  # concurrent reads share one look, so it covers all regions
        if again:
            self.follow()  # to another routing, if a resize overtook the look
        return self._levels.views(self.base, level)

    def _changes_source(self) -> StoredChanges:
        return self._changes
