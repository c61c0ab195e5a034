"""Rules over several settings. Each is a pure function of settings that yields problems.

A problem that depends on a rejected value is dropped (`Problem.needs`), so one mistake gives one line.
"""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from memwal.flush.base.create import is_version_type
from memwal.flush.base.row_hash import is_hashed
from memwal.flush.base.ttl import MAX_SECONDS, MIN_SECONDS, is_time
from memwal.ingest.settings.configuration import Settings, index_spec
from memwal.ingest.settings.endpoints import expanded
from memwal.ingest.settings.fleet import each_table, of_fleet, of_route
from memwal.ingest.settings.problems import Problem
from memwal.ingest.settings.sections import KAFKA, DaemonSettings, SourceSettings, TableSettings, location
from memwal.ingest.settings.values import Index, format_duration, format_size
from memwal.ingest.suggest import suggestion
from memwal.ingest.values.avro import check_schema
from memwal.ingest.values.spec import build
from memwal.ingest.values.type_names import parse_type
from memwal.memtable.errors import InvalidRows
from memwal.memtable.index_spec import check_indexes, is_key_type

INDEX_KINDS = ("ivf_pq", "fts", "btree")
RESERVED = ("_tombstone", "_distance", "_score", "_rowid", "_rowaddr")
_ONLY_KAFKA = (
    *("brokers", "topics", "topic_pattern", "starting_offsets", "max_offsets_per_trigger", "fail_on_data_loss"),
    *("value_format", "avro_schema", "registry", "registry_options", "envelope", "delete_when", "columns", "fields"),
)
_ONLY_FILES = ("path", "feed", "feed_every", "files_per_trigger")
_KAFKA_SETTINGS: Mapping[str, str] = {
    "kafka.bootstrap.servers": "brokers",
    "kafka.auto.offset.reset": "starting_offsets",
    "assign": "topics",
    "subscribe": "topics",
    "subscribepattern": "topic_pattern",
    "startingoffsets": "starting_offsets",
    "maxoffsetspertrigger": "max_offsets_per_trigger",
    "failondataloss": "fail_on_data_loss",
}
_SET_BY_SPARK = ("enable.auto.commit", "key.deserializer", "value.deserializer", "interceptor.classes")
_REGISTRY = ("username", "password", "token")
_BROKER = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^:\s,]+):[0-9]{1,5}")


def relations(settings: Settings, refused: Collection[tuple[str, str]]) -> list[Problem]:
    """Return every violated rule. `refused`: (section, key) pairs whose values were rejected and replaced by
    defaults."""
    problems = [*of_fleet(settings), *(of_route(settings) if settings.route.table else ())]
    nowhere = settings.route.table and not settings.fleet.prefix
    for section, table in () if nowhere else each_table(settings):
        found = [*of_table(table.table), *of_append(table), *of_dlq(table)]
        problems += [problem.of_table(section) for problem in found]
    problems += [*of_limits(settings), *of_source(settings), *of_kafka(settings)]
    problems += [*of_daemon(settings), *of_tracing(settings)]
    return [problem for problem in problems if not {(problem.section, problem.key), *problem.needs} & set(refused)]


def conflicts(pipelines: Sequence[Settings]) -> Iterator[str]:
    """Yield one line for each conflict between the pipelines of one file."""
    ports = [str(settings.sink.http_port) for settings in pipelines if settings.sink.http_port > 0]
    for what, values in (
        (
            "sink.checkpoint",
            [each.checkpoint for each in pipelines if each.sink.checkpoint or each.route.table or not each.is_fleet],
        ),
        ("feed directory (source.path)", [settings.source.path for settings in pipelines if settings.source.feed]),
        ("sink.http_port", ports),
    ):
        for value in _repeated(values):
            yield f"two pipelines have the same {what}, {value}; give each pipeline its own"
    if any(settings.source.spark != pipelines[0].source.spark for settings in pipelines):
        yield "source.spark: pipelines of one file share a Spark session; set it only in [source] of the file"


