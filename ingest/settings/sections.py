"""Every setting with its type, default and meaning, in its section.

The text below a setting is its description in `configs/default.toml`, which is rendered from the sections
(`ingest.settings.reference`); a test compares it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import unquote

from pydantic import AfterValidator, Field, SecretStr

from memwal.flush.base.open import CACHE_BYTES
from memwal.flush.sst.file_options import (
    PAGE_SIZE,
    PAGE_SIZE_MAX,
    PAGE_SIZE_MIN,
    FileOptions,
    check_compression,
    check_metadata,
)
from memwal.ingest.settings.values import (
    OFF,
    ColumnType,
    Duration,
    Index,
    Lifetime,
    Option,
    OrphanAge,
    RegionCount,
    Secret,
    Section,
    Size,
    parse_duration,
)
from memwal.wal import BUCKETS_MAX, WalOptions

KAFKA = "kafka"
SUFFIX = ".lance"
"""The directory of a table below a prefix is named NAME.lance, as LanceDB names it."""
TABLES = "tables."
"""Prefix of the sections of tables."""


class TableSettings(Section):
    """The Lance table, and how to create it if it does not exist."""

    uri: str = ""
    """path or s3:// URL of the Lance table; `init`, `run` and `serve` create it"""
    key: list[str] = Field([])
    """columns that identify a row, in order; a later row replaces an earlier one with the same key"""
    append_only: bool = False
    """create the table without a key: every row is kept, duplicates too; rows cannot be looked up or deleted by key"""
    columns: dict[str, ColumnType] = Field({})
    """column names and types, in order; used to create the table; may be left out if the source names them: Parquet
    files, Avro values"""
    indexes: dict[str, Index] = Field({})
    """column = ivf_pq, fts or btree; or a table with `type` and the parameters of the index"""
    storage_options: dict[str, Option] = Field({})
    """Lance's own storage options; write secrets as env:NAME or file:PATH"""
    cache_max: Size = Field(CACHE_BYTES, gt=0)
    """memory for Lance's caches of the base table; three quarters of it are for indexes"""
    memory_max: Size = Field(0, ge=0)
    """block puts while the table's rows in memory (memtables and cached SSTs, with indexes) take this much in one
    process; from half of it on, memtables are flushed early; 0 = no limit"""
    put_rate_max: Size = Field(0, ge=0)
    """bytes of rows per second that puts, micro-batches and deletes by key may write in one process; later puts wait,
    as for memtable.unflushed_max, or are refused as busy; 0 = no limit"""
    weight: float = Field(1.0, ge=0.01, le=100.0)
    """share of the time of a process's threads while several tables wait for them: a table of weight 2 gets twice as
    much as one of weight 1"""
    upsert: Literal["replace", "insert", "merge"] = "replace"
    """what a put to an existing key does: replace the row, keep the stored row (insert), or update only the given
    columns (merge); fixed when the table is created"""
    on_duplicate: Literal["last", "first", "fail"] = "last"
    """which of several rows with the same key in one put counts: the last, the first, or none (fail refuses the
    put); fixed when the table is created"""
    version: str = ""
    """column that orders the versions of a row: a row with a lower value than the stored row is skipped; empty = the
    later put wins; fixed when the table is created"""
    ttl: Lifetime = ""
    """age at which a row expires, such as 30d: no read returns it any more, and commits delete it from the base
    table a minute later. Kept in the table: a new value changes it for all processes, off (or 0) removes it, empty =
    leave it as it is"""
    ttl_column: str = ""
    """column of timestamps or dates (without a zone: UTC) that has the time of a row, for `ttl`; a row with null
    never expires"""

    @property
    def ttl_seconds(self) -> float | None:
        """`ttl` in seconds: 0 removes the table's ttl, None leaves it unchanged."""
        return None if not self.ttl else 0.0 if self.ttl == OFF else parse_duration(self.ttl)


class FleetSettings(Section):
    """Many tables: those below `prefix`, or sections [tables.NAME] in place of [table], each with its settings."""

    prefix: str = ""
    """directory or s3:// URL of tables NAME.lance; [table] without `uri` is then the template of new tables, and has
    the storage options of all"""
    idle_after: Duration = 300.0
    """release a region whose rows are all committed after this time without puts and reads; the next put or read claims
    it again; 0 = never. The regions of a single [table] are kept"""


