"""Output of commands: tables, cells, counts, ranges, progress bars, JSON and CSV.

Values of rows:

- A float32 is printed as the shortest decimal number that reads back to it: 76.1, not 76.0999984741211.
- Binary is printed as hexadecimal digits, two for each byte.
- JSON has no NaN and no infinity: they are the texts "NaN", "Infinity" and "-Infinity", as in protobuf's JSON.
"""

from __future__ import annotations

import csv
import json
import math
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from decimal import Decimal
from textwrap import indent
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.filesize import decimal
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from memwal.flush.verification.finding import spans
from memwal.ingest.cli.command import CommandConsole
from memwal.ingest.engine.api.results import python_values
from memwal.memtable import TOMBSTONE

_GATHERED: ContextVar[list[Any] | None] = ContextVar("memwal_gathered_json", default=None)
_Convert = Callable[[Any], Any]
Kind = Literal["number", "name", "text", "words"]
"""How a column fits: whole and to the right, whole, cut to TEXT_MIN characters, or wrapped between words."""

FIRST_ROWS = 5
CELL_WIDTH = 40
WIDER = "a wider terminal, or COLUMNS=200, shows them"
ROWS_PER_PART = 500
"""Rows that are converted and printed together; a table lays out its columns for these rows."""
TEXT_MIN, GAP, EDGES = 12, 2, 3
"""In characters: minimum width of a column whose texts are cut, gap between two columns, and both edges together."""
_WHOLE = 1 << 20
"""Characters of a value in a block."""
LISTED = 3
"""Values of a list that a cell shows."""


# ---- tables --------------------------------------------------------------------------------------------------------


def plain_table() -> Table:
    """Return an empty table in the style of all commands."""
    return Table(box=SIMPLE_HEAD, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))


def fields(title: str, shown: Mapping[str, Any]) -> Table:
    """Return names and values under a title; integers with thousands separators."""
    table = Table(title=title, title_justify="left", title_style="bold", show_header=False, box=None)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in shown.items():
        table.add_row(name, value if isinstance(value, Text) else Text(_grouped(value)))
    return table


def columns(title: str, names: Sequence[str], rows: Iterable[Iterable[Any]], empty: str = "") -> RenderableType:
    """Return rows under their names; without rows, the text `empty`."""
    listed = [list(row) for row in rows]
    if not listed:
        return Text(empty, style="dim")
    numeric = [all(type(value) in (int, float) for value in column) for column in zip(*listed, strict=True)]
    kinds: list[Kind] = ["number" if number else "name" for number in numeric]
    cells = [[cell(value) for value in row] for row in listed]
    return Group(Text(title, style="bold"), FittedTable(names, kinds, cells, WIDER))


def first_rows(rows: pa.Table, total: int) -> RenderableType:
    """Return the first of `total` rows as a table."""
    first = rows.slice(0, FIRST_ROWS)
    if not first.num_rows:
        return Text("no rows", style="dim")
    title = f"first {first.num_rows} of {total:,} rows"
    kinds = [_kind(field.type) for field in first.schema]
    values = [[cell(value, grouped=False) for value in row.values()] for row in shown_rows(first, "table")]
    return Group(Text(title, style="bold"), FittedTable(first.column_names, kinds, values, WIDER))


# ---- cells ---------------------------------------------------------------------------------------------------------


