"""The contents of a WAL entry, independent of its encoding.

An entry holds rows of the row schema and a header. The header of *every* entry, sentinels included, gives the whole
applied map (highest sequence applied per producer), so that a claim finds it in the newest entry, whatever was flushed,
committed or collected. A long map is in an object of its own, which the header names beside the changes since.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pyarrow as pa


@dataclass(frozen=True)
class BatchPart:
    """One entry's part of a producer's batch.

    Invariants. Only the last entry of a batch has `closes`; a batch without it is dropped on replay. Parts
    belong together when producer, sequence, attempt and writer epoch are equal.
    """

    producer: str
    """A Spark query id, or the name that a direct caller gave."""
    sequence: int
    """The producer's number of the batch (Spark's batch_id)."""
    attempt: str
    """Tells two attempts at one batch apart."""
    closes: bool


@dataclass(frozen=True)
class EntryHeader:
    """An entry without its rows.

    Invariants. `applied` holds, per producer, the highest sequence applied up to and including this entry: an
    entry whose part does not close its batch carries the map without that batch, the closing entry with it.
    """

    writer_epoch: int
    generation: int
    """Generation of the memtable of the rows, from 1; 0 where another program's entry does not name it."""
    entry_id: str
    """32 hex digits, fresh per entry, by which a writer knows its own after a lost answer; "" in another program's."""
    applied: Mapping[str, int] | None = field(default_factory=dict)
    """None where another program wrote the entry, without a map. Where the entry names a snapshot: the changes since
    it; the value `wal.applied.GONE` marks a removed key."""
    part: BatchPart | None = None
    sentinel: bool = False
    """True for the entry without rows that a claim puts at the tip, so that the older writer's next append fails."""
    snapshot: str = ""
    """Name of the snapshot that `applied` is relative to, see `wal.snapshots`; "" where `applied` is the whole map."""
    log_id: str = ""
    """That of the region's manifest; "" where an earlier memwal or another program wrote the entry, which may be of any
    log then."""


@dataclass(frozen=True)
class Entry:
    """A decoded entry."""

    position: int
    """1-based."""
    header: EntryHeader
    rows: pa.Table
    """In the row schema; no rows in a sentinel."""

    def is_again(self, other: Entry) -> bool:
        """Whether `other` is this entry, read at another time; False of another program's, which has no id."""
        return bool(self.header.entry_id) and self.header.entry_id == other.header.entry_id
