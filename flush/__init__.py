"""Write frozen memtables as SSTs, and SSTs into the base Lance table. README.md lists the rooms and protocols."""

from memwal.flush.base.setup import OnDuplicate, Upsert, WriteRules
from memwal.flush.base.swap import append_if_unchanged, as_new_fragments
from memwal.flush.base.table import BaseTable
from memwal.flush.base.ttl import Ttl
from memwal.flush.base.version_files import tags_of
from memwal.flush.commits.committer import commit, prune
from memwal.flush.commits.expiry import set_ttl
from memwal.flush.commits.index_catchup import PQ_ROWS_MIN
from memwal.flush.commits.index_changes import add_index, drop_index, list_indexes, undeclared
from memwal.flush.commits.load import LoadReport, RowsToLoad, finish_load, load, loaded_in
from memwal.flush.commits.load_notes import LoadAttempt, begin_load, end_abandoned, under_way
from memwal.flush.commits.report import CommitReport
from memwal.flush.errors import (
    CommitConflict,
    CountMismatch,
    FlushError,
    FlushOutOfOrder,
    InvalidFileOptions,
    InvalidResize,
    LoadEnded,
    NotALanceTable,
    NotInitialised,
    SstInvalid,
    TableExists,
    UnsupportedTable,
)
from memwal.flush.garbage.orphans import OrphanGarbage, collect_orphans
from memwal.flush.garbage.plans import PLANS_MIN, PlanCollector, PlanGarbage
from memwal.flush.garbage.space import Space, measured
from memwal.flush.garbage.ssts import BaseNeeds, SstCollector, SstGarbage, base_needs, held_at, needed_for_tags
from memwal.flush.resizing.routing import finish as finish_resize
from memwal.flush.resizing.steps import ResizeReport, is_being_resized, resize
from memwal.flush.sst.bloom import bloom_bytes, contains
from memwal.flush.sst.file_options import FileOptions
from memwal.flush.sst.files import SstFormat, read_sst, verify, write_sst
from memwal.flush.sst.flusher import FlushAttempts, flush
from memwal.flush.sst.indexes import SstIndexes
from memwal.flush.sst.key_sidecar import write_key_sidecar

__all__ = [
    "PLANS_MIN",
    "PQ_ROWS_MIN",
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
    "LoadAttempt",
    "LoadEnded",
    "LoadReport",
    "NotALanceTable",
    "NotInitialised",
    "OnDuplicate",
    "OrphanGarbage",
    "PlanCollector",
    "PlanGarbage",
    "ResizeReport",
    "RowsToLoad",
    "Space",
    "SstCollector",
    "SstFormat",
    "SstGarbage",
    "SstIndexes",
    "SstInvalid",
    "TableExists",
    "Ttl",
    "UnsupportedTable",
    "Upsert",
    "WriteRules",
    "add_index",
    "append_if_unchanged",
    "as_new_fragments",
    "base_needs",
    "begin_load",
    "bloom_bytes",
    "collect_orphans",
    "commit",
    "contains",
    "drop_index",
    "end_abandoned",
    "finish_load",
    "finish_resize",
    "flush",
    "held_at",
    "is_being_resized",
    "list_indexes",
    "load",
    "loaded_in",
    "measured",
    "needed_for_tags",
    "prune",
    "read_sst",
    "resize",
    "set_ttl",
    "tags_of",
    "undeclared",
    "under_way",
    "verify",
    "write_key_sidecar",
    "write_sst",
]
