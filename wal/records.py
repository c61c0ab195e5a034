"""The contents of a WAL entry, independent of its encoding.

An entry holds rows of the row schema and a header. The header of *every* entry, sentinels included, gives the whole
applied map (highest sequence applied per producer), so that a claim finds it in the newest entry, whatever was flushed,
committed or collected. A long map is in a separate object, which the header names beside the changes since.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pyarrow as pa


@dataclass(frozen=True)
class BatchPart:
    """One entry's part of a producer's batch.

    Invariants. Only the last entry of a batch has `closes`; a batch without it is dropped on replay. Parts belong
    together when producer, sequence, attempt and writer epoch are equal.
    """

    producer: str
    """A Spark query id, or the name given by a direct caller."""
    sequence: int
    """The producer's number of the batch (Spark's batch_id)."""
    attempt: str
    """Distinguishes two attempts at one batch."""
    closes: bool


@dataclass(frozen=True)
class EntryHeader:
    """An entry without its rows.

    Invariants. `applied` holds, per producer, the highest sequence applied up to and including this entry: an entry
    whose part does not close its batch carries the map without that batch, the closing entry with it.
    """

    writer_epoch: int
    generation: int
    """Generation of the memtable of the rows, from 1; 0 if another program's entry does not name it."""
    entry_id: str
    """32 hex digits, fresh per entry; a writer recognises its entry by it after a lost answer; "" in another program's
    entry.
    """
    applied: Mapping[str, int] | None = field(default_factory=dict)
    """None if another program wrote the entry, without a map. If the entry names a snapshot, these are the changes
    since it; the value `wal.applied.GONE` marks a removed key.
    """
    part: BatchPart | None = None
    sentinel: bool = False
    """True for the entry without rows that a claim puts at the tip, so that the older writer's next append fails."""
    snapshot: str = ""
    """Name of the snapshot that `applied` is relative to, see `wal.applied`; "" if `applied` is the whole map."""
    log_id: str = ""
    """Log id of the region's manifest. "" if an earlier memwal or another program wrote the entry, which is accepted in
    any log.
    """


@dataclass(frozen=True)
class Entry:
    """A decoded entry."""

    position: int
    """1-based."""
    header: EntryHeader
    rows: pa.Table
    """In the row schema; a sentinel has no rows."""

    def is_again(self, other: Entry) -> bool:
        """Return whether `other` is this entry, read at another time. False for another program's entry, which has no
        id.
        """
        return bool(self.header.entry_id) and self.header.entry_id == other.header.entry_id