def of_table(table: TableSettings) -> Iterator[Problem]:
    """Check uri, key, columns and indexes of [table] against each other."""
    if not table.uri:
        yield Problem("table", "uri", 'uri is not set; write the path of the table, such as uri = "data/t.lance"')
    yield from _of_key(table)
    for name in table.columns:
        if name in RESERVED or "." in name or not name:
            yield Problem("table", "columns", f"columns.{name}: the name is taken by Lance or memwal; rename it")
    yield from _of_version(table)
    yield from _of_ttl(table)
    schema = pa.schema([(name, parse_type(kind)) for name, kind in table.columns.items()])
    for column, index in table.indexes.items():
        if text := _of_index(schema, column, index):
            yield Problem("table", f"indexes.{column}", f"indexes.{column}: {text}", _column(column))


def of_append(settings: Settings) -> Iterator[Problem]:
    """Check settings that are only for tables without a key, or only for tables with one."""
    table, by = settings.table, settings.regions.by
    if table.append_only and table.key:
        text = "key is set, but append_only = true means that the table has no key; remove one of the two"
        yield Problem("table", "key", text)
    if table.append_only and settings.wal.format == "arrow":
        text = 'format = "arrow" needs a table with a key; remove it, or remove append_only'
        yield Problem("wal", "format", text)
    for rule in ("upsert", "on_duplicate", "version") if table.append_only else ():
        if rule in table.model_fields_set:
            text = f"{rule} is for puts to an existing key, and append_only = true means no key; remove it"
            yield Problem("table", rule, text)
    if by and not table.append_only:
        text = "by is for tables with append_only = true; other tables are spread by their key; remove it"
        yield Problem("regions", "by", text)
    for name in _repeated(by):
        yield Problem("regions", "by", f"by names {name!r} {by.count(name)} times; name it once")
    for name in dict.fromkeys(by):
        absent, label = f"by: {name!r} is not a column of [table]", f"by: column {name!r}"
        wanted = "name columns of numbers, text, bytes or times"
        yield from _of_column("regions", "by", name, table.columns, absent, is_hashed, label, wanted)


def of_limits(settings: Settings) -> Iterator[Problem]:
    """Check sizes and times that limit each other."""
    wal, memtable = settings.wal, settings.memtable
    if memtable.size_max > memtable.unflushed_max:
        text = (
            f"unflushed_max = {format_size(memtable.unflushed_max)!r} is less than size_max = "
            f"{format_size(memtable.size_max)!r}: puts would block before the memtable is frozen; raise it"
        )
        yield Problem("memtable", "unflushed_max", text, (("memtable", "size_max"),))
    commit = settings.commit
    if 0 < commit.pending_max <= commit.ssts_max and commit.interval > 0:
        text = (
            f"pending_max = {commit.pending_max} must be more than ssts_max = {commit.ssts_max}: puts would "
            "block before every commit; raise it, or set 0 for no limit"
        )
        yield Problem("commit", "pending_max", text, (("commit", "ssts_max"),))
    if wal.put_timeout > wal.retry_budget:
        text = (
            f"retry_budget = {format_duration(wal.retry_budget)!r} is shorter than one attempt (put_timeout = "
            f"{format_duration(wal.put_timeout)!r}); raise retry_budget or lower put_timeout"
        )
        yield Problem("wal", "retry_budget", text, (("wal", "put_timeout"),))


def of_source(settings: Settings) -> Iterator[Problem]:
    """Check the source against its table."""
    source, columns = settings.source, settings.table.columns
    if source.feed and not source.path:
        yield Problem("source", "path", "path is not set, but feed is; set it to the directory to copy the feed into")
    if source.feed and source.feed.rstrip("/") == source.path.rstrip("/"):
        yield Problem("source", "feed", f"feed = {source.feed!r} equals path; choose another directory for path")
    if source.engine == "local":
        yield from _of_local(settings)
    if source.schema_drift != "ignore":
        yield from _of_drift(settings)
    for name in source.order_by:
        yield from _of_column("source", "order_by", name, columns, f"order_by: {name!r} is not a column of [table]")


