"""Many tables in one configuration: the rules between their sections, and the names below a prefix."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from memwal import wal
from memwal.ingest.errors import Invalid
from memwal.ingest.settings.configuration import Settings
from memwal.ingest.settings.problems import Problem
from memwal.ingest.settings.sections import SUFFIX, TABLES, is_remote, location
from memwal.ingest.settings.values import check_table_name

_NEW = "new"
"""Name of a table below the prefix, to check the template."""
_SHOWN = 10
"""Names in a message."""


def of_fleet(settings: Settings) -> Iterator[Problem]:
    """Check that the tables are named in one of three ways, and that each has a location of its own."""
    tables, prefix = settings.tables, settings.fleet.prefix
    if prefix and settings.table.uri:
        text = "uri is set beside fleet.prefix; remove prefix, or remove uri to make [table] the template of new tables"
        yield Problem("table", "uri", text, (("fleet", "prefix"),))
    if prefix and tables:
        text = f"prefix is set beside [{TABLES}{next(iter(tables))}]; remove prefix or the sections of tables"
        yield Problem("fleet", "prefix", text)
    elif tables and settings.table.model_fields_set:
        text = f"is beside [{TABLES}{next(iter(tables))}]; write [tables.NAME] in its place, or remove it"
        yield Problem("table", next(iter(settings.table.model_fields_set)), text)
    if prefix.startswith("s3://") and "/" not in prefix.removeprefix("s3://").rstrip("/"):
        text = f"prefix = {prefix!r} is a whole bucket; name a folder in it, such as {prefix.rstrip('/')}/tables/"
        yield Problem("fleet", "prefix", text)
    at: dict[str, str] = {}
    for name, table in tables.items():
        if table.uri and (other := at.setdefault(location(table.uri), name)) != name:
            text = f"uri = {table.uri!r} is the location of [{TABLES}{other}] too; give each table its own"
            yield Problem(TABLES + name, "uri", text)


def of_route(settings: Settings) -> Iterator[Problem]:
    """Check the settings of a pipeline whose rows go to many tables."""
    if not settings.fleet.prefix:
        text = "table is set, but [fleet] prefix is not; set it to the directory of the tables, or remove table"
        yield Problem("route", "table", text)
    elif not settings.table.columns or not (settings.table.key or settings.table.append_only):
        text = "is the template of the tables of [route]; write its columns, and key or append_only = true"
        yield Problem("table", "columns", text)
    if settings.daemon.on_spark:
        yield Problem("daemon", "on_spark", "on_spark is for one table; remove it, or [route]")
    if settings.source.schema_drift != "ignore":
        text = f'schema_drift = "{settings.source.schema_drift}" is for one table; remove it, or [route]'
        yield Problem("source", "schema_drift", text)


def each_table(settings: Settings) -> Iterator[tuple[str, Settings]]:
    """Yield the section and the settings of each table of a configuration; of a prefix, those of a new table."""
    if settings.fleet.prefix:
        yield "table", settings.of_table(_NEW)
    elif settings.tables:
        yield from ((TABLES + name, settings.of_table(name)) for name in settings.tables)
    else:
        yield "table", settings


def table_names(settings: Settings, environ: Mapping[str, str]) -> list[str]:
    """Return the names of the tables: of the sections in their order, or those below the prefix, ascending.

    A prefix costs one listing (S3: a request for 1,000 tables) and no request for a table. Directories with another
    ending or an invalid name are left out.
    Raises: Invalid if a local prefix does not exist or a secret cannot be resolved; StoreRefused, StoreUnavailable.
    """
    prefix, names = settings.fleet.prefix, list(settings.names)
    if not prefix:
        return names
    check_prefix(settings)
    for directory in wal.open_store(prefix, settings.storage_options(environ)).children(""):
        if directory.endswith(SUFFIX):
            try:
                names.append(check_table_name(directory.removesuffix(SUFFIX)))
            except ValueError:
                continue
    return names


def checked_tables(settings: Settings, environ: Mapping[str, str]) -> list[Settings]:
    """Return the settings of the tables that a check of the configuration opens: all, but of a prefix one, a new table
    if the template has columns.

    Raises: errors of `table_names`.
    """
    names = table_names(settings, environ)
    if settings.fleet.prefix:
        names = [_NEW] if settings.table.columns else names[:1]
    return [settings.of_table(name) for name in names]


def check_prefix(settings: Settings) -> None:
    """Raise Invalid if the prefix is a local directory that does not exist. Sends no request."""
    prefix = settings.fleet.prefix
    if prefix and not is_remote(prefix) and not Path(location(prefix)).is_dir():
        raise Invalid(f"fleet.prefix = {prefix!r}: no such directory; create it, or correct the prefix")


def listed(names: list[str]) -> str:
    """Return names for a message: at most ten, and the number of the others."""
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
