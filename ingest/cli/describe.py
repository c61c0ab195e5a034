"""Describe the object at a path for people: `memwal inspect`. Reads only, claims nothing, safe while writers run.

A path below `_mem_wal/` is recognised by its name (see `wal.layout`), a table by its directory `_versions`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit
from uuid import UUID

import lance
import numpy as np
import pyarrow as pa
from lance.file import LanceFileReader
from rich.console import Group, RenderableType
from rich.text import Text

from memwal import wal
from memwal.flush import BaseTable
from memwal.flush.commits.plan import parse_plan_key
from memwal.flush.sst.bloom import BLOOM_NAME
from memwal.flush.sst.key_sidecar import PAGE_ROWS, SIDECAR_DIR
from memwal.flush.verification.finding import Unreadable, reading
from memwal.ingest.cli.print import FIRST_ROWS, columns, fields, first_rows, size, tombstones
from memwal.ingest.errors import Invalid
from memwal.memtable import TOMBSTONE
from memwal.wal import layout

_REGION_DIR = re.compile(r"_mem_wal/([0-9a-f-]{36})")
_SST_DIR = re.compile(r"_mem_wal/([0-9a-f-]{36})/([0-9a-f]{8}_gen_[0-9]+)(?:/(.+))?")
_DATA, _LOOKUP = "page_data.lance", "page_lookup.lance"
_FIRST_PAGES = 10
_HASHED = (pa.int32(), pa.int64(), pa.string(), pa.binary())
"""Types of key columns that Lance's filter hashes; see flush.sst.key_encoding."""
_BLOCK_BYTES, _WORDS_OF_A_BLOCK, _BITS_OF_A_WORD = 32, 8, 32
_CAN_BE_INSPECTED = (
    "can be inspected: a table directory, a region directory (_mem_wal/UUID), a region manifest "
    "(_mem_wal/UUID/manifest/….binpb), a WAL entry (_mem_wal/UUID/wal/….lance or ….arrow), a commit plan "
    "(_mem_wal/UUID/commits/….json), an SST (_mem_wal/UUID/…_gen_N), its key sidecar (_pk_index) and bloom_filter.bin"
)


def describe(path: str, storage_options: Mapping[str, str] | None = None) -> RenderableType:
    """Return the printable description of the manifest, WAL entry, commit plan, SST or part of one, region or table
    at `path`, which may be a URL.

    `storage_options`: Lance's own, for a URL.
    Raises: Invalid for any other object, with a list of what can be inspected; Corrupt if it is damaged;
    StoreRefused, StoreUnavailable.
    """
    place = _locate(path, storage_options)
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
        region, name, part = UUID(match[1]), match[2], match[3]
        if part is None:
            return _sst(place, region, name)
        if part == BLOOM_NAME:
            return _bloom(place, region, name)
        if part.split("/")[0] == SIDECAR_DIR:
            return _sidecar(place, region, name)
    if match := _REGION_DIR.fullmatch(place.key):
        return _region(place, UUID(match[1]))
    raise Invalid(f"{path}: {_CAN_BE_INSPECTED}")


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
    names = ("generation", "directory", "rows", "bytes in memory")
    ssts = [(each.generation, each.path, each.physical_rows, each.in_memory_bytes) for each in manifest.ssts]
    return Group(fields("region manifest", shown), columns("SSTs", names, ssts, "no SSTs"))


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
        "regions": base.buckets,
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
    names, regions = ("region", "id", "epoch", "flushed", "committed", "SSTs"), list[tuple[Any, ...]]()
    for region in layout.regions(place.store):
        if (manifest := wal.ManifestStore(place.store, region).latest()) is not None:
            committed = base.committed.get(region, 0)
            pending = sum(each.generation > committed for each in manifest.ssts)
            epoch, flushed = manifest.writer_epoch, manifest.replay_after
            regions.append((wal.named(region), str(region), epoch, flushed, committed, pending))
    return Group(
        fields("table", shown),
        columns("indexes", ("index", "rows covered", "bytes"), indexes),
        columns("regions", names, regions, "no region was ever claimed"),
    )


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
    present = set(positions)
    span = range(positions[0], positions[-1]) if positions else range(0)
    return [position for position in span if position not in present][:10]


