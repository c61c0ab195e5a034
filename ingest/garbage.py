"""`memwal gc`, and what a table does by itself at intervals: delete what nobody can need again.

For now that is entries of the WAL; see `wal.garbage` for what stays and why.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any
from uuid import UUID

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table as RichTable

import flush
import wal
from ingest.errors import Invalid
from ingest.settings import Settings

_COLUMNS: Mapping[str, str] = {
    "region": "region",
    "boundary": "flushed",
    "entries": "entries",
    "bytes": "size",
    "fences": "fences",
    "too_young": "young",
    "unreadable": "unreadable",
}
_ONLY_WHERE_ANY = ("too_young", "unreadable")


class TableCollector:
    """Collects the WALs of a table's regions, as often as it is asked.

    Thread safety. One thread at a time.
    """

    def __init__(
        self, store: wal.ObjectStore, codec: wal.EntryCodec, clock: wal.Clock, regions: Iterable[UUID]
    ) -> None:
        self._collectors = [wal.WalCollector(store, region, codec, clock) for region in regions]

    def collect(self, min_age: float, *, dry_run: bool = False) -> list[wal.WalGarbage]:
        """What was deleted per region; with `dry_run`, what would be. Raises: wal errors."""
        return [collector.collect(min_age, dry_run=dry_run) for collector in self._collectors]


def show(settings: Settings, environ: Mapping[str, str], console: Console, *, dry_run: bool, as_json: bool) -> int:
    """Collect once and print what went and what stayed. Raises: Invalid when there is no table; wal errors."""
    base = flush.BaseTable.find(settings.table.uri, settings.storage_options(environ))
    if base is None:
        raise Invalid(f"{settings.table.uri}: no table is there; correct table.uri")
    store = wal.open_store(settings.table.uri, settings.storage_options(environ))
    collector = TableCollector(store, base.codec, wal.SystemClock(), wal.regions(store))
    found = collector.collect(settings.gc.wal_age_min, dry_run=dry_run)
    if as_json:
        sys.stdout.write(json.dumps([asdict(each) for each in found], default=str, indent=2) + "\n")
    else:
        _print(found, console, dry_run=dry_run)
    return 0


def _print(found: Sequence[wal.WalGarbage], console: Console, *, dry_run: bool) -> None:
    table = RichTable(box=SIMPLE_HEAD)
    shown = [name for name in _COLUMNS if name not in _ONLY_WHERE_ANY or any(getattr(each, name) for each in found)]
    for name in shown:
        table.add_column(_COLUMNS[name], justify="left" if name == "region" else "right", no_wrap=True)
    for each in found:
        table.add_row(*(_cell(name, getattr(each, name)) for name in shown))
    console.print(table)
    entries, freed = sum(each.entries for each in found), sum(each.bytes for each in found)
    console.print(f"{'would delete' if dry_run else 'deleted'} {entries:,} WAL entries, {decimal(freed)}")


def _cell(name: str, value: Any) -> str:
    if name == "bytes":
        return decimal(value)
    return f"{value:,}" if isinstance(value, int) else str(value)
