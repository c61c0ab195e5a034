"""Frozen memtables to SSTs, SSTs into the base Lance table. See README.md for formats and protocols."""

from flush.base_table import BaseTable
from flush.bloom import bloom_bytes, contains
from flush.committer import CommitReport, commit, prune
from flush.errors import (
    CommitConflict,
    CountMismatch,
    FlushError,
    FlushOutOfOrder,
    NotALanceTable,
    NotInitialised,
    SstInvalid,
    TableExists,
    UnsupportedTable,
)
from flush.flusher import flush
from flush.key_sidecar import write_key_sidecar
from flush.sst import read_sst, verify, write_sst

__all__ = [
    "BaseTable",
    "CommitConflict",
    "CommitReport",
    "CountMismatch",
    "FlushError",
    "FlushOutOfOrder",
    "NotALanceTable",
    "NotInitialised",
    "SstInvalid",
    "TableExists",
    "UnsupportedTable",
    "bloom_bytes",
    "commit",
    "contains",
    "flush",
    "prune",
    "read_sst",
    "verify",
    "write_key_sidecar",
    "write_sst",
]