class RouteSettings(Section):
    """Routing of the rows of one source to many tables of a fleet."""

    table: str = ""
    """column, or SQL expression of columns, with the name of each row's table below fleet.prefix, such as
    "concat('t_', tenant)"; a table that does not exist is created from the template [table]; empty = one table"""


class RegionsSettings(Section):
    """Regions, the units of single-writer ownership; set when the table is created."""

    count: RegionCount = Field(2)
    """number of regions of a new table; rows are spread over them by key; see `memwal regions resize`. "auto": one,
    doubled while the table is open and grows"""
    count_max: int = Field(16, ge=1, le=BUCKETS_MAX)
    """the most regions that count = "auto" makes"""
    split_rate: int = Field(20_000, ge=1)
    """count = "auto" doubles the regions if more rows per second are put into one of them"""
    split_rows: int = Field(10_000_000, ge=1)
    """count = "auto" doubles the regions if the base table has more rows for each of them"""
    split_interval: Duration = Field(60.0)
    """least time between two doublings, and after the start"""
    by: list[str] = Field([])
    """columns that choose the region of a row, for a new `append_only` table; empty = the whole row"""

    @property
    def first(self) -> int:
        """The number of regions of a new table."""
        return 1 if isinstance(self.count, str) else self.count


class WalSettings(Section):
    """The write-ahead log, which makes puts durable."""

    format: Literal["lance", "arrow"] = "lance"
    """format of WAL entries, fixed when the table is created: lance, or arrow, which Lance's own writers also read
    and write"""
    entry_size_max: Size = Field(16 << 20, gt=0)
    """split a group of puts into several entries above this size"""
    linger_max: Duration = 0.05
    """longest time until the rows of a non-durable put are written to the WAL"""
    entry_interval: Duration = Field(0.0, le=60)
    """least time between two WAL entries of durable puts into a region; those that come in between wait, and share
    the next entry: fewer requests to object storage, later acks; give a put no shorter timeout. 0 = a put is written
    at once"""
    put_timeout: Duration = Field(10.0, gt=0)
    """time limit of one attempt to write an entry, plus 1 s per MiB; also how long a put waits while
    memtable.unflushed_max, commit.pending_max, table.memory_max or table.put_rate_max blocks it"""
    retry_budget: Duration = Field(30.0, gt=0)
    """stop the writer when storage has not answered for this long"""
    readers: int = Field(8, ge=1, le=256)
    """number of entries read concurrently when the log is replayed"""
    read_lease: Duration = Field(0.2, le=60)
    """how long an owner answers reads without asking storage again whether it still owns the region; after a crash
    the next owner waits this long before its first write; 0 = ask at every read, as tables with format `arrow` do"""

    def options(self) -> WalOptions:
        """Return the limits of the WAL's storage calls."""
        return WalOptions(self.put_timeout, self.retry_budget, readers=self.readers, read_lease=self.read_lease)


class MemtableSettings(Section):
    """Rows in memory that are not flushed yet, with their indexes."""

    size_max: Size = Field(256 << 20, gt=0)
    """freeze the memtable at this size, indexes included"""
    rows_max: int = Field(1_000_000, ge=1)
    """freeze the memtable at this number of rows"""
    entries_max: int = Field(1_000, ge=1)
    """freeze the memtable at this number of WAL entries; the next owner replays them one by one"""
    age_max: Duration = Field(60.0, gt=0)
    """freeze the memtable when its oldest row is this old"""
    unflushed_max: Size = Field(1 << 30, gt=0)
    """block puts while a region has more unflushed bytes than this"""
    index_mode: Literal["sync", "async"] = "async"
    """when vector and text indexes take the rows of a put: before it returns (sync) or in the background (async);
    reads find the rows either way"""
    vector_train_rows: int = Field(1024, ge=256)
    """vectors that IVF-PQ is trained on; up to 8 times as many (8192 at most) are searched exactly"""