_LOCAL: dict[tuple[str, str], tuple[Any, ...]] = {
    ("source", "format"): ("parquet", "csv", "json", "arrow"),
    ("source", "options"): ({},),
    ("source", "schema_drift"): ("ignore",),
    ("source", "order_by"): ([],),
    ("sink", "missing"): ("", "null"),
    ("sink", "http_port"): (-1,),
    ("dlq", "mode"): ("fail",),
    ("route", "table"): ("",),
    ("table", "upsert"): ("replace", "insert"),
}
"""The values that `source.engine = "local"` supports, by section and setting."""


def _of_local(settings: Settings) -> Iterator[Problem]:
    for (section, key), supported in _LOCAL.items():
        value = getattr(getattr(settings, section), key)
        if value not in supported:
            given = f"{key} is set" if isinstance(value, dict | list) else f"{key} = {value!r}"
            others = ", ".join(repr(each) for each in supported if isinstance(each, str | int)) or "none"
            text = f'{given}: source.engine = "local" supports {others}; change it, or set engine = "spark"'
            yield Problem(section, key, text, (("source", "engine"),))


def _of_drift(settings: Settings) -> Iterator[Problem]:
    source, table = settings.source, settings.table
    of_kafka = source.format == "kafka" and source.value_format != "raw"
    if not of_kafka and source.format not in ("json", "parquet", "orc"):
        text = f'schema_drift = "{source.schema_drift}" is for JSON and Avro of Kafka, and for JSON, Parquet and ORC'
        text += " files; remove it, other sources do not name their fields"
        yield Problem("source", "schema_drift", text, (("source", "format"), ("source", "value_format")))
    chosen, needs = ('upsert = "merge"', ("table", "upsert")) if table.upsert == "merge" else ("", ("table", "upsert"))
    if settings.sink.missing:
        chosen, needs = f'sink.missing = "{settings.sink.missing}"', ("sink", "missing")
    if source.schema_drift == "add" and chosen and table.columns:
        text = f'schema_drift = "add": with {chosen} only the columns in [table] columns are put; remove them'
        yield Problem("source", "schema_drift", text, (needs,))


def of_daemon(settings: Settings) -> Iterator[Problem]:
    """Check the endpoints (Flight's form, each once, this daemon included), and the access settings."""
    daemon = settings.daemon
    yield from _of_access(daemon)
    yield from _of_tokens(settings)
    for endpoint in daemon.endpoints:
        scheme, _, place = endpoint.partition("://")
        host, _, port = place.rpartition(":")
        if scheme not in ("grpc", "grpc+tls") or not host or not port.isdecimal():
            text = f"endpoints: {endpoint!r} is not of the form 'grpc://host:port' or 'grpc+tls://host:port'"
            yield Problem("daemon", "endpoints", text)
            return
    for endpoint in _repeated(expanded(daemon.endpoints, daemon.workers)):
        text = f"endpoints: {endpoint} is listed twice"
        yield Problem("daemon", "endpoints", text + (", counting the workers" if daemon.workers > 1 else ""))
    for given in ("endpoints", "advertise") if daemon.on_spark else ():
        if getattr(daemon, given):
            text = f"{given}: on_spark = {daemon.on_spark} lets Spark place the daemons; remove one of the two"
            yield Problem("daemon", given, text)
            return
    if (own := daemon.advertise) and own not in daemon.endpoints:
        text = f"advertise = {own!r} is not one of endpoints{suggestion(own, daemon.endpoints)}"
        yield Problem("daemon", "advertise", text)


