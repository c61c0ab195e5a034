"""`memwal verify`: check storage against the invariants, and print a remedy for each violation."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict

from rich.progress import MofNCompleteColumn
from rich.text import Text

from memwal import wal
from memwal.flush.verification.finding import Finding
from memwal.flush.verification.runner import Verified, verify_table
from memwal.ingest.cli.command import Call
from memwal.ingest.cli.print import count, progress_bar, write_json
from memwal.wal.retries import with_retried_reads

DAMAGED = 1
"""Exit code if there are findings."""


def show(call: Call, *, deep: bool, as_json: bool) -> int:
    """Check the table, print one line per finding and a summary; return 0 if clean, else 1. Writes nothing.

    Raises: NotALanceTable, NotInitialised; errors of storage.
    """
    console, clock = call.console, wal.SystemClock()
    store = with_retried_reads(wal.open_store(call.uri, call.storage_options), clock, wal.WalOptions())
    began = clock.monotonic()
    silent = as_json or console.is_quiet
    with nullcontext() if silent else progress_bar(console, "checking", [MofNCompleteColumn()], 100) as told:
        found = verify_table(store, call.uri, deep=deep, on_progress=told)
    if as_json:
        write_json({**asdict(found), "clean": not found.findings})
    else:
        for each in found.findings:
            console.print(finding_line(each), soft_wrap=True)
        console.print(_summary(found, clock.monotonic() - began), soft_wrap=True)
    return DAMAGED if found.findings else 0


def finding_line(finding: Finding) -> Text:
    """Return one finding for people: what is damaged, and the remedy."""
    line = Text.assemble((finding.check, "bold red"), "  ", (finding.where, "bold"), f": {finding.what}; ")
    return line.append(finding.remedy, style="green")


def _summary(found: Verified, seconds: float) -> Text:
    looked = (
        f"version {found.version}, {count(found.regions, 'region')}, {count(found.ssts, 'SST')}: "
        f"{count(found.checks, 'check')} in {seconds:.1f}s{'' if found.deep else ', no rows read (--deep reads them)'}"
    )
    if not found.findings:
        return Text.assemble(("clean", "bold green"), f": {looked}")
    return Text.assemble((count(len(found.findings), "finding"), "bold red"), f": {looked}")
