"""Rows that Lance's own reader returns from the base table and the published SSTs, without any log."""

from __future__ import annotations

from collections.abc import Iterable

import lance
import pyarrow as pa
from lance.mem_wal import LsmScanner, ShardSnapshot

from memwal.wal import RegionManifest


def snapshots(manifests: Iterable[RegionManifest]) -> list[ShardSnapshot]:
    """Return the published SSTs of `manifests` in the form that Lance's planners take."""
    found = []
    for manifest in manifests:
        snapshot = ShardSnapshot(str(manifest.region_id)).with_current_generation(manifest.current_generation)
        for sst in manifest.ssts:
            snapshot = snapshot.with_sstable(sst.generation, sst.path)
        found.append(snapshot)
    return found


def scanned(uri: str, manifests: Iterable[RegionManifest]) -> pa.Table:
    """Return the newest row of each key."""
    return LsmScanner.from_snapshots(lance.dataset(uri), snapshots(manifests)).to_table()
