"""Commands on several tables: `memwal tables`, and those that run on every table unless `--table` names one."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa

from memwal import flush, wal
from memwal.ingest.cli.command import Call, CommandConsole, configuration, lines_of, one_table, table_option
from memwal.ingest.cli.print import gathered_json, print_rows, write_json
from memwal.ingest.cli.status import current, pending_rows
from memwal.ingest.errors import MemWalError, classify
from memwal.ingest.settings.configuration import Settings
from memwal.ingest.settings.fleet import table_names
from memwal.wal.panics import as_exception
from memwal.wal.parallel_map import each

AT_ONCE = 16
"""Tables whose state is read concurrently; most of the time is waiting for storage."""
_SCHEMA = pa.schema(
    [
        *(("name", pa.string()), ("rows", pa.int64()), ("pending", pa.int64()), ("regions", pa.int64())),
        *(("state", pa.string()), ("owners", pa.string()), ("location", pa.string())),
    ]
)


def on_tables(config: Path, work: Callable[[Call], int], *, as_json: bool = False) -> int:
    """Run `work` on the table that `--table` names, or on each table of the configuration, and return the highest exit
    code.

    Of several tables, a heading precedes the output of each. With `as_json`, the output is one object with the results
    by name. A table that fails is reported, and the others follow.
    Raises: Invalid for a wrong configuration; with one table the errors of `work`.
    """
    settings = configuration(config)
    if not settings.is_fleet or table_option():
        return work(Call(one_table(settings, config), os.environ, fleet=settings))
    console, codes, results = CommandConsole(), [0], dict[str, Any]()
    for name in table_names(settings, os.environ):
        if not as_json:
            console.say(f"{name}:")
        try:
            with gathered_json() as values:
                codes.append(work(_call(settings, name)))
            results[name] = values[0] if values else None
        except BaseException as error:  # noqa: BLE001 - reported; `as_exception` raises interrupts
            problem = classify(as_exception(error))
            codes.append(_report(name, problem))
            results[name] = {"error": problem.message}
    if as_json:
        write_json(results)
    elif not results:
        console.say(f"no tables below {settings.fleet.prefix}")
    return max(codes)


def show_tables(config: Path, form: str) -> int:
    """Print one row for each table. Return the highest exit code of tables that cannot be read, else 0.

    `form`: as of `print_rows`. Raises: Invalid for a wrong configuration.
    """
    settings, console = configuration(config), CommandConsole()
    if table_option():
        one_table(settings, config)
    names = [table_option()] if table_option() else table_names(settings, os.environ)
    found = list(each(lambda name: _row(settings, name), names, AT_ONCE))
    rows = pa.Table.from_pylist([row for row, _ in found], _SCHEMA)
    print_rows(_SCHEMA.names, [rows], form, console, whole={"name"})
    return max((_report(str(row["name"]), problem) for row, problem in found if problem), default=0)


def _row(settings: Settings, name: str) -> tuple[dict[str, Any], MemWalError | None]:
    """Return the row of a table; with the error if it cannot be read."""
    call = _call(settings, name)
    row: dict[str, Any] = {"name": name, "location": call.uri}
    try:
        base = flush.BaseTable.find(call.uri, call.storage_options)
        if base is None:
            return row | {"state": "not created"}, None
        status = current(call, (base, wal.open_store(call.uri, call.storage_options)))
    except BaseException as error:  # noqa: BLE001 - reported; `as_exception` raises interrupts
        return row | {"state": "broken"}, classify(as_exception(error))
    in_memory, flushed, _ = pending_rows(status)
    owned = [region["owner"] for region in status["regions"] if region["owner"]]
    failed = any(region["failure"] or region["flush_error"] for region in status["regions"])
    served = "served" if len(owned) == base.buckets else "partly served" if owned else "not served"
    row |= {"rows": status["rows"], "pending": in_memory + flushed, "regions": base.buckets}
    return row | {"state": "failed" if failed else served, "owners": ", ".join(sorted(set(owned)))}, None


def _call(settings: Settings, name: str) -> Call:
    return Call(settings.of_table(name), os.environ, fleet=settings)


def _report(name: str, problem: MemWalError) -> int:
    """Print the error of a table, one line per problem, and return its exit code."""
    sys.stdout.flush()
    for line in lines_of(problem):
        print(f"memwal: {name}: {line}", file=sys.stderr)
    return problem.exit_code
