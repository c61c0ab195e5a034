"""`memwal init`, `flush`, `commit`, `gc`, `regions resize`, `pause` and `resume`: operate a table while writers run."""

from __future__ import annotations

import getpass
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any

from rich.console import Group, RenderableType
from rich.filesize import decimal

from memwal import flush as storage
from memwal import wal
from memwal.ingest.cli.command import Call
from memwal.ingest.cli.index import not_kept
from memwal.ingest.cli.open import open_base, open_for_reading, writable
from memwal.ingest.cli.print import count, plain_table, print_result
from memwal.ingest.cli.status import space_line
from memwal.ingest.engine.table.create import initialise, ttl_text
from memwal.ingest.engine.table.garbage import Ages, RegionGarbage, TableCollector, TableGarbage
from memwal.ingest.engine.table.maintenance import BaseUpkeep, maintenance_rules
from memwal.ingest.engine.table.pauses import Pauses, What, text_of
from memwal.ingest.engine.table.stored import space_status
from memwal.ingest.engine.table.upkeep import traced_commit
from memwal.ingest.errors import Invalid, MemWalError
from memwal.ingest.service.client.remote import RemoteTable
from memwal.ingest.service.ops.sentence import duration

_FILES_SHOWN = 20
_DONE: Mapping[What, str] = {
    "ingestion": "no micro-batch begins, the one under way is finished; puts by others, reads and commits go on",
    "commits": "no process commits by itself; `memwal commit` does, and flushes, puts and reads go on",
}
_RESUME: Mapping[What, str] = {"ingestion": "memwal resume CONFIG", "commits": "memwal resume CONFIG --commits"}


def init(call: Call) -> int:
    """Create the table, or check that an existing table fits; print what was done. Raises: errors of `initialise`."""
    from memwal.ingest.spark.pipeline.checks import columns_of_source  # slow to import

    base, done = initialise(call.settings, call.environ, partial(columns_of_source, call.settings))
    indexes = ", ".join(f"{spec.column} ({spec.kind})" for spec in base.indexes) or "none"
    rules = "".join(f", {rule} {chosen}" for rule, chosen in base.rules.chosen().items())
    ttl = "" if base.ttl is None else f", {ttl_text(base.ttl)}"
    call.console.say(
        f"{done} {base.uri}, version {base.version}: {len(base.schema.names)} columns, "
        f"key {', '.join(base.key) or 'none (append only)'}, {base.buckets} regions "
        f"(routing version {base.routing_version}), indexes: {indexes}{rules}{ttl}"
    )
    for line in not_kept(base):
        call.console.note(line)
    return 0


def flush(call: Call) -> int:
    """Flush the memtables to SSTs.

    Uses the daemon that owns the regions if one answers. Otherwise it claims the regions, which fences an owner that
    does not answer; if the log is empty, it claims none. Raises: Invalid if the table does not exist; wal errors.
    """
    found = open_for_reading(call)
    rows = sum(region["memtable_rows"] for region in found.status()["regions"])
    if isinstance(found, RemoteTable):
        with found, call.console.status("flushing through the daemons"):
            found.flush()
        by = f"the daemon{'' if found.router.alone else 's'} at {found.endpoint.replace(',', ', ')}"
    else:
        if rows:
            with writable(call, found) as table, call.console.status("flushing"):
                table.flush()
        by = "this process, because no daemon answers"
    said = f"flushed {rows:,} rows of {call.uri}" if rows else f"nothing to flush in {call.uri}"
    call.console.say(f"{said} ({by})")
    return 0


def commit(call: Call, *, as_json: bool) -> int:
    """Commit the published SSTs from storage, whichever process owns the regions; then maintain the base table.

    Rows in memtables stay there: flush first. Raises: Invalid if the table does not exist; flush and wal errors.
    """
    (base, store), clock = open_base(call), wal.SystemClock()
    with call.console.status("committing") as shown:
        report = traced_commit(
            lambda: storage.commit(call.uri, call.storage_options, store, clock=clock, **call.commit_limits)
        )
        shown.update("maintaining the base table")
        done = BaseUpkeep(base, clock, maintenance_rules(call.settings)).run()
    said = "\n".join((_committed(call.uri, report), *done))
    return print_result(call.console, asdict(report) | {"maintenance": list(done)}, said, as_json=as_json)


