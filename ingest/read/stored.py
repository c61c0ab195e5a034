"""The levels above the base as storage alone shows them: no claim, no owner asked, nothing written.

The WAL's tail is replayed into one memtable per region. What an owner holds only in memory is not there.
"""

from __future__ import annotations

from collections.abc import Iterable
from uuid import UUID

from memwal import wal
from memwal.flush import BaseTable
from memwal.ingest.api.reads import Level
from memwal.ingest.read.levels import RegionView
from memwal.memtable import MemTable, Snapshot, row_schema

# The tail's rows may belong to several generations, and which is not on storage: a claim that replays them
# may number them anew. So the tail counts as newer than any committed generation and is never skipped, which could
# lose the rows of a later generation; a view whose first unflushed generation was committed meanwhile is captured
# again (`RegionView.unflushed`), or a batch of which the base holds a part would be shown in part.
TAIL_GENERATION = 2**63 - 1

_CAPTURES = 5
"""Tries to read a tail before it is collected; entries stay for minutes, so one try too many is rare."""
_READ_OPTIONS = wal.WalOptions(readers=8)


def views_from_storage(base: BaseTable, store: wal.ObjectStore, level: Level) -> list[RegionView]:
    """Capture the levels above the base for reads of `level`; open the base for them only after this.

    `base`: any version; its schema, key and indexes are used. `latest` is what `durable` is: the newest that
    storage knows. Safe while writers run. Raises: wal errors, Corrupt among them, naming the object.
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
            continue  # flushed and collected between manifest and tail: the next manifest has those rows in an SST
    return _captured(base, store, region, with_tail=with_tail)


def _captured(base: BaseTable, store: wal.ObjectStore, region: UUID, *, with_tail: bool) -> RegionView | None:
    manifest = wal.ManifestStore(store, region).latest()
    if manifest is None:
        return None
    # The manifest first: rows that are flushed meanwhile are then still in the tail, which no flush deletes.
    memtables = _tail(base, store, region, manifest.replay_after) if with_tail else ()
    unflushed = manifest.current_generation if with_tail else None
    return RegionView(region, memtables, manifest.ssts, unflushed, (base.shape,) if with_tail else ())


def _tail(base: BaseTable, store: wal.ObjectStore, region: UUID, after: int) -> tuple[Snapshot, ...]:
    rows = row_schema(base.schema, base.key)
    entries, _ = wal.read_tail(store, region, base.codec, after, options=_READ_OPTIONS, with_map=False)
    return tuple(_replayed(entries, MemTable(rows, base.key, base.indexes, TAIL_GENERATION)))


def _replayed(entries: Iterable[wal.Entry], table: MemTable) -> Iterable[Snapshot]:
    for entry in entries:
        if entry.rows.num_rows:
            table.apply(entry.rows)
    table.freeze()
    if table.rows:
        yield table.snapshot()