def _of_access(daemon: DaemonSettings) -> Iterator[Problem]:
    """Check that certificates have keys, that client certificates come with TLS, and that roles come with an admin
    token."""
    pairs = ("tls_cert", "tls_key"), ("tls_client_cert", "tls_client_key")
    for given, missing in (*pairs, *(pair[::-1] for pair in pairs)):
        if getattr(daemon, given) and not getattr(daemon, missing):
            text = f"{missing} is not set, but {given} is; set both the certificate and its key"
            yield Problem("daemon", missing, text)
    if daemon.tls_client_ca and not (daemon.tls_cert or daemon.tls_key):
        text = "tls_client_ca is set, but tls_cert is not; a daemon takes client certificates with TLS only, set both"
        yield Problem("daemon", "tls_client_ca", text)
    for given in ("write_token", "read_token", "tokens"):
        if getattr(daemon, given) and not daemon.token.get_secret_value():
            yield Problem("daemon", "token", f"token is not set, but {given} is; set the token of admins as well")


def _of_tokens(settings: Settings) -> Iterator[Problem]:
    """Check the tables of tokens."""
    for at, entry in enumerate(settings.daemon.tokens):
        for pattern in entry.tables:
            if not settings.is_fleet:
                text = f"tokens[{at}] has tables, but [table] is the only one and has no name; remove tables"
                yield Problem("daemon", "tokens", text)
            elif settings.tables and not fnmatch.filter(settings.tables, pattern):
                hint = suggestion(pattern, settings.tables)
                yield Problem("daemon", "tokens", f"tokens[{at}] tables: no table has the name {pattern!r}{hint}")


def of_dlq(settings: Settings) -> Iterator[Problem]:
    """Check that the dead-letter table is not the table itself."""
    dlq, table = settings.dlq, settings.table
    if dlq.uri and table.uri and location(dlq.uri) == location(table.uri):
        yield Problem("dlq", "uri", f"uri = {dlq.uri!r} is the table itself; choose another location for dead letters")


def of_tracing(settings: Settings) -> Iterator[Problem]:
    """Check the address of the collector, without repeating a possible password."""
    url = settings.tracing.endpoint
    if "@" in url:
        text = "endpoint has a user name in it; put credentials into OTEL_EXPORTER_OTLP_HEADERS"
        yield Problem("tracing", "endpoint", text)
    elif url and not url.startswith(("http://", "https://")):
        yield Problem("tracing", "endpoint", f"endpoint = {url!r}; write http://host:port or https://host:port")


def _of_key(table: TableSettings) -> Iterator[Problem]:
    if table.columns and not table.key and not table.append_only:
        text = (
            f'key is empty; name the columns that identify a row, such as key = ["{next(iter(table.columns))}"], or '
            "write append_only = true for a table that has no key and keeps every row"
        )
        yield Problem("table", "key", text)
    for name in _repeated(table.key):
        yield Problem("table", "key", f"key names {name!r} {table.key.count(name)} times; name it once")
    for name in dict.fromkeys(table.key):
        label, wanted = f"key column {name!r}", "a key column is integer, text, binary or bool"
        absent = f"{label} is not among columns"
        yield from _of_column("table", "key", name, table.columns, absent, is_key_type, label, wanted)


def _of_ttl(table: TableSettings) -> Iterator[Problem]:
    name, seconds = table.ttl_column, table.ttl_seconds
    needs = (("table", "ttl"),)
    if seconds and not name:
        text = f"ttl = {table.ttl!r} needs the column that has the time of a row; set ttl_column too"
        yield Problem("table", "ttl_column", text, needs)
    if name and seconds is None:
        text = f"ttl_column = {name!r} has no effect without ttl; set ttl too, or remove ttl_column"
        yield Problem("table", "ttl_column", text, needs)
    if seconds and not MIN_SECONDS <= seconds <= MAX_SECONDS:
        yield Problem("table", "ttl", f"ttl = {table.ttl!r}: give at least 1s, and at most 36500d")
    if name:
        times = [column for column, kind in table.columns.items() if is_time(parse_type(kind))]
        wanted = "name a column of timestamps or dates" + (suggestion(name, times) if times else "")
        absent, label = f"ttl_column = {name!r} is not among columns", f"ttl_column {name!r}"
        yield from _of_column("table", "ttl_column", name, table.columns, absent, is_time, label, wanted)


