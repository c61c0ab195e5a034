"""Make Lance's scans of the base table: their options, their rows in memory, and their plans and statistics.

`filtered` identifies filters that lose rows with Lance's scalar indexes; such filters read the column instead. Found
with pylance 14.0.2:

- For `b IS TRUE` Lance queries the index of a boolean column for `b = true`, and takes the complement for the opposite:
  `NOT (b IS TRUE)`, `(b IS TRUE) = false` and similar filters lose the rows where b is null.
- Lance narrows a LIKE pattern with a backslash before an ordinary letter to the texts that begin with both. The
  backslash stands for the letter, so the pattern matches the texts without it.

`gathered`, `taken` and `awaited` read rows for callers that may disconnect or have a memory limit.

`WatchedDataset` wraps a dataset. It forwards all calls and, for each scan made through it, keeps the plan (planning
adds 0.3 to 1.4 ms) and Lance's statistics (`scan_stats_callback`); nothing is read twice. Found by experiment with
pylance 14.0.2:

- A plan names each scalar index as `]@name(` and a vector index as `ANNSubIndex: name=…`. It names only the column of a
  text index: `MatchQuery: column=…`.
- `rows_scanned` counts the rows whose columns were read, including rows that no B-tree or text index covers yet. Rows
  that a vector index does not cover are read by a `LanceScan`, which is not counted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import lance
import pyarrow as pa

from memwal.ingest.caller import expect_waiting, hold, present
from memwal.memtable import IndexSpec
from memwal.memtable.filter.expression import tokenize

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


_MAY = re.compile(r"\bis\b.*\b(?:true|false)\b|\\", re.IGNORECASE | re.DOTALL)


def filtered(filter: str | None) -> dict[str, Any]:
    """Return the options of Lance's scanner for a scan by `filter`."""
    return {"filter": filter} if _is_answered(filter) else {"filter": filter, "use_scalar_index": False}


def _is_answered(filter: str | None) -> bool:
    if filter is None or not _MAY.search(filter):
        return True
    words = [token.lower for token in tokenize(filter) if token.lower != "not"]
    escapes = "like" in words and any("\\" in word for word in words)
    return not escapes and not {("is", "true"), ("is", "false")}.intersection(pairwise(words))


_VECTOR_INDEX = re.compile(r"ANNSubIndex: name=(.+?), k=")
_TEXT_INDEX = re.compile(r"(?<!Flat)(?:Match|Phrase)Query: column=(.+?), query=")


@dataclass
class LanceScan:
    """One scan: its plan and Lance's statistics, which are 0 for a scan that was not read to its end."""

    plan: str = ""
    rows_scanned: int = 0
    requests: int = 0
    bytes_read: int = 0
    counted: bool = False

    def count(self, statistics: Any) -> None:
        """Record Lance's `ScanStatistics`."""
        self.rows_scanned = int(statistics.all_counts.get("rows_scanned", 0))
        self.requests, self.bytes_read, self.counted = statistics.requests, statistics.bytes_read, True

    def indexes(self, specs: Sequence[IndexSpec]) -> list[IndexSpec]:
        """Return those of the table's indexes that the plan uses."""
        vectors, texts = set(_VECTOR_INDEX.findall(self.plan)), set(_TEXT_INDEX.findall(self.plan))
        return [
            spec
            for spec in specs
            if spec.name in vectors or f"]@{spec.name}(" in self.plan or (spec.kind == "fts" and spec.column in texts)
        ]


class WatchedDataset:
    """A dataset that calls `scanned` with each scan, and otherwise behaves as the wrapped dataset.

    Thread safety. As that of `scanned`.
    """

    def __init__(self, dataset: Any, scanned: Callable[[LanceScan], None]) -> None:
        self._dataset, self._scanned = dataset, scanned

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dataset, name)

    def scanner(self, **options: Any) -> _WatchedScanner:
        """Return the wrapped dataset's scanner, watched."""
        scan = LanceScan()
        return _WatchedScanner(self._dataset.scanner(**options, scan_stats_callback=scan.count), scan, self._scanned)


_READING = ("count_rows", "to_table", "to_reader", "to_batches")
"""Methods of Lance's scanner that begin a scan."""


class _WatchedScanner:
    def __init__(self, scanner: Any, scan: LanceScan, scanned: Callable[[LanceScan], None]) -> None:
        self._scanner, self._scan, self._scanned = scanner, scan, scanned

    def __getattr__(self, name: str) -> Any:
        if name in _READING:
            self._scan.plan = self._scanner.explain_plan()
            self._scanned(self._scan)
        return getattr(self._scanner, name)