def _committed(uri: str, report: storage.CommitReport) -> str:
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


# ---- resize ---------------------------------------------------------------------------------------------------------


def resize(call: Call, *, to: int, as_json: bool) -> int:
    """Change the number of regions to `to` and print what was done.

    Raises: Invalid if the table does not exist or `to` is out of range; Unavailable if another resize came in between;
    flush and wal errors. After any error except Invalid, run the resize again.
    """
    if not 1 <= to <= wal.BUCKETS_MAX:
        raise Invalid(f"--to {to}: give a number of regions from 1 to {wal.BUCKETS_MAX}")
    uri, options = call.uri, call.storage_options
    # Recover from versions that a power cut left torn: this command also finishes a resize that was interrupted then.
    storage.BaseTable.find(uri, options, to_write=True)
    with call.console.status("asking the daemon to flush and commit") as shown:
        found = open_for_reading(call)
        if isinstance(found, RemoteTable):
            # Let the daemon flush and commit first, which shortens the pause of writes. If it is fenced or ends, the
            # resize drains its acknowledged rows from the log.
            with found, suppress(MemWalError):
                found.flush()
                found.commit()
        report = storage.resize(
            uri,
            options,
            wal.open_store(uri, options, put_timeout=call.settings.wal.put_timeout),
            to,
            clock=wal.SystemClock(),
            ids=wal.SystemIds(),
            on_step=shown.update,
            **call.commit_limits,
        )
    return print_result(call.console, {"table": uri} | asdict(report), _resized(uri, report), as_json=as_json)


def _resized(uri: str, report: storage.ResizeReport) -> str:
    """Return the report as one line for people."""
    now = f"{report.regions} regions, routing version {report.routing}, version {report.version} of {uri}"
    if report.resumed:
        return f"finished an interrupted resize: {now}"
    return (
        f"resized from {report.before} to {now}; {report.rows_drained:,} rows drained from the log, "
        f"{report.ssts_committed:,} SSTs committed, writes paused for {report.seconds:.2f} s; running "
        "daemons and pipelines continue with the new regions"
    )


# ---- pause and resume -----------------------------------------------------------------------------------------------


def pause(call: Call, what: What, reason: str) -> int:
    """Pause `what` of the table, and print the effect. Raises: Invalid if the table does not exist; wal errors."""
    found, new = _pauses(call).pause(what, _here(), reason)
    told = text_of(what, found.told())
    done = f"{_DONE[what]}; `{_RESUME[what]}` ends the pause" if new else "nothing was changed"
    told = told if new else told.replace("paused", "paused already", 1)
    call.console.say(f"{call.uri}: {told}\n{done}")
    return 0


def resume(call: Call, what: What) -> int:
    """End the pause of `what`, and print what was paused. Raises: errors of `pause`."""
    pauses = _pauses(call)
    ended = pauses.resume(what)
    if ended is None:
        call.console.say(f"{call.uri}: {what} {'are' if what == 'commits' else 'is'} not paused")
    else:
        lasted = f" after {duration(max(0.0, wal.SystemClock().now() - ended.since))}" if ended.since else ""
        call.console.say(f"{call.uri}: {what} resumed{lasted}")
    for other, told in pauses.now().items():
        call.console.say(f"{text_of(other, told)}; `{_RESUME[other]}` ends that pause")  # type: ignore[index]
    return 0


def _pauses(call: Call) -> Pauses:
    _, store = open_base(call)
    return Pauses(store, wal.SystemClock(), options=call.settings.wal.options())


