"""What `memwal run` checks of a pipeline before anything is written: Java, its checkpoint, its source, its table."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

from flush import BaseTable
from ingest.checkpoint import check_checkpoint, refuse_old_checkpoint
from ingest.configured_table import find_or_create
from ingest.daemon import check_addresses
from ingest.dead_letters import DeadLetters
from ingest.errors import Invalid
from ingest.kafka_checks import KAFKA, record_mapping
from ingest.kafka_source import check_reachable
from ingest.listening import check_address
from ingest.security import Guard
from ingest.settings import Settings
from ingest.source import check_source
from ingest.spark_master import check_master
from ingest.spark_session import check_java
from wal import SystemClock


def check(settings: Settings, environ: Mapping[str, str]) -> BaseTable | None:
    """The table as it is, None when it is to be created. Reads only. Raises: Invalid."""
    check_java(environ)
    check_master(settings.source.spark)
    check_checkpoint(settings)
    guard = _guard(settings, environ)
    if settings.sink.http_port >= 0:
        check_address("sink.http_port", settings.sink.http_host, settings.sink.http_port, guard)
    base = BaseTable.find(settings.table.uri, settings.storage_options(environ))
    if base is not None:
        base, _ = find_or_create(settings, environ)
    refuse_old_checkpoint(settings, base)
    schema = settings.arrow_schema() if base is None else written_schema(settings, base)
    if not schema.names:
        raise Invalid(f"{settings.table.uri}: no table is there; write its columns and key in [table] to create it")
    check_source(settings.source, schema)
    if settings.dlq.mode == "table":
        DeadLetters.find(settings.dead_letters, settings.storage_options(environ), SystemClock())
    if settings.source.format == KAFKA:
        record_mapping(settings.source, schema, tuple(settings.table.key) if base is None else base.key)
        check_reachable(settings.source)
    return base


def _guard(settings: Settings, environ: Mapping[str, str]) -> Guard:
    """What our own edges ask of callers; the addresses of a child daemon are looked at too."""
    if not settings.daemon.endpoints and not settings.daemon.on_spark:
        return check_addresses(settings, environ)
    return Guard.of(settings.daemon, environ)


def written_schema(settings: Settings, base: BaseTable) -> pa.Schema:
    """The columns that a file source is read with: the table's.

    Where upserts merge, only those that [table] columns names, if it does: Spark reads a column that a file does not
    have as null, and a null takes the place of what is stored.
    """
    named = settings.table.columns
    if base.rules.upsert != "merge" or not named:
        return base.schema
    return pa.schema([field for field in base.schema if field.name in named])
