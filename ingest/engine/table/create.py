"""Find, create or adopt the base table that a configuration names; reject a table that does not fit it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from tempfile import TemporaryDirectory
from typing import TypeAlias

import pyarrow as pa

from memwal import flush, wal
from memwal.flush.base.open import LanceCaches
from memwal.ingest.errors import Invalid, MemWalError
from memwal.ingest.settings.load import Settings
from memwal.ingest.settings.sections import TableSettings
from memwal.ingest.settings.values import format_duration
from memwal.ingest.suggest import suggestion
from memwal.memtable import InvalidRows, check_indexes, row_schema

_LOG = logging.getLogger("memwal.table")


Columns: TypeAlias = pa.Schema | Callable[[], pa.Schema | None] | None
"""Columns that replace `table.columns`, or a function that returns them and is called only if a table is created."""


def find_or_create(
    settings: Settings, environ: Mapping[str, str], schema: Columns = None
) -> tuple[flush.BaseTable, bool]:
    """Return the base table of `settings`, and whether this call created it.

    Raises: Invalid if the table does not exist and no schema and key are given, or if it has another key or other
    columns; errors of `schema`; flush errors if the path holds something else.
    """
    table, options, caches = settings.table, settings.storage_options(environ), LanceCaches(settings.table.cache_max)
    base = flush.BaseTable.find(table.uri, options, to_write=True, caches=caches)
    if base is not None:
        return _fitting(settings, base), False
    given = schema() if callable(schema) else schema
    wanted = settings.arrow_schema() if given is None else given
    if not len(wanted) or not (table.key or table.append_only):
        lacks = "name its key" if len(wanted) else "give its columns and its key"
        raise Invalid(
            f'{table.uri}: table not found; to create it, {lacks}, such as key = ["id"] (for a table without a key, '
            "which keeps every row: append_only = true, in Python key=())"
        )
    wanted, indexes = _with_key(wanted, table.key), settings.index_specs()
    row_schema(wanted, table.key)
    check_indexes(wanted, indexes)
    check_flush(settings, wanted)
    regions, wal_format, by = settings.regions.first, settings.wal.format, _append_by(settings)
    try:
        created = flush.BaseTable.create(
            table.uri, wanted, table.key, regions, indexes, options, wal_format, by, _rules(settings), _ttl(settings)
        )
        return replace(created, caches=caches), True
    except (flush.TableExists, OSError):
        # Another process is creating it; `find` returns its table, and completes a partly created one.
        if (base := flush.BaseTable.find(table.uri, options, to_write=True, caches=caches)) is None:
            raise
        return _fitting(settings, base), False


def of_template(table: TableSettings) -> flush.BaseTable:
    """Return an empty table from a template, for its columns and rules. Its files are deleted. Raises: Invalid."""
    with TemporaryDirectory(prefix="memwal-template-") as at:
        uri = f"{at}/template"
        try:
            settings = Settings(table=table.model_copy(update={"uri": uri, "storage_options": {}}))
            return find_or_create(settings, {})[0]
        except (InvalidRows, MemWalError) as error:
            raise Invalid(str(error).replace(uri, "[table], the template of fleet.prefix")) from error


def initialise(settings: Settings, environ: Mapping[str, str], schema: Columns = None) -> tuple[flush.BaseTable, str]:
    """Create the table of `settings`, or adopt the existing Lance table; return it and a word for what was done.

    Raises: as `find_or_create`; Invalid if existing rows do not fit the key.
    """
    try:
        base, created = find_or_create(settings, environ, schema)
        return base, "created" if created else "found"
    except flush.NotInitialised:
        table, regions, options = settings.table, settings.regions.first, settings.storage_options(environ)
        indexes, wal_format, by = settings.index_specs(), _given_format(settings), _append_by(settings)
        adopted = flush.BaseTable.adopt(
            table.uri, table.key, regions, indexes, options, wal_format, by, _rules(settings), _ttl(settings)
        )
        return _fitting(settings, adopted), f"adopted ({adopted.wal_format})"


def check_flush(settings: Settings, columns: pa.Schema, storage_version: str | None = None) -> None:
    """Raise Invalid if no SST of these columns can be written with [flush].

    `storage_version`: of the base table's files, None for a table that does not exist yet.
    """
    try:
        settings.flush.file_options().expect_fit(columns, storage_version)
    except flush.InvalidFileOptions as error:
        raise Invalid(f"[flush] {error}") from error


def _with_key(schema: pa.Schema, key: Sequence[str]) -> pa.Schema:
    """Return `schema` with its key fields declared not null, as Lance requires. Raises: Invalid."""
    for name in key:
        if name not in schema.names:
            raise Invalid(f"key column '{name}' is not in the schema{suggestion(name, schema.names)}")
        if key.count(name) > 1:
            raise Invalid(f"key column '{name}' is named twice; name it once")
    return pa.schema([field.with_nullable(field.nullable and field.name not in key) for field in schema])


def check_same_table(settings: Settings, base: flush.BaseTable) -> None:
    """Raise Invalid if `base` does not fit `settings`."""
    key = tuple(settings.table.key)
    if key and key != base.key:
        has = f"has the key {list(base.key)}" if base.key else "has no key: its rows are only appended"
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
    _check_same_indexes(settings, base)
    _check_same_columns(settings, base)


def _check_same_indexes(settings: Settings, base: flush.BaseTable) -> None:
    """Raise Invalid for an index that the table lacks, because the setting would be ignored.

    The table may have more indexes: they are added and dropped at any time.
    """
    if "indexes" not in settings.table.model_fields_set:
        return
    there = {spec.column: spec for spec in base.indexes}
    remedy = "change it with `memwal index add` and `drop`, or correct the setting"
    asked = settings.table.indexes
    for spec in settings.index_specs():
        found = there.get(spec.column)
        if found is None or found.kind != spec.kind:
            has = "none on this column" if found is None else f"{found.kind} on it"
            raise Invalid(
                f"[table] indexes.{spec.column} is {spec.kind}, but the table at {base.uri} has {has}; {remedy}"
            )
        index = asked[spec.column]
        for name, value in ({} if isinstance(index, str) else index).items():
            has = found.parameters.get(name, value)
            if name != "type" and has != value:
                raise Invalid(
                    f"[table] indexes.{spec.column}: {name} = {value!r}, but {has!r} in the table at {base.uri}; "
                    f"{remedy}"
                )


def _check_same_columns(settings: Settings, base: flush.BaseTable) -> None:
    columns = settings.table.columns
    for name in columns:
        if name not in base.schema.names and name not in base.unsupported:
            raise Invalid(
                f"[table] columns.{name}: the table at {settings.table.uri} has no such column"
                f"{suggestion(name, base.schema.names)}"
            )
    for field in settings.arrow_schema():
        if field.name in base.unsupported:
            continue
        found = base.schema.field(field.name).type
        if found != field.type:
            raise Invalid(
                f"[table] columns.{field.name} is {field.type}, but {found} in the table at {settings.table.uri}; "
                "correct the setting or choose another uri"
            )


def _fitting(settings: Settings, base: flush.BaseTable) -> flush.BaseTable:
    """Return `base` with the ttl of `settings`, unchanged if they set none.

    Raises: Invalid if it does not fit `settings`; InvalidRows for the ttl.
    """
    check_same_table(settings, base)
    check_flush(settings, base.schema, base.storage_version)
    wanted = _ttl(settings)
    if settings.table.ttl_seconds is None or wanted == base.ttl:
        return base
    newest = flush.set_ttl(base, wanted, wal.SystemClock())
    _LOG.warning("%s: %s; before: %s", base.uri, ttl_text(wanted), ttl_text(base.ttl))
    return newest


def ttl_text(ttl: flush.Ttl | None) -> str:
    """Return a ttl in words, such as "rows expire 30d after event_time"."""
    if ttl is None:
        return "no row expires"
    return f"rows expire {format_duration(ttl.seconds)} after {ttl.column or 'a column that was dropped'}"


def _ttl(settings: Settings) -> flush.Ttl | None:
    seconds = settings.table.ttl_seconds
    return flush.Ttl(settings.table.ttl_column, seconds) if seconds else None


def _append_by(settings: Settings) -> list[str] | None:
    """Return the columns that route rows of a table without a key; None if it has a key."""
    return settings.regions.by if settings.table.append_only else None


def _given_format(settings: Settings) -> wal.WalFormat | None:
    """Return the setting `wal.format`, None if it is not set: its default is for new tables only."""
    return settings.wal.format if "format" in settings.wal.model_fields_set else None


def _rules(settings: Settings) -> flush.WriteRules:
    return flush.WriteRules(settings.table.upsert, settings.table.on_duplicate, settings.table.version)
