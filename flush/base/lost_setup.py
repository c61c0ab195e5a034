"""Reject a table whose set-up another program removed, while regions may hold rows that only the set-up finds."""

from __future__ import annotations

import lance

from memwal.flush.base.setup import REGIONS, metadata_of
from memwal.flush.errors import UnsupportedTable
from memwal.wal import ObjectStore, regions
from memwal.wal.layout import ROOT, manifest_prefix

_LOOK_BACK = 1_000
"""Number of newest versions searched for the set-up, if the newest one lacks it."""


def refuse_written_over(uri: str, dataset: lance.LanceDataset, store: ObjectStore) -> None:
    """Reject a table that lacks Lance's MemWAL index although its regions were claimed.

    No region is claimed before the index exists, so the index was dropped, and the committed generations with it: it is
    unknown which rows of the SSTs the table holds. If the index was made and a region claimed after `dataset` was
    opened, `dataset` moves to the newest version.
    """
    if not has_claims(store):
        return
    dataset.checkout_latest()  # type: ignore[no-untyped-call]
    if dataset.mem_wal_index_details() is not None:
        return
    raise UnsupportedTable(
        f"{uri}: version {dataset.version} was written over by another program, and the progress of its regions is "
        "lost; restore the version before that (LanceDataset.restore), or, to keep its rows as they are and give up "
        f"those that were not committed, move {store.url(ROOT.rstrip('/'))} away and run `memwal init`"
    )


def has_claims(store: ObjectStore) -> bool:
    """Return whether any region on storage was ever claimed."""
    return any(list(store.list(manifest_prefix(region))) for region in regions(store))


def refuse_wiped(uri: str, dataset: lance.LanceDataset, store: ObjectStore) -> None:
    """Reject a table whose set-up another program removed from the schema's metadata, while an older version has it.

    Its regions may hold acknowledged rows that are not committed; only the table with its set-up finds them. A table
    without regions was left on purpose (`flush/beside_lancedb.md`).
    """
    if not has_claims(store):
        return
    older = sorted((ref["version"] for ref in dataset.version_refs()), reverse=True)
    for version in older[:_LOOK_BACK]:
        try:
            had_setup = version < dataset.version and REGIONS in metadata_of(dataset.checkout_version(version))
        except (OSError, ValueError):  # cleaned up meanwhile
            continue
        if had_setup:
            raise UnsupportedTable(
                f"{uri}: another program wiped the metadata of the schema, and with it the table's set-up, in version "
                f"{version + 1}; restore version {version} (LanceDataset.restore) and open it again. Do not copy its "
                f"rows elsewhere: acknowledged rows that are not committed yet are below {uri}/{ROOT} only"
            )
