"""The report of `memwal run --once`: figures, then up to four queries on the table's own columns."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pyarrow as pa
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from memwal.ingest.engine.api.results import python_rows, python_values
from memwal.ingest.service.client.remote import RemoteTable
from memwal.ingest.service.client.tables import RemoteFleet
from memwal.ingest.spark.pipeline.metrics import Figures
from memwal.memtable import IndexSpec
from memwal.wal import Clock

ROWS_SHOWN = 2
_SAMPLE = 32
_WIDTH = 80
_NARROW, _PADDING = 12, 2
_COLUMNS_SHOWN = 4
_WORD = re.compile(r"[A-Za-z]{4,}")


def print_report(
    console: Console, table: RemoteTable | RemoteFleet, indexes: Sequence[IndexSpec], figures: Figures, clock: Clock
) -> None:
    """Print the figures of a run and the answers of the queries, at level latest. Raises: errors of the reads."""
    console.print(figures_table(figures, table.status()))
    if isinstance(table, RemoteFleet):
        return
    for query in queries(table, indexes):
        began = clock.monotonic()
        found = query.ask()
        seconds = clock.monotonic() - began
        count = f"{found.num_rows:,} row{'' if found.num_rows == 1 else 's'}"
        title = f"[bold]{query.name}[/]  {escape(query.words)}  [dim]{count}, {seconds * 1e3:.1f} ms[/]"
        console.print(title, soft_wrap=True, highlight=False)
        shown = Table(box=None, header_style="dim", padding=(0, 1))
        head = found.slice(0, ROWS_SHOWN)
        texts = {name: [_text(value) for value in python_values(head[name])] for name in head.column_names}
        whole = {field.name for field in head.schema if not pa.types.is_string(field.type)} | set(table.key)
        widths = _widths(texts, whole, min(_WIDTH, console.width))
        for name, width in widths.items():
            kind = head.schema.field(name).type
            number = pa.types.is_integer(kind) or pa.types.is_floating(kind)
            justify: Literal["left", "right"] = "right" if number else "left"
            shown.add_column(Text(name), no_wrap=True, overflow="ellipsis", justify=justify, width=width)
        for row in zip(*(texts[name] for name in widths), strict=True):
            shown.add_row(*map(Text, row))
        console.print(shown)


# ---- figures -------------------------------------------------------------------------------------------------------


def figures_table(figures: Figures, status: Mapping[str, Any]) -> Table:
    """Return the figures as two columns. Flushed SSTs count even after they were committed and pruned."""
    regions = status["regions"]
    lines = _stream_lines(figures) if figures.micro_batches else {"rows in": "0: the source holds nothing new"}
    lines |= (
        {"tables": f"{len(status['tables']):,}"}
        if "tables" in status
        else {
            "table": f"version {status['base_version']}, {status['rows']:,} rows in {len(regions)} regions; "
            f"{sum(not sst['committed'] for region in regions for sst in region['ssts']):,} SSTs not committed",
        }
    )
    shown = Table(
        title=Text(str(status["table"])),
        title_style="bold",
        title_justify="left",
        box=None,
        show_header=False,
    )
    shown.add_column(style="dim")
    shown.add_column(overflow="fold")
    for name, value in lines.items():
        shown.add_row(name, value)
    return shown


def _stream_lines(figures: Figures) -> dict[str, str]:
    repeated = f", {figures.repeated:,} of them applied before" if figures.repeated else ""
    none = "not measured: no row was sent"
    acks = f"p50 {_ms(figures.ack_p50)}, p99 {_ms(figures.ack_p99)} from the last row sent"
    waits = f"p50 {_ms(figures.batch_p50)}, max {_ms(figures.batch_max)} without waiting for the trigger"
    kept = f", {figures.letters:,} new dead letters" if figures.letters else ", no new dead letter"
    batches = "micro-batch" if figures.micro_batches == 1 else "micro-batches"
    bad = {"bad rows": f"{figures.bad:,} left out{kept}"} if figures.bad else {}
    return {
        "rows in": f"{figures.rows:,} in {figures.micro_batches:,} {batches}{repeated}",
        **bad,
        "rows per second": f"{figures.rows_per_second:,.0f} over {figures.seconds:.1f} s, from start to last ack",
        "put ack": acks if figures.rows else none,
        "batch to queryable": waits if figures.rows else none,
    }


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms" if seconds < 1 else f"{seconds:,.2f} s"


# ---- queries -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Query:
    """One query of the report: its name, its description, and how to run it."""

    name: str
    words: str
    ask: Callable[[], pa.Table]


def queries(table: RemoteTable, indexes: Sequence[IndexSpec]) -> list[Query]:
    """Return a lookup by key, and for each kind of index one query: a filter, a vector search or a text search.

    Queries use values of stored rows, so that each returns rows.
    """
    rows = table.scan(limit=_SAMPLE).read_all()
    if not rows.num_rows:
        return []
    found, columns = list[Query | None](), shown_columns(table, indexes)
    if table.key:
        first = python_rows(rows.slice(0, 1))[0]
        key = {name: first[name] for name in table.key}
        words = ", ".join(f"{name} = {_literal(value)}" for name, value in key.items())
        found.append(Query("by key", words, lambda: table.get([key], columns)))
    for kind in ("btree", "ivf_pq", "fts"):
        column = next((index.column for index in indexes if index.kind == kind), None)
        filled = [row for row in python_rows(rows) if column is not None and row[column] is not None]
        if column is not None and filled:
            found.append(_on_index(table, kind, column, filled[len(filled) // 2], columns))
    return [query for query in found if query is not None]


def shown_columns(table: RemoteTable, indexes: Sequence[IndexSpec]) -> list[str]:
    """Return the columns that fit into 80 characters: the key, indexed columns, then others.

    Vectors and bytes are left out.
    """
    indexed = [index.column for index in indexes]
    names = dict.fromkeys([*table.key, *indexed, *table.schema.names])
    return [name for name in names if _printable(table.schema.field(name).type)][:_COLUMNS_SHOWN]


def _printable(kind: pa.DataType) -> bool:
    return not (pa.types.is_nested(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _on_index(table: RemoteTable, kind: str, column: str, row: dict[str, Any], columns: list[str]) -> Query | None:
    """Return a query by the index of `column`, with the value of a stored row; None if the value has no words."""
    value = row[column]
    if kind == "btree":
        condition = f"{column} >= {_literal(value)}"
        return Query("by filter", condition, lambda: table.scan(columns, condition).read_all())
    if kind == "ivf_pq":
        near = f"{column} near that of {_literal(row[table.key[0]]) if table.key else 'one of the rows'}"
        return Query("by vector", near, lambda: table.search(column, value, ROWS_SHOWN, columns=columns))
    words = " ".join(sorted(dict.fromkeys(_WORD.findall(value.lower())), key=len, reverse=True)[:2])
    matches = f"{column} matches '{words}'"
    return Query("by text", matches, lambda: table.match(column, words, ROWS_SHOWN, columns=columns)) if words else None


def _literal(value: object) -> str:
    return str(value) if isinstance(value, int | float) else "'" + str(value).replace("'", "''") + "'"


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else str(value)


def _widths(texts: Mapping[str, list[str]], whole: set[str], room: int) -> dict[str, int]:
    """Return the widths of the columns that fit into `room` characters. Only columns outside of `whole` are cut."""
    wanted = {name: max(map(cell_len, [name, *values])) for name, values in texts.items()}
    least = {name: want if name in whole else min(want, max(cell_len(name), _NARROW)) for name, want in wanted.items()}
    widths = dict[str, int]()
    for name in sorted(texts, key=lambda name: name not in whole):
        if least[name] + _PADDING <= room:
            widths[name], room = least[name], room - least[name] - _PADDING
    for name in widths:
        given = min(room, wanted[name] - widths[name])
        widths[name], room = widths[name] + given, room - given
    return {name: widths[name] for name in texts if name in widths}