# ---- SSTs -----------------------------------------------------------------------------------------------------------


def _sst(place: Place, region: UUID, name: str) -> RenderableType:
    """Return the description of an SST. Raises: Corrupt if its data cannot be read."""
    store, named = place.store, layout.parse_sst_dir(name)
    with _readable(place.key):
        dataset = lance.dataset(store.url(place.key), storage_options=store.storage_options)
        first, rows = dataset.scanner(limit=FIRST_ROWS).to_table(), dataset.count_rows()
        indexes = list(dataset.describe_indices())
        physical = sum(fragment.physical_rows for fragment in dataset.get_fragments())
        deleted = dataset.count_rows(TOMBSTONE) if TOMBSTONE in dataset.schema.names else 0
    bloom, keys = store.get(layout.sst_key(region, name, BLOOM_NAME)), dict[str, Any]()
    if bloom is not None or place.base().key:
        keys["key sidecar rows"] = _sidecar_rows(store, layout.sst_key(region, name, f"{SIDECAR_DIR}/{_DATA}"))
        keys["bloom filter bytes"] = "missing" if bloom is None else len(bloom)
    shown = {
        "region": region,
        "directory": name,
        "generation": named.generation if named else "?",
        "published": _published(store, region, name),
        "rows": rows,
        **({"superseded rows": physical - rows} if physical > rows else {}),
        "tombstones": deleted,
        **keys,
        "storage version": dataset.data_storage_version,
        "bytes": size(sum(each.size for each in store.describe(f"{place.key}/"))),
    }
    return Group(
        fields("SST", shown),
        columns(
            "indexes",
            ("index", "type", "columns", "rows", "bytes"),
            [(i.name, i.index_type, ", ".join(i.field_names), i.num_rows_indexed, i.total_size_bytes) for i in indexes],
            "no indexes",
        ),
        first_rows(first, rows),
    )


def _sidecar(place: Place, region: UUID, name: str) -> RenderableType:
    """Return the description of the key sidecar of the SST `name`. Raises: Corrupt if it cannot be read."""
    prefix = layout.sst_key(region, name, f"{SIDECAR_DIR}/")
    with _readable(prefix):
        files = [_file(place.store, prefix + part) for part in (_DATA, _LOOKUP)]
        data, lookup = (file.read_all().to_table() for file in files)
    pages = lookup.num_rows
    shown = {
        "region": region,
        "SST": name,
        "rows": data.num_rows,
        "key type": data.schema.field("values").type,
        "pages": f"{pages:,} of {PAGE_ROWS:,} rows",
        "in order": "yes" if _in_order(data) else "no: damaged, run memwal verify --deep",
        "bytes": size(sum(each.size for each in place.store.describe(prefix))),
    }
    listed = lookup.slice(0, _FIRST_PAGES).select(["page_idx", "min", "max", "null_count"])
    title = "pages" if pages <= _FIRST_PAGES else f"first {_FIRST_PAGES} of {pages:,} pages"
    values = [list(row.values()) for row in listed.to_pylist()]
    return Group(
        fields("key sidecar", shown),
        columns(title, ("page", "lowest key", "highest key", "nulls"), values, "no pages"),
        first_rows(data.rename_columns(["key", "row"]), data.num_rows),
    )


