"""Rows of Lance that are read into memory for callers who may leave or may take only so much."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import lance
import pyarrow as pa

from memwal.ingest.caller import expect_waiting, hold, present

ROW_ID = "_rowid"
"""Lance's own, one for each row of a version; `search` and `match` take it as a column."""


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


def taken(dataset: lance.LanceDataset, ids: Sequence[int], columns: Sequence[str]) -> pa.Table:
    """Return `columns` of the rows with these `_rowid`s, in their order. They count as held for the caller.

    Raises: what `hold` raises.
    """
    rows: pa.Table = dataset._take_rows(list(ids), columns=list(columns))  # noqa: SLF001 - no public one
    hold(rows.nbytes)
    return rows


def awaited(scanner: Any) -> Iterator[pa.RecordBatch]:
    """Yield the batches of a scan. Raises: what `expect_waiting` raises, between two batches."""
    for batch in scanner.to_batches():
        expect_waiting()
        yield batch
