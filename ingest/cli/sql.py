"""`memwal sql`: one SELECT over the table, through the owner of the regions if one answers, else from storage."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping

import pyarrow as pa

from memwal.ingest.cli.open import open_for_reading
from memwal.ingest.cli.print import ROWS_PER_PART, count, print_rows
from memwal.ingest.cli.quiet import CommandConsole
from memwal.ingest.engine.api.results import RowStream
from memwal.ingest.settings.load import Settings


def answer(
    settings: Settings, environ: Mapping[str, str], query: str, level: str, form: str, console: CommandConsole
) -> int:
    """Run `query` (- for standard input), print its rows as they arrive, and return the exit code. Raises: Invalid."""
    text = sys.stdin.read() if query == "-" else query
    table = open_for_reading(settings, environ)
    with table.sql(text, level=level) as rows:
        total = print_rows(rows.schema.names, _gathered(rows), form, console)
    if form == "table":
        console.notes.print(count(total, "row"))
    return 0


def _gathered(rows: RowStream) -> Iterator[pa.Table]:
    """Yield the rows in tables of at least ROWS_PER_PART, so that small batches share one table header."""
    waiting: list[pa.RecordBatch] = []
    for batch in rows:
        waiting.append(batch)
        if sum(each.num_rows for each in waiting) >= ROWS_PER_PART:
            yield pa.Table.from_batches(waiting)
            waiting = []
    if waiting:
        yield pa.Table.from_batches(waiting)