def _bloom(place: Place, region: UUID, name: str) -> RenderableType:
    """Return the description of the bloom filter of the SST `name`: how full it is, and its rate of false positives."""
    data, base = place.bytes(), place.base()
    if not data or len(data) % _BLOCK_BYTES:
        raise wal.Corrupt(f"{place.key}: a bloom filter of {len(data)} bytes; its size is a multiple of {_BLOCK_BYTES}")
    keys = _sidecar_rows(place.store, layout.sst_key(region, name, f"{SIDECAR_DIR}/{_DATA}"))
    kinds = [base.schema.field(column).type for column in base.key]
    bits = np.unpackbits(np.frombuffer(data, dtype=np.uint8))
    # An absent key passes if 8 bits are set, one in each word of a block.
    passes = bits.reshape(-1, _WORDS_OF_A_BLOCK, _BITS_OF_A_WORD).mean(axis=2).prod(axis=1).mean()
    shown = {
        "region": region,
        "SST": name,
        "keys": keys,
        "bytes": size(len(data)),
        "blocks": len(data) // _BLOCK_BYTES,
        "bits per key": f"{bits.size / keys:.1f}" if isinstance(keys, int) and keys else "-",
        "bits set": f"{bits.mean():.1%}",
        "false positives": f"{passes:.2%} of absent keys",
    }
    if not any(kind in _HASHED for kind in kinds):
        shown["false positives"] = f"all keys pass: Lance does not hash keys of {', '.join(map(str, kinds))}"
    return fields("bloom filter", shown)


def _in_order(data: pa.Table) -> bool:
    rows = data.sort_by([("values", "ascending"), ("ids", "ascending")])
    return bool(rows.equals(data))


def _published(store: wal.ObjectStore, region: UUID, name: str) -> str:
    manifest = wal.ManifestStore(store, region).latest()
    if manifest is not None and any(each.path == name for each in manifest.ssts):
        return f"yes, in manifest version {manifest.version}"
    return "no: not in the region manifest (not published yet, or committed already)"


def _sidecar_rows(store: wal.ObjectStore, key: str) -> Any:
    if not store.exists(key):
        return "missing"
    with _readable(key):
        return int(_file(store, key).metadata().num_rows)


def _file(store: wal.ObjectStore, key: str) -> LanceFileReader:
    return LanceFileReader(store.url(key), storage_options=dict(store.storage_options))


@contextmanager
def _readable(key: str) -> Iterator[None]:
    """Convert pylance's errors for an unreadable file to Corrupt, naming `key`."""
    try:
        with reading():
            yield
    except Unreadable as error:
        raise wal.Corrupt(f"{key}: cannot be read: {error}; restore it from a backup") from error


# ---- paths ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Place:
    """A path, split at the table: its root, the key below it ("" for the table itself), and the store of the table."""

    root: str
    key: str
    store: wal.ObjectStore

    def base(self) -> BaseTable:
        """Return the base table. Raises: errors of BaseTable.open."""
        return BaseTable.open(self.root, self.store.storage_options)

    def bytes(self) -> bytes:
        """Return the object at the key. Raises: Invalid if it does not exist."""
        data = self.store.get(self.key)
        if data is None:
            raise Invalid(f"{self.store.url(self.key)}: no such file; {_CAN_BE_INSPECTED}")
        return data


def _locate(path: str, storage_options: Mapping[str, str] | None) -> Place:
    """Split `path` at the table's root. Raises: Invalid if it does not exist or is not in a table."""
    if "://" in path and not path.startswith("file://"):
        url = path.rstrip("/")
        table, found, below = url.partition(f"/{layout.ROOT}")
        store, key = wal.open_store(table, storage_options), f"{layout.ROOT}{below}" if found else ""
        if not store.list("_versions/"):
            raise Invalid(f"{url}: not in a Lance table; {_CAN_BE_INSPECTED}")
        if key and not store.list(key):
            raise Invalid(f"{url}: no such object; {_CAN_BE_INSPECTED}")
        return Place(table, key, store)
    local = Path(unquote(urlsplit(path).path) if path.startswith("file://") else path).absolute()
    if not local.exists():
        raise Invalid(f"{path}: no such file or directory; {_CAN_BE_INSPECTED}")
    parts = local.parts
    cut = parts.index("_mem_wal") if "_mem_wal" in parts else len(parts)
    root = Path(*parts[:cut])
    if not (root / "_versions").is_dir():
        raise Invalid(f"{path}: not in a Lance table; {_CAN_BE_INSPECTED}")
    return Place(str(root), "/".join(parts[cut:]), wal.open_store(str(root)))
