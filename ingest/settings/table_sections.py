"""The sections about storing a table: every setting with its type, default and meaning."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

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
    Section,
    Size,
    parse_duration,
)
from memwal.wal import WalOptions


class TableSettings(Section):
    """The Lance table, and how to create it if it does not exist."""

    uri: str = Field("", description="path or s3:// URL of the Lance table; `init`, `run` and `serve` create it")
    key: list[str] = Field(
        [], description=("columns that identify a row, in order; a later row replaces an earlier one with the same key")
    )
    append_only: bool = Field(
        False,
        description=("create the table without a key: every row is kept, duplicates too; no lookup or delete by key"),
    )
    columns: dict[str, ColumnType] = Field({}, description="column names and types, in order; used to create the table")
    indexes: dict[str, Index] = Field(
        {}, description="column = ivf_pq, fts or btree; or a table with `type` and the parameters of the index"
    )
    storage_options: dict[str, Option] = Field(
        {}, description="Lance's own storage options; write secrets as env:NAME or file:PATH"
    )
    cache_max: Size = Field(
        CACHE_BYTES,
        gt=0,
        description="memory for Lance's caches of the base table; three quarters of it are for indexes",
    )
    upsert: Literal["replace", "insert", "merge"] = Field(
        "replace",
        description=(
            "what a put to an existing key does: replace the row, keep the stored row (insert), or "
            "update only the given columns (merge); fixed when the table is created"
        ),
    )
    on_duplicate: Literal["last", "first", "fail"] = Field(
        "last",
        description=(
            "which of several rows with the same key in one put counts: the last, the first, or none (fail "
            "refuses the put); fixed when the table is created"
        ),
    )
    version: str = Field(
        "",
        description=(
            "column that orders the versions of a row: a row with a lower value than the stored row "
            "is skipped; empty = the later put wins; fixed when the table is created"
        ),
    )
    ttl: Lifetime = Field(
        "",
        description=(
            "age at which a row expires, such as 30d: no read returns it, and commits delete it from the base "
            "table a minute later. Kept in the table: a new value changes it for all processes, off (or 0) "
            "removes it, empty = leave it as it is"
        ),
    )
    ttl_column: str = Field(
        "",
        description=(
            "column of timestamps or dates (without a zone: UTC) that has the time of a row, for `ttl`; a row with "
            "null never expires"
        ),
    )

    @property
    def ttl_seconds(self) -> float | None:
        """`ttl` in seconds: 0 removes the table's ttl, None leaves it unchanged."""
        return None if not self.ttl else 0.0 if self.ttl == OFF else parse_duration(self.ttl)


class RegionsSettings(Section):
    """Regions, the units of single-writer ownership; set when the table is created."""

    count: int = Field(
        2,
        ge=1,
        le=4096,
        description="number of regions of a new table; rows are spread over them by key; see `memwal regions resize`",
    )
    by: list[str] = Field(
        [],
        description=("columns that choose the region of a row, for a new `append_only` table; empty = the whole row"),
    )


class WalSettings(Section):
    """The write-ahead log, which makes puts durable."""

    format: Literal["lance", "arrow"] = Field(
        "lance",
        description=(
            "format of WAL entries, fixed when the table is created: lance, or arrow, which Lance's own writers "
            "read and write too"
        ),
    )
    entry_size_max: Size = Field(
        16 << 20, gt=0, description="split a group of puts into several entries above this size"
    )
    linger_max: Duration = Field(
        0.05, description="longest time until the rows of a non-durable put are written to the WAL"
    )
    entry_interval: Duration = Field(
        0.0,
        le=60,
        description=(
            "least time between two WAL entries of durable puts into a region; puts in between share the next "
            "entry: fewer requests to object storage, later acks; a put's timeout must be longer. 0 = a put is "
            "written at once"
        ),
    )
    put_timeout: Duration = Field(
        10.0,
        gt=0,
        description=(
            "time limit of one attempt to write an entry, plus 1 s per MiB; also of a put while "
            "memtable.unflushed_max or commit.pending_max blocks it"
        ),
    )
    retry_budget: Duration = Field(
        30.0, gt=0, description="stop the writer when storage has not answered for this long"
    )
    readers: int = Field(8, ge=1, le=256, description="number of entries read concurrently when the log is replayed")
    read_lease: Duration = Field(
        0.2,
        le=60,
        description=(
            "how long an owner answers reads before it proves its ownership again; after a crash the next owner "
            "waits this long before its first write; 0 = prove it at every read, as tables with format `arrow` do"
        ),
    )

    def options(self) -> WalOptions:
        """Return the limits of the WAL's storage calls."""
        return WalOptions(self.put_timeout, self.retry_budget, readers=self.readers, read_lease=self.read_lease)


