"""From settings to an open table: find or create the base table, then claim its regions."""

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
from ingest.edge import at_the_edge
from ingest.errors import Invalid
from ingest.garbage import Ages
from ingest.keys import nearest
from ingest.region_context import Limits, OnReplay, RegionContext, Upkeep
from ingest.replay_progress import replay_bar
from ingest.settings import Settings, load
from ingest.table import Table
from ingest.vector_models import VectorModels
from memtable import check_indexes, row_schema

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
    rows = row_schema(base.schema, base.key)
    models = VectorModels()
    models.read(base)
    context = RegionContext(
        store=store,
        codec=base.codec,
        clock=clock,
        ids=ids,
        schema=rows,
        key=base.key,
        indexes=base.indexes,
        required=base.required,
        storage_version=base.storage_version,
        field_ids=base.row_field_ids,
        files=settings.flush.file_options(),
        sst_indexes=flush.SstIndexes(base.indexes, models.current, wanted=settings.flush.indexes),
        flushing=threading.Semaphore(settings.flush.at_once),
        limits=_limits(settings, base.wal_format),
        wal_options=limits,
        index_mode=settings.memtable.index_mode,
        models=models,
        shape=base.shape,
        rules=base.rules,
        routing=base.routing_version,
        route_into=base.route_into,
    )
    commit, gc = settings.commit, settings.gc
    limits_of_commit = CommitLimits(commit.interval, commit.ssts_max, commit.size_max)
    rules = maintenance_rules(settings)
    upkeep = Upkeep(limits_of_commit, commit.retries, commit.memory_max, gc.interval, Ages.of(gc), rules)
    with nullcontext(on_replay) if on_replay is not None or not claim else replay_bar(clock) as tell:
        return Table(base, replace(context, on_replay=tell), upkeep, base.regions if claim else ())


def find_or_create(
    settings: Settings, environ: Mapping[str, str], schema: pa.Schema | None = None
) -> tuple[flush.BaseTable, bool]:
    """The base table of `settings`, and whether it was created now.

    `schema`: takes the place of `table.columns`. Raises: Invalid when there is nothing and no schema and key are given,
    or when the table there has another key or other columns; flush errors when the path holds something else.
    """
    table, options = settings.table, settings.storage_options(environ)
    base = flush.BaseTable.find(table.uri, options)
    if base is not None:
        _check_same_table(settings, base)
        return base, False
    wanted = schema if schema is not None else settings.arrow_schema()
    if not len(wanted) or not (table.key or table.append_only):
        raise Invalid(
            f"{table.uri}: no table is there; give its columns and its key, and it is created; or its columns and "
            "append_only = true (in Python key=()) for a table that has no key and keeps every row"
        )
    wanted, indexes = _with_key(wanted, table.key), settings.index_specs()
    row_schema(wanted, table.key)
    check_indexes(wanted, indexes)
    try:
        rules = flush.WriteRules(table.upsert, table.on_duplicate, table.version)
        created = flush.BaseTable.create(
            table.uri,
            wanted,
            table.key,
            settings.regions.count,
            indexes,
            options,
            settings.wal.format,
            _append_by(settings),
            rules,
        )
        return created, True
    except (flush.TableExists, OSError):
        # Somebody else creates it at this moment; what they made, whole or half, is found (and completed) now.
        if (base := flush.BaseTable.find(table.uri, options)) is None:
            raise
        _check_same_table(settings, base)
        return base, False


def initialise(settings: Settings, environ: Mapping[str, str]) -> tuple[flush.BaseTable, str]:
    """Create the table of `settings`, or adopt the Lance table that is there; returns it and what was done.

    Raises: as `find_or_create`; Invalid when the rows that are there do not fit the key.
    """
    try:
        base, created = find_or_create(settings, environ)
        return base, "created" if created else "found"
    except flush.NotInitialised:
        uri, key, indexes = settings.table.uri, tuple(settings.table.key), settings.index_specs()
        options, wal_format = settings.storage_options(environ), _given_format(settings)
        table, by = settings.table, _append_by(settings)
        rules = flush.WriteRules(table.upsert, table.on_duplicate, table.version)
        adopted = flush.BaseTable.adopt(uri, key, settings.regions.count, indexes, options, wal_format, by, rules)
        _check_same_table(settings, adopted)
        return adopted, f"adopted ({adopted.wal_format})"


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


def _with_key(schema: pa.Schema, key: Sequence[str]) -> pa.Schema:
    """`schema` with its key fields declared not null, as Lance wants a key's fields."""
    for name in key:
        if name not in schema.names:
            raise Invalid(f"key column '{name}' is not in the schema{nearest(name, schema.names)}")
        if key.count(name) > 1:
            raise Invalid(f"key column '{name}' is named twice; name it once")
    return pa.schema([field.with_nullable(field.nullable and field.name not in key) for field in schema])


def _check_same_table(settings: Settings, base: flush.BaseTable) -> None:
    key = tuple(settings.table.key)
    if key and key != base.key:
        has = f"has the key {list(base.key)}" if base.key else "has none: its rows are only appended"
        raise Invalid(
            f"[table] key = {list(key)} but the table at {settings.table.uri} {has}; "
            "correct the setting or choose another uri"
        )
    if settings.table.append_only and base.key:
        raise Invalid(
            f"[table] append_only = true but the table at {base.uri} has the key {list(base.key)}; take it out (in "
            "Python key=()), or choose another uri"
        )
    by = tuple(settings.regions.by)
    if by and by != base.append_by:
        there = list(base.append_by or ()) or "the whole row"
        raise Invalid(
            f"[regions] by = {list(by)} but the rows of the table at {base.uri} are spread by {there}; leave it out"
        )
    _check_same_choices(settings, base)
    _check_same_columns(settings, base)


def _check_same_choices(settings: Settings, base: flush.BaseTable) -> None:
    """What is fixed when a table is set up, where it is said at all."""
    if _given_format(settings) not in (None, base.wal_format):
        raise Invalid(
            f'[wal] format = "{settings.wal.format}" but the table at {base.uri} has "{base.wal_format}", which is '
            "fixed when a table is set up; correct the setting, or leave it out"
        )
    for rule, there in base.rules._asdict().items():
        if rule in settings.table.model_fields_set and (given := getattr(settings.table, rule)) != there:
            raise Invalid(
                f'[table] {rule} = "{given}" but the table at {base.uri} has "{there}", which is fixed when a table is '
                "set up; correct the setting, or leave it out"
            )


def _check_same_columns(settings: Settings, base: flush.BaseTable) -> None:
    columns = settings.table.columns
    for name in columns:
        if name not in base.schema.names:
            raise Invalid(
                f"[table] columns.{name}: the table at {settings.table.uri} has no such column"
                f"{nearest(name, base.schema.names)}"
            )
    for field in settings.arrow_schema():
        found = base.schema.field(field.name).type
        if found != field.type:
            raise Invalid(
                f"[table] columns.{field.name} is {field.type}, but {found} in the table at {settings.table.uri}; "
                "correct the setting or choose another uri"
            )


def _append_by(settings: Settings) -> list[str] | None:
    """What `flush.BaseTable.create` takes for a table without a key; None where it has one."""
    return settings.regions.by if settings.table.append_only else None


def _given_format(settings: Settings) -> wal.WalFormat | None:
    """The setting `wal.format`, None where it is left at its default: that is for new tables only."""
    return settings.wal.format if "format" in settings.wal.model_fields_set else None


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