class FlushSettings(Section):
    """Writing frozen memtables as SSTs."""

    retry_delay: Duration = 1.0
    """pause before the first retry of a failed flush; it doubles with each retry, to 16 times this at most"""
    at_once: int = Field(2, ge=1, le=16)
    """number of memtables flushed concurrently per table"""
    cache_max: Size = Field(1 << 30, gt=0)
    """memory for uncommitted SSTs, their rows and indexes, so that reads need not load them: those flushed here are
    kept, others are loaded at the first read; the least recently used go first"""
    indexes: bool = True
    """build the table's indexes inside SSTs, for Lance's own readers; memwal does not need them. SSTs of fewer than
    10,000 rows have only vector indexes"""
    storage_version: Literal["base", "2.0", "2.1", "2.2"] = "base"
    """Lance file version of SSTs; base = the same as the base table"""
    page_size: Size = Field(PAGE_SIZE, ge=PAGE_SIZE_MIN, le=PAGE_SIZE_MAX)
    """bytes per column that Lance collects before it writes a page of an SST"""
    compression: Annotated[dict[str, str], AfterValidator(check_compression)] = Field({})
    """compression of SST columns: name pattern = zstd, zstd:1 to zstd:22, lz4, fsst or none; the first match applies"""
    metadata: Annotated[dict[str, str], AfterValidator(check_metadata)] = Field({})
    """schema metadata to add to SSTs"""

    def file_options(self) -> FileOptions:
        """Return the options of the SST file writer."""
        version = None if self.storage_version == "base" else self.storage_version
        return FileOptions(version, self.page_size, self.compression, self.metadata)


class CommitSettings(Section):
    """Merging SSTs into the base table."""

    interval: Duration = 30.0
    """longest time until a durable row is in the base table; memtables are flushed for it; 0 = commit only on demand
    and at the end of `run --once`"""
    ssts_max: int = Field(8, ge=1)
    """commit earlier when a region has this many uncommitted SSTs"""
    size_max: Size = Field(1 << 30, gt=0)
    """commit earlier when the uncommitted SSTs reach this size"""
    pending_max: int = Field(256, ge=0)
    """block puts while a region has this many uncommitted SSTs; 0 = never"""
    retries: int = Field(10, ge=0)
    """number of retries after a conflict with another writer of the base table"""
    memory_max: Size = Field(1 << 30, gt=0)
    """most bytes of SSTs loaded into memory for one commit; at least one SST is loaded"""
    optimize_interval: Duration = 10.0
    """least time between merges of index segments of the base table; runs after a commit; 0 = never"""
    optimize_segments: int = Field(8, ge=2)
    """merge this many index segments of similar size into one; each commit adds one per index"""
    compact_interval: Duration = 10.0
    """least time between compactions of the base table; runs after a commit; 0 = never"""
    compact_fragments: int = Field(8, ge=2)
    """compact this many fragments of similar size into one; each commit adds one"""
    compact_rows_max: int = Field(1 << 20, ge=1)
    """compact fragments of this many rows or more only to remove deleted rows"""
    compact_bytes_max: Size = Field(1 << 30, gt=0)
    """most bytes of fragments that one compaction reads, and most bytes of a file that it writes; fragments of this
    size or more are compacted only to remove deleted rows, one at a time"""
    compact_deleted_percent: int = Field(25, ge=1, le=100)
    """rewrite a fragment when more than this percentage of its rows is deleted"""


class GcSettings(Section):
    """Deleting files that are no longer needed."""

    interval: Duration = 300.0
    """time between garbage collections; 0 = only with `memwal gc`"""
    wal_age_min: Duration = 600.0
    """minimum age before a WAL entry is deleted; active readers may still need it"""
    sst_age_min: Duration = 600.0
    """minimum age before a committed or abandoned SST is deleted; active readers may still need it"""
    manifest_age_min: Duration = 86400.0
    """minimum age before an old region manifest is deleted; tables with wal.format = "arrow" keep all"""
    changes_age_min: Duration = 0.0
    """minimum age before a change can no longer be read by `changes` and `memwal tail`; keeps WAL entries and region
    manifests that long, versions of the base table two hours longer. 0 = no longer than they are kept anyway"""
    orphan_age_min: OrphanAge = 604_800.0
    """minimum age before a file that no version of the base table refers to is deleted; must exceed the duration of
    any commit or index build"""
    versions_age_min: Duration = 3600.0
    """keep every version of the base table that was the newest within this time; older ones are thinned out. Must
    exceed the duration of any read; 0 = never delete a version"""
    versions_hourly: Duration = 86400.0
    """keep the last version of each hour for this time; 0 = none by the hour"""
    versions_daily: Duration = 604_800.0
    """keep the last version of each day for this time; 0 = none by the day"""
    space_max: float = Field(2.0, ge=0, allow_inf_nan=False)
    """most bytes of the newest version and those older than versions_age_min, as a multiple of the newest version's;
    above it the oldest are deleted. Tagged and pre-setup versions stay; 0 = no limit"""
    versions_min: int = Field(10, ge=1)
    """number of newest versions to keep regardless of age"""
    versions_interval: Duration = 600.0
    """least time between deletions of old versions; runs after a commit; 0 = never"""


