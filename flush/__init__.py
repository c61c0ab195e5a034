"""Frozen memtables to SSTs, SSTs into the base Lance table. See README.md for formats and protocols."""

from flush.base_table import BaseTable
from flush.bloom import bloom_bytes, contains
from flush.commit_report import CommitReport
from flush.committer import commit, prune
from flush.errors import (
    CommitConflict,
    CountMismatch,
    FlushError,
    FlushOutOfOrder,
    InvalidFileOptions,
    InvalidResize,
    NotALanceTable,
    NotInitialised,
    SstInvalid,
    TableExists,
    UnsupportedTable,
)
from flush.file_options import FileOptions
from flush.flusher import FlushAttempts, flush
from flush.garbage import SstCollector, SstGarbage, asks_for
from flush.key_sidecar import write_key_sidecar
from flush.orphans import OrphanGarbage, collect_orphans
from flush.plan_garbage import PLANS_MIN, PlanCollector, PlanGarbage
from flush.resize import BUCKETS_MAX, ResizeReport, being_resized, resize
from flush.retained import BaseNeeds, base_needs
from flush.routing import finish as finish_resize
from flush.sst import read_sst, verify, write_sst
from flush.sst_indexes import SstIndexes
from flush.swap import swapped, unborn
from flush.table_setup import OnDuplicate, Upsert, WriteRules

__all__ = [
    "BUCKETS_MAX",
    "PLANS_MIN",
    "BaseNeeds",
    "BaseTable",
    "CommitConflict",
    "CommitReport",
    "CountMismatch",
    "FileOptions",
    "FlushAttempts",
    "FlushError",
    "FlushOutOfOrder",
    "InvalidFileOptions",
    "InvalidResize",
    "NotALanceTable",
    "NotInitialised",
    "OnDuplicate",
    "OrphanGarbage",
    "PlanCollector",
    "PlanGarbage",
    "ResizeReport",
    "SstCollector",
    "SstGarbage",
    "SstIndexes",
    "SstInvalid",
    "TableExists",
    "UnsupportedTable",
    "Upsert",
    "WriteRules",
    "asks_for",
    "base_needs",
    "being_resized",
    "bloom_bytes",
    "collect_orphans",
    "commit",
    "contains",
    "finish_resize",
    "flush",
    "prune",
    "read_sst",
    "resize",
    "swapped",
    "unborn",
    "verify",
    "write_key_sidecar",
    "write_sst",
]
