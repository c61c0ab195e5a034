"""The memtable: rows of one generation with their key, vector, text and scalar indexes, in memory only."""

from memwal.memtable.conversion import convert, exact, is_list, misfit, overflows
from memwal.memtable.errors import InvalidRows, MemTableFailed, MemTableFrozen
from memwal.memtable.index_spec import IndexSpec, check_indexes
from memwal.memtable.schema import (
    LANCES_ROW_COLUMNS,
    TOMBSTONE,
    emptied,
    key_columns,
    required_columns,
    row_schema,
    tombstones,
    unsupported,
    with_tombstone,
)
from memwal.memtable.snapshot import Snapshot
from memwal.memtable.table import Checked, MemTable
from memwal.memtable.vector.quantiser import VectorModel

__all__ = [
    "LANCES_ROW_COLUMNS",
    "TOMBSTONE",
    "Checked",
    "IndexSpec",
    "InvalidRows",
    "MemTable",
    "MemTableFailed",
    "MemTableFrozen",
    "Snapshot",
    "VectorModel",
    "check_indexes",
    "convert",
    "emptied",
    "exact",
    "is_list",
    "key_columns",
    "misfit",
    "overflows",
    "required_columns",
    "row_schema",
    "tombstones",
    "unsupported",
    "with_tombstone",
]