class MemtableSettings(Section):
    """Rows in memory that are not flushed yet, with their indexes."""

    size_max: Size = Field(256 << 20, gt=0, description="freeze the memtable at this size, indexes included")
    rows_max: int = Field(1_000_000, ge=1, description="freeze the memtable at this number of rows")
    entries_max: int = Field(
        1_000,
        ge=1,
        description=("freeze the memtable at this number of WAL entries; the next owner replays them one by one"),
    )
    age_max: Duration = Field(60.0, gt=0, description="freeze the memtable when its oldest row is this old")
    unflushed_max: Size = Field(
        1 << 30, gt=0, description="block puts while a region has more unflushed bytes than this"
    )
    index_mode: Literal["sync", "async"] = Field(
        "async",
        description=(
            "when vector and text indexes take the rows of a put: before it returns (sync) or in the "
            "background (async); reads find the rows either way"
        ),
    )
    vector_train_rows: int = Field(
        1024,
        ge=256,
        description="vectors that IVF-PQ is trained on; up to 8 times as many (8192 at most) are searched exactly",
    )


class FlushSettings(Section):
    """Writing frozen memtables as SSTs."""

    retry_delay: Duration = Field(
        1.0,
        description=(
            "pause before the first retry of a failed flush; it doubles with each retry, to 16 times this at most"
        ),
    )
    at_once: int = Field(2, ge=1, le=64, description="number of memtables flushed concurrently per table")
    cache_max: Size = Field(
        1 << 30,
        gt=0,
        description=(
            "memory for uncommitted SSTs, their rows and indexes: those flushed here are kept, others are loaded "
            "at the first read; the least recently used go first"
        ),
    )
    indexes: bool = Field(
        True,
        description=(
            "build the table's indexes inside SSTs, for Lance's own readers; SSTs of fewer than 10,000 rows have "
            "only vector indexes"
        ),
    )
    storage_version: Literal["base", "2.0", "2.1", "2.2"] = Field(
        "base", description="Lance file version of SSTs; base = the same as the base table"
    )
    page_size: Size = Field(
        PAGE_SIZE,
        ge=PAGE_SIZE_MIN,
        le=PAGE_SIZE_MAX,
        description="bytes per column that Lance collects before it writes a page of an SST",
    )
    compression: Annotated[dict[str, str], AfterValidator(check_compression)] = Field(
        {},
        description=(
            "compression of SST columns: name pattern = zstd, zstd:1 to zstd:22, lz4, fsst or none; "
            "the first match applies"
        ),
    )
    metadata: Annotated[dict[str, str], AfterValidator(check_metadata)] = Field(
        {}, description="schema metadata to add to SSTs"
    )

    def file_options(self) -> FileOptions:
        """Return the options of the SST file writer."""
        version = None if self.storage_version == "base" else self.storage_version
        return FileOptions(version, self.page_size, self.compression, self.metadata)


