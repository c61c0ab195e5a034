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
    NotALanceTable,
    NotInitialised,
    SstInvalid,
    TableExists,
    UnsupportedTable,
)
from flush.file_options import FileOptions
from flush.flusher import flush
from flush.garbage import SstCollector, SstGarbage
from flush.key_sidecar import write_key_sidecar
from flush.orphans import OrphanGarbage, collect_orphans
from flush.plan_garbage import PLANS_MIN, PlanCollector, PlanGarbage
from flush.retained import BaseNeeds, base_needs
from flush.sst import read_sst, verify, write_sst
from flush.sst_indexes import SstIndexes
from flush.swap import swapped, unborn
from flush.table_setup import OnDuplicate, Upsert, WriteRules

__all__ = [
    "PLANS_MIN",
    "BaseNeeds",
    "BaseTable",
    "CommitConflict",
    "CommitReport",
    "CountMismatch",
    "FileOptions",
    "FlushError",
    "FlushOutOfOrder",
    "InvalidFileOptions",
    "NotALanceTable",
    "NotInitialised",
    "OnDuplicate",
    "OrphanGarbage",
    "PlanCollector",
    "PlanGarbage",
    "SstCollector",
    "SstGarbage",
    "SstIndexes",
    "SstInvalid",
    "TableExists",
    "UnsupportedTable",
    "Upsert",
    "WriteRules",
    "base_needs",
    "bloom_bytes",
    "collect_orphans",
    "commit",
    "contains",
    "flush",
    "prune",
    "read_sst",
    "swapped",
    "unborn",
    "verify",
    "write_key_sidecar",
    "write_sst",
]
