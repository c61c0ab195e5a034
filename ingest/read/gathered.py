"""Scans of Lance that are read into memory, batch by batch, for callers who may leave or may take only so much."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from memwal.ingest.caller import expect_waiting, hold, present


def gathered(scanner: Any, *, counted: bool = True) -> pa.Table:
    """Return all rows of a scan. `counted`: whether they count as held for the caller.

    Raises: what `expect_waiting` and `hold` raise, between two batches.
    """
    if present() is None:
        rows: pa.Table = scanner.to_table()
        return rows
    reader, batches = scanner.to_reader(), list[pa.RecordBatch]()
    for batch in reader:
        expect_waiting()
        if counted:
            hold(batch.nbytes)
        batches.append(batch)
    return pa.Table.from_batches(batches, reader.schema)


def awaited(scanner: Any) -> Iterator[pa.RecordBatch]:
    """Yield the batches of a scan. Raises: what `expect_waiting` raises, between two batches."""
    for batch in scanner.to_batches():
        expect_waiting()
        yield batch
