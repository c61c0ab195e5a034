"""`memwal flush` and `memwal commit`: run one step towards the base table now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from typing import Any

from rich.filesize import decimal

from memwal import flush, wal
from memwal.ingest.cli.open import open_base, open_for_reading, open_here
from memwal.ingest.cli.print import count, write_json
from memwal.ingest.cli.quiet import CommandConsole
from memwal.ingest.engine.table.maintenance import BaseUpkeep
from memwal.ingest.engine.table.open import maintenance_rules
from memwal.ingest.engine.table.upkeep import traced_commit
from memwal.ingest.service.client.remote import RemoteTable
from memwal.ingest.settings.load import Settings


def commit(settings: Settings, environ: Mapping[str, str], console: CommandConsole, *, as_json: bool) -> int:
    """Commit the published SSTs from storage, whichever process owns the regions; then maintain the base table.

    Rows in memtables stay there: flush first. Raises: Invalid if the table does not exist; flush and wal errors.
    """
    uri, options, clock = settings.table.uri, settings.storage_options(environ), wal.SystemClock()
    (base, store), limits = open_base(settings, environ), settings.commit
    with console.status("committing") as shown:
        report = traced_commit(
            lambda: flush.commit(
                uri,
                options,
                store,
                clock=clock,
                retries=limits.retries,
                memory_max=limits.memory_max,
                options=wal.WalOptions(settings.wal.put_timeout, settings.wal.retry_budget),
            )
        )
        shown.update("maintaining the base table")
        done = BaseUpkeep(base, clock, maintenance_rules(settings)).run()
    if as_json:
        write_json(asdict(report) | {"maintenance": list(done)})
    else:
        for line in (describe(uri, report), *done):
            console.out(line, highlight=False)
    return 0


def describe(uri: str, report: flush.CommitReport) -> str:
    """Return the report as one line for people."""
    if not report.ssts and report.rows_repaired:
        rows = count(report.rows_repaired, "row")
        return f"repaired {rows} with duplicate keys, nothing to commit: version {report.version} of {uri}"
    if not report.ssts:
        return f"nothing to commit: version {report.version} of {uri} has every flushed row"
    rows = ", ".join(
        f"{count(number, 'row')} {what}"
        for number, what in (
            (report.rows_inserted, "inserted"),
            (report.rows_updated, "updated"),
            (report.rows_deleted, "deleted"),
            (report.rows_skipped, "skipped"),
            (report.rows_repaired, "repaired"),
        )
        if number
    )
    # a pass that only deletes writes no data file
    files = f"{decimal(report.bytes_written)} written to {count(report.files_written, 'file')} in "
    ssts = f"{count(report.ssts, 'SST')} of {count(len(report.regions), 'region')}"
    return (
        f"committed {ssts} as version {report.version} of {uri}: "
        f"{rows or 'no row changed'}; {files if report.files_written else ''}{report.seconds:.2f} s"
    )


def flush_table(settings: Settings, environ: Mapping[str, str], console: CommandConsole) -> int:
    """Flush the memtables to SSTs.

    Uses the daemon that owns the regions if one answers. Otherwise it claims the regions, which fences an owner that
    does not answer; if the log is empty, it claims none. Raises: Invalid if the table does not exist; wal errors.
    """
    found = open_for_reading(settings, environ)
    if isinstance(found, RemoteTable):
        with found, console.status("flushing through the daemons"):
            rows = _in_memory(found.status()["regions"])
            found.flush()
        by = f"the daemon{'' if found.router.alone else 's'} at {found.endpoint.replace(',', ', ')}"
    else:
        rows = _in_memory(found.status()["regions"])
        if rows:
            with (
                closing(open_here(settings, environ, console.on_replay)) as table,
                console.status("flushing"),
            ):
                table.flush()
        by = "this process, because no daemon answers"
    said = f"flushed {rows:,} rows of {settings.table.uri}" if rows else f"nothing to flush in {settings.table.uri}"
    console.out(f"{said} ({by})", highlight=False)
    return 0


def _in_memory(regions: Sequence[Mapping[str, Any]]) -> int:
    return sum(region["memtable_rows"] for region in regions)
