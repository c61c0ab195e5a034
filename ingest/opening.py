"""From settings to an open table: what its regions share, what it does by itself, and the claim of its regions."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa

import flush
import wal
from flush.maintenance import MaintenanceRules
from ingest.commit_policy import CommitLimits
from ingest.configured_table import find_or_create
from ingest.edge import at_the_edge
from ingest.errors import Invalid
from ingest.garbage import Ages
from ingest.region_context import Limits, OnReplay, RegionContext, Upkeep
from ingest.replay_progress import replay_bar
from ingest.settings import Settings, load
from ingest.table import Table
from ingest.vector_models import VectorModels
from memtable import row_schema

_LOG = logging.getLogger("memwal.opening")
_RESIZED_PAUSE = 0.25
"""Seconds between two tries to open a table that is being resized."""
SHARD_WRITER_ROWS, SHARD_WRITER_BATCHES = 100_000, 8_000
"""Lance's ShardWriter, with its default settings, does not open a region that has more rows or batches of one
generation in its log (pylance 14.0.2). In arrow format a generation ends before that; an entry is one batch."""


@at_the_edge
def open_embedded(
    uri: str | os.PathLike[str],
    *,
    schema: pa.Schema | None = None,
    key: str | Sequence[str] | None = None,
    regions: int | None = None,
    indexes: Mapping[str, str | dict[str, Any]] | None = None,
    storage_options: Mapping[str, str] | None = None,
    settings: str | Path | Mapping[str, Any] | None = None,
) -> Table:
    """Open a table with its regions claimed by this process; an absent one is created from `schema` and `key`.

    `key`: its columns; () for a table that has none and keeps every row (`append_only`). `indexes`: column -> "ivf_pq"
    | "fts" | "btree", or a dict with "type" and parameters. `storage_options`: Lance's own. `settings`: a TOML path or
    a dict of its sections; arguments given here win. Raises: Invalid for every mistake in the arguments, all at once
    where they come from settings.
    """
    given: dict[str, Any] = {"uri": os.fspath(uri)}
    if (
        isinstance(key, tuple) and not key
    ):  # and no other empty sequence: a key that was computed, and came out empty, is a mistake
        given["append_only"] = True
    elif key is not None:
        given["key"] = [key] if isinstance(key, str) else list(key)
        if not given["key"]:
            raise Invalid(
                "key is empty; name the columns that identify a row, or give key=() for a table without a key"
            )
    if indexes is not None:
        given["indexes"] = dict(indexes)
    if storage_options is not None:
        given["storage_options"] = dict(storage_options)
    overrides: dict[str, dict[str, Any]] = {"table": given}
    if regions is not None:
        overrides["regions"] = {"count": regions}
    loaded = load(settings, os.environ, overrides)
    _check_arguments(loaded, schema, regions, indexes is not None)
    return open_table(loaded, os.environ, schema)


def open_table(
    settings: Settings,
    environ: Mapping[str, str],
    schema: pa.Schema | None = None,
    *,
    on_replay: OnReplay | None = None,
    clock: wal.Clock | None = None,
    claim: bool = True,
) -> Table:
    """Open (or create) the table of `settings` and claim its regions; with `claim` False none of them yet.

    `on_replay`: told of the log's replay; without it a terminal shows a progress bar, where that takes a while.
    `clock`: None for the system's. A table that is being resized is waited for, up to `wal.retry_budget`.
    Raises: Invalid, wal and flush errors.
    """
    clock = clock or wal.SystemClock()
    until, finish = clock.monotonic() + settings.wal.retry_budget, not claim
    while True:
        try:
            return _opened(settings, environ, schema, on_replay, clock, claim=claim, finish=finish)
        except (wal.Sealed, wal.Resized) as error:
            if clock.monotonic() >= until:
                raise
            _LOG.info("%s: %s", settings.table.uri, error)
        clock.sleep(_RESIZED_PAUSE)
        finish = True


def _opened(
    settings: Settings,
    environ: Mapping[str, str],
    schema: pa.Schema | None,
    on_replay: OnReplay | None,
    clock: wal.Clock,
    *,
    claim: bool,
    finish: bool,
) -> Table:
    """`finish`: do first what a resize that broke off after its decision has left, if there is one."""
    options = settings.storage_options(environ)
    store = wal.open_store(settings.table.uri, options, put_timeout=settings.wal.put_timeout)
    base, _ = find_or_create(settings, environ, schema)
    ids = wal.SystemIds()
    limits = wal.WalOptions(settings.wal.put_timeout, settings.wal.retry_budget, settings.wal.readers)
    wal.probe(store, ids, clock, limits)
    if finish:
        base = flush.finish_resize(base, store, clock=clock, ids=ids, options=limits)
    context = _context(settings, base, store, clock, ids, limits)
    with nullcontext(on_replay) if on_replay is not None or not claim else replay_bar(clock) as tell:
        return Table(base, replace(context, on_replay=tell), _upkeep(settings), base.regions if claim else ())


def _context(
    settings: Settings,
    base: flush.BaseTable,
    store: wal.ObjectStore,
    clock: wal.Clock,
    ids: wal.Ids,
    wal_options: wal.WalOptions,
) -> RegionContext:
    models = VectorModels()
    models.read(base)
    return RegionContext(
        store=store,
        codec=base.codec,
        clock=clock,
        ids=ids,
        schema=row_schema(base.schema, base.key),
        key=base.key,
        indexes=base.indexes,
        required=base.required,
        storage_version=base.storage_version,
        field_ids=base.row_field_ids,
        files=settings.flush.file_options(),
        sst_indexes=flush.SstIndexes(base.indexes, models.current, wanted=settings.flush.indexes),
        flushing=threading.Semaphore(settings.flush.at_once),
        limits=_limits(settings, base.wal_format),
        wal_options=wal_options,
        index_mode=settings.memtable.index_mode,
        models=models,
        shape=base.shape,
        rules=base.rules,
        routing=base.routing_version,
        route_into=base.route_into,
    )


def _upkeep(settings: Settings) -> Upkeep:
    commit, gc = settings.commit, settings.gc
    limits = CommitLimits(commit.interval, commit.ssts_max, commit.size_max)
    rules = maintenance_rules(settings)
    return Upkeep(limits, commit.retries, commit.memory_max, gc.interval, Ages.of(gc), rules)


def _check_arguments(settings: Settings, schema: pa.Schema | None, regions: int | None, indexes: bool) -> None:
    """Refuse arguments that contradict the table that is there; they would otherwise be ignored."""
    base = flush.BaseTable.find(settings.table.uri, settings.storage_options(os.environ))
    if base is None:
        return
    if regions not in (None, base.buckets):
        raise Invalid(f"regions = {regions}, but the table at {base.uri} has {base.buckets}; leave the argument out")
    kinds = {spec.column: spec.kind for spec in base.indexes}
    if indexes and kinds != {spec.column: spec.kind for spec in settings.index_specs()}:
        there = ", ".join(f"{column} ({kind})" for column, kind in kinds.items()) or "none"
        raise Invalid(f"indexes: the table at {base.uri} has other indexes, {there}; leave the argument out")
    if schema is not None and [(f.name, f.type) for f in schema] != [(f.name, f.type) for f in base.schema]:
        raise Invalid(
            f"schema: the table at {base.uri} has another one ({_columns(base.schema)}); leave the argument out"
        )


def _columns(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in schema)


def maintenance_rules(settings: Settings) -> MaintenanceRules:
    """When the base table is maintained, from [commit] and [gc]."""
    commit, gc = settings.commit, settings.gc
    return MaintenanceRules(
        optimize_interval=commit.optimize_interval,
        segments_min=commit.optimize_segments,
        compact_interval=commit.compact_interval,
        fragments_min=commit.compact_fragments,
        rows_max=commit.compact_rows_max,
        deleted_min=commit.compact_deleted_percent / 100,
        versions_interval=gc.versions_interval,
        versions_age_min=gc.versions_age_min,
        versions_min=gc.versions_min,
    )


def _limits(settings: Settings, wal_format: wal.WalFormat) -> Limits:
    arrow = wal_format == "arrow"
    return Limits(
        entry_size_max=settings.wal.entry_size_max,
        linger_max=settings.wal.linger_max,
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