def _here() -> str:
    """Return who runs this command, so that others can contact them."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a container may run as a user without a name
        user = "somebody"
    return f"{user}@{socket.gethostname()}"


# ---- garbage --------------------------------------------------------------------------------------------------------


def collect(call: Call, *, dry_run: bool, as_json: bool) -> int:
    """Collect once; print what was deleted and kept, per region and kind.

    Raises: Invalid if the table does not exist; wal and flush errors.
    """
    base, store = open_base(call)
    collector = TableCollector(store, base.codec, wal.SystemClock(), wal.regions(store), call.settings.wal.options())
    with call.console.status("looking" if dry_run else "collecting"):
        found = collector.collect(base, Ages.of(call.settings.gc), dry_run=dry_run)
    told = {
        "table": base.uri,
        "dry_run": found.dry_run,
        "regions": [
            {"region": each.region}
            | {name: _without_ids(getattr(each, name)) for name in ("wal", "ssts", "plans", "manifests")}
            for each in found.regions
        ],
        "orphans": _without_ids(found.orphans),
        "bytes": found.bytes,
        "storage": space_status(found.space),
    }
    return print_result(call.console, told, _garbage(found), as_json=as_json)


def _without_ids(found: Any) -> dict[str, Any]:
    return {name: value for name, value in asdict(found).items() if name not in ("region", "dry_run", "kept")}


def _garbage(found: TableGarbage) -> RenderableType:
    """Return a collection for people: what was deleted of each kind, what was kept and why."""
    table = plain_table()
    table.add_column("region", no_wrap=True)
    table.add_column("kind", no_wrap=True)
    table.add_column("would delete" if found.dry_run else "deleted", justify="right", no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("kept")
    for each in found.regions:
        for place, (kind, deleted, size, kept) in enumerate(_rows(each)):
            region = wal.named(each.region).removeprefix("region ") if place == 0 else ""
            table.add_row(region, kind, f"{deleted:,}", decimal(size), kept)
    orphans = found.orphans
    kept = _kept({"young": orphans.too_young})
    table.add_row("base", "orphan files", f"{len(orphans.files):,}", decimal(orphans.bytes), kept)
    space = [] if found.space is None else [space_line(found.space.bytes, found.space.factor, found.space.time)]
    odd = []
    if found.unreadable:
        odd.append(f"{found.unreadable:,} WAL entries cannot be read; examine them with `memwal inspect`")
    if found.unaccounted:
        odd.append(
            f"{found.unaccounted:,} SSTs are neither published nor committed: was the base table restored to an older "
            "version? They were kept, because their rows may be stored nowhere else"
        )
    return Group(table, *_files(found), *odd, found.summary(), *space)


def _rows(found: RegionGarbage) -> Iterator[tuple[str, int, int, str]]:
    """Yield for each kind of object: its name, the number deleted, their bytes, and what was kept."""
    log, ssts = found.wal, found.ssts
    kept = {"fences": log.fences, "young": log.too_young, "unreadable": log.unreadable}
    yield "WAL entries", log.entries, log.bytes, _kept(kept)
    kept = {
        "published": ssts.listed,
        "still needed": ssts.needed,
        "young": ssts.too_young,
        "unaccounted for": ssts.unaccounted,
    }
    yield "SSTs", ssts.committed, ssts.bytes - ssts.abandoned_bytes, _kept(kept)
    if ssts.abandoned or ssts.unpublished:
        yield "abandoned SSTs", ssts.abandoned, ssts.abandoned_bytes, _kept({"maybe in use": ssts.unpublished})
    if found.plans.plans or found.plans.needed:
        yield "commit plans", found.plans.plans, found.plans.bytes, _kept({"still needed": found.plans.needed})
    old = found.manifests
    if old.versions:
        yield "old manifests", old.versions, old.bytes, _kept({"kept": old.kept})


def _kept(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {what}" for what, count in counts.items() if count)


def _files(found: TableGarbage) -> Iterator[str]:
    """Yield the names of orphan files, only for a dry run, which keeps them."""
    if found.dry_run and found.orphans.files:
        files = found.orphans.files
        yield "\n".join(f"  {key}" for key in files[:_FILES_SHOWN])
        yield f"  and {len(files) - _FILES_SHOWN:,} more, see --json\n" if len(files) > _FILES_SHOWN else ""
