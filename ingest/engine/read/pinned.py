"""Capture one moment of a table as names and positions, whose rows are read later and by other processes.

`pin` asks storage which objects hold the rows of a level at this moment: a version of the base table, SSTs, and the
positions of WAL entries. These objects never change, so every process that reads a `Pinned` sees the same rows,
whatever is written later. A `Pinned` holds no rows and no secrets, and can be pickled.

Nothing retains these objects: after the ages in `[gc]` they may be deleted. `PinnedReads` distinguishes a deletion from
damage.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from uuid import UUID

import lance
import pyarrow as pa

from memwal import flush, wal
from memwal.flush.base.ttl import Expiry
from memwal.ingest.engine.api.reads import Level
from memwal.ingest.engine.read.base import BaseReads
from memwal.ingest.engine.read.levels import Stack
from memwal.ingest.engine.read.merged import MergedView
from memwal.ingest.errors import Unavailable
from memwal.memtable import TOMBSTONE, MemTable, Snapshot, row_schema
from memwal.memtable.filter.predicate import referenced
from memwal.wal.layout import sst_key
from memwal.wal.panics import RustPanic, panics_as_errors
from memwal.wal.parallel_map import AT_ONCE, each

_CAPTURES = 20
"""Attempts to pin a moment; a flush or commit rarely overtakes one."""
_READ_OPTIONS = wal.WalOptions(readers=8)
_GENERATION = 1
"""Generation of the memtables created here. Nothing reads it: a moment holds only levels that its base version
lacks.
"""
_OF_STORAGE = (wal.Corrupt, wal.Overtaken, flush.NotALanceTable, OSError, ValueError, RustPanic)
"""Errors raised by reading a deleted object: memwal's own errors, and Lance's."""


@dataclass(frozen=True, slots=True)
class PinnedRegion:
    """The levels of one region above the base table, with the WAL entries `after`+1 .. `upto`."""

    region: UUID
    ssts: tuple[wal.SsTable, ...]
    """Ascending generations, all uncommitted."""
    after: int
    upto: int
    log_id: str = ""
    """As for `wal.read_tail`."""


@dataclass(frozen=True, slots=True)
class Fragment:
    """A fragment of the base table. `rows`: without deleted rows. `bytes`: size of its files, 0 if not recorded."""

    id: int
    rows: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Pinned:
    """A moment of a table at one level.

    Thread safety. Immutable; hashable; pickles. Holds no secret.
    """

    uri: str
    table_id: str
    version: int
    """Version of the base table."""
    regions: tuple[PinnedRegion, ...]
    """The regions with rows above the base table."""
    fragments: tuple[Fragment, ...]
    now: float = 0.0
    """Unix time in seconds of the process that pinned the moment: rows that have expired by then appear in no read."""


def pin(base: flush.BaseTable, store: wal.ObjectStore, level: Level) -> tuple[Pinned, flush.BaseTable]:
    """Return the present moment at `level`, and the base version in it. `latest` equals `durable` here.

    `base`: any version. Every row acknowledged as durable before the call is in a
    `durable` moment. Writes nothing; safe while writers run.
    Raises: Unavailable if commits keep overtaking it; errors of `wal` and `flush`.
    """
    for _ in range(_CAPTURES):
        with suppress(wal.Overtaken):
            # Regions first: rows committed in between are then in the base table, and possibly in an SST that is
            # skipped. In the other order, neither the base table nor the manifests would have them.
            manifests = _manifests(store) if level != "committed" else []
            ends = list(each(partial(_end, base, store, level), manifests, AT_ONCE))
            newest = base.latest()
            committed = newest.committed
            if level != "flushed" and any(committed.get(m.region_id, 0) >= m.current_generation for m in manifests):
                continue  # the base table has part of the tail, and the boundary is unknown
            regions = (_pinned(newest, manifest, end) for manifest, end in zip(manifests, ends, strict=True))
            kept = tuple(region for region in regions if region.ssts or region.upto > region.after)
            fragments = tuple(_fragment(fragment) for fragment in newest.dataset.get_fragments())
            now = wal.SystemClock().now()
            return Pinned(newest.uri, newest.table_id, newest.version, kept, fragments, now), newest
    raise Unavailable(f"{_CAPTURES} commits in a row overtook this read; read again")


def _manifests(store: wal.ObjectStore) -> list[wal.RegionManifest]:
    found = each(lambda region: wal.ManifestStore(store, region).latest(), wal.regions(store), AT_ONCE)
    return [manifest for manifest in found if manifest is not None]


def _end(base: flush.BaseTable, store: wal.ObjectStore, level: Level, manifest: wal.RegionManifest) -> int:
    """Return the position of the last WAL entry to read."""
    if level == "flushed":
        return manifest.replay_after
    suffix, after = base.codec.suffix, manifest.replay_after
    return wal.tail_end(store, manifest.region_id, suffix, after, options=_READ_OPTIONS)


def _pinned(newest: flush.BaseTable, manifest: wal.RegionManifest, end: int) -> PinnedRegion:
    committed = newest.committed.get(manifest.region_id, 0)
    ssts = tuple(sst for sst in manifest.ssts if sst.generation > committed)
    return PinnedRegion(manifest.region_id, ssts, manifest.replay_after, end, manifest.log_id)


def _fragment(fragment: lance.LanceFragment) -> Fragment:
    data = fragment.metadata
    size = sum(file.file_size_bytes or 0 for file in data.files)
    return Fragment(fragment.fragment_id, data.physical_rows - data.num_deletions, size)


class PinnedReads:
    """Read the rows of a pinned moment: the newest row of each key, without deleted rows, then filtered.

    The first read of base rows reads the keys above the base table and keeps them.
    Thread safety. Any thread. Errors. Unavailable if objects of the moment were deleted since; InvalidRows for a filter
    that fails on a row; otherwise the errors of the packages.
    """

    def __init__(self, pinned: Pinned, storage_options: Mapping[str, str]) -> None:
        """Open the base table at the version in `pinned`. Raises: Unavailable if that version was deleted."""
        self._pinned = pinned
        self._store = wal.open_store(pinned.uri, storage_options)
        with self._deleted_told_apart(None):
            self._base = flush.BaseTable.open(pinned.uri, storage_options, version=pinned.version)
        self._expiry = self._base.expiry(pinned.now)
        self._keys: Stack | None = None
        self._loading = threading.Lock()

    @property
    def schema(self) -> pa.Schema:
        """The columns of the table at this moment."""
        return self._base.schema

    def above(self, region: UUID, columns: Sequence[str], filter: str | None) -> Iterator[pa.Table]:
        """Yield the rows of the levels of `region` above the base table, with `columns`."""
        pinned = next(levels for levels in self._pinned.regions if levels.region == region)
        mentioned = referenced(filter, self._base.schema) if filter else []
        mentioned += [self._expiry.column] if self._expiry is not None else []
        with self._deleted_told_apart(filter):
            levels = [_memtable(rows, self._base.key) for rows in self._levels(pinned, {*columns, *mentioned})]
            stack = Stack(levels, keyed=bool(self._base.key))
            view = MergedView(BaseReads(self._base), (stack,), list(self._base.key), expiry=self._expiry)
            yield from view.level_rows(list(columns), filter)

    def below(self, fragments: Sequence[int], columns: Sequence[str], filter: str | None) -> Iterator[pa.Table]:
        """Yield the rows of these base fragments that no level above hides, with `columns`."""
        with self._deleted_told_apart(filter):
            stacks = (self._keys_above(),) if self._base.key and self._pinned.regions else ()
            reads = FragmentReads(self._base, fragments, self._expiry)
            yield from MergedView(reads, stacks, list(self._base.key)).base_rows(list(columns), filter)

    # ---- inside --------------------------------------------------------------------------------------------------

    def _keys_above(self) -> Stack:
        """Return all keys above the base table as a single level, so that each base row is looked up once.

        A key never moves between regions, so its region and level do not matter.
        """
        with self._loading:
            if self._keys is None:
                regions = each(lambda region: list(self._levels(region, set())), self._pinned.regions, AT_ONCE)
                levels = [rows for levels in regions for rows in levels]
                every = [] if not levels else [_memtable(pa.concat_tables(levels), self._base.key)]
                self._keys = Stack(every)
            return self._keys

    def _levels(self, region: PinnedRegion, columns: set[str]) -> Iterator[pa.Table]:
        """Yield the rows of each level of a region, newest first, with the key, `columns` and `_tombstone`."""
        base, kept = self._base, {*columns, *self._base.key, TOMBSTONE}
        schema = pa.schema([field for field in row_schema(base.schema, base.key) if field.name in kept])
        if region.upto > region.after:
            entries, _ = wal.read_tail(
                self._store,
                region.region,
                base.codec,
                region.after,
                upto=region.upto,
                options=_READ_OPTIONS,
                with_map=False,
                log_id=region.log_id,
            )
            parts = [entry.rows.select(schema.names) for entry in entries if entry.rows.num_rows]
            if parts:
                yield pa.concat_tables(parts).cast(schema)
        with_ids = pa.schema([base.shape.rows.field(name) for name in schema.names])
        read = partial(flush.read_sst, self._store, region.region, columns=with_ids)
        for rows in list(each(read, region.ssts[::-1], AT_ONCE)):
            yield rows.cast(schema)

    @contextmanager
    def _deleted_told_apart(self, filter: str | None) -> Iterator[None]:
        """Raise Unavailable in place of an error inside, if an object of the moment was deleted."""
        try:
            with panics_as_errors:
                yield
        except _OF_STORAGE as error:
            if isinstance(error, wal.Overtaken) or self._is_deleted():
                uri, version = self._pinned.uri, self._pinned.version
                raise Unavailable(
                    f"{uri}: this read began at version {version}, and objects of that moment were deleted since (the "
                    "ages in [gc]); read again from the present moment"
                ) from error
            if filter is not None:
                BaseReads(self._base).raise_filter_error(filter)
            raise

    def _is_deleted(self) -> bool:
        newest = flush.BaseTable.open(self._pinned.uri, self._store.storage_options)
        if self._pinned.version not in {ref["version"] for ref in newest.dataset.version_refs()}:
            return True
        if newest.table_id != self._pinned.table_id:
            return True
        return any(
            next(iter(self._store.list(f"{sst_key(region.region, sst.path)}/")), None) is None
            for region in self._pinned.regions
            for sst in region.ssts
        )


class FragmentReads(BaseReads):
    """Read the rows of some fragments of one base version; only `batches` is restricted to them."""

    def __init__(self, base: flush.BaseTable, fragments: Sequence[int], expiry: Expiry | None) -> None:
        super().__init__(base, expiry)
        wanted = set(fragments)
        self._fragments = [part for part in base.dataset.get_fragments() if part.fragment_id in wanted]

    def batches(self, columns: Sequence[str], filter: str | None, limit: int | None) -> Iterator[pa.Table]:
        """As `BaseReads.batches`."""
        wanted, live = list(columns), self._filtered(filter)
        scanner = self._dataset.scanner(columns=wanted, **live, limit=limit, fragments=self._fragments)
        for batch in scanner.to_batches():
            yield pa.Table.from_batches([batch])


def _memtable(rows: pa.Table, key: Sequence[str]) -> Snapshot:
    table = MemTable(rows.schema, key, (), _GENERATION)
    table.apply(rows)
    table.freeze()
    return table.snapshot()
