"""Detect, on storage, rows that a region's log or SSTs hold and the base table does not."""

from __future__ import annotations

from uuid import UUID

from memwal import flush, wal


def tip(base: flush.BaseTable, store: wal.ObjectStore, region: UUID) -> int:
    """Return the position of the newest WAL entry of `region`, 0 without one. Raises StoreUnavailable, StoreRefused."""
    manifest = wal.ManifestStore(store, region).latest()
    known = 0 if manifest is None else max(manifest.last_seen, manifest.replay_after)
    return wal.find_tip(store, region, base.codec.suffix, known)


def holds_rows(base: flush.BaseTable, store: wal.ObjectStore, region: UUID, upto: int, options: wal.WalOptions) -> bool:
    """Return whether an entry up to position `upto` has rows that were not flushed; a claim writes entries without
    rows.

    Raises Corrupt, StoreUnavailable, StoreRefused.
    """
    manifest = wal.ManifestStore(store, region).latest()
    if manifest is None or manifest.replay_after >= upto:
        return False
    after, log_id = manifest.replay_after, manifest.log_id
    entries, _ = wal.read_tail(store, region, base.codec, after, upto=upto, options=options, log_id=log_id)
    return any(entry.rows.num_rows for entry in entries if entry.position <= upto)


def are_all_committed(base: flush.BaseTable, store: wal.ObjectStore) -> bool:
    """Return whether `base`, the newest version, has all rows that were acknowledged as durable before the call.

    Raises: as `holds_rows`.
    """
    for region in wal.regions(store):
        manifest = wal.ManifestStore(store, region).latest()
        if manifest is None:
            continue
        published = max((sst.generation for sst in manifest.ssts), default=0)
        if published > base.committed.get(region, 0):
            return False
        if holds_rows(base, store, region, tip(base, store, region), wal.WalOptions()):
            return False
    return True
