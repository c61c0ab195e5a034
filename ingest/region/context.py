"""What all regions of one opened table share."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol
from uuid import UUID

import pyarrow as pa

from memwal import wal
from memwal.flush import SstFormat, WriteRules
from memwal.flush.base.shape import Shape
from memwal.flush.resizing.applied_maps import RouteInto
from memwal.ingest.ops.counters import Meters
from memwal.ingest.read.levels import RegionView
from memwal.ingest.region.vector_models import VectorModels
from memwal.memtable import IndexSpec, MemTable

IndexMode = Literal["sync", "async"]
"""When rows enter the vector and text indexes: before their write is acknowledged, or after. Reads find them anyway."""
OnReplay = Callable[[UUID, str, int, int], None]
"""Called while a region is opened, with the region, "reading" or "applying", entries done, entries in all."""


class Find(Protocol):
    """Looks stored rows up. Thread safety. Any thread."""

    def __call__(
        self, view: RegionView, keys: pa.Table, columns: Sequence[str], shape: Shape | None, above: int | None = None
    ) -> pa.Table:
        """Return the live rows of `keys` (distinct), with some columns of a shape, from the levels in a region's view
        and the newest base table; if the last column is `_tombstone`, rows that delete too.

        `above`: only rows above the base, which must have this version. A row that has expired is not there: if the
        last column is `_tombstone`, it is a delete without values, else it is left out.
        Raises: CaptureOvertaken for a view that a commit overtook; Reshaped if the base has another shape; BaseChanged;
        errors of reading storage.
        """
        ...


class Keep(Protocol):
    """Keeps flushed memtables for readers. Thread safety. Any thread."""

    def __call__(self, region: UUID, sst: wal.SsTable, memtable: MemTable, shape: Shape | None) -> None:
        """Take over the memtable of `shape` that was flushed as `sst`; called before readers are shown the SST."""
        ...


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
    """Puts wait while this many SSTs or more are not committed; 0: they never wait for commits."""
    generation_rows: int | None = None
    """Most rows in the log of one generation, unless one put alone has more; None: any number. `generation_entries`:
    the same of entries."""
    generation_entries: int | None = None
    entries_max: int = 1_000
    entry_interval: float = 0.0
    """Seconds between two entries for which durable puts wait; 0: they never wait for one another."""


@dataclass(frozen=True, slots=True)
class RegionContext:
    """Storage, schema and limits, given to every `RegionWriter`. `schema` is the row schema. `required` names columns
    outside the key that need a value in a put, though the row schema lets them be null, as tombstones are."""

    store: wal.ObjectStore
    codec: wal.EntryCodec
    clock: wal.Clock
    ids: wal.Ids
    schema: pa.Schema
    key: tuple[str, ...]
    indexes: tuple[IndexSpec, ...]
    sst_format: SstFormat
    limits: Limits
    wal_options: wal.WalOptions
    required: tuple[str, ...] = ()
    flushing: threading.Semaphore = field(default_factory=threading.Semaphore)
    """Held while a memtable is flushed, to limit the copies of rows in memory: `flush.at_once` regions at a time."""
    log: logging.Logger = field(default_factory=lambda: logging.getLogger("memwal.region"))
    on_replay: OnReplay | None = None
    meters: Meters = field(default_factory=Meters)
    index_mode: IndexMode = "async"
    models: VectorModels = field(default_factory=VectorModels)
    shape: Shape | None = None
    """The shape of `schema` and `indexes`; None if they never change. See `ingest.region.admission`."""
    rules: WriteRules = field(default_factory=WriteRules)
    find: Find | None = None
    """Looks stored rows up; needed if `rules` depend on them, never called if a put just replaces."""
    any_expired: Callable[[pa.Table], bool] | None = None
    """Returns whether one of a write's rows has expired, or may have; None: no row ever does. Called as `find` is."""
    loads: Callable[[], Mapping[UUID, int]] | None = None
    """Returns which loads past the log have landed, and raises Unavailable while one is under way; None: there are
    none. Called as `find` is."""
    keep: Keep | None = None
    """Keeps flushed memtables, so that reads need not load their SSTs; None: they are dropped."""
    routing: int = 1
    """Version of the routing of rows to regions when the table was opened."""
    route_into: RouteInto | None = None
    """Where rows went before the table was resized; needed only for writes that a resize met half applied."""
    daemon: bool = False
    """Whether a daemon claims the regions; written in their owners' notes."""

    @property
    def has_indexes(self) -> bool:
        """Whether the table has indexes that rows enter after they were applied: of vectors or text."""
        return any(spec.kind != "btree" for spec in self.indexes)

    @property
    def index_at_once(self) -> bool:
        """Whether rows enter the indexes before their write is acknowledged. If only keys are indexed: after it."""
        return self.index_mode == "sync" and self.has_indexes

    def replayed(self, region: UUID, step: str, done: int, total: int) -> None:
        """Report how far `region` is opened, if somebody asked for it."""
        if self.on_replay is not None:
            self.on_replay(region, step, done, total)

    def memtable(self, generation: int) -> MemTable:
        """Return an empty memtable with all of the table's indexes and the newest vector models."""
        return MemTable(self.schema, self.key, self.indexes, generation, models=self.models.current())
