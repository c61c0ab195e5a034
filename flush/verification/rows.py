"""Check the rows in the log, and each SST against the part of the log that it was made from.

The fingerprint of an SST: it holds the rows of the log between two positions, which the manifests record, because the
version that publishes it moves `replay_after` from one to the other. So while all those entries exist,

    newest row per key of the entries in (replay_after before, replay_after after]  =  the SST's rows

bit by bit, tombstones included; without a key all rows, in order. Nothing is checked if entries were collected, or if
one of the range is damaged, which check_log reports. The generation number in an entry is not used: a claim that
replays entries may renumber them.
"""

from __future__ import annotations

from collections.abc import Iterator
from uuid import UUID

import numpy as np
import pyarrow as pa

from memwal.flush.commits.changes import newest_per_key
from memwal.flush.history.diff import RowDiff, compare_rows
from memwal.flush.sst.files import read_sst
from memwal.flush.verification.finding import Finding, Unreadable, View, reading
from memwal.flush.verification.sst import check_routes
from memwal.wal import Corrupt, Entry, ManifestHistory, Overtaken, RegionManifest, SsTable, find_tip, replay
from memwal.wal.errors import AnotherLog
from memwal.wal.layout import sst_key, wal_prefix

_READERS = 4
_ROW = "_row"


def check_tail(view: View, region: UUID) -> Iterator[Finding]:
    """Check the entries that no SST holds yet: they decode, and each row is in its own region."""
    after = view.manifests[region].replay_after
    try:
        entries = _entries(view, region, after, find_tip(view.store, region, view.base.codec.suffix, after))
    except (Overtaken, AnotherLog):  # check_log reports the latter
        return
    except Corrupt as error:
        yield Finding("entry", wal_prefix(region), str(error).partition(";")[0], "restore it from a backup")
        return
    rows = _newest(view, entries)
    if rows is not None:
        yield from check_routes(view, region, wal_prefix(region), rows.select(list(view.base.routed_by)))


def check_fingerprint(view: View, region: UUID, sst: SsTable) -> Iterator[Finding]:
    """Check one SST against the entries that it was made from, if they all exist."""
    covered = _covered(view, region, sst)
    if covered is None:
        return
    try:
        entries = _entries(view, region, *covered)
    except (Corrupt, Overtaken):
        return  # collected, or damaged, which check_log reports
    rows, place = _newest(view, entries), sst_key(region, sst.path)
    if rows is None:
        return
    try:
        with reading():
            held = read_sst(view.store, region, sst, view.base.shape.rows)
    except (Corrupt, Unreadable):
        return  # reported by check_parts and check_rows
    key = view.base.key
    if not key:  # the rows are matched by their numbers
        key = (_ROW,)
        rows, held = (each.append_column(_ROW, pa.array(np.arange(each.num_rows))) for each in (rows, held))
    if diff := compare_rows(rows, held, key):
        remedy = "stop its writer; restore the SST from a backup, or move the region's manifests back before it"
        what = f"it differs from positions {covered[0] + 1} to {covered[1]} of the log: {_difference(diff)}"
        yield Finding("fingerprint", place, what, remedy)


def _covered(view: View, region: UUID, sst: SsTable) -> tuple[int, int] | None:
    """Return the positions that an SST covers, as (after, last); None if the manifests no longer have them."""

    def is_published(manifest: RegionManifest) -> bool:
        return manifest.current_generation > sst.generation

    try:
        history = ManifestHistory(view.store, region)
        before, then = history.last_before(is_published), history.first(is_published)
    except Corrupt:
        return None
    if before is None or then is None or sst.path not in {published.path for published in then.ssts}:
        return None
    return before.replay_after, then.replay_after


def _entries(view: View, region: UUID, after: int, tip: int) -> list[Entry]:
    log_id = view.manifests[region].log_id
    return replay(view.store, region, view.base.codec, after, tip, readers=_READERS, log_id=log_id)


def _newest(view: View, entries: list[Entry]) -> pa.Table | None:
    """Return the newest row of each key, tombstones included; without a key every row; None without rows."""
    rows = [entry.rows for entry in entries if entry.rows.num_rows]
    if not rows:
        return None
    if not view.base.key:
        return pa.concat_tables(rows)
    chosen = newest_per_key(rows, view.base.key)
    return pa.concat_tables(
        [table.filter(pa.array(each.deletes | each.upserts)) for table, each in zip(rows, chosen, strict=True)]
    )


def _difference(diff: RowDiff) -> str:
    counts = {
        "rows are only in the log": len(diff.removed),
        "rows are only in the SST": len(diff.added),
        f"rows differ in {', '.join(diff.columns)}": len(diff.changed),
    }
    return ", ".join(f"{count:,} {what}" for what, count in counts.items() if count)
