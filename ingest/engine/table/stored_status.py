"""Report the status of a table from storage alone, if no process serves it."""

from __future__ import annotations

from typing import Any

from memwal import flush, wal
from memwal.ingest.engine.read.stored import StoredLevels
from memwal.ingest.engine.region.state import ssts_status
from memwal.ingest.engine.table.pauses import Pauses


def status_from_storage(base: flush.BaseTable, store: wal.ObjectStore) -> dict[str, Any]:
    """Return the status of a table that no process serves; memtable rows are those of the WAL's unflushed tail."""
    tails = {view.region: view for view in StoredLevels(store).views(base, "durable")}
    regions = []
    for bucket, region in enumerate(base.regions):
        manifest = wal.ManifestStore(store, region).latest()
        if manifest is not None:
            memtables = tails[region].memtables if region in tails else ()
            regions.append(_region(store, manifest, bucket, sum(snapshot.n for snapshot in memtables), base))
    return {
        "table": base.uri,
        "base_version": base.version,
        "routing": base.routing_version,
        "rows": base.dataset.count_rows(),
        "ttl": ttl_status(base),
        "unsupported_columns": dict(base.unsupported),
        "regions": regions,
        "paused": Pauses(store, wal.SystemClock()).now(),
    }


def ttl_status(base: flush.BaseTable) -> dict[str, Any] | None:
    """Return when rows expire, for a status: None, or `{"column", "seconds"}`; the column is None if it was dropped."""
    return None if base.ttl is None else {"column": base.ttl.column or None, "seconds": base.ttl.seconds}


def space_status(space: flush.Space | None) -> dict[str, Any] | None:
    """Return the bytes on storage, for a status: None, or `{"bytes": {kind: number}, "factor", "time"}`."""
    return None if space is None else {"bytes": dict(space.bytes), "factor": space.factor, "time": space.time}


def _region(
    store: wal.ObjectStore, manifest: wal.RegionManifest, bucket: int, tail_rows: int, base: flush.BaseTable
) -> dict[str, Any]:
    committed = base.committed.get(manifest.region_id, 0)
    return {
        "id": str(manifest.region_id),
        "bucket": bucket,
        "epoch": manifest.writer_epoch,
        "owner": None,
        "wal_position": wal.find_tip(
            store, manifest.region_id, base.codec.suffix, max(manifest.last_seen, manifest.replay_after)
        ),
        "replay_after": manifest.replay_after,
        "generation": manifest.current_generation,
        "memtable_rows": tail_rows,
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
