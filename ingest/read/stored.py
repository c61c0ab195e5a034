"""Captures the levels above the base from storage alone: no claim, no request to an owner, no write.

The tail of the WAL is replayed into one memtable per region. Rows that an owner holds only in memory are missing.
"""

from __future__ import annotations

from collections.abc import Iterable
from uuid import UUID

from memwal import wal
from memwal.flush import BaseTable
from memwal.ingest.api.reads import Level
from memwal.ingest.read.levels import RegionView
from memwal.memtable import MemTable, Snapshot, row_schema

# The rows of the tail may belong to several generations, and storage does not show which: a claim that replays them
# may number them differently. So the tail counts as newer than any committed generation and is never skipped; skipping
# could lose the rows of a later generation. If the first unflushed generation of a view was committed meanwhile, the
# view is captured again (`RegionView.unflushed`); otherwise a batch that is partly in the base would be shown in part.
TAIL_GENERATION = 2**63 - 1

_CAPTURES = 5
"""Attempts to read a tail before it is collected; entries stay for minutes, so a second attempt is rare."""
_READ_OPTIONS = wal.WalOptions(readers=8)


def views_from_storage(base: BaseTable, store: wal.ObjectStore, level: Level) -> list[RegionView]:
    """Capture the levels above the base for reads of `level`; the caller opens the base only after this.

    `base`: any version; its schema, key and indexes are used. `latest` equals `durable` here: the newest rows on
    storage. Safe while writers run. Raises: wal errors, Corrupt among them, naming the object.
    """
    if level == "committed":
        return []
    views = (_view(base, store, region, with_tail=level != "flushed") for region in wal.regions(store))
    return [view for view in views if view is not None]


def _view(base: BaseTable, store: wal.ObjectStore, region: UUID, *, with_tail: bool) -> RegionView | None:
    for _ in range(_CAPTURES - 1):
        try:
            return _captured(base, store, region, with_tail=with_tail)
        except wal.Overtaken:
            continue  # flushed and collected between the two reads: the next manifest has these rows in an SST
    return _captured(base, store, region, with_tail=with_tail)


def _captured(base: BaseTable, store: wal.ObjectStore, region: UUID, *, with_tail: bool) -> RegionView | None:
    manifest = wal.ManifestStore(store, region).latest()
    if manifest is None:
        return None
    # The manifest is read first: rows flushed after it are still in the tail, because a flush deletes no entries.
    if not with_tail:
        return RegionView(region, (), manifest.ssts)
    memtables, tail = _tail(base, store, region, manifest.replay_after)
    return RegionView(region, memtables, manifest.ssts, manifest.current_generation, (base.shape,), tail=tail)


def _tail(
    base: BaseTable, store: wal.ObjectStore, region: UUID, after: int
) -> tuple[tuple[Snapshot, ...], tuple[int, int] | None]:
    """Return the rows of the WAL entries at `after`+1 to the tip, and the positions of the first and the last."""
    rows = row_schema(base.schema, base.key)
    entries, _ = wal.read_tail(store, region, base.codec, after, options=_READ_OPTIONS, with_map=False)
    read = tuple(_replayed(entries, MemTable(rows, base.key, base.indexes, TAIL_GENERATION)))
    return read, (entries[0].position, entries[-1].position) if entries else None


def _replayed(entries: Iterable[wal.Entry], table: MemTable) -> Iterable[Snapshot]:
    for entry in entries:
        if entry.rows.num_rows:
            table.restore(entry.rows)
    table.freeze()
    if table.rows:
        yield table.snapshot()
