"""Describe the object at a path for people: `memwal inspect`. Reads only, claims nothing, safe while writers run.

A path below `_mem_wal/` is recognised by its name (see `wal.layout`), a table by its directory `_versions`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from uuid import UUID

from rich.console import Group, RenderableType
from rich.text import Text

from memwal import wal
from memwal.flush import BaseTable
from memwal.flush.commits.plan import parse_plan_key
from memwal.flush.sst.bloom import BLOOM_NAME
from memwal.flush.sst.key_sidecar import SIDECAR_DIR
from memwal.ingest.cli.dump.locate import CAN_BE_INSPECTED, Place, locate
from memwal.ingest.cli.dump.sst import bloom, sidecar, sst
from memwal.ingest.cli.print import columns, fields, first_rows, size, tombstones
from memwal.ingest.errors import Invalid
from memwal.wal import layout

_REGION_DIR = re.compile(r"_mem_wal/([0-9a-f-]{36})")
_SST_DIR = re.compile(r"_mem_wal/([0-9a-f-]{36})/([0-9a-f]{8}_gen_[0-9]+)(?:/(.+))?")


def describe(path: str, storage_options: Mapping[str, str] | None = None) -> RenderableType:
    """Return the printable description of the manifest, WAL entry, commit plan, SST or part of one, region or table
    at `path`, which may be a URL.

    `storage_options`: Lance's own, for a URL.
    Raises: Invalid for any other object, with a list of what can be inspected; Corrupt if it is damaged;
    StoreRefused, StoreUnavailable.
    """
    place = locate(path, storage_options)
    if not place.key:
        return _table(place)
    if layout.parse_manifest_key(place.key):
        data = place.bytes()
        return _manifest(wal.RegionManifest.decode(data), len(data))
    if found := layout.parse_entry_key(place.key):
        return _entry(place, found)
    if plan := parse_plan_key(place.key):
        return _plan(place, *plan)
    if match := _SST_DIR.fullmatch(place.key):
        shown = _of_sst(place, UUID(match[1]), match[2], match[3])
        if shown is not None:
            return shown
    if match := _REGION_DIR.fullmatch(place.key):
        return _region(place, UUID(match[1]))
    raise Invalid(f"{path}: {CAN_BE_INSPECTED}")


def _of_sst(place: Place, region: UUID, name: str, part: str | None) -> RenderableType | None:
    """Return the description of an SST or its `part`; None for a part without a description."""
    if part is None:
        return sst(place, region, name)
    if part == BLOOM_NAME:
        return bloom(place, region, name)
    return sidecar(place, region, name) if part.split("/")[0] == SIDECAR_DIR else None


def _manifest(manifest: wal.RegionManifest, length: int) -> RenderableType:
    shown = {
        "region": manifest.region_id,
        "version": manifest.version,
        "status": manifest.status.name,
        "writer epoch": manifest.writer_epoch,
        "replay after position": manifest.replay_after,
        "last seen position": manifest.last_seen,
        "current generation": manifest.current_generation,
        "sharding spec": manifest.spec_id,
        "edit id": manifest.edit_id or "none: written by another program",
        "bytes": size(length),
    }
    return Group(fields("region manifest", shown), _sst_list(manifest.ssts))


def _entry(place: Place, key: layout.EntryKey) -> RenderableType:
    base, data = place.base(), place.bytes()
    codec = base.codec
    if key.suffix != codec.suffix:
        raise Invalid(f"{place.key}: a WAL entry in .{key.suffix} format in a table whose format is {codec.suffix}")
    entry = codec.decode(key.position, data)
    header, part = entry.header, entry.header.part
    shown = {
        "region": key.region,
        "position": entry.position,
        "writer epoch": header.writer_epoch,
        "generation": header.generation,
        "entry id": header.entry_id or "none: written by another program",
        "sentinel": "yes: it fences older writers, or records a batch without rows" if header.sentinel else "no",
        "applied": _applied(header),
        "part of a batch": "no" if part is None else _part(part),
        "rows": entry.rows.num_rows,
        "tombstones": tombstones(entry.rows),
        "bytes": size(len(data)),
    }
    return Group(fields("WAL entry", shown), first_rows(entry.rows, entry.rows.num_rows))


def _plan(place: Place, region: UUID, first: int) -> RenderableType:
    data, done = place.bytes(), place.base().committed.get(region, 0)
    try:
        plan = json.loads(data)
        last, by = int(plan["last"]), str(plan.get("by", ""))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise wal.Corrupt(f"{place.key}: {data[:60]!r} is no commit plan; restore it from a backup") from error
    state = "committed" if done >= last else "agreed, not committed yet: the next commit takes this range"
    shown = {
        "region": region,
        "generations": f"{first:,} to {last:,}",
        "agreed by": by or "unknown",
        "state": f"{state} (the base table holds generation {done:,})",
    }
    return fields("commit plan", shown)


def _region(place: Place, region: UUID) -> RenderableType:
    manifest = wal.ManifestStore(place.store, region).latest()
    listed = {each.key: each.size for each in place.store.describe(layout.wal_prefix(region))}
    positions = sorted(key.position for key in map(layout.parse_entry_key, listed) if key is not None)
    log = {
        "WAL entries": len(positions),
        "WAL positions": f"{positions[0]:,} to {positions[-1]:,}" if positions else "none",
        "holes": ", ".join(map(str, _holes(positions))) or "none",
        "not flushed": sum(position > (manifest.replay_after if manifest else 0) for position in positions),
        "bytes": size(sum(listed.values())),
    }
    latest = (
        Text("no manifest: the region was never claimed")
        if manifest is None
        else _manifest(manifest, len(manifest.encode()))
    )
    return Group(latest, fields("write-ahead log", log))


def _table(place: Place) -> RenderableType:
    base = place.base()
    built = {index.name: index for index in base.dataset.describe_indices()}
    rows = base.dataset.count_rows()
    shown = {
        "table": place.root,
        "base version": base.version,
        "rows": rows,
        "fragments": len(base.dataset.get_fragments()),
        "storage version": base.storage_version,
        "key": ", ".join(base.key) or f"none, rows are routed by {', '.join(base.append_by or ()) or 'the whole row'}",
        "buckets": base.buckets,
        "WAL format": base.wal_format,
        "upsert": base.rules.upsert,
        "on duplicate": base.rules.on_duplicate,
        "version column": base.rules.version or "none",
        "indexes": ", ".join(f"{spec.column} ({spec.kind})" for spec in base.indexes) or "none",
        "columns": ", ".join(f"{field.name} {field.type}" for field in base.schema),
    }
    indexes = [
        (spec.name, built[spec.name].num_rows_indexed, size(built[spec.name].total_size_bytes or 0))
        if spec.name in built
        else (spec.name, 0, "not built yet")
        for spec in base.indexes
    ]
    return Group(
        fields("table", shown),
        columns("indexes", ("index", "rows covered", "bytes"), indexes),
        _region_list(place.store, base),
    )


def _sst_list(ssts: Iterable[wal.SsTable]) -> RenderableType:
    rows = [(each.generation, each.path, each.physical_rows, each.in_memory_bytes) for each in ssts]
    return columns("SSTs", ("generation", "directory", "rows", "bytes in memory"), rows, "no SSTs")


def _region_list(store: wal.ObjectStore, base: BaseTable) -> RenderableType:
    rows = []
    for region in layout.regions(store):
        manifest = wal.ManifestStore(store, region).latest()
        if manifest is not None:
            committed = base.committed.get(region, 0)
            pending = [each.generation for each in manifest.ssts if each.generation > committed]
            rows.append((region, manifest.writer_epoch, manifest.replay_after, committed, len(pending)))
    names = ("region", "epoch", "flushed to", "committed", "pending SSTs")
    return columns("regions", names, rows, "no region was ever claimed")


def _part(part: wal.BatchPart) -> str:
    closes = "closes it" if part.closes else "does not close it"
    return f"{part.producer}:{part.sequence} attempt {part.attempt}, {closes}"


def _applied(header: wal.EntryHeader) -> str:
    if header.applied is None:
        return "unknown: written by another program"
    said = ", ".join(f"{name}:{number}" for name, number in header.applied.items())
    if header.snapshot:
        return f"snapshot {header.snapshot}, and since: {said or 'nothing'}"
    return said or "nothing"


def _holes(positions: list[int]) -> list[int]:
    """Return the positions missing between the lowest and the highest; at most the first ten."""
    present: Callable[[int], bool] = set(positions).__contains__
    span = range(positions[0], positions[-1]) if positions else range(0)
    return [position for position in span if not present(position)][:10]
