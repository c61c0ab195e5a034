"""The sections of the configuration: every key, its type, its default and what it means.

This is the only place where a setting is declared. `configs/default.toml` and the README's reference are rendered from
here (`ingest.settings.reference`), and tests hold them to it. Durations are float seconds, sizes int bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import pyarrow as pa
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, SecretStr

from flush.base.caches import CACHE_BYTES
from flush.sst.file_options import PAGE_SIZE, PAGE_SIZE_MIN, FileOptions, check_compression, check_metadata
from ingest.mapping.type_names import parse_type
from ingest.secret_refs import check_only_reference, check_reference, resolve
from ingest.settings.units import parse_duration, parse_size
from memtable.index_spec import IndexSpec
from wal import WalOptions

KAFKA = "kafka"


def _checked_type(name: str) -> str:
    parse_type(name)
    return name


def _a_day_at_least(seconds: float) -> float:
    if seconds < 86_400.0:
        raise ValueError('must be at least "1d": what a commit under way has written looks just the same')
    return seconds


Duration = Annotated[float, BeforeValidator(parse_duration)]
OrphanAge = Annotated[Duration, AfterValidator(_a_day_at_least)]
Size = Annotated[int, BeforeValidator(parse_size)]
ColumnType = Annotated[str, AfterValidator(_checked_type)]
Option = Annotated[SecretStr, AfterValidator(check_reference)]
Secret = Annotated[SecretStr, AfterValidator(check_only_reference)]
Index = str | dict[str, Any]


class Section(BaseModel):
    """One table of the TOML file. Immutable; refuses unknown keys and values of another type."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class TableSettings(Section):
    """Which Lance table, and how to create it when it is not there."""

    uri: str = Field("", description="path or s3:// URL of the Lance table; `init`, `run` and `serve` create it")
    key: list[str] = Field([], description="columns that identify a row, in order; a later row replaces an earlier one")
    append_only: bool = Field(
        False,
        description="a new table has no key: every row is kept, equal ones too; none is looked up or deleted by key",
    )
    columns: dict[str, ColumnType] = Field(
        {}, description="column names and types in order, used when the table is created"
    )
    indexes: dict[str, Index] = Field(
        {}, description="column = ivf_pq, fts or btree; or a table with type and the index's parameters"
    )
    storage_options: dict[str, Option] = Field(
        {}, description="Lance's own storage options; secrets as env:NAME or file:PATH"
    )
    cache_max: Size = Field(
        CACHE_BYTES, gt=0, description="memory for Lance's caches of the base table, three quarters of it for indexes"
    )
    upsert: Literal["replace", "insert", "merge"] = Field(
        "replace",
        description="a put of a key that is there: its row takes the stored one's place; is left out; or gives its "
        "columns only. Fixed when the table is set up",
    )
    on_duplicate: Literal["last", "first", "fail"] = Field(
        "last",
        description="rows of one put with the same key: which of them counts, or the put is refused. "
        "Fixed when the table is set up",
    )
    version: str = Field(
        "",
        description="column that says which row of a key is newer: a row with a lower value than the stored row's is "
        "left out; empty = the later put is newer. Fixed when the table is set up",
    )


class RegionsSettings(Section):
    """Units of single-writer ownership; fixed when the table is created."""

    count: int = Field(2, ge=1, le=4096, description="regions of a new table; rows are spread over them by their key")
    by: list[str] = Field(
        [], description="of a new table with `append_only`: columns to spread the rows by; none = by the whole row"
    )


class WalSettings(Section):
    """The log that makes a put durable."""

    format: Literal["lance", "arrow"] = Field(
        "lance",
        description="entries of a new table: Lance files, or `arrow`, which Lance's own writers read and write too",
    )
    entry_size_max: Size = Field(16 << 20, gt=0, description="a larger group of puts is split over several entries")
    linger_max: Duration = Field(0.05, description="longest wait of a non-durable put for the next entry")
    put_timeout: Duration = Field(
        10.0, gt=0, description="one attempt to write an entry, plus 1 s per MiB; a put's wait for room"
    )
    retry_budget: Duration = Field(30.0, gt=0, description="after this long without an answer the writer stops itself")
    readers: int = Field(8, ge=1, le=256, description="entries that are read at once when a region's log is replayed")
    read_lease: Duration = Field(
        0.2,
        le=60,
        description="an owner answers reads this long after storage confirmed that it is the owner; after a crash the "
        "next one waits this long before its first write; 0 = ask storage at every read, as `arrow` tables do",
    )

    def options(self) -> WalOptions:
        """The limits of the log's storage calls."""
        return WalOptions(self.put_timeout, self.retry_budget, readers=self.readers, read_lease=self.read_lease)


