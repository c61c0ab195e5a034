"""What `memwal run` and `config check` check before anything is written: Java, secrets, addresses, source, table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import pyarrow as pa

from memwal.flush import BaseTable
from memwal.ingest.engine.api.missing import missing_rule, named
from memwal.ingest.engine.table.create import check_flush, find_or_create, of_template
from memwal.ingest.errors import Invalid, MemWalError, classify
from memwal.ingest.secret_refs import resolve, resolve_spark
from memwal.ingest.service.daemon.serve import check_addresses
from memwal.ingest.service.rpc.credentials import Access
from memwal.ingest.service.rpc.guard import Guard, check_address
from memwal.ingest.settings.fleet import check_prefix
from memwal.ingest.settings.load import Settings
from memwal.ingest.settings.sections import KAFKA, SourceSettings
from memwal.ingest.spark.dlq.table import DeadLetters
from memwal.ingest.spark.drift.kinds import new_columns
from memwal.ingest.spark.drift.schemas import fields_of_schema
from memwal.ingest.spark.names import check_spark_names
from memwal.ingest.spark.pipeline.checkpoint import check_checkpoint, refuse_old_checkpoint
from memwal.ingest.spark.session import check_java, check_master, check_spark
from memwal.ingest.spark.source.files import check_source, columns_of_files
from memwal.ingest.spark.source.kafka.rows import record_mapping
from memwal.ingest.spark.source.kafka.stream import check_reachable
from memwal.ingest.tracing import check_installed
from memwal.ingest.values.avro import inline_schema, newest_schema, options_of
from memwal.ingest.values.spec import VALUE, RecordMapping
from memwal.wal import SystemClock

T = TypeVar("T")
Checked = Callable[[str, Any, MemWalError | None], None]


def check(settings: Settings, environ: Mapping[str, str]) -> BaseTable | None:
    """Return the table; None if it does not exist yet; of many tables, their template. Reads only.

    Raises: the first problem, mostly Invalid.
    """
    base, problems = find_problems(settings, environ, starts=True)
    if problems:
        raise problems[0]
    return base


def find_problems(
    settings: Settings, environ: Mapping[str, str], *, starts: bool, checked: Checked | None = None
) -> tuple[BaseTable | None, list[MemWalError]]:
    """Return the table (None if it does not exist or cannot be read) and all problems. Reads only.

    `starts`: the pipeline is about to run. Otherwise it may be running already, and its ports may be in use. A failed
    check skips only the checks that depend on it. `checked`: called after each check with its name, its result and its
    problem.
    """
    problems: list[MemWalError] = []

    def step(name: str, work: Callable[..., T], *args: Any) -> T | None:
        found, problem = None, None
        try:
            found = work(*args)
        except Exception as error:  # noqa: BLE001 - reported with the other problems
            problem = classify(error)
            problems.append(problem)
        if checked is not None:
            checked(name, found, problem)
        return found

    pipeline = starts or has_source(settings)
    of_spark = pipeline and settings.source.engine == "spark"
    if of_spark:
        step("PySpark", check_spark)
        step("Java", check_java, environ)
        step("Spark's options", check_spark_names, settings.source)
        step("Spark's master", _master, settings, environ)
        step("checkpoint", check_checkpoint, settings)
    step("addresses", _edges, settings, environ, starts)
    step("secrets", _secrets, settings, environ)
    step("tracing", check_installed, settings.tracing)
    known = len(problems)
    base = step("table", _table, settings, environ)
    schema = step("columns", _schema, settings, base) if len(problems) == known else None
    if of_spark and schema is not None:
        step("old checkpoint", refuse_old_checkpoint, settings, base)
        key, rules = (settings.table.key, settings.table.upsert) if base is None else (base.key, base.rules.upsert)
        step("source", _source, settings, schema, tuple(key), rules)
        if settings.dlq.mode == "table":
            step(
                "dead letters",
                DeadLetters.find,
                settings.dead_letters,
                settings.storage_options(environ),
                SystemClock(),
            )
    return base, problems


def has_source(settings: Settings) -> bool:
    """Return whether the configuration names a source of rows, so that it describes a pipeline."""
    return bool({"format", "path", "feed"} & settings.source.model_fields_set)


def _edges(settings: Settings, environ: Mapping[str, str], starts: bool) -> None:
    """Check addresses, tokens and certificates of the daemons and HTTP servers, including those of a child daemon."""
    daemon, sink = settings.daemon, settings.sink
    guard = Guard.of(daemon, environ) if daemon.endpoints or daemon.on_spark else None
    if guard is None:
        guard = check_addresses(settings, environ, free=starts)
    elif not starts and daemon.endpoints and not daemon.on_spark:
        check_addresses(settings, environ, free=False)
    if sink.http_port >= 0:
        check_address("sink.http_port", sink.http_host, sink.http_port, guard, free=starts)


def _master(settings: Settings, environ: Mapping[str, str]) -> None:
    """Check that a standalone master answers. `_secrets` reports references that cannot be resolved."""
    given = {name: value for name, value in settings.source.spark.items() if name == "spark.master"}
    try:
        conf = resolve_spark(given, environ)
    except Invalid:
        return
    check_master(conf)


def _secrets(settings: Settings, environ: Mapping[str, str]) -> None:
    """Check that every secret reference can be resolved, including those that are resolved late."""
    source, lines = settings.source, list[str]()
    for resolved in (
        lambda: Access.of(settings).options(environ),
        lambda: resolve(source.options, environ, "[source] options"),
        lambda: resolve(source.registry_options, environ, "[source] registry_options"),
        lambda: resolve_spark(source.spark, environ),
    ):
        try:
            resolved()
        except Invalid as error:
            lines += error.lines
    if lines:
        raise Invalid.of(lines)


def _table(settings: Settings, environ: Mapping[str, str]) -> BaseTable | None:
    if settings.route.table:
        check_prefix(settings)
        return of_template(settings.table)
    base = BaseTable.find(settings.table.uri, settings.storage_options(environ), to_write=True)
    return None if base is None else find_or_create(settings, environ)[0]


def _schema(settings: Settings, base: BaseTable | None) -> pa.Schema:
    if base is not None:
        return written_schema(settings, base)
    schema = columns_of_source(settings) or settings.arrow_schema()
    if not schema.names:
        raise Invalid(
            f"{settings.table.uri}: the table does not exist; write its columns and key in [table] to create it"
        )
    check_flush(settings, schema)
    return schema


def columns_of_source(settings: Settings) -> pa.Schema | None:
    """Return the columns of a table to be created, if its configuration names none: those of the source.

    None if they are configured, or if the source names no types. Raises: Invalid, Unavailable if they cannot be read.
    """
    source = settings.source
    if settings.table.columns:
        return None
    if source.format == "parquet":
        return columns_of_files(source)
    avro = source.format == KAFKA and source.value_format == "avro"
    schema = _schema_of_topic(source) if avro else None
    if schema is None:
        return None
    columns, _ = new_columns(fields_of_schema(schema, source.envelope), ())
    return pa.schema([field.remove_metadata() for field in columns])


def _schema_of_topic(source: SourceSettings) -> Any:
    """Return the Avro schema of the configuration, else the newest one of the first topic; None if unknown."""
    if not source.registry:
        return inline_schema(source.avro_schema)
    if not source.topics:
        return None
    options = options_of(source.registry_options)
    try:
        return newest_schema(source.topics[0], source.registry, options)
    except ValueError as error:
        raise Invalid(f"source.registry: {error}; write the columns in [table]") from None


def _source(settings: Settings, schema: pa.Schema, key: tuple[str, ...], upsert: str) -> None:
    check_source(settings.source, schema)
    if settings.source.format == KAFKA:
        mapping = record_mapping(settings.source, schema, key)
        if missing_rule(settings.sink.missing or None, key, upsert) != "null":
            _expect_fields(settings.source, mapping)
        check_reachable(settings.source)


def _expect_fields(source: SourceSettings, mapping: RecordMapping) -> None:
    """Raise Invalid if `avro_schema` lacks the field of a column: every row would set the column to null."""
    if source.value_format != "avro" or not source.avro_schema:
        return
    fields = fields_of_schema(inline_schema(source.avro_schema), source.envelope)
    lacking = [
        column.name
        for column in mapping.columns
        if column.leaf is not None and column.leaf.origin.root == VALUE and column.default is None
        if column.leaf.origin.path and column.leaf.origin.path[0] not in fields
    ]
    if fields and lacking:
        raise Invalid(
            f"[source] avro_schema has no field for the {named(lacking)} of the table; name it in [source.columns], or "
            "write the columns that the values have in [table] columns and set sink.missing"
        )


def written_schema(settings: Settings, base: BaseTable) -> pa.Schema:
    """Return the columns that a source is read with: those of the table.

    If a rule for missing columns applies and [table] columns is set, only the columns named there: a source returns
    null for a column that it lacks, and a null would replace the stored value.
    """
    named = settings.table.columns
    if not named or not (settings.sink.missing or base.rules.upsert == "merge"):
        return base.schema
    return pa.schema([field for field in base.schema if field.name in named])
