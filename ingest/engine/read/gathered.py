"""Read rows of Lance scans into memory for callers that may disconnect or have a memory limit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import lance
import pyarrow as pa

from memwal.ingest.caller import expect_waiting, hold, present

ROW_ID = "_rowid"
"""Lance's column with the id of each row of a version; `search` and `match` accept it as a column."""


def gathered(scanner: Any, *, counted: bool = True) -> pa.Table:
    """Return all rows of a scan. `counted`: whether their bytes count towards the caller's memory limit.

    Raises: the errors of `expect_waiting` and `hold`, between two batches.
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
    """Return `columns` of the rows with these `_rowid`s, in their order. Their bytes count towards the caller's limit.

    Raises: the errors of `hold`.
    """
    rows: pa.Table = dataset._take_rows(list(ids), columns=list(columns))  # noqa: SLF001 - Lance has no public method
    hold(rows.nbytes)
    return rows


def awaited(scanner: Any) -> Iterator[pa.RecordBatch]:
    """Yield the batches of a scan. Raises: the errors of `expect_waiting`, between two batches."""
    for batch in scanner.to_batches():
        expect_waiting()
        yield batch
