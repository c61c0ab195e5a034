"""Define the state that all regions of one open table share."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal
from uuid import UUID

import pyarrow as pa

from memwal import wal
from memwal.flush import BaseTable, SstFormat, WriteRules
from memwal.flush.base.shape import Shape
from memwal.flush.resizing.applied_maps import RouteInto
from memwal.ingest.engine.read.levels import RegionView
from memwal.ingest.engine.region.counters import Meters
from memwal.ingest.engine.region.quotas import TableMemory
from memwal.ingest.lanes import SCHEDULER, Scheduler
from memwal.ingest.log_limit import Log, log_of
from memwal.memtable import IndexSpec, MemTable, VectorModel, row_schema
from memwal.wal.panics import as_exception

_LOG = logging.getLogger("memwal.models")


class VectorModels:
    """The newest trained models of the base table's vector indexes that this process has read, by column.

    They are read when the table is opened and after a commit, operations that read storage anyway; new memtables get
    them from memory. A memtable keeps the model it began with. Without a readable model it trains on its own rows.
    Thread safety. `current` from any thread, without access to storage; `read` from one thread at a time.
    """

    def __init__(self) -> None:
        self._current: Mapping[str, VectorModel] = {}
        self._read_from: tuple[tuple[str, ...], frozenset[str]] = ((), frozenset())

    def current(self) -> Mapping[str, VectorModel]:
        """Return the models by column; a column whose index the base table has not built is missing."""
        return self._current

    def read(self, base: BaseTable) -> None:
        """Read the models of `base` if its vector indexes changed since the last call.

        Never raises, because memtables work without a model. A failure is logged, and the models stay unchanged.
        """
        wanted = {spec.name for spec in base.indexes if spec.kind == "ivf_pq"}
        if not wanted:
            return
        try:
            built = [index for index in base.dataset.describe_indices() if index.name in wanted]
            columns = tuple(sorted(spec.column for spec in base.indexes if spec.kind == "ivf_pq"))
            read_from = (columns, frozenset(str(segment.uuid) for index in built for segment in index.segments))
            if read_from == self._read_from:
                return
            models = base.vector_models()
            # raises if the models do not fit
            MemTable(row_schema(base.schema, base.key), base.key, base.indexes, 0, models=models)
        except BaseException as error:  # noqa: BLE001 - memtables then train their own models
            reason = as_exception(error)
            _LOG.warning("%s: cannot read the models of its vector indexes: %s", base.uri, reason)
            return
        self._current, self._read_from = models, read_from


IndexMode = Literal["sync", "async"]
"""When rows enter the vector and text indexes: before their write is acknowledged, or after. Reads find them in both.
"""
OnReplay = Callable[[UUID, str, int, int], None]
"""Callback while a region is opened: region, "reading" or "applying", entries done, entries in total."""


Find = Callable[[RegionView, pa.Table, Sequence[str], Shape | None, int | None], pa.Table]
"""`find(view, keys, columns, shape, above)` returns the live rows of `keys` (distinct) with the columns of a shape.

Searches the levels of a region's view and the newest base table. If the last column is `_tombstone`, tombstones are
returned too. `above`: None, or search only the levels above the base table, which must have this version. An expired
row counts as absent: it is returned as a tombstone without values if the last column is `_tombstone`, and left out
otherwise. Called from any thread.
Raises: CaptureOvertaken for a view that a commit overtook; Reshaped if the base table has another shape; BaseChanged if
it has another version than `above`; errors of reading storage.
"""

Keep = Callable[[UUID, wal.SsTable, MemTable, Shape | None], None]
"""Takes over the memtable of a shape that was flushed as an SST of a region, so that readers need not load it. Called
from any thread, before readers see the SST.
"""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a region writer in bytes and seconds; see the sections [wal], [memtable], [flush], [commit]."""

    entry_size_max: int
    linger_max: float
    size_max: int
    rows_max: int
    age_max: float
    unflushed_max: int
    retry_delay: float
    pending_max: int = 0
    """Puts wait while at least this many SSTs are uncommitted; 0: puts never wait for commits."""
    generation_rows: int | None = None
    """Maximum rows in the log of one generation, unless one put has more; None: unlimited. `generation_entries`: the
    same for entries.
    """
    generation_entries: int | None = None
    entries_max: int = 1_000
    entry_interval: float = 0.0
    """Seconds between two entries of durable puts; 0: durable puts never wait for one another."""