# ---- processes -----------------------------------------------------------------------------------------------------


class SourceSettings(Section):
    """The Spark Structured Streaming source of `memwal run`."""

    engine: Literal["spark", "local"] = "spark"
    """what reads the source: Spark, or local for Parquet, CSV, JSON and Arrow files on local disks, without Spark and
    Java"""
    format: str = Field("parquet", min_length=1)
    """kafka, or the name of any other Spark streaming source"""
    path: str = ""
    """directory that a file source watches; write a file under a name that begins with . or _, then rename it: Spark
    reads a file once, as it is when it is first seen"""
    feed: str = ""
    """directory or file to simulate a stream from: its files are copied into `path` in order of their names"""
    feed_every: Duration = 0.0
    """time between two files of the feed"""
    files_per_trigger: int = Field(1, ge=1)
    """number of files per micro-batch of a file source"""
    trigger: Duration = 0.2
    """time between two micro-batches"""
    freshness_max: Duration = 30.0
    """objective of `memwal run`: longest time from a row's landing in the source until it is searchable; beyond it
    the page warns, /health/readyz returns 503 and MemwalNotFresh fires; 0 = no objective"""
    options: dict[str, Option] = Field({})
    """additional options of the Spark source, under Spark's names; write secrets as env:NAME or file:PATH"""
    schema_drift: Literal["ignore", "fail", "add"] = "ignore"
    """what to do with fields that the table has no column for (JSON, Avro from Kafka, Parquet, ORC): ignore them,
    fail the run, or add nullable columns; fail and add inspect every micro-batch before it is written"""
    order_by: list[str] = Field([])
    """columns that order rows with the same key inside a micro-batch; the last row wins"""
    spark: dict[str, Option] = Field({"spark.master": SecretStr("local[2]")})
    """Spark configuration of the session; write secrets as env:NAME or file:PATH"""
    brokers: str = ""
    """Kafka: bootstrap brokers as host:port, separated by commas"""
    topics: list[str] = Field([])
    """Kafka: topics to read"""
    topic_pattern: str = ""
    """Kafka: regular expression for the topics to read, in place of `topics`; must match the whole name"""
    starting_offsets: str = "earliest"
    """Kafka: where the first start begins: earliest, latest or JSON such as {"flights": {"0": 17}}"""
    max_offsets_per_trigger: int = Field(0, ge=0)
    """Kafka: most records per micro-batch; 0 = no limit"""
    fail_on_data_loss: bool = True
    """Kafka: stop if records were deleted from the topic before they were read"""
    outage_max: Duration = 600.0
    """Kafka: how long to retry when the brokers do not answer; 0 = end the run at once"""
    value_format: Literal["json", "avro", "raw"] = "json"
    """Kafka: format of record values"""
    avro_schema: str = ""
    """Avro: schema of all values, as JSON"""
    registry: str = ""
    """Avro: URL of a Confluent-compatible schema registry, in place of `avro_schema`"""
    registry_options: dict[str, Option] = Field({})
    """username and password, or token, for the registry; as env:NAME or file:PATH"""
    envelope: Literal["none", "debezium"] = "none"
    """Kafka: envelope around each row: none, or Debezium's before/after/op"""
    delete_when: str = ""
    """Kafka: Spark SQL condition, such as value.op = 'D'; a record that meets it deletes its key"""
    columns: dict[str, str | dict[str, Any]] = Field({})
    """Kafka: column = the field or SQL expression it is read from, see ingest/source; a column that is not listed is
    read from the field with its name"""
    fields: dict[str, ColumnType] = Field({})
    """Kafka: types of fields that SQL expressions use but no column is read from"""


