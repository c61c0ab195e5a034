"""Frozen memtables to SSTs, SSTs into the base Lance table. See README.md for formats and protocols."""

from flush.base.setup import OnDuplicate, Upsert, WriteRules
from flush.base.swap import swapped, unborn
from flush.base.table import BaseTable
from flush.commits.committer import commit, prune
from flush.commits.report import CommitReport
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
from flush.garbage.orphans import OrphanGarbage, collect_orphans
from flush.garbage.plans import PLANS_MIN, PlanCollector, PlanGarbage
from flush.garbage.retained import BaseNeeds, base_needs
from flush.garbage.ssts import SstCollector, SstGarbage, asks_for
from flush.resizing.routing import finish as finish_resize
from flush.resizing.steps import BUCKETS_MAX, ResizeReport, being_resized, resize
from flush.sst.bloom import bloom_bytes, contains
from flush.sst.file_options import FileOptions
from flush.sst.files import read_sst, verify, write_sst
from flush.sst.flusher import FlushAttempts, flush
from flush.sst.indexes import SstIndexes
from flush.sst.key_sidecar import write_key_sidecar

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
