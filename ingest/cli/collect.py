"""`memwal gc`: collect garbage once, and print what was deleted and kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.filesize import decimal

from memwal import wal
from memwal.ingest.cli.open import open_base
from memwal.ingest.cli.print import plain_table, write_json
from memwal.ingest.cli.status import space_line
from memwal.ingest.engine.table.garbage import Ages, RegionGarbage, TableCollector, TableGarbage
from memwal.ingest.engine.table.stored_status import space_status
from memwal.ingest.settings.load import Settings

_FILES_SHOWN = 20


def show(settings: Settings, environ: Mapping[str, str], console: Console, *, dry_run: bool, as_json: bool) -> int:
    """Collect once; print what was deleted and kept. Raises: Invalid if the table does not exist; wal, flush errors."""
    base, store = open_base(settings, environ)
    limits = wal.WalOptions(settings.wal.put_timeout, settings.wal.retry_budget)
    collector = TableCollector(store, base.codec, wal.SystemClock(), wal.regions(store), limits)
    with console.status("looking" if dry_run else "collecting"):
        found = collector.collect(base, Ages.of(settings.gc), dry_run=dry_run)
    if as_json:
        write_json(as_dict(found, base.uri))
    else:
        console.print(render(found))
    return 0


def as_dict(found: TableGarbage, uri: str) -> dict[str, Any]:
    """Return the output of `--json`: what was deleted and kept, per region and kind; sizes in bytes."""
    return {
        "table": uri,
        "dry_run": found.dry_run,
        "regions": [
            {
                "region": each.region,
                "wal": _without_ids(each.wal),
                "ssts": _without_ids(each.ssts),
                "plans": _without_ids(each.plans),
                "manifests": _without_ids(each.manifests),
            }
            for each in found.regions
        ],
        "orphans": _without_ids(found.orphans),
        "bytes": found.bytes,
        "storage": space_status(found.space),
    }


def _without_ids(found: Any) -> dict[str, Any]:
    return {name: value for name, value in asdict(found).items() if name not in ("region", "dry_run", "kept")}


def render(found: TableGarbage) -> RenderableType:
    """Return a collection for people: what was deleted of each kind, what was kept and why."""
    table = plain_table()
    table.add_column("region", no_wrap=True)
    table.add_column("kind", no_wrap=True)
    table.add_column("would delete" if found.dry_run else "deleted", justify="right", no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("kept")
    for each in found.regions:
        for place, (kind, count, size, kept) in enumerate(_rows(each)):
            table.add_row(each.region.hex[:8] if place == 0 else "", kind, f"{count:,}", decimal(size), kept)
    orphans = found.orphans
    kept = _kept({"young": orphans.too_young})
    table.add_row("base", "orphan files", f"{len(orphans.files):,}", decimal(orphans.bytes), kept)
    space = [] if found.space is None else [space_line(found.space.bytes, found.space.factor, found.space.time)]
    return Group(table, *_files(found), *_odd(found), found.summary(), *space)


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
        yield (
            "abandoned SSTs",
            ssts.abandoned,
            ssts.abandoned_bytes,
            _kept({"maybe in use": ssts.unpublished}),
        )

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


def _odd(found: TableGarbage) -> Iterator[str]:
    if found.unreadable:
        yield f"{found.unreadable:,} WAL entries cannot be read; examine them with `memwal inspect`"
    if found.unaccounted:
        yield (
            f"{found.unaccounted:,} SSTs are neither published nor committed: was the base table restored to an older "
            "version? They were kept, because their rows may be stored nowhere else"
        )