class SinkSettings(Section):
    """Sending rows from Spark tasks to the owners of the regions."""

    checkpoint: str = ""
    """Spark's checkpoint directory, not on s3://; empty = table.uri + .checkpoint"""
    stream_timeout: Duration = Field(300.0, gt=0)
    """time limit for sending the rows of one region in a micro-batch, retries after a change of owner included"""
    missing: Literal["", "null", "keep"] = ""
    """what happens to columns of the table that the rows lack: set to null, or keep their stored values; the source
    then has the columns in `table.columns`. Empty = refuse the run, or keep if table.upsert is merge"""
    in_flight_max: Size = Field(64 << 20, gt=0)
    """most bytes that one task sends before they are acked"""
    http_host: str = Field("127.0.0.1", min_length=1)
    """address that http_port listens on; the same rules as for `daemon.host`"""
    http_port: int = Field(-1, ge=-1, le=65535)
    """port of the page, /metrics, /health and /status of `run`; 0 = any free port, -1 = off"""


Role = Literal["read", "write", "admin"]


class TokenSettings(Section):
    """A token of callers, and their rights."""

    token: Secret
    role: Role = "read"
    tables: list[Annotated[str, Field(min_length=1)]] = Field([])
    """names of tables, with wildcards as of files; empty = all"""


class DaemonSettings(Section):
    """The process that owns the regions."""

    host: str = Field("127.0.0.1", min_length=1)
    """address that `serve` listens on; an address that other machines reach requires token, tls_cert and tls_key"""
    port: int = Field(0, ge=0, le=65535)
    """port that `serve` listens on; 0 = any free port, which is printed"""
    endpoints: list[str] = Field([])
    """addresses of all daemons of the table, as grpc://host:port or grpc+tls://host:port; each serves a share of the
    regions; empty = `serve` serves all regions, `run` starts a child process"""
    advertise: str = ""
    """which of the endpoints this daemon is; empty = the one with its host and port"""
    workers: int = Field(1, ge=1, le=64)
    """number of processes per daemon, on consecutive ports; each uses one core"""
    on_spark: int = Field(0, ge=0, le=1000)
    """number of daemons to run on the executors of the Spark cluster in source.spark; 0 = `serve` is the daemon
    itself"""
    claim_again: Duration = 10.0
    """how long a fenced daemon without peers waits before it claims its regions again; it does so only if the other
    writer has ended, and exits with code 1 otherwise; 0 = exit at once"""
    read_ahead: Duration = 2.0
    """how often one of several daemons reads what is new in the logs of the regions that it would take over, which
    makes a take-over shorter; about three requests per region each time, and one or two for each new entry; 0 = read
    them only when they are taken over"""
    calls_max: int = Field(1000, ge=1)
    """most calls that a daemon answers at once; clients that it refuses ask again"""
    message_max: Size = Field(256 << 20, gt=0)
    """largest request, and largest batch of rows, that a daemon takes"""
    put_max: Size = Field(4 << 30, gt=0)
    """most bytes of one put, or of a region's rows in a micro-batch, that a daemon takes, counted as columns of the
    table: nulls and columns that the put lacks count too"""
    query_timeout: Duration = 3600.0
    """longest time that a daemon works for one read, without the time in which the caller takes no rows; it ends at
    the next batch; 0 = no limit"""
    query_memory: Size = Field(4 << 30, ge=0)
    """most bytes of rows that a daemon gathers for one read; scans stream and gather none; 0 = no limit"""
    drain_timeout: Duration = 20.0
    """longest wait for puts in progress when the daemon ends"""
    http_port: int = Field(-1, ge=-1, le=65535)
    """port of the page, /metrics, /health and /status; 0 = any free port, -1 = off"""
    token: Secret = SecretStr("")
    """bearer token, as env:NAME or file:PATH: what this process sends, and what a daemon takes as that of an admin,
    who may do everything; empty = no authentication"""
    write_token: Secret = SecretStr("")
    """token of callers that may put, delete and read, as env:NAME or file:PATH; read again when it changes"""
    read_token: Secret = SecretStr("")
    """token of callers that may only read, as env:NAME or file:PATH; read again when it changes"""
    tokens: list[TokenSettings] = Field([])
    """more tokens of callers, each a section [[daemon.tokens]]: `token`, as env:NAME or file:PATH; `role`: read, write
    or admin; `tables`: of a fleet, the names that it is for, such as ["orders", "t_*"]; empty = all"""
    tls_cert: str = ""
    """PEM file with the server's certificate; empty = no TLS"""
    tls_key: str = ""
    """PEM file with its private key, without a password"""
    tls_ca: str = ""
    """PEM file with the CA that clients trust, on executors too; empty = the system's"""
    tls_client_ca: str = ""
    """PEM file with the CAs that sign clients' certificates (mutual TLS): whoever connects must present one, other
    daemons too; empty = no client certificates"""
    tls_client_cert: str = ""
    """PEM file with the certificate that this process, its peers and Spark tasks present to daemons; empty = none,
    or tls_cert if tls_client_ca is set"""
    tls_client_key: str = ""
    """PEM file with its private key, without a password"""


