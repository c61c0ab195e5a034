"""What Lance's own reader finds in the base table and the published SSTs, without any log."""

from __future__ import annotations

from collections.abc import Iterable

import lance
import pyarrow as pa
from lance.mem_wal import LsmScanner, ShardSnapshot

from memwal.wal import RegionManifest


def snapshots(manifests: Iterable[RegionManifest]) -> list[ShardSnapshot]:
    """What Lance's planners take for the SSTs that `manifests` publish."""
    found = []
    for manifest in manifests:
        snapshot = ShardSnapshot(str(manifest.region_id)).with_current_generation(manifest.current_generation)
        for sst in manifest.ssts:
            snapshot = snapshot.with_sstable(sst.generation, sst.path)
        found.append(snapshot)
    return found


def scanned(uri: str, manifests: Iterable[RegionManifest]) -> pa.Table:
    """Every row, as the newest of its key."""
    return LsmScanner.from_snapshots(lance.dataset(uri), snapshots(manifests)).to_table()
