"""How `memwal inspect` shows things: fields beside each other, rows in a table, the first of many."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table
from rich.table import Table as RichTable
from rich.text import Text

from memwal.flush.verification.finding import spans
from memwal.ingest.api.python_times import python_rows, python_values
from memwal.memtable import TOMBSTONE

FIRST_ROWS = 5
CELL_WIDTH = 40


def fields(title: str, shown: Mapping[str, Any]) -> Table:
    """Names and values under a title; numbers with their thousands apart."""
    table = Table(title=title, title_justify="left", title_style="bold", show_header=False, box=None)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in shown.items():
        number = isinstance(value, int) and not isinstance(value, bool)
        table.add_row(name, value if isinstance(value, Text) else escape(f"{value:,}" if number else str(value)))
    return table


def columns(title: str, names: Iterable[str], rows: Iterable[Iterable[Any]], empty: str = "") -> RenderableType:
    """Rows under their names; where there is none, the text `empty`."""
    listed = [list(row) for row in rows]
    if not listed:
        return Text(empty, style="dim")
    table = Table(header_style="bold", box=SIMPLE_HEAD)
    for place, name in enumerate(names):
        numeric = all(type(row[place]) in (int, float) for row in listed)
        # Wide values, such as a region's id, are folded and never cut: who inspects wants to copy them.
        table.add_column(escape(name), justify="right" if numeric else "left", overflow="fold")
    for row in listed:
        table.add_row(*(escape(cell(value)) for value in row))
    return Group(Text(title, style="bold"), table)  # a title of the table's own would be folded to its width


def first_rows(rows: pa.Table, total: int) -> RenderableType:
    """The first of `total` rows."""
    first = rows.slice(0, FIRST_ROWS)
    values = zip(*map(python_values, first.columns), strict=True)
    title = f"first {first.num_rows} of {total:,} rows"
    return columns(title, first.column_names, values, "no rows")


def cell(value: Any) -> str:
    """One value, at most CELL_WIDTH letters of it; of a list the first three."""
    if value is None:
        return "-"
    if isinstance(value, bytes):
        return value.hex() if len(value) <= CELL_WIDTH // 2 else f"{value[: CELL_WIDTH // 2 - 1].hex()}…"
    if isinstance(value, list):
        shown = ", ".join(f"{number:.3g}" if isinstance(number, float) else str(number) for number in value[:3])
        return f"[{shown}{', …' if len(value) > 3 else ''}] ({len(value)})"
    text = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
    return text if len(text) <= CELL_WIDTH else f"{text[: CELL_WIDTH - 1]}…"


def size(number: int) -> str:
    """Bytes, and in larger units where that says more: 37,205 (37.2 kB)."""
    return f"{number:,} ({decimal(number)})" if number >= 1000 else f"{number:,}"


def tombstones(rows: pa.Table) -> int:
    """How many of `rows` are."""
    return int(pc.sum(rows.column(TOMBSTONE)).as_py() or 0) if TOMBSTONE in rows.column_names else 0


def as_rich(rows: pa.Table, width: int = 48) -> RichTable:
    """Rows as a table for people: vectors and long texts cut to `width` characters."""
    table = RichTable(box=SIMPLE_HEAD, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    for field in rows.schema:
        table.add_column(field.name, justify="right" if pa.types.is_integer(field.type) else "left", overflow="fold")
    for row in python_rows(rows):
        table.add_row(*(_cell(value, width) for value in row.values()))
    return table


def _cell(value: Any, width: int) -> str:
    if value is None:
        return "[dim]null[/dim]"
    if isinstance(value, list):
        shown = ", ".join(f"{each:.3g}" if isinstance(each, float) else str(each) for each in value[:3])
        return f"\\[{shown}{', …' if len(value) > 3 else ''}] ({len(value)})"
    text = f"{value:.4f}" if isinstance(value, float) else str(value)
    return (text if len(text) <= width else f"{text[: width - 1]}…").replace("[", "\\[")


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}–{last}"


def ranges(numbers: Iterable[int]) -> str:
    """1, 2, 3, 7 as 1–3, 7."""
    return ", ".join(_span(first, last) for first, last in spans(numbers))


def _write_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, default=str, indent=2) + "\n")
