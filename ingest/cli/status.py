"""`memwal status`: the state of a table, from its owner if one answers, else from storage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from rich.console import Console, Group, RenderableType
from rich.filesize import decimal
from rich.live import Live
from rich.text import Text

from memwal import flush, wal
from memwal.ingest.cli.command import Call
from memwal.ingest.cli.open import open_for_reading
from memwal.ingest.cli.print import FittedTable, Kind, ranges, write_json
from memwal.ingest.engine.table.pauses import text_of
from memwal.ingest.service.client.remote import RemoteTable
from memwal.ingest.service.ops import skew
from memwal.ingest.settings.values import format_duration

REFRESH = 1.0
"""Seconds between two refreshes of `--watch`."""


def show(call: Call, *, as_json: bool, watch: bool, limit: int | None = None) -> int:
    """Print the status once, or with `watch` every second until interrupted.

    `limit`: regions in the table.
    On a terminal, `watch` redraws in place; elsewhere, and as JSON, it prints every refresh (JSON: one line each).
    Raises: Invalid if the table does not exist.
    """
    if not watch:
        _print(current(call), call.console, limit, as_json=as_json)
        return 0
    console, clock = call.console, wal.SystemClock()
    if as_json or not console.is_terminal:
        while True:
            _print(current(call), console, limit, as_json=as_json, indent=None)
            clock.sleep(REFRESH)
    with Live(render(current(call), limit), console=console, auto_refresh=False) as live:
        while True:
            clock.sleep(REFRESH)
            live.update(render(current(call), limit), refresh=True)


def _print(
    status: Mapping[str, Any], console: Console, limit: int | None, *, as_json: bool, indent: int | None = 2
) -> None:
    if as_json:
        write_json(status, indent=indent)
    else:
        console.print(render(status, limit))


def current(call: Call, found: tuple[flush.BaseTable, wal.ObjectStore] | None = None) -> dict[str, Any]:
    """Return the status by `Table.status()`, or by `StoredTable.status()` if no daemon serves the table.

    `found`: the result of `open_base`, if the caller has it.
    """
    table = open_for_reading(call, found)
    if isinstance(table, RemoteTable):
        with table:
            return table.status()
    return table.status()


def render(status: Mapping[str, Any], limit: int | None = None) -> RenderableType:
    """Return a status as text and a table of at most `limit` regions for people."""
    names = ("region", "id", "epoch", "WAL", "flushed", "gen", "in memory", "SSTs", "behind")
    kinds: list[Kind] = ["name" if name == "id" else "number" for name in names]
    rows, more = list[list[Text]](), len(status["regions"][limit:]) if limit else 0
    for region in status["regions"][:limit]:
        waiting = sum(not sst["committed"] for sst in region["ssts"])
        behind = region["behind"]  # of the oldest row that is not in the base table; only an owner knows it
        row = (
            str(region["bucket"]),
            UUID(region["id"]).hex[:8],
            str(region["epoch"]),
            str(region["wal_position"]),
            str(region["replay_after"]),
            str(region["generation"]),
            f"{region['memtable_rows']:,}",
            f"{len(region['ssts'])} ({waiting} pending)" if waiting else str(len(region["ssts"])),
            "-" if behind is None else f"{behind['committed']:.1f} s",
        )
        rows.append([Text(value) for value in row])
    routing = f"{len(status['regions'])} regions claimed, routing version {status.get('routing', 1)}"
    routing += f", doubles up to {most} as the table grows" if (most := status.get("regions_max")) else ""
    head = f"{status['table']}: version {status['base_version']}, {status['rows']:,} rows committed, {routing}"
    troubles = [
        f"region {each['bucket']} is {each['state'].replace('_', ' ')}: {text}"
        for each in status["regions"]
        if (text := _trouble(each))
    ]
    troubles += [_last_error(each) for each in status["regions"] if each["last_errors"] and not _trouble(each)]
    troubles += [_uncommitted(failure) for failure in status.get("commit_failures", ())]
    troubles += [f"{puts:,} puts refused by {limit}" for limit, puts in status.get("refused_puts", {}).items()]
    paused = [text_of(what, told) for what, told in sorted(status.get("paused", {}).items(), reverse=True)]
    troubles += [
        f"puts are rejected until a column is dropped: {why}" for why in status.get("unsupported_columns", {}).values()
    ]
    above = [head, *_ttl(status), *_owners(status), *paused]
    skewed = [text] if (text := skew.measured(status["regions"])) else []
    rest = [f"{more:,} more regions; --limit {len(status['regions'])} shows them"] if more else []
    below = [*rest, *troubles, *skewed, pending(status)]
    if (measured := status.get("storage")) is not None:
        below.append(space_line(measured["bytes"], measured["factor"], measured["time"]))
    if sealed := sum(bool(region.get("sealed")) for region in status["regions"]):
        again = "if it was interrupted, run `memwal regions resize` again"
        below.append(f"resize in progress: {sealed} regions are sealed; {again}")
    table = FittedTable(names, kinds, rows, "--json prints them")
    return Group(Text("\n".join(above)), table, Text("\n".join(below)))


def _ttl(status: Mapping[str, Any]) -> list[str]:
    """Return one line if rows expire."""
    if (ttl := status.get("ttl")) is None:
        return []
    if ttl["column"] is None:
        return ["rows do not expire: the column of the table's ttl was dropped"]
    return [f"rows expire {format_duration(ttl['seconds'])} after {ttl['column']}; those not deleted yet are counted"]


def _owners(status: Mapping[str, Any]) -> list[str]:
    """Return one line per daemon with its regions; addresses are too long for a column."""
    served: dict[str | None, list[int]] = {}
    for region in status["regions"]:
        served.setdefault(region["owner"], []).append(region["bucket"])
    unowned = served.pop(None, [])
    lines = [f"{owner} serves {_regions(buckets)}{_version(status, owner)}" for owner, buckets in served.items()]
    if unowned:
        lines.append(f"no owner answers for {_regions(unowned)}; shown as stored")
    if status.get("served_last_by"):
        lines.append(f"last served by {', '.join(status['served_last_by'])}")
    return lines


def _version(status: Mapping[str, Any], owner: str | None) -> str:
    told = status.get("versions", {}).get(owner)
    return "" if told is None else f" (memwal {told['memwal']}, protocol {told['protocol']})"


def _regions(buckets: Sequence[int]) -> str:
    return f"{'region' if len(buckets) == 1 else 'regions'} {ranges(buckets)}"


def _trouble(region: Mapping[str, Any]) -> str | None:
    trouble: str | None = region["failure"] or region["flush_error"]
    return trouble


def _last_error(region: Mapping[str, Any]) -> str:
    """Return one line about the newest error of a region. The error may be resolved; the owner reports it until it
    ends."""
    what, last = max(region["last_errors"].items(), key=lambda item: item[1]["at"])
    at = datetime.fromtimestamp(last["at"], UTC)
    return f"region {region['bucket']}: last error at {at:%Y-%m-%d %H:%M:%S} UTC, {what}: {last['error']}"


def _uncommitted(failure: Mapping[str, str]) -> str:
    if not failure["region"]:
        return f"the last commit failed: {failure['error']}"
    return f"{wal.named(failure['region'])} cannot be committed: {failure['error']}"


def space_line(found: Mapping[str, int], factor: float, time: float) -> str:
    """Return bytes by kind and their factor in one line. `time`: of the measurement, in unix seconds."""
    names = {"newest": "newest version", "older": "older versions", "ssts": "SSTs", "log": "log", "orphans": "orphans"}
    parts = ", ".join(f"{names[kind]} {decimal(number)}" for kind, number in found.items())
    at = datetime.fromtimestamp(time, UTC)
    total = decimal(sum(found.values()))
    return f"on storage: {total}, {factor:.1f} times the newest version ({parts}), at {at:%Y-%m-%d %H:%M} UTC"


def pending(status: Mapping[str, Any]) -> str:
    """Return one line about the rows that are not in the base table yet."""
    rows, flushed, ssts = pending_rows(status)
    if not rows and not ssts:
        return "nothing pending: every acknowledged row is in the base table"
    return f"pending: {rows:,} rows in memtables, {flushed:,} rows in {ssts} SSTs; all durable and queryable"


def pending_rows(status: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return the number of rows in memtables, and of those in uncommitted SSTs with the number of these SSTs."""
    ssts = [sst for region in status["regions"] for sst in region["ssts"] if not sst["committed"]]
    rows = sum(region["memtable_rows"] for region in status["regions"])
    return rows, sum(sst["rows"] or 0 for sst in ssts), len(ssts)
