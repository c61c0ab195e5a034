"""What all regions of one opened table share."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import pyarrow as pa

import wal
from memtable import IndexSpec, MemTable


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a region writer; sizes in bytes, times in seconds. See the sections [wal], [memtable], [flush]."""

    entry_size_max: int
    linger_max: float
    size_max: int
    rows_max: int
    age_max: float
    unflushed_max: int
    retry_delay: float


@dataclass(frozen=True, slots=True)
class RegionContext:
    """Storage, schema and limits, handed to every `RegionWriter`. `schema` is the row schema."""

    store: wal.ObjectStore
    codec: wal.EntryCodec
    clock: wal.Clock
    ids: wal.Ids
    schema: pa.Schema
    key: tuple[str, ...]
    indexes: tuple[IndexSpec, ...]
    storage_version: str
    limits: Limits
    wal_options: wal.WalOptions
    log: logging.Logger = field(default_factory=lambda: logging.getLogger("memwal.region"))

    def memtable(self, generation: int) -> MemTable:
        """An empty memtable with all of the table's indexes."""
        return MemTable(self.schema, self.key, self.indexes, generation)