def _of_version(table: TableSettings) -> Iterator[Problem]:
    name = table.version
    if name and table.upsert == "insert":
        text = f'version = {name!r} needs puts that replace rows; remove it, or remove upsert = "insert"'
        yield Problem("table", "version", text, (("table", "upsert"),))
    if name in table.key:
        yield Problem("table", "version", f"version = {name!r} is part of the key; name a column outside it")
    elif name:
        absent, label = f"version = {name!r} is not among columns", f"version column {name!r}"
        wanted = "name a column of integers, timestamps or dates"
        yield from _of_column("table", "version", name, table.columns, absent, is_version_type, label, wanted)


def _of_index(schema: pa.Schema, column: str, index: Index) -> str:
    spec = index_spec(column, index, train_rows=256)
    if spec.kind is None:
        return f"type is missing; set it to one of {', '.join(INDEX_KINDS)}"
    if spec.kind not in INDEX_KINDS:
        return f"unknown index kind {spec.kind!r}{suggestion(str(spec.kind), INDEX_KINDS)}"
    if not schema.names:
        return ""
    if column not in schema.names:
        return f"no such column in [table] columns{suggestion(column, schema.names)}"
    try:
        check_indexes(schema, (spec,))
    except InvalidRows as error:
        return str(error)
    return ""


def _of_column(
    section: str,
    key: str,
    name: str,
    columns: Mapping[str, str],
    absent: str,
    fits: Callable[[pa.DataType], bool] = lambda _: True,
    label: str = "",
    wanted: str = "",
) -> Iterator[Problem]:
    """Check that `name`, the value of a setting, is one of `columns`, and of a type that `fits`.

    `absent`: the problem of a missing column. `label`, `wanted`: the subject and the remedy of the problem of its type.
    Nothing is checked without columns.
    """
    if columns and name not in columns:
        yield Problem(section, key, f"{absent}{suggestion(name, columns)}", _column(name))
    elif columns and not fits(parse_type(columns[name])):
        yield Problem(section, key, f"{label} is {columns[name]}; {wanted}", _column(name))


def _repeated(values: Sequence[str]) -> dict[str, None]:
    return dict.fromkeys(value for value in values if values.count(value) > 1)


def _column(name: str) -> tuple[tuple[str, str], ...]:
    return (("table", f"columns.{name}"),)


# ---- Kafka ---------------------------------------------------------------------------------------------------------


def of_kafka(settings: Settings) -> Iterator[Problem]:
    """Check all Kafka settings that need no broker."""
    source = settings.source
    if source.format != KAFKA:
        yield from _misplaced(source, _ONLY_KAFKA, f'is for format = "kafka", not for {source.format!r}; remove it')
        return
    yield from _misplaced(source, _ONLY_FILES, "is for file sources; remove it")
    yield from _of_topics(source)
    for name in source.options:
        if name.lower() in _KAFKA_SETTINGS:
            yield Problem("source", f"options.{name}", f"options.{name}: set {_KAFKA_SETTINGS[name.lower()]} instead")
        if name.lower().removeprefix("kafka.") in _SET_BY_SPARK:
            yield Problem("source", f"options.{name}", f"options.{name}: Spark's source sets it itself; remove it")
    yield from _of_offsets(source)
    yield from _of_values(source)
    if source.delete_when and settings.table.append_only:
        text = "delete_when needs a key, and append_only = true means no key; remove one of the two"
        yield Problem("source", "delete_when", text)
    if settings.table.columns:
        schema = settings.arrow_schema()
        needs = (("table", "columns"), *(("table", f"columns.{name}") for name in settings.table.columns))
        for problem in build(source, schema, settings.table.key)[1]:
            yield Problem("source", problem.key, problem.text, needs)


