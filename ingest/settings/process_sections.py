"""The sections about the processes around a table: source, sink, daemon, dead letters, log."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, SecretStr

from memwal.ingest.settings.values import ColumnType, Duration, Option, Secret, Section, Size

KAFKA = "kafka"


class SourceSettings(Section):
    """The Spark Structured Streaming source of `memwal run`."""

    format: str = Field("parquet", min_length=1, description="kafka, or the name of any other Spark streaming source")
    path: str = Field(
        "",
        description=(
            "directory that a file source watches; Spark reads a file once, so write it under a name that begins "
            "with . or _, then rename it"
        ),
    )
    feed: str = Field(
        "",
        description=(
            "directory or file to simulate a stream from: its files are copied into `path` in order of their names"
        ),
    )
    feed_every: Duration = Field(0.0, description="time between two files of the feed")
    files_per_trigger: int = Field(1, ge=1, description="number of files per micro-batch of a file source")
    trigger: Duration = Field(0.2, description="time between two micro-batches")
    freshness_max: Duration = Field(
        30.0,
        description=(
            "objective of `memwal run`: longest time from a row's landing in the source until it is searchable; beyond "
            "it the page warns, /health/readyz returns 503 and MemwalNotFresh fires; 0 = no objective"
        ),
    )
    options: dict[str, Option] = Field(
        {},
        description=(
            "additional options of the Spark source, under Spark's names; write secrets as env:NAME or file:PATH"
        ),
    )
    schema_drift: Literal["ignore", "fail", "add"] = Field(
        "ignore",
        description=(
            "what to do with new fields (JSON, Avro from Kafka, Parquet, ORC): ignore them, fail the run, or add "
            "nullable columns; fail and add inspect every micro-batch before it is written"
        ),
    )
    order_by: list[str] = Field(
        [], description="columns that order rows with the same key inside a micro-batch; the last row wins"
    )
    spark: dict[str, Option] = Field(
        {"spark.master": SecretStr("local[2]")},
        description="Spark configuration of the session; write secrets as env:NAME or file:PATH",
    )
    brokers: str = Field("", description="Kafka: bootstrap brokers as host:port, separated by commas")
    topics: list[str] = Field([], description="Kafka: topics to read")
    topic_pattern: str = Field(
        "",
        description=(
            "Kafka: regular expression for the topics to read, in place of `topics`; must match the whole name"
        ),
    )
    starting_offsets: str = Field(
        "earliest",
        description=('Kafka: where the first start begins: earliest, latest or JSON such as {"flights": {"0": 17}}'),
    )
    max_offsets_per_trigger: int = Field(0, ge=0, description="Kafka: most records per micro-batch; 0 = no limit")
    fail_on_data_loss: bool = Field(
        True, description="Kafka: stop if records were deleted from the topic before they were read"
    )
    outage_max: Duration = Field(
        600.0, description="Kafka: how long to retry when the brokers do not answer; 0 = end the run at once"
    )
    value_format: Literal["json", "avro", "raw"] = Field("json", description="Kafka: format of record values")
    avro_schema: str = Field("", description="Avro: schema of all values, as JSON")
    registry: str = Field(
        "", description="Avro: URL of a Confluent-compatible schema registry, in place of `avro_schema`"
    )
    registry_options: dict[str, Option] = Field(
        {}, description="username and password, or token, for the registry; as env:NAME or file:PATH"
    )
    envelope: Literal["none", "debezium"] = Field(
        "none", description="Kafka: envelope around each row: none, or Debezium's before/after/op"
    )
    delete_when: str = Field(
        "", description=("Kafka: Spark SQL condition, such as value.op = 'D'; a record that meets it deletes its key")
    )
    columns: dict[str, str | dict[str, Any]] = Field(
        {},
        description=(
            "Kafka: column = the field or SQL expression it is read from, see ingest/source; other columns are "
            "read from the field with their name"
        ),
    )
    fields: dict[str, ColumnType] = Field(
        {}, description="Kafka: types of fields that SQL expressions use but no column is read from"
    )


class SinkSettings(Section):
    """Sending rows from Spark tasks to the owners of the regions."""

    checkpoint: str = Field(
        "", description="Spark's checkpoint directory, not on s3://; empty = table.uri + .checkpoint"
    )
    stream_timeout: Duration = Field(
        300.0,
        gt=0,
        description=(
            "time limit for sending the rows of one region in a micro-batch, retries after a change of owner included"
        ),
    )
    missing: Literal["", "null", "keep"] = Field(
        "",
        description=(
            "what happens to columns of the table that the rows lack: null, or keep their stored values; the "
            "source then has the columns in `table.columns`. Empty = refuse the run, or keep if table.upsert is "
            "merge"
        ),
    )
    in_flight_max: Size = Field(64 << 20, gt=0, description="most bytes that one task sends before they are acked")
    http_host: str = Field(
        "127.0.0.1", min_length=1, description="address that http_port listens on; the same rules as for `daemon.host`"
    )
    http_port: int = Field(
        -1,
        ge=-1,
        le=65535,
        description="port of the page, /metrics, /health and /status of `run`; 0 = any free port, -1 = off",
    )


class DaemonSettings(Section):
    """The process that owns the regions."""

    host: str = Field(
        "127.0.0.1",
        min_length=1,
        description=(
            "address that `serve` listens on; an address that other machines reach requires token, tls_cert and tls_key"
        ),
    )
    port: int = Field(
        0, ge=0, le=65535, description="port that `serve` listens on; 0 = any free port, which is printed"
    )
    endpoints: list[str] = Field(
        [],
        description=(
            "addresses of all daemons of the table, as grpc://host:port or grpc+tls://host:port; empty = `serve` "
            "serves all regions, `run` starts a child process"
        ),
    )
    advertise: str = Field(
        "", description="which of the endpoints this daemon is; empty = the one with its host and port"
    )
    workers: int = Field(
        1, ge=1, le=64, description="number of processes per daemon, on consecutive ports; each uses one core"
    )
    on_spark: int = Field(
        0,
        ge=0,
        le=1000,
        description=(
            "number of daemons to run on the executors of the Spark cluster in source.spark; 0 = "
            "`serve` is the daemon itself"
        ),
    )
    claim_again: Duration = Field(
        10.0,
        description=(
            "how long a fenced daemon without peers waits before it claims its regions again, if the other writer "
            "has ended; otherwise it exits with code 1; 0 = exit at once"
        ),
    )
    read_ahead: Duration = Field(
        2.0,
        description=(
            "how often one of several daemons reads new entries of the regions that it would take over, which "
            "makes a take-over shorter, at about three requests per region and one or two per new entry; 0 = only "
            "when they are taken over"
        ),
    )
    calls_max: int = Field(
        1000, ge=1, description="most calls that a daemon answers at once; clients that it refuses ask again"
    )
    message_max: Size = Field(
        256 << 20, gt=0, description="largest request, and largest batch of rows, that a daemon takes"
    )
    put_max: Size = Field(
        4 << 30,
        gt=0,
        description=(
            "most bytes of one put, or of a region's rows in a micro-batch, counted as columns of the table with "
            "nulls and missing columns"
        ),
    )
    query_timeout: Duration = Field(
        3600.0,
        description=(
            "longest time that a daemon works for one read, without the time in which the caller takes no rows; 0 "
            "= no limit"
        ),
    )
    query_memory: Size = Field(
        4 << 30,
        ge=0,
        description="most bytes of rows that a daemon gathers for one read; scans stream and gather none; 0 = no limit",
    )
    drain_timeout: Duration = Field(20.0, description="longest wait for puts in progress when the daemon ends")
    http_port: int = Field(
        -1, ge=-1, le=65535, description="port of the page, /metrics, /health and /status; 0 = any free port, -1 = off"
    )
    token: Secret = Field(
        SecretStr(""),
        description=(
            "token, as env:NAME or file:PATH: what this process sends, and what a daemon accepts as that of an "
            "admin, who may do everything; empty = no authentication"
        ),
    )
    write_token: Secret = Field(
        SecretStr(""),
        description=(
            "token of callers that may put, delete and read, as env:NAME or file:PATH; read again when it changes"
        ),
    )
    read_token: Secret = Field(
        SecretStr(""),
        description="token of callers that may only read, as env:NAME or file:PATH; read again when it changes",
    )
    tls_cert: str = Field("", description="PEM file with the server's certificate; empty = no TLS")
    tls_key: str = Field("", description="PEM file with its private key, without a password")
    tls_ca: str = Field(
        "", description="PEM file with the CA that clients trust, on executors too; empty = the system's"
    )
    tls_client_ca: str = Field(
        "",
        description=(
            "PEM file with the CAs that sign clients' certificates (mutual TLS), also those of other daemons; "
            "empty = no client certificates"
        ),
    )
    tls_client_cert: str = Field(
        "",
        description=(
            "PEM file with the certificate that clients, peers and Spark tasks present to daemons; empty = none, "
            "or tls_cert if tls_client_ca is set"
        ),
    )
    tls_client_key: str = Field("", description="PEM file with its private key, without a password")


class DlqSettings(Section):
    """Dead letters: source rows that do not parse, do not fit the table, or are refused by it."""

    mode: Literal["fail", "skip", "table"] = Field(
        "fail",
        description=(
            "what a bad row does: stop the pipeline (fail), be dropped and counted (skip), or be "
            "stored in the dead-letter table (table)"
        ),
    )
    uri: str = Field("", description="path or URL of the dead-letter table; empty = table.uri + .dlq")
    max_bad_percent: int = Field(
        10, ge=0, le=100, description="stop the pipeline above this percentage of bad rows; 100 = never"
    )
    bad_window: int = Field(
        1000,
        ge=1,
        description=(
            "number of most recent rows, rounded up to whole micro-batches, that max_bad_percent is measured over"
        ),
    )
    age_max: Duration = Field(
        2_592_000.0,
        description=("age above which `memwal dlq purge` deletes dead letters, unless the command says otherwise"),
    )


class LogSettings(Section):
    """Messages on standard error."""

    level: Literal["debug", "info", "warning", "error"] = Field(
        "warning", description="least severe level that is written"
    )
    format: Literal["text", "json"] = Field("text", description="one line of text or one JSON object per message")


class TracingSettings(Section):
    """OpenTelemetry spans, sent to a collector over OTLP/HTTP; needs the extra `otel`. Its OTEL_* variables count."""

    enabled: bool = Field(False, description="whether to make spans and send them; off costs nothing")
    endpoint: str = Field(
        "",
        description=(
            "URL of the collector, such as http://127.0.0.1:4318; empty = OTEL_EXPORTER_OTLP_ENDPOINT, or port 4318 "
            "of this host"
        ),
    )
    sample: float = Field(
        1.0,
        ge=0,
        le=1,
        description="share of the traces begun here that is kept; 1 = all, or what OTEL_TRACES_SAMPLER says",
    )


class CostSettings(Section):
    """Prices of requests to an object store, for metrics of what they cost; local files cost nothing."""

    put_price: float = Field(
        0.005,
        ge=0,
        allow_inf_nan=False,
        description="dollars per 1,000 PUT, COPY, POST and LIST requests; the defaults are those of S3 Standard",
    )
    get_price: float = Field(
        0.0004, ge=0, allow_inf_nan=False, description="dollars per 1,000 GET, HEAD and other requests"
    )
    delete_price: float = Field(0.0, ge=0, allow_inf_nan=False, description="dollars per 1,000 DELETE requests")
    hourly_budget: float = Field(
        1.0,
        ge=0,
        allow_inf_nan=False,
        description="dollars that the requests of one process may cost per hour before an alert fires; 0 = no limit",
    )
