"""`memwal regions resize`: change the number of regions of a table; `flush.resizing.steps` describes the protocol."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict

from rich.console import Console

from memwal import flush, wal
from memwal.ingest.cli.open import open_for_reading
from memwal.ingest.cli.print import write_json
from memwal.ingest.errors import Invalid, MemWalError
from memwal.ingest.service.client.remote import RemoteTable
from memwal.ingest.settings.load import Settings


def resize(settings: Settings, environ: Mapping[str, str], console: Console, *, to: int, as_json: bool) -> int:
    """Change the number of regions to `to` and print what was done.

    Raises: Invalid if the table does not exist or `to` is out of range; Unavailable if another resize came in between;
    flush and wal errors. After any error except Invalid, run the resize again.
    """
    if not 1 <= to <= flush.BUCKETS_MAX:
        raise Invalid(f"--to {to}: give a number of regions from 1 to {flush.BUCKETS_MAX}")
    uri, options, clock = settings.table.uri, settings.storage_options(environ), wal.SystemClock()
    # Recover from versions that a power cut left torn: this command also finishes a resize that was interrupted then.
    flush.BaseTable.find(uri, options, to_write=True)
    with console.status("asking the daemon to flush and commit") as shown:
        _empty_memtables(settings, environ)
        report = flush.resize(
            uri,
            options,
            wal.open_store(uri, options, put_timeout=settings.wal.put_timeout),
            to,
            clock=clock,
            ids=wal.SystemIds(),
            retries=settings.commit.retries,
            memory_max=settings.commit.memory_max,
            options=settings.wal.options(),
            on_step=shown.update,
        )
    if as_json:
        write_json({"table": uri} | asdict(report))
    else:
        console.out(describe(uri, report), highlight=False)
    return 0


def describe(uri: str, report: flush.ResizeReport) -> str:
    """Return the report as one line for people."""
    now = f"{report.regions} regions, routing version {report.routing}, version {report.version} of {uri}"
    if report.resumed:
        return f"finished an interrupted resize: {now}"
    return (
        f"resized from {report.before} to {now}; {report.rows_drained:,} rows drained from the log, "
        f"{report.ssts_committed:,} SSTs committed, writes paused for {report.seconds:.2f} s; running "
        "daemons and pipelines continue with the new regions"
    )


def _empty_memtables(settings: Settings, environ: Mapping[str, str]) -> None:
    """If a daemon answers, let it flush and commit first, which shortens the pause of writes."""
    found = open_for_reading(settings, environ)
    if isinstance(found, RemoteTable):
        with (
            found,
            suppress(MemWalError),
        ):  # if it is fenced or ends, the resize drains its acknowledged rows from the log
            found.flush()
            found.commit()
