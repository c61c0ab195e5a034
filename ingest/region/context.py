"""What all regions of one opened table share."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal
from uuid import UUID

import pyarrow as pa

from memwal import wal
from memwal.flush import FileOptions, SstIndexes, WriteRules
from memwal.flush.base.shape import Shape
from memwal.flush.resizing.applied_maps import RouteInto
from memwal.ingest.ops.counters import Meters
from memwal.ingest.read.levels import RegionView
from memwal.ingest.region.vector_models import VectorModels
from memwal.memtable import IndexSpec, MemTable

IndexMode = Literal["sync", "async"]
"""When rows enter the vector and text indexes: before their write is answered, or behind it. Reads find them anyway."""
OnReplay = Callable[[UUID, str, int, int], None]
"""Told, while a region is opened: the region, "reading" or "applying", entries done, entries in all."""
Find = Callable[[RegionView, pa.Table, Sequence[str], Shape | None], pa.Table]
"""The live rows of some keys (distinct) with some columns of a shape, as a region's levels in the view and the newest
base table hold them; with `_tombstone` as the last column rows that delete too. Raises: OverTaken for a view that a
commit overtook; Reshaped where the base has another shape; what reading storage does."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a region writer; sizes in bytes, times in seconds. See the sections [wal], [memtable], [flush]
    and [commit]."""

    entry_size_max: int
    linger_max: float
    size_max: int
    rows_max: int
    age_max: float
    unflushed_max: int
    retry_delay: float
    pending_max: int = 0
    """SSTs that wait to be committed while puts are taken at once; 0: any number."""
    generation_rows: int | None = None
    """A generation has no more rows and entries in the log, unless one put alone has more; None: any number."""
    generation_entries: int | None = None
    entries_max: int = 1_000


@dataclass(frozen=True, slots=True)
class RegionContext:
    """Storage, schema and limits, handed to every `RegionWriter`. `schema` is the row schema; `required` names columns
    outside the key which a put must give a value, though the row schema, having tombstones, lets them be null."""

    store: wal.ObjectStore
    codec: wal.EntryCodec
    clock: wal.Clock
    ids: wal.Ids
    schema: pa.Schema
    key: tuple[str, ...]
    indexes: tuple[IndexSpec, ...]
    storage_version: str
    limits: Limits
    wal_options: wal.WalOptions
    required: tuple[str, ...] = ()
    field_ids: tuple[int, ...] | None = None
    """See `BaseTable.row_field_ids`."""
    files: FileOptions = field(default_factory=FileOptions)
    sst_indexes: SstIndexes = field(default_factory=SstIndexes)
    flushing: threading.Semaphore = field(default_factory=threading.Semaphore)
    """Held while one memtable is flushed: by so many regions at once as there may be copies of rows in memory."""
    log: logging.Logger = field(default_factory=lambda: logging.getLogger("memwal.region"))
    on_replay: OnReplay | None = None
    meters: Meters = field(default_factory=Meters)
    index_mode: IndexMode = "async"
    models: VectorModels = field(default_factory=VectorModels)
    shape: Shape | None = None
    """What `schema` and `indexes` are taken from; None where nobody changes them. See `ingest.region.admission`."""
    rules: WriteRules = field(default_factory=WriteRules)
    find: Find | None = None
    """Looks keys up; needed where `rules` ask what is stored, never called where a put just replaces."""
    routing: int = 1
    """Version of the routing of rows to regions that the table was opened with."""
    route_into: RouteInto | None = None
    """Where rows went before the table was resized; asked only for writes that a resize met half applied."""
    daemon: bool = False
    """Whether the regions are claimed for a daemon: said in the notes of their owner."""

    @property
    def has_indexes(self) -> bool:
        """Whether there are indexes that rows enter after they were applied: of vectors or text."""
        return any(spec.kind != "btree" for spec in self.indexes)

    @property
    def index_at_once(self) -> bool:
        """Whether rows enter the indexes before their write is answered. Keys alone are always indexed behind it."""
        return self.index_mode == "sync" and self.has_indexes

    def replayed(self, region: UUID, step: str, done: int, total: int) -> None:
        """Tell whoever wants to know how far `region` is opened."""
        if self.on_replay is not None:
            self.on_replay(region, step, done, total)

    def memtable(self, generation: int) -> MemTable:
        """An empty memtable with all of the table's indexes, and the vector models of this moment."""
        return MemTable(self.schema, self.key, self.indexes, generation, models=self.models.current())