class CommitSettings(Section):
    """Merging SSTs into the base table."""

    interval: Duration = Field(
        30.0,
        description=(
            "longest time until a durable row is in the base table; memtables are flushed for it; 0 = commit only "
            "on demand and at the end of `run --once`"
        ),
    )
    ssts_max: int = Field(8, ge=1, description="commit earlier when a region has this many uncommitted SSTs")
    size_max: Size = Field(1 << 30, gt=0, description="commit earlier when the uncommitted SSTs reach this size")
    pending_max: int = Field(
        256, ge=0, description="block puts while a region has this many uncommitted SSTs; 0 = never"
    )
    retries: int = Field(
        10, ge=0, description="number of retries after a conflict with another writer of the base table"
    )
    memory_max: Size = Field(
        1 << 30, gt=0, description="most bytes of SSTs loaded into memory for one commit; at least one SST is loaded"
    )
    optimize_interval: Duration = Field(
        10.0,
        description=("least time between merges of index segments of the base table; runs after a commit; 0 = never"),
    )
    optimize_segments: int = Field(
        8, ge=2, description="merge this many index segments of similar size into one; each commit adds one per index"
    )
    compact_interval: Duration = Field(
        10.0, description="least time between compactions of the base table; runs after a commit; 0 = never"
    )
    compact_fragments: int = Field(
        8, ge=2, description="compact this many fragments of similar size into one; each commit adds one"
    )
    compact_rows_max: int = Field(
        1 << 20, ge=1, description="compact fragments of this many rows or more only to remove deleted rows"
    )
    compact_bytes_max: Size = Field(
        1 << 30,
        gt=0,
        description=(
            "most bytes of fragments that one compaction reads, and of a file that it writes; fragments of this "
            "size or more are compacted only to remove deleted rows, one at a time"
        ),
    )
    compact_deleted_percent: int = Field(
        25, ge=1, le=100, description="rewrite a fragment when more than this percentage of its rows is deleted"
    )


class GcSettings(Section):
    """Deleting files that are no longer needed."""

    interval: Duration = Field(300.0, description="time between garbage collections; 0 = only with `memwal gc`")
    wal_age_min: Duration = Field(
        600.0, description="minimum age before a WAL entry is deleted; active readers may still need it"
    )
    sst_age_min: Duration = Field(
        600.0,
        description=("minimum age before a committed or abandoned SST is deleted; active readers may still need it"),
    )
    manifest_age_min: Duration = Field(
        86400.0,
        description=('minimum age before an old region manifest is deleted; tables with wal.format = "arrow" keep all'),
    )
    changes_age_min: Duration = Field(
        0.0,
        description=(
            "minimum age before a change can no longer be read by `changes` and `memwal tail`; keeps WAL entries "
            "and region manifests that long, versions of the base table two hours longer. "
            "0 = no longer than they are kept anyway"
        ),
    )
    orphan_age_min: OrphanAge = Field(
        604_800.0,
        description=(
            "minimum age before a file that no version of the base table refers to is deleted; must exceed any "
            "commit or index build"
        ),
    )
    versions_age_min: Duration = Field(
        3600.0,
        description=(
            "keep every version of the base table that was the newest within this time; older ones are thinned "
            "out. Must exceed the duration of any read; 0 = never delete a version"
        ),
    )
    versions_hourly: Duration = Field(
        86400.0, description="keep the last version of each hour for this time; 0 = none by the hour"
    )
    versions_daily: Duration = Field(
        604_800.0, description="keep the last version of each day for this time; 0 = none by the day"
    )
    space_max: float = Field(
        2.0,
        ge=0,
        allow_inf_nan=False,
        description=(
            "most bytes of the newest version and those older than versions_age_min, as a multiple of the newest "
            "version's; above it the oldest are deleted. Tagged and pre-setup versions stay; 0 = no limit"
        ),
    )
    versions_min: int = Field(10, ge=1, description="number of newest versions to keep regardless of age")
    versions_interval: Duration = Field(
        600.0, description="least time between deletions of old versions; runs after a commit; 0 = never"
    )
