"""`memwal index`: list, add and drop the indexes of a table, with or without daemons."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rich.filesize import decimal

from memwal import flush, wal
from memwal.ingest.cli.command import Call
from memwal.ingest.cli.open import open_base
from memwal.ingest.cli.print import columns, count, write_json
from memwal.ingest.engine.table import indexes
from memwal.ingest.errors import Invalid


def show(call: Call, *, as_json: bool) -> int:
    """Print the indexes that memwal keeps, and the other indexes of the base table. Raises: Invalid if the table is
    absent."""
    base, _ = open_base(call)
    listed, others = flush.list_indexes(base), flush.undeclared(base)
    if as_json:
        write_json({"indexes": listed, "others": others})
        return 0
    names = ("name", "column", "kind", "parameters", "base rows", "waiting", "size")
    rows = [
        (
            each["name"],
            each["column"],
            each["kind"],
            ", ".join(f"{name} = {value}" for name, value in each["parameters"].items()),
            each["rows"],
            each["rows_waiting"],
            decimal(each["bytes"]) if each["built"] else "not built yet",
        )
        for each in listed
    ]
    call.console.print(columns(f"indexes of {base.uri}, version {base.version}", names, rows, "the table has no index"))
    for line in not_kept(base):
        call.console.note(line)
    return 0


def not_kept(base: flush.BaseTable) -> list[str]:
    """Return a line for each index that only Lance keeps; searches of rows above the base table do not use it."""
    can = "`memwal index add` on its column takes it over"
    return [f"not kept by memwal: {name}: {reason or can}" for name, reason in flush.undeclared(base).items()]


def add(call: Call, column: str, kind: str, given: Sequence[str]) -> int:
    """Add an index; `given`: parameters as NAME=VALUE. Raises: Invalid; flush errors."""
    base, _ = open_base(call)
    with call.console.status(f"building {kind} on {column}"):
        name = indexes.added(base, column, kind, _parameters(given), wal.SystemClock())
    done = next(each for each in flush.list_indexes(base.latest()) if each["name"] == name)
    covers = f"covers {count(done['rows'], 'row')} of the base table"
    if not done["built"]:
        covers = f"is built by the first commit that brings {flush.PQ_ROWS_MIN} vectors; until then searches are exact"
    call.console.say(f"index {name} ({kind} on {column}) of {base.uri} {covers}")
    return 0


def drop(call: Call, name: str) -> int:
    """Drop an index. Raises: Invalid if it does not exist; flush errors."""
    base, _ = open_base(call)
    column = next((spec.column for spec in base.indexes if spec.name == name), None)
    indexes.dropped(base, name, wal.SystemClock())
    call.console.say(f"dropped the index {name} of {base.uri}")
    if column in call.settings.table.indexes:
        text = f"[table] indexes still names {column}: remove it there, or the next start will refuse the setting"
        call.console.note(text)
    return 0


def _parameters(given: Sequence[str]) -> dict[str, Any]:
    parameters = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise Invalid(f"--set {text!r}: write NAME=VALUE, such as --set metric=cosine")
        try:
            parameters[name] = json.loads(value)
        except ValueError:
            parameters[name] = value
    return parameters