def cell(value: Any, width: int = CELL_WIDTH, *, grouped: bool = True) -> Text:
    """Return a value for a table; of a list, the first three values and the length.

    `width`: maximum characters of a text or of bytes; the rest is cut.
    `grouped`: print integers with thousands separators. True for counts, False for values of the user's columns.
    """
    if value is None:
        return Text("null", style="dim")
    if isinstance(value, bytes):
        return Text(value.hex() if len(value) <= width // 2 else f"{value[: width // 2 - 1].hex()}…")
    if isinstance(value, list):
        shown = ", ".join(f"{each:.3g}" if isinstance(each, float) else printable(str(each)) for each in value[:LISTED])
        return Text(f"[{shown}{', …' if len(value) > LISTED else ''}] ({len(value)})")
    text = f"{value:.10g}" if isinstance(value, float) else _grouped(value) if grouped else str(value)
    if isinstance(value, int | float | Decimal):
        return Text(text)
    return Text(printable(text if len(text) <= width else f"{text[: width - 1]}…"))


def printable(text: str) -> str:
    """Return `text` with control characters and line breaks escaped."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def _grouped(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def size(number: int) -> str:
    """Return a number of bytes, with a larger unit from 1,000 on: 37,205 (37.2 kB)."""
    return f"{number:,} ({decimal(number)})" if number >= 1000 else f"{number:,}"


def count(number: int, what: str) -> str:
    """Return a number with its noun: 1 row, 2,000 rows."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def tombstones(rows: pa.Table) -> int:
    """Return the number of tombstones among `rows`."""
    return int(pc.sum(rows.column(TOMBSTONE)).as_py() or 0) if TOMBSTONE in rows.column_names else 0


def span(first: int, last: int) -> str:
    """Return a range of numbers: 4–6, or 4 if both are equal."""
    return str(first) if first == last else f"{first}–{last}"


def ranges(numbers: Iterable[int]) -> str:
    """Return 1, 2, 3, 7 as 1–3, 7."""
    return ", ".join(span(first, last) for first, last in spans(numbers))


@contextmanager
def progress_bar(
    console: Console, text: str, columns: Iterable[ProgressColumn], total: int | None
) -> Iterator[Callable[[str, int, int], None] | None]:
    """Show a progress bar during the context. Yield the function that sets its text, the steps done and their number;
    None if the console is not a terminal.

    `columns`: after the text and the bar. `total`: steps, until the function is called.
    """
    if not console.is_terminal:
        yield None
        return
    shown = (TextColumn("{task.description}"), BarColumn(), *columns, TimeElapsedColumn())
    with Progress(*shown, console=console, transient=True) as bar:
        task = bar.add_task(text, total=total)
        yield lambda text, done, total: bar.update(task, description=text, completed=done, total=total)


# ---- tables that fit the terminal ----------------------------------------------------------------------------------


class FittedTable:
    """A table that fits the console. Columns that do not fit are left out, and a line below the table names them."""

    def __init__(self, names: Sequence[str], kinds: Sequence[Kind], rows: Iterable[Sequence[Text]], more: str) -> None:
        """`more`: how to see the columns that were left out."""
        self._names, self._kinds, self._more = names, kinds, more
        self._cells = list(zip(*rows, strict=True)) or [()] * len(names)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        table, left_out = _fitted(self._names, self._kinds, self._cells, options.max_width)
        yield table
        if left_out:
            yield Text(f"not shown: {', '.join(left_out)} ({self._more})", style="dim")


class RowTables:
    """Prints rows as tables that fit the console, one for each call, with the same columns as the first.

    Numbers, times, names and the values of the columns `whole` are never cut; other texts are, down to TEXT_MIN
    characters. Columns that do not fit beside the others are left out, from the last on. If no column fits, or with
    `vertical`, each row is a block with one line for each column.
    """

    def __init__(self, console: Console, *, vertical: bool = False, whole: Collection[str] = ()) -> None:
        self._console, self._vertical, self._whole, self.printed = console, vertical, whole, 0
        self._given: Sequence[str] = ()
        self.left_out: Sequence[str] = ()
        """Columns that did not fit."""

    def print(self, rows: pa.Table) -> None:
        """Print `rows`; without rows, the names of the columns."""
        if rows.column_names != self._given:  # the first rows, or the columns have changed
            self._given, self.left_out = rows.column_names, ()
        shown = rows.drop_columns(list(self.left_out))
        whole = [field.name in self._whole for field in shown.schema]
        kinds: list[Kind] = [
            "name" if named and _kind(field.type) == "text" else _kind(field.type)
            for field, named in zip(shown.schema, whole, strict=True)
        ]
        cells = [
            [cell(value, _WHOLE if named else CELL_WIDTH, grouped=False) for value in shown_values(column, "table")]
            for column, named in zip(shown.columns, whole, strict=True)
        ]
        table, left_out = _fitted(shown.column_names, kinds, cells, self._console.width)
        self._vertical = self._vertical or 0 < shown.num_columns == len(left_out)
        if self._vertical:
            self._print_blocks(rows)
            return
        self.left_out = [*left_out, *self.left_out]
        self.printed += rows.num_rows
        self._console.print(table)

    def _print_blocks(self, rows: pa.Table) -> None:
        wide = max(map(cell_len, rows.column_names), default=0)
        for row in shown_rows(rows, "table"):
            self.printed += 1
            self._console.out(f"-[ row {self.printed} ]".ljust(wide + 3, "-"), highlight=False)
            for name, value in row.items():
                text = cell(value, _WHOLE, grouped=False).plain
                self._console.out(f"{name}{' ' * (wide - cell_len(name))} | {text}", highlight=False)


def _kind(kind: pa.DataType) -> Kind:
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return "number"
    return "name" if pa.types.is_temporal(kind) or pa.types.is_boolean(kind) else "text"


def _fitted(
    names: Sequence[str], kinds: Sequence[Kind], cells: Sequence[Sequence[Text]], room: int
) -> tuple[Table, list[str]]:
    """Return the columns that fit into `room` characters as a table, and the names of the others."""
    widths, table = _widths(names, kinds, cells, room - EDGES), plain_table()
    for at, width in widths.items():
        justify: Literal["left", "right"] = "right" if kinds[at] == "number" else "left"
        wraps = kinds[at] == "words"
        overflow: Literal["fold", "ellipsis"] = "fold" if wraps else "ellipsis"
        table.add_column(Text(names[at]), justify=justify, width=width, no_wrap=not wraps, overflow=overflow)
    for row in zip(*(cells[at] for at in widths), strict=True):
        table.add_row(*row)
    return table, [name for at, name in enumerate(names) if at not in widths]


def _widths(names: Sequence[str], kinds: Sequence[Kind], cells: Sequence[Sequence[Text]], room: int) -> dict[int, int]:
    """Return the widths of the columns that fit, by their places.

    Columns of words come first, with the width of their longest word. The others fit from the first on. Room that is
    left goes to the columns that are cut or wrapped.
    """
    wanted, widths = list[int](), dict[int, int]()
    for at, (name, kind, column) in enumerate(zip(names, kinds, cells, strict=True)):
        wanted.append(max(cell_len(name), *(each.cell_len for each in column), 1))
        if kind == "words":
            words = (cell_len(word) for each in column for word in each.plain.split())
            widths[at] = min(room, max(cell_len(name), TEXT_MIN, *words))
    left = room + GAP - sum(width + GAP for width in widths.values())
    for at, (name, kind, want) in enumerate(zip(names, kinds, wanted, strict=True)):
        if kind == "words":
            continue
        least = min(want, max(cell_len(name), TEXT_MIN)) if kind == "text" else want
        if least + GAP > left:
            break
        widths[at], left = least, left - least - GAP
    lacking = sorted((wanted[at] - width, at) for at, width in widths.items())
    for place, (lacks, at) in enumerate(lacking):
        given = max(0, min(lacks, left // (len(lacking) - place)))
        widths[at], left = widths[at] + given, left - given
    return dict(sorted(widths.items()))


# ---- for programs --------------------------------------------------------------------------------------------------


@contextmanager
def gathered_json() -> Iterator[list[Any]]:
    """During the context, append the values of `write_json` to the yielded list instead of writing them."""
    values: list[Any] = []
    before = _GATHERED.set(values)
    try:
        yield values
    finally:
        _GATHERED.reset(before)


def write_json(value: Any, *, indent: int | None = 2, ascii_only: bool = True) -> None:
    """Write `value` to standard output as JSON; values without a JSON type become texts."""
    if (values := _GATHERED.get()) is not None:
        values.append(value)
        return
    sys.stdout.write(json.dumps(value, default=str, indent=indent, ensure_ascii=ascii_only) + "\n")
    sys.stdout.flush()


def print_result(console: CommandConsole, value: Any, text: RenderableType, *, as_json: bool) -> int:
    """Print a result: `value` as JSON, or `text` for people. Return the exit code 0."""
    if as_json:
        write_json(value)
    elif isinstance(text, str):
        console.say(text)
    else:
        console.print(text)
    return 0


def in_parts(rows: pa.Table) -> Iterator[pa.Table]:
    """Yield `rows` in tables of at most ROWS_PER_PART rows."""
    return (rows.slice(at, ROWS_PER_PART) for at in range(0, rows.num_rows, ROWS_PER_PART))


def print_rows(
    names: Sequence[str],
    rows: Iterable[pa.Table],
    form: str,
    console: Console,
    *,
    vertical: bool = False,
    whole: Collection[str] = (),
) -> tuple[int, Sequence[str]]:
    """Print rows with the columns `names` as they arrive. Return their number, and the columns that did not fit.

    `whole`: columns whose texts are not cut, such as the key.
    `form`: "table" (one `RowTables` per ROWS_PER_PART rows), "json" (one list), "ndjson" (one line per row) or "csv".
    """
    tables = RowTables(console, vertical=vertical, whole=whole)
    writer = csv.writer(sys.stdout)
    if form == "csv":
        writer.writerow(names)
    total = 0
    for part in (part for table in rows for part in in_parts(table)):
        if form == "table":
            tables.print(part)
        elif form == "csv":
            writer.writerows(zip(*(shown_values(column, form) for column in part.columns), strict=True))
        elif form == "ndjson":
            sys.stdout.writelines(json.dumps(row, default=str) + "\n" for row in shown_rows(part, form))
        else:
            texts = (indent(json.dumps(row, default=str, indent=2), "  ") for row in shown_rows(part, form))
            sys.stdout.write(",\n" if total else "[\n")
            sys.stdout.write(",\n".join(texts))
        total += part.num_rows
        sys.stdout.flush()
    if form == "json":
        sys.stdout.write("\n]\n" if total else "[]\n")
    elif form == "table" and not total:
        tables.print(pa.table({name: pa.array([], pa.string()) for name in names}))
    sys.stdout.flush()
    return total, tables.left_out


# ---- values of rows -----------------------------------------------------------------------------------------------


def shown_values(column: pa.ChunkedArray | pa.Array, form: str) -> list[Any]:
    """Return the values of a column for the output format `form`: those of `python_values`, converted by the rules
    above.

    For "table" binary stays bytes, which a cell cuts to its width.
    """
    values, convert = python_values(column), _converter(column.type, form)
    return values if convert is None else [None if value is None else convert(value) for value in values]


def shown_rows(rows: pa.Table, form: str) -> list[dict[str, Any]]:
    """Return `rows` as dicts of `shown_values`."""
    columns = [shown_values(column, form) for column in rows.columns]
    return [dict(zip(rows.column_names, values, strict=True)) for values in zip(*columns, strict=True)]


def _converter(kind: pa.DataType, form: str) -> _Convert | None:
    """Return the conversion of a type's values; None if they stay unchanged."""
    json = form in ("json", "ndjson")
    if pa.types.is_floating(kind):
        narrow = np.float32 if pa.types.is_float32(kind) else np.float16 if pa.types.is_float16(kind) else None
        return _number(narrow, json=json) if json or narrow is not None else None
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind):
        return None if form == "table" else bytes.hex
    if pa.types.is_dictionary(kind):
        return _converter(kind.value_type, form)
    if pa.types.is_struct(kind):
        return _struct({field.name: _converter(field.type, form) for field in kind})
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return _list(_converter(kind.value_type, form))
    return None


def _number(narrow: Any, *, json: bool) -> _Convert:
    def convert(value: float) -> float | str:
        if math.isfinite(value):
            return value if narrow is None else float(str(narrow(value)))
        if not json:
            return value
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"

    return convert


def _list(convert: _Convert | None) -> _Convert | None:
    if convert is None:
        return None
    return lambda values: (
        values  # a text where Python cannot represent a time
        if isinstance(values, str)
        else [None if value is None else convert(value) for value in values]
    )


def _struct(converters: dict[str, _Convert | None]) -> _Convert | None:
    wanted = {name: convert for name, convert in converters.items() if convert is not None}
    if not wanted:
        return None

    def convert(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {
            name: wanted[name](each) if name in wanted and each is not None else each for name, each in value.items()
        }

    return convert
