"""Build an open table from settings: checks, the regions' shared context, the upkeep, and the claims of its regions."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any

import pyarrow as pa

from memwal import flush, wal
from memwal.flush.sst.indexes import SCALAR_ROWS_MIN
from memwal.ingest.engine.region.context import Limits, OnReplay, RegionContext, VectorModels
from memwal.ingest.engine.table import embedded
from memwal.ingest.engine.table.create import check_same_table, find_or_create
from memwal.ingest.engine.table.live_owners import Ask, Claimant, LiveOwners
from memwal.ingest.engine.table.open_here import claiming
from memwal.ingest.engine.table.replay_progress import replay_bar
from memwal.ingest.engine.table.resize import BROKEN_OFF
from memwal.ingest.engine.table.stored import StoredTable
from memwal.ingest.settings.load import Settings
from memwal.ingest.settings.values import AUTO

_LOG = logging.getLogger("memwal.opening")
_RESIZED_PAUSE = 0.25
"""Seconds between two attempts to open a table that is being resized."""
SHARD_WRITER_ROWS, SHARD_WRITER_BATCHES = 100_000, 8_000
"""With its default settings, Lance's ShardWriter does not open a region whose log has more rows or batches of one
generation (pylance 14.0.2). In arrow format a generation ends before that; an entry is one batch.
"""


def open_stored(settings: Settings, environ: Mapping[str, str]) -> StoredTable:
    """Return the table of `settings` on storage. Writes nothing. Raises: Invalid if it is missing or does not fit."""
    uri, options = settings.table.uri, settings.storage_options(environ)
    base = flush.BaseTable.open(uri, options)
    check_same_table(settings, base)
    return StoredTable(base, wal.open_store(uri, options), sql_memory=settings.sql.memory_max)


def open_table(
    settings: Settings,
    environ: Mapping[str, str],
    schema: pa.Schema | None = None,
    *,
    ask: Ask,
    on_replay: OnReplay | None = None,
    clock: wal.Clock | None = None,
    claim: bool = True,
    claimant: Claimant | None = None,
    lazy: bool = False,
    name: str = "",
    turn: threading.Semaphore | None = None,
    probe: bool = True,
) -> embedded.Table:
    """Open (or create) the table of `settings` and claim its regions; with `claim` False claim none yet.

    `ask`: asks a daemon that an owner note names what it owns. `on_replay`: called during the log's replay; without
    it a terminal shows a progress bar if the replay takes long. `clock`: None for the system's. `claimant`: the
    claiming process; by default a program that takes nothing over. `lazy`: see `embedded.Table`. `name`: of a table of
    a fleet, for its log lines. `turn`: see `CommitLoop`. `probe`: False if the storage of the table was probed
    before (`wal.probe`). With `claim` False, live owners are checked only if a claimant is given. If the table is being
    resized, wait up to `wal.retry_budget`.
    Raises: Invalid; Unavailable if another process serves it (`table.live_owners`); wal and flush errors.
    """
    clock = clock or wal.SystemClock()
    began, finish = clock.monotonic(), not claim
    until = began + settings.wal.retry_budget
    storage_options, ids, wal_options = settings.storage_options(environ), wal.SystemIds(), settings.wal.options()
    while True:
        try:
            store = wal.open_store(settings.table.uri, storage_options, put_timeout=settings.wal.put_timeout)
            base, created = find_or_create(settings, environ, schema)
            if probe:
                wal.probe(store, ids, clock, wal_options)
            if not created and (claim or claimant is not None):
                owners_of(base, store, ask).refuse(claimant or Claimant(), clock)
            if finish:  # a resize that was interrupted after its decision
                base = flush.finish_resize(base, store, clock=clock, ids=ids, options=wal_options)
            context = context_of(settings, base, store, clock, ids, wal_options).named(name)
            with nullcontext(on_replay) if on_replay is not None or not claim else replay_bar(clock) as tell:
                daemon = claimant is not None and claimant.daemon
                context = replace(context, on_replay=tell, daemon=daemon, committing=turn)
                alone = None if claimant is None or claimant.daemon else claimant
                with claiming(base, take_over=alone.take_over) if alone else nullcontext():
                    return embedded.Table(base, context, settings, base.regions if claim else (), lazy=lazy)
        except (wal.Sealed, wal.Resized) as error:
            if clock.monotonic() >= until:
                raise
            _LOG.info("%s: %s", settings.table.uri, error)
            if settings.regions.count == AUTO and clock.monotonic() >= began + BROKEN_OFF:
                with suppress(flush.CommitConflict, flush.InvalidResize):  # another process has ended it
                    how: dict[str, Any] = {"clock": clock, "ids": ids, "options": wal_options}
                    flush.resize(base.uri, storage_options, store, base.buckets, **how)
        clock.sleep(_RESIZED_PAUSE)
        finish = True


def refuse_served(
    settings: Settings, environ: Mapping[str, str], claimant: Claimant, ask: Ask, clock: wal.Clock
) -> None:
    """Return if `claimant` may claim the table of `settings`, or must create it. Raises: as `LiveOwners.refuse`."""
    options = settings.storage_options(environ)
    base = flush.BaseTable.find(settings.table.uri, options, to_write=True)
    if base is not None:
        owners_of(base, wal.open_store(settings.table.uri, options), ask).refuse(claimant, clock)


def owners_of(base: flush.BaseTable, store: wal.ObjectStore, ask: Ask) -> LiveOwners:
    """Return the check for live owners of `base`."""
    return LiveOwners(base.uri, store, base.regions, base.table_id or store.url(""), ask)


def context_of(
    settings: Settings,
    base: flush.BaseTable,
    store: wal.ObjectStore,
    clock: wal.Clock,
    ids: wal.Ids,
    wal_options: wal.WalOptions,
) -> RegionContext:
    """Return what the regions of `base` share. Reads the models of its vector indexes."""
    models = VectorModels()
    models.read(base)
    indexes = flush.SstIndexes(
        base.indexes, models.current, wanted=settings.flush.indexes, scalar_rows_min=SCALAR_ROWS_MIN
    )
    return RegionContext(
        **RegionContext.of_shape(base),
        store=store,
        clock=clock,
        ids=ids,
        sst_format=flush.SstFormat.of(base, settings.flush.file_options(), indexes),
        flush_at_once=settings.flush.at_once,
        weight=settings.table.weight,
        limits=_limits(settings, base.wal_format),
        wal_options=wal_options,
        index_mode=settings.memtable.index_mode,
        models=models,
        routing=base.routing_version,
    )


def _limits(settings: Settings, wal_format: wal.WalFormat) -> Limits:
    arrow = wal_format == "arrow"
    return Limits(
        entry_size_max=settings.wal.entry_size_max,
        linger_max=settings.wal.linger_max,
        entry_interval=settings.wal.entry_interval,
        size_max=settings.memtable.size_max,
        rows_max=settings.memtable.rows_max,
        entries_max=settings.memtable.entries_max,
        age_max=settings.memtable.age_max,
        unflushed_max=settings.memtable.unflushed_max,
        retry_delay=settings.flush.retry_delay,
        pending_max=settings.commit.pending_max,
        generation_rows=SHARD_WRITER_ROWS if arrow else None,
        generation_entries=SHARD_WRITER_BATCHES if arrow else None,
    )
