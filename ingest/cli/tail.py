"""`memwal tail`: print the changes of a table, through a daemon if one serves it, else from storage."""

from __future__ import annotations

import csv
import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from memwal.ingest.cli.command import Call
from memwal.ingest.cli.open import open_for_reading
from memwal.ingest.cli.print import RowTables, count, in_parts, shown_rows, write_json
from memwal.ingest.engine.api.changes import POSITION, REGION, ROW, Changes
from memwal.ingest.errors import Invalid


def tail(
    call: Call,
    *,
    since: str,
    images: str,
    columns: list[str] | None,
    limit: int | None,
    follow: bool,
    form: str,
    vertical: bool = False,
) -> int:
    """Print changes up to the end or the limit, with `follow` until interrupted. Then print the position to standard
    error.

    Raises: Invalid, also with the reason `changes_gone`.
    """
    table = open_for_reading(call)
    changes = table.changes(_since(since), images=images, columns=columns, follow=follow)
    tables = RowTables(call.console, vertical=vertical, whole=table.key)
    printer = _Printer(changes, form, tables, limit)
    with suppress(KeyboardInterrupt):  # ends a tail that follows
        printer.run()
    if not call.console.is_quiet:
        others = f"; not shown: {', '.join(tables.left_out)} (--columns, or -x)" if tables.left_out else ""
        again = f" and repeats {count(printer.repeated, 'row')}" if printer.repeated else ""
        for line in (
            *([f"{count(tables.printed, 'row')}{others}"] if form == "table" else []),
            f"--since '{json.dumps(printer.position)}' continues from here{again}",  # also if it is wrapped
        ):
            print(call.console.wrapped(line) if sys.stderr.isatty() else line, file=sys.stderr)
    return 0


class _Printer:
    """Prints the batches of `changes`, and tracks the position before the first row that was not printed.

    A position names a WAL entry. If printing ends inside an entry, the position is before that entry, and `repeated`
    counts its printed rows.
    """

    def __init__(self, changes: Changes, form: str, tables: RowTables, limit: int | None) -> None:
        self._changes, self._form, self.tables, self._left = changes, form, tables, limit
        self._head: list[str] = []
        self._printed = False
        self.position, self.repeated = changes.position, 0

    def run(self) -> None:
        """Print until the end of the changes or the limit; without changes, the names of the columns."""
        schema = self._changes.schema
        for batch in self._changes:
            printed = 0
            for part in in_parts(pa.Table.from_batches([batch])):
                wanted = part if self._left is None else part.slice(0, self._left)
                self._print(wanted)
                printed += wanted.num_rows
                self._printed = True
                if self._left is not None:
                    self._left -= wanted.num_rows
                self._note(batch, printed)
            if self._left == 0:
                return
        if not self._printed:
            self._print(schema.empty_table())
        self.position = self._changes.position

    def _note(self, batch: pa.RecordBatch, printed: int) -> None:
        """Move `position` up to the entry that holds the first row of `batch` that was not printed."""
        if printed == batch.num_rows:
            self.position, self.repeated = self._changes.position, 0
            return
        region, entries = batch.column(REGION)[printed].as_py(), batch.column(POSITION)
        entry = entries[printed].as_py()
        self.position = {**self.position, "regions": {**self.position["regions"], region: entry - 1}}
        self.repeated = pc.sum(pc.equal(entries.slice(0, printed), entry)).as_py() or 0

    def _print(self, rows: pa.Table) -> None:
        form = self._form
        if form in ("json", "ndjson"):
            for row in shown_rows(rows, form):
                write_json(row, indent=None)
        elif form == "csv":
            writer = csv.writer(sys.stdout)
            if rows.column_names != self._head:  # a change of the columns starts a new header
                self._head = rows.column_names
                writer.writerow(self._head)
            writer.writerows(row.values() for row in shown_rows(rows, form))
        else:
            nested = [field.name for field in rows.schema if pa.types.is_nested(field.type)]
            self.tables.print(rows.drop_columns([REGION, ROW, *nested]))
        sys.stdout.flush()


def _since(text: str) -> Any:
    """Return "earliest", "latest", or the position in a JSON text or a file."""
    if text.startswith("@"):
        try:
            text = Path(text[1:]).read_text(encoding="utf-8").strip()
        except OSError as error:
            raise Invalid(f"--since: {text[1:]}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise Invalid(f"--since: {text[1:]} is not text: give a file that holds a position") from None
    if not text.startswith("{"):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise Invalid("--since: not a position: write earliest, latest, the JSON of a position, or @FILE") from None
