"""`memwal backup`, `restore` and `verify`: copy a table at one moment, create a table from that copy, check storage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from pydantic import SecretStr
from rich.filesize import decimal
from rich.progress import MofNCompleteColumn, TaskProgressColumn
from rich.text import Text

from memwal import wal
from memwal.flush import BaseTable
from memwal.flush.backup.copying import Progress as OnProgress
from memwal.flush.backup.record import Record
from memwal.flush.backup.restore import RestoreRun
from memwal.flush.backup.restore import restore as restore_table
from memwal.flush.backup.take import BackupRun, back_up
from memwal.flush.verification.finding import Finding
from memwal.flush.verification.runner import verify_table
from memwal.ingest.cli.command import Call, CommandConsole
from memwal.ingest.cli.open import open_base
from memwal.ingest.cli.print import count, print_result, progress_bar, write_json
from memwal.ingest.errors import Invalid
from memwal.ingest.secret_refs import resolve
from memwal.wal.retries import with_retried_reads

DAMAGED = 1
"""Exit code if there are findings."""
_S3 = "s3://"
_QUERIES_SHOWN = 10
"""Other producers may have UUIDs as names too, in any number."""


def backup(call: Call, dest: str, options: Sequence[str], *, resume: bool, as_json: bool) -> int:
    """Copy the table to `dest` while writers run, and print the content of the copy.

    `options`: storage options of `dest`, NAME=VALUE.
    Raises: Invalid if the table does not exist or `dest` is not empty; Corrupted if the table is damaged;
    Unavailable; wal and flush errors.
    """
    (base, store), limits = open_base(call), _limits(call)
    place = wal.open_store(dest, _options(call, dest, options), put_timeout=limits.put_timeout)
    with _progress("copying") as told:
        run = BackupRun(store, place, wal.SystemClock(), wal.SystemIds(), limits, told, base=base)
        record = back_up(run, resume=resume)
    said = f"backed up {base.uri} to {dest}, {_described(record)}"
    return print_result(call.console, {"backup": dest} | _as_dict(record), said, as_json=as_json)


def restore(call: Call, source: str, options: Sequence[str], *, resume: bool, as_json: bool) -> int:
    """Create the table of `settings` from the backup at `source`, verify it and print its content; return 0 if it is
    clean, else 1.

    `options`: storage options of `source`, NAME=VALUE.
    Raises: Invalid if the table exists or `source` has no finished backup; Corrupted if the backup is damaged; wal
    and flush errors.
    """
    uri, limits = call.uri, _limits(call)
    place = wal.open_store(source, _options(call, source, options), put_timeout=limits.put_timeout)
    table = wal.open_store(uri, call.storage_options, put_timeout=limits.put_timeout)
    with _progress("restoring") as told:
        run = RestoreRun(place, table, wal.SystemClock(), wal.SystemIds(), limits, told, uri=uri)
        report = restore_table(run, resume=resume)
    record, findings = report.record, report.verified.findings
    if as_json:
        write_json({"restored": uri, "backup": source, "verified": asdict(report.verified)} | _as_dict(record))
        return DAMAGED if findings else 0
    call.console.say(f"restored {uri} from {source}, {_described(record)}")
    for finding in findings:
        call.console.print(finding_line(finding), soft_wrap=True)
    verified = count(len(findings), "finding") if findings else "clean"
    call.console.say(f"verified: {verified}; `memwal run` and `memwal serve` go on from here")
    for query, number in [*sorted(record.queries.items())][:_QUERIES_SHOWN]:
        call.console.say(f"query {query}: micro-batch {number} is the last one in it")
    if record.queries and not BaseTable.open(uri, call.storage_options).key:
        call.console.say(
            "the table has no key: begin with the checkpoint of the original table, since with a new one the rows of "
            "the source are appended again"
        )
    return DAMAGED if findings else 0


def _limits(call: Call) -> wal.WalOptions:
    return wal.WalOptions(call.settings.wal.put_timeout, call.settings.wal.retry_budget)


def _options(call: Call, place: str, given: Sequence[str]) -> dict[str, str]:
    """Return the storage options of the backup: the given ones, else those of the table if both are on S3."""
    if not given:
        both = place.startswith(_S3) and call.uri.startswith(_S3)
        return call.storage_options if both else {}
    if not place.startswith(_S3):
        raise Invalid(f"--option: {place} is a local path, which has no storage options; leave --option out")
    named = {}
    for each in given:
        name, equals, value = each.partition("=")
        if not name or not equals:
            raise Invalid("--option: write NAME=VALUE, such as region=eu-west-1 or secret_access_key=env:NAME")
        named[name] = SecretStr(value)
    return resolve(named, call.environ, "--option")


def _described(record: Record) -> str:
    began = datetime.fromtimestamp(record.began, UTC)
    return (
        f"as of {began:%Y-%m-%d %H:%M:%S} UTC: version {record.version}, {count(len(record.regions), 'region')}, "
        f"{count(len(record.objects), 'object')}, {decimal(record.size)}"
    )


def _as_dict(record: Record) -> dict[str, Any]:
    """Return a record for `--json`: times in Unix seconds, and the number of objects in place of their list."""
    said = {name: value for name, value in asdict(record).items() if name != "objects"}
    return said | {"objects": len(record.objects), "bytes": record.size}


@contextmanager
def _progress(what: str) -> Iterator[OnProgress | None]:
    """Show a progress bar on standard error during the context, if it is a terminal."""
    with progress_bar(CommandConsole(stderr=True), what, [TaskProgressColumn()], None) as show:

        def told(done: int, objects: int, size: int, total: int) -> None:
            if show is not None:
                show(f"{what} {done:,} of {objects:,} objects, {decimal(size)} of {decimal(total)}", size, total)

        yield told if show is not None else None


# ---- verify ---------------------------------------------------------------------------------------------------------


def verify(call: Call, *, deep: bool, as_json: bool) -> int:
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
        looked = (
            f": version {found.version}, {count(found.regions, 'region')}, {count(found.ssts, 'SST')}: "
            f"{count(found.checks, 'check')} in {clock.monotonic() - began:.1f}s"
            f"{'' if found.deep else ', no rows read (--deep reads them)'}"
        )
        result = count(len(found.findings), "finding") if found.findings else "clean"
        style = "bold red" if found.findings else "bold green"
        console.print(Text.assemble((result, style), looked), soft_wrap=True)
    return DAMAGED if found.findings else 0


def finding_line(finding: Finding) -> Text:
    """Return one finding for people: what is damaged, and the remedy."""
    line = Text.assemble((finding.check, "bold red"), "  ", (finding.where, "bold"), f": {finding.what}; ")
    return line.append(finding.remedy, style="green")