class MemtableSettings(Section):
    """Rows that are durable in the log and not flushed yet, with their indexes."""

    size_max: Size = Field(256 << 20, gt=0, description="freeze at this many bytes, indexes counted")
    rows_max: int = Field(1_000_000, ge=1, description="freeze at this many rows")
    entries_max: int = Field(
        1_000,
        ge=1,
        description="freeze at this many entries of the log, which the next owner would have to read one by one",
    )
    age_max: Duration = Field(60.0, gt=0, description="freeze when the oldest row is this old")
    unflushed_max: Size = Field(1 << 30, gt=0, description="puts wait while a region has more bytes unflushed")
    index_mode: Literal["sync", "async"] = Field(
        "async",
        description="vector and text indexes take rows before a put returns, or behind it; reads find them either way",
    )
    vector_train_rows: int = Field(
        1024, ge=256, description="vectors that IVF-PQ trains on; up to 8 times as many are searched exactly"
    )


class FlushSettings(Section):
    """Frozen memtables to SSTs."""

    retry_delay: Duration = Field(
        1.0, description="first pause before a failed flush is tried again; later ones double, up to 16 times this"
    )
    at_once: int = Field(2, ge=1, le=64, description="memtables of a table that are flushed at the same time")
    indexes: bool = Field(
        True, description="build the table's indexes inside SSTs too, for Lance's own readers; ours do without"
    )
    storage_version: Literal["base", "2.0", "2.1", "2.2"] = Field(
        "base", description="Lance file version of SSTs; base = that of the base table"
    )
    page_size: Size = Field(
        PAGE_SIZE, ge=PAGE_SIZE_MIN, description="bytes of a column that Lance gathers for a page of an SST"
    )
    compression: Annotated[dict[str, str], AfterValidator(check_compression)] = Field(
        {}, description="SSTs' column pattern = zstd, zstd:1 to zstd:22, lz4, fsst or none; the first that fits counts"
    )
    metadata: Annotated[dict[str, str], AfterValidator(check_metadata)] = Field(
        {}, description="schema metadata of SSTs"
    )

    def file_options(self) -> FileOptions:
        """What of this is the file writer's."""
        version = None if self.storage_version == "base" else self.storage_version
        return FileOptions(version, self.page_size, self.compression, self.metadata)


class CommitSettings(Section):
    """SSTs into the base table."""

    interval: Duration = Field(
        30.0,
        description="longest time a durable row stays out of the base table, memtables are flushed for it; "
        "0 = on demand and at the end of `run --once`",
    )
    ssts_max: int = Field(8, ge=1, description="commit earlier where so many SSTs of a region wait")
    size_max: Size = Field(1 << 30, gt=0, description="commit earlier where SSTs of this size wait")
    pending_max: int = Field(
        256, ge=0, description="puts wait while so many SSTs of a region are not committed; 0 = any number"
    )
    retries: int = Field(10, ge=0, description="attempts after another writer committed to the base table first")
    memory_max: Size = Field(
        1 << 30, gt=0, description="SSTs of this size at most are taken into memory at once, but one at least"
    )
    optimize_interval: Duration = Field(
        10.0, description="least time between merges of the base table's index segments, after a commit; 0 = never"
    )
    optimize_segments: int = Field(
        8, ge=2, description="index segments of similar size that are merged into one; each commit adds one per index"
    )
    compact_interval: Duration = Field(
        10.0, description="least time between compactions of the base table, after a commit; 0 = never"
    )
    compact_fragments: int = Field(
        8, ge=2, description="fragments of similar size that are compacted into one; each commit adds one"
    )
    compact_rows_max: int = Field(
        1 << 20, ge=1, description="fragments of so many rows are compacted for their deleted rows only"
    )
    compact_deleted_percent: int = Field(
        25, ge=1, le=100, description="a fragment with a larger share of deleted rows is rewritten without them"
    )


class GcSettings(Section):
    """Deleting what nobody can need again."""

    interval: Duration = Field(300.0, description="time between collections; 0 = only by `memwal gc`")
    wal_age_min: Duration = Field(600.0, description="WAL entries stay this long at least, for readers under way")
    sst_age_min: Duration = Field(
        600.0, description="committed and abandoned SSTs stay this long at least, for readers under way"
    )
    manifest_age_min: Duration = Field(
        86400.0, description='old region manifests stay this long at least; in tables of wal.format "arrow" for ever'
    )
    orphan_age_min: OrphanAge = Field(
        604_800.0,
        description="files that no version of the base table refers to stay this long at least: longer than any commit "
        "or index build takes",
    )
    versions_age_min: Duration = Field(
        604_800.0,
        description="versions of the base table stay this long at least, tagged ones and those from before its set-up "
        "for ever; 0 = all do. Longer than any other program keeps the table open between two writes: from an older "
        "handle Lance brings deleted rows back",
    )
    versions_min: int = Field(10, ge=1, description="so many newest versions stay, however old")
    versions_interval: Duration = Field(
        3600.0, description="least time between removals of old versions, after a commit; 0 = never"
    )


