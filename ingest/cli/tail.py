"""`memwal tail`: prints the changes of a table, through a daemon if one serves it, else from storage."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from memwal.ingest.api.changes import REGION, ROW, Changes
from memwal.ingest.cli.open import open_for_reading
from memwal.ingest.cli.print import as_rich, write_json
from memwal.ingest.cli.quiet import CommandConsole
from memwal.ingest.cli.values import shown_rows
from memwal.ingest.errors import Invalid
from memwal.ingest.settings.load import Settings


@dataclass(frozen=True, slots=True)
class Tail:
    """What to print, as typed."""

    since: str
    images: str
    columns: list[str] | None
    follow: bool


def tail(settings: Settings, environ: Mapping[str, str], asked: Tail, form: str, console: CommandConsole) -> int:
    """Print changes until there are no more, with `follow` until interrupted; then the position, to standard error.

    Raises: Invalid, `changes_gone` among it.
    """
    table = open_for_reading(settings, environ)
    since = _since(asked.since)
    changes = table.changes(since, images=asked.images, columns=asked.columns, follow=asked.follow)
    with suppress(KeyboardInterrupt):  # it is how a tail that follows ends
        _print(changes, form, console)
    if not console.is_quiet:
        print(f"--since '{json.dumps(changes.position)}' goes on from here", file=sys.stderr)
    return 0


def _print(changes: Changes, form: str, console: CommandConsole) -> None:
    head: list[str] = []
    writer = csv.writer(sys.stdout)
    for batch in changes:
        rows = pa.Table.from_batches([batch])
        if form in ("json", "ndjson"):
            for row in shown_rows(rows, form):
                write_json(row, indent=None)
        elif form == "csv":
            if rows.column_names != head:  # columns that somebody changed get a new head
                head = rows.column_names
                writer.writerow(head)
            writer.writerows(row.values() for row in shown_rows(rows, form))
        else:
            nested = [field.name for field in rows.schema if pa.types.is_nested(field.type)]
            console.print(as_rich(rows.drop_columns([REGION, ROW, *nested])))
        sys.stdout.flush()


def _since(text: str) -> Any:
    """Return "earliest", "latest" or the position that a JSON text or a file holds."""
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