@dataclass(frozen=True, slots=True)
class RegionContext:
    """Storage, schema and limits that every `RegionWriter` of a table receives.

    `schema` is the row schema. `required` names columns outside the key that need a value in a put. The row schema
    still allows nulls in them, because tombstones have nulls there.
    """

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
    committing: threading.Semaphore | None = None
    """Limits how many tables of a process commit at a time; see `CommitLoop`. None: no limit."""
    flush_at_once: int = 1
    """The maximum number of regions that flush at a time, to limit copies of rows in memory."""
    lanes: Scheduler = SCHEDULER
    """Runs the work of the regions."""
    weight: float = 1.0
    """The table's share of the threads; see `ingest.lanes`."""
    log: Log = field(default_factory=lambda: logging.getLogger("memwal.region"))
    name: str = ""
    """Of the table in a fleet, for its log lines; "" for an only table."""
    on_replay: OnReplay | None = None
    meters: Meters = field(default_factory=Meters)
    index_mode: IndexMode = "async"
    models: VectorModels = field(default_factory=VectorModels)
    shape: Shape | None = None
    """The shape of `schema` and `indexes`; None if they never change. See `region.admission`."""
    rules: WriteRules = field(default_factory=WriteRules)
    find: Find | None = None
    """Looks stored rows up. Required if `rules` depend on stored rows; never called if puts only replace."""
    any_expired: Callable[[pa.Table], bool] | None = None
    """Returns whether a write has a row that has expired, or may have; None: rows never expire. Called as `find` is."""
    loads: Callable[[], Mapping[UUID, int]] | None = None
    """Returns the loads past the log that have landed; raises Unavailable while one is in progress. None: the table has
    no loads. Called as `find` is.
    """
    keep: Keep | None = None
    """Keeps flushed memtables, so that reads need not load their SSTs; None: the memtables are dropped."""
    routing: int = 1
    """Version of the routing of rows to regions when the table was opened."""
    route_into: RouteInto | None = None
    """The routing from before a resize; used only for writes that were half applied at a resize."""
    daemon: bool = False
    """Whether a daemon claims the regions; recorded in the owners' notes."""
    memory: TableMemory | None = None
    """Limits the memory of the table; None: no limit."""

    @property
    def has_indexes(self) -> bool:
        """Whether the table has vector or text indexes, which rows enter after they were applied."""
        return any(spec.kind != "btree" for spec in self.indexes)

    @property
    def index_at_once(self) -> bool:
        """Whether rows enter the indexes before their write is acknowledged. False if only keys are indexed."""
        return self.index_mode == "sync" and self.has_indexes

    def named(self, name: str) -> RegionContext:
        """Return the same context for a table of a fleet."""
        return replace(self, name=name, log=log_of(logging.getLogger("memwal.region"), name), meters=Meters(name))

    @staticmethod
    def of_shape(base: BaseTable) -> dict[str, Any]:
        """Return the fields that the columns, indexes and rules of `base` determine."""
        return {
            "codec": base.codec,
            "schema": row_schema(base.schema, base.key),
            "key": base.key,
            "indexes": base.indexes,
            "required": base.required,
            "rules": base.rules,
            "shape": base.shape,
            "route_into": base.route_into,
        }

    def manifests(self, region: UUID, options: wal.WalOptions | None = None) -> wal.ManifestStore:
        """Return access to the manifests of `region`. `options`: None for those of the log."""
        options = options or self.wal_options
        return wal.ManifestStore(self.store, region, ids=self.ids, clock=self.clock, options=options)

    def replayed(self, region: UUID, step: str, done: int, total: int) -> None:
        """Report the progress of opening `region` to `on_replay`, if one is set."""
        if self.on_replay is not None:
            self.on_replay(region, step, done, total)

    def memtable(self, generation: int) -> MemTable:
        """Return an empty memtable with all of the table's indexes and the newest vector models."""
        return MemTable(self.schema, self.key, self.indexes, generation, models=self.models.current())
