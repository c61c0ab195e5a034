"""What lies at a path, for people: `memwal inspect`. Reads only, takes nothing, safe while writers run.

A path below `_mem_wal/` is known by its name (see `wal.layout`), a table by Lance's `_versions` directory in
it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit
from uuid import UUID

import lance
import pyarrow as pa
import pyarrow.compute as pc
from lance.file import LanceFileReader
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

import wal
from flush import BaseTable
from ingest.errors import Invalid
from memtable import TOMBSTONE
from wal import layout

CAN_BE_INSPECTED = (
    "can be inspected: a table directory, a region directory (_mem_wal/UUID), a region manifest "
    "(_mem_wal/UUID/manifest/….binpb), a WAL entry (_mem_wal/UUID/wal/….lance or ….arrow), "
    "an SST (_mem_wal/UUID/…_gen_N)"
)
FIRST_ROWS = 5
CELL_WIDTH = 40
_REGION_DIR = re.compile(r"_mem_wal/([0-9a-f-]{36})")
_SST_DIR = re.compile(r"_mem_wal/([0-9a-f-]{36})/([0-9a-f]{8}_gen_[0-9]+)")


@dataclass(frozen=True, slots=True)
class _Place:
    """A path, split at the table: its root, the key below it ("" for the table itself), and the store of the
    table.
    """

    root: str
    key: str
    store: wal.ObjectStore

    def base(self) -> BaseTable:
        return BaseTable.open(self.root, self.store.storage_options)

    def bytes(self) -> bytes:
        data = self.store.get(self.key)
        if data is None:
            raise Invalid(f"{self.store.url(self.key)}: no such file; {CAN_BE_INSPECTED}")
        return data


def describe(path: str, storage_options: Mapping[str, str] | None = None) -> RenderableType:
    """The manifest, WAL entry, SST, region or table at `path` (or URL), ready to print with rich.

    `storage_options`: Lance's own, for a URL.
    Raises: Invalid when it is none of these, saying what can be inspected; Corrupt when it is damaged; StoreRefused,
    StoreUnavailable.
    """
    place = _located(path, storage_options)
    if not place.key:
        return _table(place)
    if layout.parse_manifest_key(place.key):
        data = place.bytes()
        return _manifest(wal.RegionManifest.decode(data), len(data))
    if found := layout.parse_entry_key(place.key):
        return _entry(place, found)
    if match := _SST_DIR.fullmatch(place.key):
        return _sst(place, UUID(match[1]), match[2])
    if match := _REGION_DIR.fullmatch(place.key):
        return _region(place, UUID(match[1]))
    raise Invalid(f"{path}: {CAN_BE_INSPECTED}")


def _located(path: str, storage_options: Mapping[str, str] | None) -> _Place:
    """Split `path` at the table's root. Raises: Invalid for one that does not exist or lies in no table."""
    if "://" in path and not path.startswith("file://"):
        return _located_by_url(path.rstrip("/"), storage_options)
    local = Path(unquote(urlsplit(path).path) if path.startswith("file://") else path).absolute()
    if not local.exists():
        raise Invalid(f"{path}: no such file or directory; {CAN_BE_INSPECTED}")
    parts = local.parts
    cut = parts.index("_mem_wal") if "_mem_wal" in parts else len(parts)
    root = Path(*parts[:cut])
    if not (root / "_versions").is_dir():
        raise Invalid(f"{path}: not in a Lance table; {CAN_BE_INSPECTED}")
    return _Place(str(root), "/".join(parts[cut:]), wal.open_store(str(root)))


def _located_by_url(url: str, storage_options: Mapping[str, str] | None) -> _Place:
    root, found, below = url.partition(f"/{layout.ROOT}")
    store, key = wal.open_store(root, storage_options), f"{layout.ROOT}{below}" if found else ""
    if not store.list("_versions/"):
        raise Invalid(f"{url}: not in a Lance table; {CAN_BE_INSPECTED}")
    if key and not store.list(key):
        raise Invalid(f"{url}: no such object; {CAN_BE_INSPECTED}")
    return _Place(root, key, store)


# ---- what each kind shows
# --------------------------------------------------------------------------------------------


def _manifest(manifest: wal.RegionManifest, size: int) -> RenderableType:
    fields = {
        "region": manifest.region_id,
        "version": manifest.version,
        "status": manifest.status.name,
        "writer epoch": manifest.writer_epoch,
        "replay after position": manifest.replay_after,
        "last seen position": manifest.last_seen,
        "current generation": manifest.current_generation,
        "sharding spec": manifest.spec_id,
        "bytes": size,
    }
    return Group(_fields("region manifest", fields), _sst_list(manifest.ssts))


def _entry(place: _Place, key: layout.EntryKey) -> RenderableType:
    base, data = place.base(), place.bytes()
    codec = base.codec
    if key.suffix != codec.suffix:
        raise Invalid(f"{place.key}: a WAL entry in .{key.suffix} format in a table whose format is {codec.suffix}")
    entry = codec.decode(key.position, data)
    header, part = entry.header, entry.header.part
    fields = {
        "region": key.region,
        "position": entry.position,
        "writer epoch": header.writer_epoch,
        "generation": header.generation,
        "entry id": header.entry_id or "none: written by another program",
        "sentinel": "yes, it fences older writers" if header.sentinel else "no",
        "applied": _applied(header.applied),
        "part of a batch": "no"
        if part is None
        else f"{part.producer}:{part.sequence} attempt {part.attempt}"
        + (", closes it" if part.closes else ", does not close it"),
        "rows": entry.rows.num_rows,
        "tombstones": _tombstones(entry.rows),
        "bytes": len(data),
    }
    return Group(_fields("WAL entry", fields), _first_rows(entry.rows))