class SqlSettings(Section):
    """Queries of `memwal sql` and `table.sql`, which run in the caller's process."""

    memory_max: Size = Field(512 << 20, ge=1 << 20)
    """most bytes that one query holds for sorts, groups and joins; sorts and groups use temporary files beyond it, the
    smaller side of a join must fit"""


class DlqSettings(Section):
    """Dead letters: source rows that do not parse, do not fit the table, or are refused by it."""

    mode: Literal["fail", "skip", "table"] = "fail"
    """what a bad row does: stop the pipeline (fail), be dropped and counted (skip), or be stored in the dead-letter
    table (table)"""
    uri: str = ""
    """path or URL of the dead-letter table; empty = table.uri + .dlq"""
    max_bad_percent: int = Field(10, ge=0, le=100)
    """stop the pipeline above this percentage of bad rows; 100 = never"""
    bad_window: int = Field(1000, ge=1)
    """number of most recent rows, rounded up to whole micro-batches, that max_bad_percent is measured over"""
    age_max: Duration = 2_592_000.0
    """age above which `memwal dlq purge` deletes dead letters, unless the command says otherwise"""


class LogSettings(Section):
    """Messages on standard error."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """least severe level that is written"""
    format: Literal["text", "json"] = "text"
    """one line of text or one JSON object per message"""


class TracingSettings(Section):
    """OpenTelemetry spans, sent to a collector over OTLP/HTTP; needs the extra `otel`. Its OTEL_* variables count."""

    enabled: bool = False
    """whether to make spans and send them; off costs nothing"""
    endpoint: str = ""
    """URL of the collector, such as http://127.0.0.1:4318; empty = OTEL_EXPORTER_OTLP_ENDPOINT, or port 4318 of this
    host"""
    sample: float = Field(1.0, ge=0, le=1)
    """share of the traces begun here that is kept; 1 = all, or what OTEL_TRACES_SAMPLER says"""


class CostSettings(Section):
    """Prices of requests to an object store, for metrics of what they cost; local files cost nothing."""

    put_price: float = Field(0.005, ge=0, allow_inf_nan=False)
    """dollars per 1,000 PUT, COPY, POST and LIST requests; the defaults are those of S3 Standard"""
    get_price: float = Field(0.0004, ge=0, allow_inf_nan=False)
    """dollars per 1,000 GET, HEAD and other requests"""
    delete_price: float = Field(0.0, ge=0, allow_inf_nan=False)
    """dollars per 1,000 DELETE requests"""
    hourly_budget: float = Field(1.0, ge=0, allow_inf_nan=False)
    """dollars that the requests of one process may cost per hour before an alert fires; 0 = no limit"""


def is_remote(path: str) -> bool:
    """Return whether only Spark can read a path (`s3a://…`, `hdfs://…`)."""
    return "://" in path and not path.startswith("file://")


def location(path: str) -> str:
    """Return a path or URL in one form: absolute, without links, `..`, escapes and a slash at the end."""
    if "://" in path:
        path = unquote(path).rstrip("/")
    return path if is_remote(path) else os.path.realpath(local_path(path))


def local_path(path: str) -> Path:
    """Return a local path or `file:` URL as a Path."""
    return Path(path.removeprefix("file://") if path.startswith("file://") else path)
