"""Read a table from storage without a claim, and report its status.

Used by `open(uri, read_only=True)`, `connect(uri, fallback="durable")`, and commands if no owner answers. `latest` then
means `durable`: base table, SSTs and the WAL's tail. Rows that an owner holds only in memory (non-durable, at most
`wal.linger_max` old) are missing.
"""

from __future__ import annotations

from typing import Any

from memwal import flush, wal
from memwal.ingest.engine.api.lancedb_forms import LanceDBForms
from memwal.ingest.engine.api.reads import SQL_MEMORY, Level
from memwal.ingest.engine.changes.reader import StoredChanges
from memwal.ingest.engine.read.levels import RegionView
from memwal.ingest.engine.read.local import LevelReads
from memwal.ingest.engine.read.reader import Reader
from memwal.ingest.engine.read.stored import StoredLevels
from memwal.ingest.engine.region.state import ssts_status
from memwal.ingest.engine.table import owner_notes as owners
from memwal.ingest.engine.table.pauses import Pauses
from memwal.ingest.errors import translate_errors


class StoredTable(LevelReads, LanceDBForms):
    """Reads of one table from storage; the methods that write raise Invalid.

    Thread safety. Any thread. Errors. Only `ingest.errors` kinds.
    Invariants. Writes nothing and claims nothing, whoever serves the table.
    """

    def __init__(
        self,
        base: flush.BaseTable,
        store: wal.ObjectStore,
        clock: wal.Clock | None = None,
        *,
        sql_memory: int = SQL_MEMORY,
    ) -> None:
        """`base`: any version; every read opens the newest. `clock`: None for the system's. `sql_memory`: see
        `connect`.
        """
        super().__init__(base, Reader(base, store, clock=clock))
        self._sql_memory = sql_memory
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

    @property
    def _shows(self) -> str:
        return "read-only, reads durable"

    def _views(self, level: Level, keys: Any, *, again: bool) -> list[RegionView]:
        del keys  # concurrent reads share one look, so it covers all regions
        if again:
            self.follow()  # to another routing, if a resize overtook the look
        return self._levels.views(self.base, level)

    def _changes_source(self) -> StoredChanges:
        return self._changes


def status_from_storage(base: flush.BaseTable, store: wal.ObjectStore) -> dict[str, Any]:
    """Return the status of a table that no process serves; memtable rows are those of the WAL's unflushed tail."""
    tails = {view.region: view for view in StoredLevels(store).views(base, "durable")}
    regions = []
    for bucket, region in enumerate(base.regions):
        manifest = wal.ManifestStore(store, region).latest()
        if manifest is None:
            continue
        memtables = tails[region].memtables if region in tails else ()
        known, committed = max(manifest.last_seen, manifest.replay_after), base.committed.get(region, 0)
        regions.append(
            {
                "id": str(region),
                "bucket": bucket,
                "epoch": manifest.writer_epoch,
                "owner": None,
                "wal_position": wal.find_tip(store, region, base.codec.suffix, known),
                "replay_after": manifest.replay_after,
                "generation": manifest.current_generation,
                "memtable_rows": sum(snapshot.n for snapshot in memtables),
                "memtable_bytes": 0,
                "unindexed_rows": 0,
                "state": "no owner",
                "failure": None,
                "sealed": manifest.status is wal.RegionStatus.SEALED,
                "flush_error": None,
                "last_errors": {},
                "behind": None,
                "ssts": [sst | {"committed": sst["generation"] <= committed} for sst in ssts_status(manifest)],
            }
        )
    return base_status(base) | {"regions": regions, "paused": Pauses(store, wal.SystemClock()).now()}


def base_status(base: flush.BaseTable) -> dict[str, Any]:
    """Return the part of a status that the base table determines; see `Operations.status`."""
    return {
        "table": base.uri,
        "base_version": base.version,
        "routing": base.routing_version,
        "rows": base.dataset.count_rows(),
        "ttl": None if base.ttl is None else {"column": base.ttl.column or None, "seconds": base.ttl.seconds},
        "unsupported_columns": dict(base.unsupported),
    }


def space_status(space: flush.Space | None) -> dict[str, Any] | None:
    """Return the bytes on storage, for a status: None, or `{"bytes": {kind: number}, "factor", "time"}`."""
    return None if space is None else {"bytes": dict(space.bytes), "factor": space.factor, "time": space.time}
