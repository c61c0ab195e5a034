"""What an entry of the log says, apart from how it is encoded.

An entry holds rows of the row schema and a header. The header says, in *every* entry and in sentinels too, the whole
map of what each producer has had applied, so that a claim finds it by the newest entry whatever was flushed, committed
or collected. A long map is in an object of its own, which the header names, and the header has what changed since.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pyarrow as pa


@dataclass(frozen=True)
class BatchPart:
    """One entry's share in a batch of a producer.

    Invariants. Only the last entry of a batch has `closes`; a batch without it is dropped on replay. Parts
    belong together when producer, sequence, attempt and writer epoch are equal.
    """

    producer: str
    """A Spark query id, or the name a direct caller gave."""
    sequence: int
    """The producer's number of the batch (Spark's batch_id)."""
    attempt: str
    """Tells two attempts at one batch apart."""
    closes: bool


@dataclass(frozen=True)
class EntryHeader:
    """Everything an entry says besides its rows.

    Invariants. `applied` holds, per producer, the highest sequence applied up to and including this entry: an
    entry whose part does not close its batch carries the map without that batch, the closing entry with it.
    """

    writer_epoch: int
    generation: int
    """Generation of the memtable the rows belong to, from 1; 0 where another program's entry does not say."""
    entry_id: str
    """32 hex digits, fresh per entry: how a writer knows its own entry after a lost answer; "" in another program's."""
    applied: Mapping[str, int] | None = field(default_factory=dict)
    """None where the entry does not carry the map: another program wrote it. Where it names a snapshot, the changes
    since; `wal.applied.GONE` is the value of a key that was taken out."""
    part: BatchPart | None = None
    sentinel: bool = False
    """A data-less entry a claim puts at the tip, which makes the older writer's next append fail."""
    snapshot: str = ""
    """What `applied` is relative to, see `wal.snapshots`; "" where it is the whole map."""


@dataclass(frozen=True)
class Entry:
    """A decoded entry."""

    position: int
    """1-based."""
    header: EntryHeader
    rows: pa.Table
    """In the row schema; no rows in a sentinel."""
