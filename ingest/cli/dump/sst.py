"""Describe an SST and its parts for `memwal inspect`: data, indexes, key sidecar, bloom filter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import UUID

import lance
import numpy as np
import pyarrow as pa
from lance.file import LanceFileReader
from rich.console import Group, RenderableType

from memwal import wal
from memwal.flush.sst.bloom import BLOOM_NAME
from memwal.flush.sst.key_sidecar import PAGE_ROWS, SIDECAR_DIR
from memwal.flush.verification.finding import unreadable
from memwal.ingest.cli.dump.locate import Place
from memwal.ingest.cli.print import FIRST_ROWS, columns, fields, first_rows, size
from memwal.memtable import TOMBSTONE
from memwal.wal import layout

_DATA, _LOOKUP = "page_data.lance", "page_lookup.lance"
_FIRST_PAGES = 10
_HASHED = (pa.int32(), pa.int64(), pa.string(), pa.binary())
"""Types of key columns that Lance's filter hashes; see flush.sst.key_encoding."""
_BLOCK_BYTES, _WORDS_OF_A_BLOCK, _BITS_OF_A_WORD = 32, 8, 32


def sst(place: Place, region: UUID, name: str) -> RenderableType:
    """Return the description of an SST. Raises: Corrupt if its data cannot be read."""
    store, named = place.store, layout.parse_sst_dir(name)
    with _readable(place.key):
        dataset = lance.dataset(store.url(place.key), storage_options=store.storage_options)
        first, rows = dataset.scanner(limit=FIRST_ROWS).to_table(), dataset.count_rows()
        indexes = list(dataset.describe_indices())
        physical = sum(fragment.physical_rows for fragment in dataset.get_fragments())
        deleted = dataset.count_rows(TOMBSTONE) if TOMBSTONE in dataset.schema.names else 0
    shown = {
        "region": region,
        "directory": name,
        "generation": named.generation if named else "?",
        "published": _published(store, region, name),
        "rows": rows,
        **({"superseded rows": physical - rows} if physical > rows else {}),
        "tombstones": deleted,
        **_key_files(place, region, name),
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


def _key_files(place: Place, region: UUID, name: str) -> dict[str, Any]:
    """Return the fields about the key sidecar and the bloom filter; nothing if the table has no key."""
    bloom = place.store.get(layout.sst_key(region, name, BLOOM_NAME))
    if bloom is None and not place.base().key:
        return {}
    return {
        "key sidecar rows": _sidecar_rows(place.store, layout.sst_key(region, name, f"{SIDECAR_DIR}/{_DATA}")),
        "bloom filter bytes": "missing" if bloom is None else len(bloom),
    }


def sidecar(place: Place, region: UUID, name: str) -> RenderableType:
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


def bloom(place: Place, region: UUID, name: str) -> RenderableType:
    """Return the description of the bloom filter of the SST `name`: how full it is, and its rate of false positives."""
    data, base = place.bytes(), place.base()
    if not data or len(data) % _BLOCK_BYTES:
        raise wal.Corrupt(f"{place.key}: a bloom filter of {len(data)} bytes; its size is a multiple of {_BLOCK_BYTES}")
    keys = _sidecar_rows(place.store, layout.sst_key(region, name, f"{SIDECAR_DIR}/{_DATA}"))
    kinds = [base.schema.field(column).type for column in base.key]
    bits = np.unpackbits(np.frombuffer(data, dtype=np.uint8))
    shown = {
        "region": region,
        "SST": name,
        "keys": keys,
        "bytes": size(len(data)),
        "blocks": len(data) // _BLOCK_BYTES,
        "bits per key": f"{bits.size / keys:.1f}" if isinstance(keys, int) and keys else "-",
        "bits set": f"{bits.mean():.1%}",
        "false positives": f"{_passes(bits):.2%} of absent keys",
    }
    if not any(kind in _HASHED for kind in kinds):
        shown["false positives"] = f"all keys pass: Lance does not hash keys of {', '.join(map(str, kinds))}"
    return fields("bloom filter", shown)


def _passes(bits: Any) -> float:
    """Return the share of absent keys that the filter passes: those with 8 bits set, one in each word of a block."""
    filled = bits.reshape(-1, _WORDS_OF_A_BLOCK, _BITS_OF_A_WORD).mean(axis=2)
    return float(filled.prod(axis=1).mean())


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
        yield
    except BaseException as error:
        if (reason := unreadable(error)) is None:
            raise
        raise wal.Corrupt(f"{key}: cannot be read: {reason}; restore it from a backup") from error