class SourceSettings(Section):
    """Where the rows of `memwal run` come from: a Spark Structured Streaming source."""

    format: str = Field("parquet", min_length=1, description="kafka, or the name of any other Spark streaming source")
    path: str = Field("", description="directory that a file source watches")
    feed: str = Field("", description="a stream from files at hand: they are copied into `path` in name order")
    feed_every: Duration = Field(0.0, description="time between two files of the feed")
    files_per_trigger: int = Field(1, ge=1, description="files in one micro-batch of a file source")
    trigger: Duration = Field(0.2, description="time between two micro-batches")
    options: dict[str, Option] = Field(
        {}, description="more options of the Spark source, as Spark names them; secrets as env:NAME or file:PATH"
    )
    schema_drift: Literal["ignore", "fail", "add"] = Field(
        "ignore",
        description="fields that the table has no column for (JSON, Avro of Kafka, Parquet and ORC): are left out; end "
        "the run; or become nullable columns. The last two look at every micro-batch before it is written",
    )
    order_by: list[str] = Field([], description="order of one key's rows inside a micro-batch; the last wins")
    spark: dict[str, str] = Field({"spark.master": "local[2]"}, description="Spark configuration of the session")
    brokers: str = Field("", description="Kafka: host:port of brokers to begin with, separated by commas")
    topics: list[str] = Field([], description="Kafka: topics to read")
    topic_pattern: str = Field("", description="Kafka: or a regular expression, every topic that it matches as a whole")
    starting_offsets: str = Field(
        "earliest", description='Kafka, at the first start: earliest, latest or JSON such as {"flights": {"0": 17}}'
    )
    max_offsets_per_trigger: int = Field(
        0, ge=0, description="Kafka: records in one micro-batch at most; 0 = all there are"
    )
    fail_on_data_loss: bool = Field(True, description="Kafka: stop where records were deleted before they were read")
    outage_max: Duration = Field(
        600.0, description="Kafka: longest time that brokers which do not answer are asked again; 0 = end the run"
    )
    value_format: Literal["json", "avro", "raw"] = Field("json", description="Kafka: what the values of records are")
    avro_schema: str = Field("", description="Avro: the schema of every value, as JSON")
    registry: str = Field("", description="Avro: or the URL of a Confluent-style registry that knows the schemas by id")
    registry_options: dict[str, Option] = Field(
        {}, description="username and password, or token, for the registry; as env:NAME or file:PATH"
    )
    envelope: Literal["none", "debezium"] = Field(
        "none", description="Kafka: what is around a row: nothing, or Debezium's before, after and op"
    )
    delete_when: str = Field(
        "", description="Kafka: Spark SQL, such as value.op = 'D'; a record of which it holds deletes its key"
    )
    columns: dict[str, str | dict[str, Any]] = Field(
        {}, description="Kafka: column = where it comes from, see Kafka; one that is not named = the field of its name"
    )
    fields: dict[str, ColumnType] = Field(
        {}, description="Kafka: types of fields that SQL uses and no column is mapped from"
    )


class SinkSettings(Section):
    """From Spark tasks to the owners of the regions."""

    checkpoint: str = Field(
        "", description="Spark's checkpoint directory, not on s3://; empty = uri with .checkpoint behind it"
    )
    stream_timeout: Duration = Field(
        300.0,
        gt=0,
        description="longest time of one region's rows of a micro-batch, from the first to the ack; "
        "they are sent again where their owner is lost or changes",
    )
    in_flight_max: Size = Field(
        64 << 20, gt=0, description="bytes of one task's rows whose acks it waits for while it sends the next region's"
    )
    http_host: str = Field("127.0.0.1", min_length=1, description="address of http_port; as `daemon.host`")
    http_port: int = Field(
        -1, ge=-1, le=65535, description="port of /metrics, /health and /status of `run`; 0 = any free one, -1 = off"
    )


