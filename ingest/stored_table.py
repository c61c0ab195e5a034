"""A table as it is on storage, read without claiming anything: what commands use when no owner answers.

`latest` then means the newest that storage knows: base table, SSTs and the WAL's tail. Rows that a silent owner holds
only in memory (non-durable, at most `wal.linger_max` old) are not there.
"""

from __future__ import annotations

import flush
import wal
from ingest.level_reads import LevelReads
from ingest.levels import Level, RegionView
from ingest.reader import Reader
from ingest.storage_reader import views_from_storage


class StoredTable(LevelReads):
    """Reads of one table from storage.

    Thread safety. Any thread. Errors. Only `ingest.errors` kinds.
    """

    def __init__(self, base: flush.BaseTable, store: wal.ObjectStore) -> None:
        """`base`: any version; every read opens the newest."""
        super().__init__(base, Reader(base, store))
        self._store = store

    def _views(self, level: Level) -> list[RegionView]:
        return views_from_storage(self.base, self._store, level)
