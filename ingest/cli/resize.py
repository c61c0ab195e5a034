"""`memwal regions resize`: another number of regions for a table; the protocol is told in `flush.resizing.steps`."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict

from rich.console import Console

from memwal import flush, wal
from memwal.ingest.cli.open import open_for_reading
from memwal.ingest.client.remote import RemoteTable
from memwal.ingest.errors import Invalid, MemWalError
from memwal.ingest.settings.load import Settings


def resize(settings: Settings, environ: Mapping[str, str], console: Console, *, to: int, as_json: bool) -> int:
    """Give the table of `settings` so many regions and print what was done.

    Raises: Invalid when there is no table, or for a number that it cannot have; Unavailable when another resize got in
    between; flush and wal errors. After an error but Invalid, resize again.
    """
    if not 1 <= to <= flush.BUCKETS_MAX:
        raise Invalid(f"--to {to}: give a number of regions from 1 to {flush.BUCKETS_MAX}")
    uri, options, clock = settings.table.uri, settings.storage_options(environ), wal.SystemClock()
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
        sys.stdout.write(json.dumps({"table": uri} | asdict(report), indent=2) + "\n")
    else:
        console.out(describe(uri, report), highlight=False)
    return 0


def describe(uri: str, report: flush.ResizeReport) -> str:
    """A report for people, in one line."""
    now = f"{report.regions} regions, routing version {report.routing}, version {report.version} of {uri}"
    if report.resumed:
        return f"finished a resize that was broken off: {now}"
    return (
        f"resized from {report.before} to {now}; {report.rows_drained:,} rows drained from the log, "
        f"{report.ssts_committed:,} SSTs committed, nobody could write for {report.seconds:.2f} s; daemons "
        "and pipelines that were open go on with the new regions"
    )


def _empty_memtables(settings: Settings, environ: Mapping[str, str]) -> None:
    """Let the daemon, where one answers, do beforehand what would be done while nobody can write."""
    found = open_for_reading(settings, environ)
    if isinstance(found, RemoteTable):
        with found, suppress(MemWalError):  # it is fenced, or ends: what it has acknowledged is drained from its log
            found.flush()
            found.commit()
