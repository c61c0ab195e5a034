"""`memwal query`, `sql` and `delete`: through the owner of the regions if one answers, else from storage."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from memwal.ingest.cli.command import Call
from memwal.ingest.cli.open import Readable, open_for_reading, writable
from memwal.ingest.cli.print import ROWS_PER_PART, count, print_rows
from memwal.ingest.engine.api.explanation import Explain, Explanation
from memwal.ingest.engine.api.keys import parse_key
from memwal.ingest.engine.api.reads import check_level
from memwal.ingest.engine.api.results import RowStream
from memwal.ingest.errors import Invalid
from memwal.ingest.service.client.remote import RemoteTable

_SEVERAL = "COLUMN^BOOST,COLUMN=words, such as --match 'title^3,body=web server'"


@dataclass(frozen=True, slots=True)
class Query:
    """One read as typed: `keys`, or any of `filter`, `near` and `match`. `near` and `match` together are a hybrid
    search."""

    keys: tuple[str, ...]
    filter: str | None
    near: str | None
    match: str | None
    columns: list[str] | None
    limit: int
    level: str
    order_by: str | None = None
    offset: int = 0
    how: Mapping[str, Any] = field(default_factory=dict)
    """Search parameters by the argument names of `Reads.search`; None if an option was not given."""


def query(call: Call, query: Query, form: str, *, vertical: bool = False, explain: bool = False) -> int:
    """Run `query`, print its rows and return the exit code.

    `vertical`: print a table's rows as blocks.
    `explain`: then print its explanation, to standard error if standard output is for programs. Raises: Invalid for
    options that cannot be combined.
    """
    _check(query)
    explanations: list[Explanation] = []
    reader = open_for_reading(call)
    rows = _run(reader, query, explanations.append if explain else None)
    table = form == "table"
    nested = [field.name for field in rows.schema if pa.types.is_nested(field.type)]
    hidden = nested if table and not vertical and not query.columns else []
    shown = rows.drop_columns(hidden)
    _, left_out = print_rows(shown.column_names, [shown], form, call.console, vertical=vertical, whole=reader.key)
    if table:
        _note_rows(call, rows.num_rows, [*left_out, *hidden])
    for explanation in explanations:
        if table:
            call.console.say(f"\n{explanation}")
        else:
            text = str(explanation) if form == "csv" else explanation.to_json(2 if form == "json" else None)
            sys.stderr.write(f"{text}\n")
    return 0


def _note_rows(call: Call, rows: int, left_out: Sequence[str]) -> None:
    """Print the number of rows, and the columns that are not shown."""
    others = f"; not shown: {', '.join(left_out)} (name them, or print every row vertically: -x)" if left_out else ""
    call.console.note(f"{count(rows, 'row')}{others}")


def _check(query: Query) -> None:
    check_level(query.level)
    others = {"--filter": query.filter, "--near": query.near, "--match": query.match}
    if query.keys and (asked := [name for name, value in others.items() if value]):
        raise Invalid(f"--key and {asked[0]} cannot be combined; a key names one row")
    ranked = [name for name, value in others.items() if value and name != "--filter"]
    if query.order_by and (ranked or query.keys):
        by = ranked[0] if ranked else "--key"
        raise Invalid(f"--order-by and {by} cannot be combined; rows found by {by} have an order of their own")
    if query.offset and query.keys:
        raise Invalid("--offset and --key cannot be combined; a key names one row")
    given = [f"--{name.replace('_', '-')}" for name, value in query.how.items() if value is not None]
    if given and not query.near:
        raise Invalid(f"{given[0]} says how to search by vector; add --near, or remove it")


def _run(table: Readable, query: Query, explain: Explain | None) -> pa.Table:
    if query.keys:
        keys = [parse_key(text, table.key) for text in query.keys]
        asked = keys if len(table.key) > 1 else [key[0] for key in keys]
        return table.get(asked, query.columns, level=query.level, explain=explain)
    near = _column_and_text("--near", query.near) if query.near else None
    match = _columns_and_text(query.match, table.schema.names) if query.match else None
    common: dict[str, Any] = {"filter": query.filter, "columns": query.columns, "level": query.level}
    common |= {"offset": query.offset, "explain": explain}
    if near:
        vector = _vector(table, *near, query.level)
        how = {**query.how, "distance_range": _distances(query.how.get("distance_range"))}
        if match:
            names: dict[str, Any] = {"vector_column": near[0], "text_column": match[0]}
            return table.hybrid(vector, match[1], query.limit, **common, **names, **how)
        return table.search(near[0], vector, query.limit, **common, **how)
    if match:
        return table.match(*match, query.limit, **common)
    return table.scan(limit=query.limit, order_by=query.order_by, **common).read_all()


def _distances(text: str | None) -> tuple[float | None, float | None] | None:
    """Return the ends of --distance-range; None for an omitted end."""
    if text is None:
        return None
    low, comma, high = text.partition(",")
    try:
        if comma:
            return float(low) if low.strip() else None, float(high) if high.strip() else None
    except ValueError:
        pass
    raise Invalid(f"--distance-range {text!r}: write LOWEST,BELOW; either may be empty, such as --distance-range ,0.5")


def _column_and_text(option: str, text: str) -> tuple[str, str]:
    column, equals, rest = text.partition("=")
    if not equals or not column or not rest:
        such = "embedding=[0.1, 0.2, …] or embedding=key:17" if option == "--near" else "description='web server'"
        raise Invalid(f"{option} {text!r}: write COLUMN=…, such as {option} {such}")
    return column, rest


def _columns_and_text(text: str, known: Sequence[str]) -> tuple[str | dict[str, float], str]:
    """Return the columns of --match with their boosts, and the words. `known`: the columns of the table."""
    named, words = _column_and_text("--match", text)
    if named in known:  # column names may contain commas
        return named, words
    boosts: dict[str, float] = {}
    for part in named.split(","):
        column, sign, boost = part.partition("^")
        if not column or column in boosts:
            wrong = f"column '{column}' is named twice" if column else "a column has no name"
            raise Invalid(f"--match {text!r}: {wrong}; write {_SEVERAL}")
        try:
            boosts[column] = float(boost) if sign else 1.0
        except ValueError:
            raise Invalid(f"--match {text!r}: the boost '{boost}' is no number; write {_SEVERAL}") from None
    return boosts, words


def _vector(table: Readable, column: str, text: str, level: str) -> list[float]:
    """Return the query vector: the vector of a row, or a JSON list from the command line or a file."""
    if text.startswith("key:"):
        key = parse_key(text.removeprefix("key:"), table.key)
        found = table.get([key] if len(key) > 1 else [key[0]], [column], level=level)
        if not found.num_rows:
            raise Invalid(f"--near: no row has the key {text.removeprefix('key:')!r}")
        vector: list[float] | None = found.column(column)[0].as_py()
        if not isinstance(vector, list):
            raise Invalid(f"--near: column '{column}' of that row contains no vector")
        return vector
    try:
        numbers = json.loads(Path(text[1:]).read_text() if text.startswith("@") else text)
        if not (isinstance(numbers, list) and {type(number) for number in numbers} <= {int, float}):
            raise TypeError
        return [float(number) for number in numbers]
    except OSError as error:
        raise Invalid(f"--near: {text[1:]}: {error.strerror}") from None
    except (ValueError, TypeError, OverflowError, RecursionError):
        raise Invalid("--near: not a JSON list of numbers; write [0.1, 0.2, …], @file.json or key:VALUE") from None


# ---- sql ------------------------------------------------------------------------------------------------------------


def select(
    call: Call, query: str | None, level: str, form: str, *, limit: int | None = None, vertical: bool = False
) -> int:
    """Run `query` (- for standard input), print at most `limit` of its rows as they arrive, and return the exit code.

    Without a query, read queries from the terminal. Raises: Invalid.
    """

    def print_query(table: Readable, text: str, vertical: bool) -> tuple[int, Sequence[str]]:
        with table.sql(text, level=level) as rows:
            found, names = _gathered(rows, limit), rows.schema.names
            return print_rows(names, found, form, call.console, vertical=vertical, whole=table.key)

    if query is None:
        from memwal.ingest.cli.shell import shell

        return shell(call, print_query, vertical=vertical)
    total, left_out = print_query(open_for_reading(call), sys.stdin.read() if query == "-" else query, vertical)
    if form == "table":
        _note_rows(call, total, left_out)
    return 0


def _gathered(rows: RowStream, limit: int | None) -> Iterator[pa.Table]:
    """Yield at most `limit` rows in tables of at least ROWS_PER_PART, so that small batches share one table header."""
    waiting: list[pa.RecordBatch] = []
    for batch in rows:
        waiting.append(batch if limit is None else batch.slice(0, limit))
        limit = None if limit is None else limit - waiting[-1].num_rows
        if sum(each.num_rows for each in waiting) >= ROWS_PER_PART:
            yield pa.Table.from_batches(waiting)
            waiting = []
        if limit == 0:
            break
    if waiting:
        yield pa.Table.from_batches(waiting)


# ---- delete ---------------------------------------------------------------------------------------------------------


def delete(call: Call, keys: tuple[str, ...], filter: str | None, *, dry_run: bool) -> int:
    """Delete the rows of `keys`, each as typed, or those that pass `filter`; print their number, and return the exit
    code.

    Uses the daemons that own the regions; if none answers, claims the regions.
    Raises: Invalid unless exactly one of `keys` and `filter` is given, or for a malformed one.
    """
    if bool(keys) == (filter is not None):
        raise Invalid("give --key or --filter, and not both: which rows are to be deleted?")
    table = open_for_reading(call)
    if not table.key:
        raise Invalid("the table has no key (append_only), so no row can be deleted")
    typed = list(dict.fromkeys(tuple(parse_key(text, table.key)) for text in keys))
    what: list[Any] | None = ([list(key) for key in typed] if len(table.key) > 1 else [key[0] for key in typed]) or None
    if dry_run:
        found = table.count(filter) if what is None else table.get(what, list(table.key)).num_rows
    elif isinstance(table, RemoteTable):
        found = table.delete(what, filter=filter).rows
    else:
        with writable(call, table) as owned, call.console.status("deleting"):
            found = owned.delete(what, filter=filter).rows
    missing = "" if what is None or found == len(what) else f"; {count(len(what) - found, 'key')} had no row"
    verb = "would delete" if dry_run else "deleted"
    call.console.say(f"{verb} {count(found, 'row')} of {call.uri}{missing}")
    return 0