def _misplaced(source: SourceSettings, names: tuple[str, ...], why: str) -> Iterator[Problem]:
    """Report those of `names` that differ from their defaults."""
    for name in names:
        if getattr(source, name) != SourceSettings.model_fields[name].default:
            yield Problem("source", name, f"{name} {why}")


def _of_topics(source: SourceSettings) -> Iterator[Problem]:
    brokers = [each.strip() for each in source.brokers.split(",")]
    if not source.brokers:
        yield Problem("source", "brokers", 'brokers is not set; list at least one, such as "localhost:9092"')
    for broker in brokers if source.brokers else ():
        if not _BROKER.fullmatch(broker):
            yield Problem("source", "brokers", f"brokers: {broker!r} is not of the form 'host:port'")
    if bool(source.topics) == bool(source.topic_pattern):
        text = "topics and topic_pattern are both set" if source.topics else "topics is not set"
        yield Problem("source", "topics", f'{text}; set one of them, such as topics = ["flights"]')
    for topic in source.topics:
        if not re.fullmatch(r"[a-zA-Z0-9._-]{1,249}", topic):
            yield Problem("source", "topics", f"topics: {topic!r} is not a topic name; patterns: topic_pattern")
    try:
        re.compile(source.topic_pattern)
    except re.error as error:
        text = f"topic_pattern = {source.topic_pattern!r} is not a regular expression: {error}; correct it"
        yield Problem("source", "topic_pattern", text)


def _of_offsets(source: SourceSettings) -> Iterator[Problem]:
    text = source.starting_offsets
    if text in ("earliest", "latest"):
        return
    try:
        offsets = json.loads(text)
        for partitions in offsets.values():
            for number, offset in partitions.items():
                if int(number) < 0 or isinstance(offset, bool) or not isinstance(offset, int) or offset < -2:
                    raise ValueError
    except (ValueError, AttributeError):
        hint = 'write "earliest", "latest" or JSON such as {"flights": {"0": 17}}'
        yield Problem("source", "starting_offsets", f"starting_offsets = {text!r} is not valid; {hint}")


def _of_values(source: SourceSettings) -> Iterator[Problem]:
    avro = source.value_format == "avro"
    if avro and bool(source.avro_schema) == bool(source.registry):
        yield Problem("source", "value_format", 'value_format = "avro" needs one of avro_schema and registry; set it')
    if not avro:
        why = f'is for value_format = "avro", not for {source.value_format!r}; remove it'
        yield from _misplaced(source, ("avro_schema", "registry", "registry_options"), why)
    yield from _of_schemas(source)
    if source.value_format == "raw" and source.envelope != "none":
        yield Problem("source", "envelope", "envelope needs values with fields; set value_format to json or avro")
    for name, kind in source.fields.items():
        if pa.types.is_fixed_size_list(parse_type(kind)):
            yield Problem("source", f"fields.{name}", f"fields.{name}: SQL has no vector type; choose another type")


def _of_schemas(source: SourceSettings) -> Iterator[Problem]:
    if source.avro_schema:
        try:
            check_schema(source.avro_schema)
        except ValueError as error:
            yield Problem("source", "avro_schema", f"avro_schema {error}; correct it")
    if "@" in source.registry:  # not repeated: it may contain a password
        text = "registry has a user name or password in its URL; put them into registry_options"
        yield Problem("source", "registry", text)
    elif source.registry and not source.registry.startswith(("http://", "https://")):
        yield Problem("source", "registry", f"registry = {source.registry!r} must be an http:// or https:// URL")
    for name in source.registry_options:
        if name not in _REGISTRY:
            text = f"registry_options.{name} is not known{suggestion(name, _REGISTRY)}"
            yield Problem("source", f"registry_options.{name}", text)
