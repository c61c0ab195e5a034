"""Backups and restores for tests, and reads of their contents."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import UUID

import lance

from memwal.flush import BaseTable
from memwal.flush.backup.record import Record
from memwal.flush.backup.restore import RestoreReport, RestoreRun, restore
from memwal.flush.backup.take import BackupRun, back_up
from memwal.ingest.engine.table.stored import StoredTable
from memwal.wal import Clock, ManifestStore, ObjectStore, SystemClock, SystemIds, WalOptions, open_store, regions
from memwal.wal.applied import AppliedMap
from memwal.wal.entry_reader import EntryReader
from memwal.wal.replay import newest_applied
from tests.clean import assert_clean

OPTIONS = WalOptions()


def backed_up(
    source: str | ObjectStore,
    dest: str | ObjectStore,
    *,
    uri: str = "",
    resume: bool = False,
    at_once: int = 1,
    clock: Clock | None = None,
) -> Record:
    """Back up the table at `source`, by default with one thread, so that its calls have an order."""
    stores = [place if not isinstance(place, str) else open_store(place) for place in (source, dest)]
    base = BaseTable.open(uri or stores[0].url(""), stores[0].storage_options)
    run = BackupRun(*stores, clock or SystemClock(), SystemIds(), OPTIONS, at_once=at_once, base=base)
    return back_up(run, resume=resume)


def restored(
    source: str | ObjectStore, dest: str | ObjectStore, *, resume: bool = False, at_once: int = 1
) -> RestoreReport:
    """Restore the backup at `source` to `dest`, and verify the table completely."""
    stores = [place if not isinstance(place, str) else open_store(place) for place in (source, dest)]
    uri = stores[1].url("")
    run = RestoreRun(*stores, SystemClock(), SystemIds(), OPTIONS, at_once=at_once, uri=uri)
    report = restore(run, resume=resume)
    assert report.verified.findings == ()
    assert_clean(open_store(uri, stores[1].storage_options), uri)
    return report


def rows_of(uri: str, options: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """Return all durable rows, read without a claim, ordered by their first column."""
    base = BaseTable.open(uri, options)
    with StoredTable(base, open_store(uri, options)) as table:
        found: list[dict[str, Any]] = table.scan(level="durable").read_all().to_pylist()
    return sorted(found, key=lambda row: next(iter(row.values())))


def applied_of(uri: str) -> dict[UUID, AppliedMap]:
    """Return the applied map of each region, as the next claim will read it."""
    store, codec = open_store(uri), BaseTable.open(uri).codec
    found = {}
    for region in regions(store):
        manifest = ManifestStore(store, region).latest()
        assert manifest is not None
        reader = EntryReader(store, region, codec)
        tip = max(_positions(store, region), default=0)
        found[region] = newest_applied(reader, tip, manifest.replay_after)
    return found


def _positions(store: ObjectStore, region: UUID) -> list[int]:
    from memwal.wal.layout import parse_entry_key, wal_prefix

    return [parsed.position for key in store.list(wal_prefix(region)) if (parsed := parse_entry_key(key))]


def tags(uri: str, options: Mapping[str, str] | None = None) -> list[str]:
    """Return the tags of a table."""
    return list(lance.dataset(uri, storage_options=dict(options or {})).tags.list())


def contents(directory: str | Path) -> dict[str, bytes]:
    """Return the contents of every file below a directory."""
    root = Path(directory)
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}