def _sst(place: _Place, region: UUID, name: str) -> RenderableType:
    store = place.store
    dataset = lance.dataset(store.url(place.key), storage_options=store.storage_options)
    rows = dataset.to_table()
    named = layout.parse_sst_dir(name)
    bloom = store.get(layout.sst_key(region, name, "bloom_filter.bin"))
    fields = {
        "region": region,
        "directory": name,
        "generation": named.generation if named else "?",
        "published": _published(store, region, name),
        "rows": rows.num_rows,
        "tombstones": _tombstones(rows),
        "key sidecar rows": _sidecar_rows(store, layout.sst_key(region, name, "_pk_index/page_data.lance")),
        "bloom filter bytes": "missing" if bloom is None else len(bloom),
        "storage version": dataset.data_storage_version,
        "bytes": sum(each.size for each in store.describe(f"{place.key}/")),
    }
    return Group(_fields("SST", fields), _first_rows(rows))


def _region(place: _Place, region: UUID) -> RenderableType:
    manifest = wal.ManifestStore(place.store, region).latest()
    keys = map(layout.parse_entry_key, place.store.list(layout.wal_prefix(region)))
    positions = sorted(key.position for key in keys if key is not None)
    log = {
        "WAL entries": len(positions),
        "WAL positions": f"{positions[0]} to {positions[-1]}" if positions else "none",
        "holes": ", ".join(map(str, _holes(positions))) or "none",
        "not flushed": sum(position > (manifest.replay_after if manifest else 0) for position in positions),
    }
    latest = Text("no manifest: never claimed") if manifest is None else _manifest(manifest, len(manifest.encode()))
    return Group(latest, _fields("write-ahead log", log))


def _table(place: _Place) -> RenderableType:
    base = place.base()
    fields = {
        "table": place.root,
        "base version": base.version,
        "rows": base.dataset.count_rows(),
        "fragments": len(base.dataset.get_fragments()),
        "storage version": base.storage_version,
        "key": ", ".join(base.key),
        "buckets": base.buckets,
        "WAL format": base.wal_format,
        "indexes": ", ".join(f"{spec.column} ({spec.kind})" for spec in base.indexes) or "none",
        "columns": ", ".join(f"{field.name} {field.type}" for field in base.schema),
    }
    return Group(_fields("table", fields), _region_list(place.store, base))


# ---- parts
# -----------------------------------------------------------------------------------------------------------


def _fields(title: str, fields: Mapping[str, Any]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False, box=None)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in fields.items():
        table.add_row(name, escape(f"{value:,}" if isinstance(value, int) else str(value)))
    return table


def _columns(title: str, names: Iterable[str], rows: Iterable[Iterable[Any]]) -> RenderableType:
    table = Table(*names, title=title, title_justify="left", header_style="bold")
    for row in rows:
        table.add_row(*(escape(_cell(value)) for value in row))
    return table


def _sst_list(ssts: Iterable[wal.SsTable]) -> RenderableType:
    rows = [(sst.generation, sst.path, sst.physical_rows, sst.in_memory_bytes) for sst in ssts]
    return _columns("SSTs", ("generation", "directory", "rows", "bytes in memory"), rows) if rows else Text("no SSTs")


def _region_list(store: wal.ObjectStore, base: BaseTable) -> RenderableType:
    rows = []
    for region in layout.regions(store):
        manifest = wal.ManifestStore(store, region).latest()
        if manifest is not None:
            committed = base.committed.get(region, 0)
            pending = [sst.generation for sst in manifest.ssts if sst.generation > committed]
            rows.append((region, manifest.writer_epoch, manifest.replay_after, committed, len(pending)))
    names = ("region", "epoch", "replay after", "committed generation", "SSTs not committed")
    return _columns("regions", names, rows) if rows else Text("no region was ever claimed")


def _first_rows(rows: pa.Table) -> RenderableType:
    if not rows.num_rows:
        return Text("no rows")
    first = rows.slice(0, FIRST_ROWS)
    title = f"first {first.num_rows} of {rows.num_rows:,} rows"
    return _columns(title, first.column_names, zip(*(column.to_pylist() for column in first.columns), strict=True))


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, list):
        shown = ", ".join(f"{number:.3g}" if isinstance(number, float) else str(number) for number in value[:3])
        return f"[{shown}{', …' if len(value) > 3 else ''}] ({len(value)})"
    text = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
    return text if len(text) <= CELL_WIDTH else f"{text[: CELL_WIDTH - 1]}…"


def _applied(applied: Mapping[str, int] | None) -> str:
    if applied is None:
        return "not said: written by another program"
    return ", ".join(f"{name}:{number}" for name, number in applied.items()) or "nothing"


def _tombstones(rows: pa.Table) -> int:
    return int(pc.sum(rows.column(TOMBSTONE)).as_py() or 0) if TOMBSTONE in rows.column_names else 0


def _published(store: wal.ObjectStore, region: UUID, name: str) -> str:
    manifest = wal.ManifestStore(store, region).latest()
    if manifest is not None and any(sst.path == name for sst in manifest.ssts):
        return f"yes, in manifest version {manifest.version}"
    return "no: not listed by the region manifest (not yet published, or committed already)"


def _sidecar_rows(store: wal.ObjectStore, key: str) -> Any:
    if not store.exists(key):
        return "missing"
    return LanceFileReader(store.url(key), storage_options=store.storage_options).metadata().num_rows


def _holes(positions: list[int]) -> list[int]:
    """Positions missing between the lowest and the highest; at most the first ten."""
    present: Callable[[int], bool] = set(positions).__contains__
    span = range(positions[0], positions[-1]) if positions else range(0)
    return [position for position in span if not present(position)][:10]