class DaemonSettings(Section):
    """The process that owns the regions."""

    host: str = Field(
        "127.0.0.1",
        min_length=1,
        description="address that `serve` listens on; one that others reach needs token, tls_cert and tls_key",
    )
    port: int = Field(0, ge=0, le=65535, description="port of `serve`; 0 = any free one, which it prints")
    endpoints: list[str] = Field(
        [],
        description="every daemon of the table, grpc://host:port, grpc+tls:// with TLS; each serves its share of the "
        "regions. Empty = `serve` serves all, `run` starts a child process",
    )
    advertise: str = Field(
        "", description="which of the endpoints this daemon is; empty = the one of its host and port"
    )
    workers: int = Field(
        1, ge=1, le=64, description="processes of a daemon, at ports from its own on; one process is one core"
    )
    on_spark: int = Field(
        0,
        ge=0,
        le=1000,
        description="so many daemons, each with its workers, run on the executors of the Spark of source.spark; "
        "0 = `serve` is the daemon itself",
    )
    claim_again: Duration = Field(
        10.0,
        description="time after which a daemon that is alone claims regions again which another writer took, if that "
        "has gone; if it lives the daemon ends with exit code 1. 0 = ends at once",
    )
    drain_timeout: Duration = Field(20.0, description="longest wait for puts under way when the daemon ends")
    http_port: int = Field(
        -1, ge=-1, le=65535, description="port of /metrics, /health and /status; 0 = any free one, -1 = off"
    )
    token: Secret = Field(
        SecretStr(""), description="bearer token of every call, as env:NAME or file:PATH; empty = none is asked for"
    )
    tls_cert: str = Field("", description="PEM file of the certificate that `serve` shows; empty = no TLS")
    tls_key: str = Field("", description="PEM file of its key, without a password")
    tls_ca: str = Field(
        "", description="PEM file of the authority that clients trust; empty = the system's. On executors too"
    )


class DlqSettings(Section):
    """Dead letters: rows of the source that do not parse, do not fit the table or are refused by it."""

    mode: Literal["fail", "skip", "table"] = Field(
        "fail",
        description="a bad row stops the pipeline; is left out and counted; or is kept too, in a Lance table beside "
        "the main one",
    )
    uri: str = Field("", description="the table of dead letters; empty = table.uri with .dlq behind it")
    max_bad_percent: int = Field(
        10, ge=0, le=100, description="a larger share of bad rows stops the pipeline; 100 = none does"
    )
    bad_window: int = Field(
        1000,
        ge=1,
        description="that share is taken of the newest micro-batches with so many rows together, never of fewer rows",
    )
    age_max: Duration = Field(
        2_592_000.0, description="age from which `memwal dlq purge` deletes letters, where it is told no other"
    )


class LogSettings(Section):
    """What is written to standard error."""

    level: Literal["debug", "info", "warning", "error"] = Field("warning", description="least severe message written")
    format: Literal["text", "json"] = Field("text", description="one line of text or one JSON object per message")


class Settings(Section):
    """A whole configuration. Build it with `ingest.settings.load.load`, which also checks what spans several keys.

    Thread safety. Immutable. Secrets are held as references and never printed.
    """

    table: TableSettings = Field(default_factory=TableSettings)
    regions: RegionsSettings = Field(default_factory=RegionsSettings)
    wal: WalSettings = Field(default_factory=WalSettings)
    memtable: MemtableSettings = Field(default_factory=MemtableSettings)
    flush: FlushSettings = Field(default_factory=FlushSettings)
    commit: CommitSettings = Field(default_factory=CommitSettings)
    gc: GcSettings = Field(default_factory=GcSettings)
    source: SourceSettings = Field(default_factory=SourceSettings)
    sink: SinkSettings = Field(default_factory=SinkSettings)
    daemon: DaemonSettings = Field(default_factory=DaemonSettings)
    dlq: DlqSettings = Field(default_factory=DlqSettings)
    log: LogSettings = Field(default_factory=LogSettings)

    def arrow_schema(self) -> pa.Schema:
        """The table's schema from `table.columns`: key columns not null, every other column nullable.

        Empty when no columns are configured (a table that exists brings its own).
        """
        return pa.schema(
            [
                pa.field(name, parse_type(kind), nullable=name not in self.table.key)
                for name, kind in self.table.columns.items()
            ]
        )

    def index_specs(self) -> tuple[IndexSpec, ...]:
        """The configured indexes, in order; IVF-PQ takes `memtable.vector_train_rows` where it names no train_rows."""
        return tuple(
            index_spec(column, index, self.memtable.vector_train_rows) for column, index in self.table.indexes.items()
        )

    def storage_options(self, environ: Mapping[str, str]) -> dict[str, str]:
        """`table.storage_options` in clear, for the store only. Raises: Invalid for references that point nowhere."""
        return resolve(self.table.storage_options, environ)

    @property
    def checkpoint(self) -> str:
        """Spark's checkpoint directory with the default filled in."""
        return self.sink.checkpoint or f"{self.table.uri.rstrip('/')}.checkpoint"

    @property
    def dead_letters(self) -> str:
        """Where the table of dead letters is, with the default filled in."""
        return self.dlq.uri or f"{self.table.uri.rstrip('/')}.dlq"


def index_spec(column: str, index: Index, train_rows: int) -> IndexSpec:
    """One index as `table.indexes` writes it: a kind, or a table with `type` and parameters."""
    parameters: dict[str, Any] = {"type": index} if isinstance(index, str) else dict(index)
    kind = parameters.pop("type", None)
    if kind == "ivf_pq":
        parameters.setdefault("train_rows", train_rows)
    return IndexSpec(column, kind, parameters)
