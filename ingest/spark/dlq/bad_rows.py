"""Find the bad rows of a batch, and the share of bad rows in the newest micro-batches.

A batch is checked as a whole. If the check fails, the batch is halved until the bad rows are isolated: b bad rows of n
cost about 2 b log2(n / b) checks; a batch without bad rows costs one.
"""

from __future__ import annotations

import base64
import json
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from memwal.ingest.engine.api.results import python_values
from memwal.ingest.service.client.target import Target
from memwal.ingest.spark.source.columns import PROBLEM, rows_and_deletes
from memwal.memtable import InvalidRows

T = TypeVar("T")

_ALONE = " in row 0"
"""Row number in the message of a row that was checked alone; it is removed."""


@dataclass(frozen=True, slots=True)
class BadRow:
    """Why a row is a dead letter: the stage (parse, map, fit, refused), the column if one is the cause, the reason."""

    stage: str
    column: str | None
    reason: str


def problems_of(batch: pa.RecordBatch) -> dict[int, BadRow]:
    """Return the rows that the source or the mapping could not use, by their number in the batch."""
    if PROBLEM not in batch.schema.names:
        return {}
    said = batch[PROBLEM]
    if said.null_count == len(said):
        return {}
    rows = pc.indices_nonzero(pc.is_valid(said)).to_pylist()
    return {row: _problem(text) for row, text in zip(rows, said.take(pa.array(rows)).to_pylist(), strict=True)}


def _problem(text: str) -> BadRow:
    stage, colon, reason = text.partition(": ")
    return BadRow(stage, None, reason) if colon and stage in ("parse", "map") else BadRow("map", None, text)


def unfit_of(batch: pa.RecordBatch, check: Callable[[pa.RecordBatch], T]) -> tuple[dict[int, BadRow], T | None]:
    """Return the rows that `check` rejects, by their number in the batch; without such rows, the result of `check`.

    Raises: InvalidRows if `check` rejects zero rows of these columns too: the columns are the cause, not a row.
    """
    try:
        return {}, check(batch)
    except InvalidRows:
        check(batch.slice(0, 0))
    found: dict[int, BadRow] = {}
    _halve(batch, 0, check, found)
    return found, None


def _halve(
    failed: pa.RecordBatch, first: int, check: Callable[[pa.RecordBatch], object], found: dict[int, BadRow]
) -> None:
    """Add the bad rows of `failed`, which has at least one, to `found`.

    `first`: number of the first row of `failed`.
    """
    if failed.num_rows == 1:
        try:
            check(failed)
        except InvalidRows as error:
            found[first] = BadRow("fit", error.column, str(error).replace(_ALONE, ""))
        return
    middle = failed.num_rows // 2
    for start, part in ((0, failed.slice(0, middle)), (middle, failed.slice(middle))):
        try:
            check(part)
        except InvalidRows:
            _halve(part, first + start, check, found)


# ---- rows as JSON --------------------------------------------------------------------------------------------------


def as_json(row: Mapping[str, Any]) -> bytes:
    """Return a row of a source without raw bytes as JSON: times as ISO text, bytes as base64, without nulls."""
    given = {name: value for name, value in row.items() if value is not None}
    return json.dumps(given, default=_plain, ensure_ascii=False).encode(errors="surrogateescape")


def _plain(value: object) -> object:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, datetime | date):
        return value.isoformat()
    if isinstance(value, Decimal) and value == value.to_integral_value():
        return int(value)
    return str(value)


def readable_row(batch: pa.RecordBatch, row: int) -> dict[str, Any]:
    """Return the values of one row.

    Bytes of text that are not UTF-8 become surrogates, and `as_json` writes them as the original bytes. The dead letter
    is then not valid JSON, so that no replay puts a different text.
    """
    return {name: _value(batch[name].slice(row, 1)) for name in batch.schema.names}


def _value(alone: pa.Array) -> Any:
    try:
        return python_values(alone)[0]
    except UnicodeDecodeError:
        return alone.cast(pa.binary())[0].as_py().decode(errors="surrogateescape")


class BadRate:
    """The share of bad rows in the newest micro-batches that have `window` rows together; no share with fewer rows.

    Thread safety. One thread.

    A new process starts with no rows: a stream that was stopped because of its bad rows runs for `window` more rows
    before it is stopped again, unless one micro-batch alone has too many bad rows.
    """

    def __init__(self, max_percent: int, window: int) -> None:
        self._max_percent, self._window = max_percent, window
        self._batches: deque[tuple[int, int]] = deque()
        self._rows = self._bad = 0

    def with_more(self, rows: int, bad: int) -> str | None:
        """Count a micro-batch of `rows` rows, `bad` of them bad.

        Return a message if the share is now too high, else None.
        """
        self._batches.append((rows, bad))
        self._rows += rows
        self._bad += bad
        while self._rows - self._batches[0][0] >= self._window:
            old_rows, old_bad = self._batches.popleft()
            self._rows -= old_rows
            self._bad -= old_bad
        if self._rows < self._window or self._bad * 100 <= self._max_percent * self._rows:
            return None
        return f"{self._bad:,} of the last {self._rows:,} rows ({self._bad * 100 / self._rows:.1f} %) are bad"


def conformed_to(target: Target, batch: pa.RecordBatch) -> pa.Table:
    """Return the user's columns of a batch in the table's types.

    Raises: InvalidRows for rows that a region would refuse.
    """
    rows, deletes = rows_and_deletes(batch, target.base.key, target.base.rules.version)
    whole = target.checker.whole(rows, False if deletes is None else deletes)
    target.checker.checked(whole)
    return whole
